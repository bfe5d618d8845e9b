// Wire primitives: a bounded reader and a writer of little-endian bytes. Pure values, any thread.
//
// Reader is total: it accepts any bytes and never reads past their end. After the first fault every
// further read returns zero values and ok() is false, so a parser checks once at its end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "types.h"

namespace kvpush {

class WireWriter {
 public:
  void u8(std::uint8_t value) { bytes_.push_back(static_cast<std::byte>(value)); }
  void u64(std::uint64_t value) {
    for (int shift = 0; shift < 64; shift += 8) {
      u8(static_cast<std::uint8_t>(value >> shift));
    }
  }
  // LEB128: small numbers, the usual case, take one byte.
  void varint(std::uint64_t value) {
    while (value >= 0x80) {
      u8(static_cast<std::uint8_t>(value) | 0x80U);
      value >>= 7;
    }
    u8(static_cast<std::uint8_t>(value));
  }
  void zigzag(std::int64_t value) {
    varint((static_cast<std::uint64_t>(value) << 1) ^ static_cast<std::uint64_t>(value >> 63));
  }
  void raw(BytesView data) { bytes_.insert(bytes_.end(), data.begin(), data.end()); }
  void blob(BytesView data) {
    varint(data.size());
    raw(data);
  }
  void string(std::string_view text) {
    blob(std::as_bytes(std::span<const char>(text.data(), text.size())));
  }

  Bytes take() { return std::move(bytes_); }

 private:
  Bytes bytes_;
};

class WireReader {
 public:
  explicit WireReader(BytesView data) : data_(data) {}

  bool ok() const noexcept { return ok_; }
  bool at_end() const noexcept { return ok_ && position_ == data_.size(); }
  std::size_t remaining() const noexcept { return data_.size() - position_; }
  void fail() noexcept { ok_ = false; }

  std::uint8_t u8() {
    if (!ok_ || position_ >= data_.size()) {
      ok_ = false;
      return 0;
    }
    return static_cast<std::uint8_t>(data_[position_++]);
  }
  std::uint64_t u64() {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 8) {
      value |= static_cast<std::uint64_t>(u8()) << shift;
    }
    return ok_ ? value : 0;
  }
  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const std::uint8_t byte = u8();
      const std::uint64_t payload = byte & 0x7FU;
      if (shift == 63 && payload > 1) {
        ok_ = false;  // more than 64 bits
      }
      value |= payload << shift;
      if ((byte & 0x80U) == 0) {
        return ok_ ? value : 0;
      }
    }
    ok_ = false;
    return 0;
  }
  std::int64_t zigzag() {
    const std::uint64_t value = varint();
    return static_cast<std::int64_t>(value >> 1) ^ -static_cast<std::int64_t>(value & 1U);
  }
  // A number that must not exceed `limit`.
  std::uint64_t bounded(std::uint64_t limit) {
    const std::uint64_t value = varint();
    if (value > limit) {
      ok_ = false;
    }
    return ok_ ? value : 0;
  }
  std::uint32_t u32() { return static_cast<std::uint32_t>(bounded(0xFFFF'FFFFU)); }
  bool boolean() { return bounded(1) == 1; }
  // A view into the input, valid as long as that is.
  BytesView blob(std::size_t limit) {
    const std::size_t size = bounded(limit);
    if (!ok_ || size > remaining()) {
      ok_ = false;
      return {};
    }
    const BytesView view = data_.subspan(position_, size);
    position_ += size;
    return view;
  }
  std::string string(std::size_t limit) {
    const BytesView view = blob(limit);
    return {reinterpret_cast<const char*>(view.data()), view.size()};
  }
  BytesView raw(std::size_t size) {
    if (!ok_ || size > remaining()) {
      ok_ = false;
      return {};
    }
    const BytesView view = data_.subspan(position_, size);
    position_ += size;
    return view;
  }

 private:
  BytesView data_;
  std::size_t position_ = 0;
  bool ok_ = true;
};

}  // namespace kvpush
