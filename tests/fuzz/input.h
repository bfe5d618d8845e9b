// Input: a fuzzer's bytes read as small numbers. Once they are used up every number is zero, so any
// bytes are a whole script. Plain value, one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "types.h"

namespace kvpush::fuzz {

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : left_(data, size) {}

  bool empty() const noexcept { return left_.empty(); }
  std::uint8_t byte() {
    if (left_.empty()) {
      return 0;
    }
    const std::uint8_t value = left_.front();
    left_ = left_.subspan(1);
    return value;
  }
  // In [0, limit); `limit` is at most 256.
  std::uint32_t below(std::uint32_t limit) { return byte() % limit; }
  bool flag() { return (byte() & 1U) != 0; }
  std::uint64_t u64() {
    std::uint64_t value = 0;
    for (int i = 0; i < 8; ++i) {
      value = value << 8U | byte();
    }
    return value;
  }
  // Up to `limit` bytes, as they are.
  BytesView bytes(std::size_t limit) {
    const std::size_t size = limit < left_.size() ? limit : left_.size();
    const auto taken = left_.first(size);
    left_ = left_.subspan(size);
    return std::as_bytes(taken);
  }
  BytesView rest() { return bytes(left_.size()); }

 private:
  std::span<const std::uint8_t> left_;
};

}  // namespace kvpush::fuzz
