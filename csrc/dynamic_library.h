// DynamicLibrary: a shared library found and opened while the program runs.
//
// The only caller of dlopen and dlsym. Libraries are never closed: NIXL, UCX and the CUDA driver
// keep threads and thread-local state that must not lose their code. Plain value: any thread.
#pragma once

#include <string>

#include "status.h"

namespace kvpush {

class DynamicLibrary {
 public:
  // Opens a library by path, or by name through the loader's search path. Symbols stay local to it.
  // The error names the path and says what the loader said.
  static Result<DynamicLibrary> open(const std::string& path);

  const std::string& path() const noexcept { return path_; }

  // Sets `function` to the named symbol; the error names the library and the symbol.
  template <typename Function>
  Status resolve(const char* symbol, Function*& function) const {
    const Result<void*> address = find(symbol);
    if (!address.is_ok()) return address.status();
    function = reinterpret_cast<Function*>(address.value());
    return Status::ok();
  }

 private:
  DynamicLibrary(std::string path, void* handle) : path_(std::move(path)), handle_(handle) {}
  Result<void*> find(const char* symbol) const;

  std::string path_;
  void* handle_;  // never closed
};

}  // namespace kvpush
