// kvpush-sim: runs seeds of the simulator. A line for each that fails, then a closing count.
#include <charconv>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>

#include "sim/world.h"

namespace {

constexpr const char* kUsage =
    "usage: kvpush-sim --seeds A..B [--mode push|pull] [--verbose]\n"
    "  Runs the simulator once for each seed from A to B, both included. Prints a line for each\n"
    "  seed that fails and a closing count; the exit status is 1 if one failed.\n"
    "  --mode     all of them push, or pull; else each seed decides\n"
    "  --verbose  also says what happens, and each run's hash: equal seeds give equal runs\n";

bool read_number(std::string_view text, std::uint64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

bool read_seeds(std::string_view text, std::uint64_t& first, std::uint64_t& last) {
  const std::size_t dots = text.find("..");
  if (dots == std::string_view::npos) {
    return read_number(text, first) && read_number(text, last);
  }
  return read_number(text.substr(0, dots), first) && read_number(text.substr(dots + 2), last) &&
         first <= last;
}

}  // namespace

int main(int argc, char** argv) {
  std::uint64_t first = 0;
  std::uint64_t last = 0;
  bool given = false;
  bool verbose = false;
  std::string_view mode;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--verbose") == 0) {
      verbose = true;
    } else if (std::strcmp(argv[i], "--seeds") == 0 && i + 1 < argc) {
      given = read_seeds(argv[++i], first, last);
    } else if (std::strcmp(argv[i], "--mode") == 0 && i + 1 < argc &&
               (std::strcmp(argv[i + 1], "push") == 0 || std::strcmp(argv[i + 1], "pull") == 0)) {
      mode = argv[++i];
    } else {
      given = false;
      break;
    }
  }
  if (!given) {
    std::fputs(kUsage, stderr);
    return 2;
  }
  std::uint64_t passed = 0;
  std::uint64_t failed = 0;
  std::uint64_t done = 0;
  std::uint64_t not_done = 0;
  std::uint64_t listed = 0;
  for (std::uint64_t seed = first; seed <= last; ++seed) {
    const bool pull = mode.empty() ? kvpush::sim::seed_pulls(seed) : mode == "pull";
    kvpush::sim::World world(seed, verbose, pull);
    const kvpush::sim::RunResult result = world.run();
    done += result.loads_done;
    not_done += result.loads_failed;
    listed += result.posted_from_lists;
    ++(result.ok() ? passed : failed);
    if (!result.ok()) {
      std::printf("seed %" PRIu64 " (%s) failed: %s\n", seed, pull ? "pull" : "push",
                  result.violations.front().c_str());
      for (std::size_t i = 1; verbose && i < result.violations.size(); ++i) {
        std::printf("  and: %s\n", result.violations[i].c_str());
      }
    }
    if (verbose) {
      std::printf("seed %" PRIu64 " hash %016" PRIx64 "\n", seed, result.hash);
    }
    std::fflush(stdout);
  }
  std::printf("%" PRIu64 " passed, %" PRIu64 " failed (%" PRIu64 " loads done, %" PRIu64
              " ended otherwise, %" PRIu64 " posts from lists)\n",
              passed, failed, done, not_done, listed);
  return failed == 0 ? 0 : 1;
}
