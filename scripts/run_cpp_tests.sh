#!/usr/bin/env bash
# Builds the C++ tests with one preset and runs them: run_cpp_tests.sh dev|asan-ubsan|tsan|release
set -euo pipefail
cd "$(dirname "$0")/.."
preset=$1
build=build/$preset
log=$build.log

mkdir -p build
echo "C++ tests, $preset: building ..."
if ! { cmake --preset "$preset" && cmake --build --preset "$preset"; } >"$log" 2>&1; then
  tail -n 60 "$log" >&2
  echo "building $preset failed; the whole log: $log" >&2
  exit 1
fi

# ThreadSanitizer of older compilers cannot live with much address space randomisation.
run=()
if [[ $preset == tsan ]] && ! "$build/tests/cpp/kvpush_tests" --gtest_list_tests >/dev/null 2>&1; then
  run=(setarch "$(uname -m)" -R)
fi

# Over the real NIXL too, but not under a sanitizer: UCX's own threads and tricks are not ours.
if [[ $preset == dev || $preset == release ]] && [[ -z ${KVPUSH_NIXL_LIBRARY:-} ]]; then
  KVPUSH_NIXL_LIBRARY=$(python -c 'from kvpush._nixl import find_library; print(find_library())') ||
    { echo "C++ tests, $preset: NIXL not found, see above" >&2; exit 1; }
  export KVPUSH_NIXL_LIBRARY
fi

export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
export TSAN_OPTIONS=${TSAN_OPTIONS:-second_deadlock_stack=1}
echo "C++ tests, $preset: running ..."
results=$build/tests.log
if "${run[@]}" ctest --preset "$preset" --parallel "${CMAKE_BUILD_PARALLEL_LEVEL:-2}" >"$results" 2>&1; then
  grep -E '^[0-9]+% tests passed' "$results" | sed "s/^/C++ tests, $preset: /"
else
  grep -vE '^ *[0-9]+/[0-9]+ Test +#[0-9]+: .* Passed |^ *Start ' "$results" | tail -n 200 >&2
  echo "C++ tests, $preset: failed; the whole log: $results" >&2
  exit 1
fi
