#include "check.h"

#include <cstdio>
#include <cstdlib>

namespace kvpush {

void check_failed(const char* condition, const char* file, int line, const char* why) noexcept {
  std::fprintf(stderr,
               "kvpush: internal error at %s:%d: %s (check `%s` failed). Please report it.\n", file,
               line, why, condition);
  std::fflush(stderr);
  std::abort();
}

}  // namespace kvpush
