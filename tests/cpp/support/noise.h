// The simulator's generator, and random bytes besides: the same on every machine.
#pragma once

#include "sim/random.h"
#include "types.h"

namespace kvpush {

class Noise : public sim::Random {
 public:
  using Random::Random;

  Bytes bytes(std::size_t size) {
    Bytes out(size);
    for (std::byte& byte : out) {
      byte = static_cast<std::byte>(next());
    }
    return out;
  }
};

}  // namespace kvpush
