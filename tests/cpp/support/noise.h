// A small seeded generator for tests: the same numbers on every machine.
#pragma once

#include <cstdint>

#include "types.h"

namespace kvpush {

class Noise {
 public:
  explicit Noise(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {  // splitmix64
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15U);
    z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31U);
  }
  std::uint64_t below(std::uint64_t limit) { return next() % limit; }
  Bytes bytes(std::size_t size) {
    Bytes out(size);
    for (std::byte& byte : out) {
      byte = static_cast<std::byte>(next());
    }
    return out;
  }

 private:
  std::uint64_t state_;
};

}  // namespace kvpush
