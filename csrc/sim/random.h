// The simulator's randomness: one seed, the same numbers on every machine. Nothing else in csrc
// draws any.
#pragma once

#include <cstdint>

#include "check.h"

namespace kvpush::sim {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {  // splitmix64
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15U);
    z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31U);
  }
  // Uniform in [0, limit).
  std::uint64_t below(std::uint64_t limit) {
    KVPUSH_CHECK(limit != 0, "nothing is below zero");
    return next() % limit;
  }
  // Uniform in [low, high].
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(below(static_cast<std::uint64_t>(high - low) + 1));
  }
  bool chance(std::uint32_t per_mille) { return below(1'000) < per_mille; }
  // A generator of its own, so that draws here do not shift draws there.
  Random fork() { return Random(next()); }

 private:
  std::uint64_t state_;
};

}  // namespace kvpush::sim
