#include "dynamic_library.h"

#include <dlfcn.h>

namespace kvpush {
namespace {

// The loader's own words for the last failure on this thread.
std::string loader_error() {
  const char* const message = dlerror();  // NOLINT(concurrency-mt-unsafe): glibc's is per thread
  return message == nullptr ? "no reason given by the loader" : message;
}

}  // namespace

Result<DynamicLibrary> DynamicLibrary::open(const std::string& path) {
  if (path.empty()) return Status::error("cannot open a shared library: its path is empty");
  // RTLD_NOW: what the library itself lacks is an error here, not a crash in the middle of a
  // transfer.
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return Status::error("cannot open the shared library " + path + ": " + loader_error());
  }
  return DynamicLibrary(path, handle);
}

Result<void*> DynamicLibrary::find(const char* symbol) const {
  (void)dlerror();  // forget an older failure. NOLINT(concurrency-mt-unsafe)
  void* const address = dlsym(handle_, symbol);
  if (address == nullptr) {
    return Status::error("the shared library " + path_ + " lacks the symbol " + symbol + ": " +
                         loader_error());
  }
  return address;
}

}  // namespace kvpush
