// Runs a fuzz target without libFuzzer: every file of a corpus, then changed copies of them.
//
//   fuzz_consumer --runs 20000 --seed 1 CORPUS...     or --seconds 60
//
// One seed gives the same runs everywhere. A run that fails aborts the process; the input is then
// in the file that --crash names.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "sim/random.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Sample = std::vector<std::uint8_t>;
constexpr std::size_t kMaxBytes = 512;

Sample read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<Sample> read_corpus(const std::vector<std::string>& places) {
  std::vector<std::filesystem::path> files;
  for (const std::string& place : places) {
    if (std::filesystem::is_directory(place)) {
      for (const auto& entry : std::filesystem::directory_iterator(place)) {
        files.push_back(entry.path());
      }
    } else {
      files.emplace_back(place);
    }
  }
  std::ranges::sort(files);  // the order of a directory is not the same everywhere
  std::vector<Sample> samples;
  for (const auto& file : files) {
    samples.push_back(read_file(file));
  }
  return samples;
}

// A few changes: bytes overwritten, put in, taken out, or the tail of another sample.
Sample changed(const std::vector<Sample>& corpus, kvpush::sim::Random& random) {
  Sample sample = corpus.empty() ? Sample{} : corpus[random.below(corpus.size())];
  for (std::uint64_t left = 1 + random.below(8); left != 0; --left) {
    const auto at = static_cast<std::ptrdiff_t>(random.below(sample.size() + 1));
    const auto value = static_cast<std::uint8_t>(random.next());
    switch (random.below(4)) {
      case 0:
        sample.insert(sample.begin() + at, value);
        break;
      case 1:
        sample.erase(sample.begin() + at,
                     sample.begin() + at + std::min<std::ptrdiff_t>(std::ssize(sample) - at, 3));
        break;
      case 2:
        if (!corpus.empty()) {
          const Sample other = corpus[random.below(corpus.size())];
          const auto from = static_cast<std::ptrdiff_t>(random.below(other.size() + 1));
          sample.insert(sample.begin() + at, other.begin() + from, other.end());
        }
        break;
      default:
        if (at < std::ssize(sample)) {
          sample[static_cast<std::size_t>(at)] = value;
        }
        break;
    }
  }
  sample.resize(std::min(sample.size(), kMaxBytes));
  return sample;
}

}  // namespace

int main(int argc, char** argv) {
  std::uint64_t runs = 0;
  std::uint64_t seconds = 0;
  std::uint64_t seed = 1;
  std::string crash;
  std::vector<std::string> places;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.starts_with("--") && i + 1 < argc) {
      const std::string value = argv[++i];
      if (word == "--runs") {
        runs = std::stoull(value);
      } else if (word == "--seconds") {
        seconds = std::stoull(value);
      } else if (word == "--seed") {
        seed = std::stoull(value);
      } else if (word == "--crash") {
        crash = value;
      } else {
        std::cerr << "unknown option " << word << '\n';
        return 2;
      }
    } else {
      places.push_back(word);
    }
  }
  const auto run = [&crash](const Sample& sample) {
    if (!crash.empty()) {
      std::ofstream file(crash, std::ios::binary | std::ios::trunc);
      std::copy(sample.begin(), sample.end(), std::ostreambuf_iterator<char>(file));
    }
    (void)LLVMFuzzerTestOneInput(sample.data(), sample.size());
  };
  const std::vector<Sample> corpus = read_corpus(places);
  std::ranges::for_each(corpus, run);
  kvpush::sim::Random random(seed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  std::uint64_t done = 0;
  while (done < runs || (seconds != 0 && std::chrono::steady_clock::now() < end)) {
    run(changed(corpus, random));
    ++done;
  }
  if (!crash.empty()) {
    std::filesystem::remove(crash);  // it named no finding
  }
  std::cout << corpus.size() << " files and " << done << " changed copies: no finding\n";
  return 0;
}
