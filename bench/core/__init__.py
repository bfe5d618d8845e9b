"""The C++ benchmarks: of the core alone, and of transfers over NIXL's C API."""
