#!/usr/bin/env bash
# Fuzzes each target in turn: fuzz.sh SECONDS [TARGET...]
# With libFuzzer where a clang++ has it, else with the driver of tests/fuzz and the usual compiler.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=$1
shift
targets=("${@:-}")
[[ -n ${targets[0]} ]] || targets=(message consumer producer engine)

# Whether this compiler can build and link a libFuzzer target with AddressSanitizer.
has_libfuzzer() {
  echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
    "$1" -x c++ -fsanitize=fuzzer,address - -o /dev/null 2>/dev/null
}

compiler=()
for name in ${CXX:-} clang++ clang++-{22..16}; do
  if command -v "$name" >/dev/null && has_libfuzzer "$name"; then
    compiler=("-DCMAKE_CXX_COMPILER=$name" -DKVPUSH_FUZZER=ON)
    break
  fi
done
build=build/fuzz
((${#compiler[@]})) || { build=build/fuzz-plain; echo "fuzz: no clang++ with libFuzzer found: without coverage"; }

mkdir -p build
log=$build.log
echo "fuzz: building ..."
if ! { cmake --preset fuzz -B "$build" "${compiler[@]}" &&
  cmake --build "$build" --target "${targets[@]/#/fuzz_}"; } >"$log" 2>&1; then
  tail -n 60 "$log" >&2
  echo "fuzz: building failed; the whole log: $log" >&2
  exit 1
fi

for target in "${targets[@]}"; do
  new=build/fuzz-corpus/$target
  mkdir -p "$new"
  program=$build/tests/fuzz/fuzz_$target
  echo "fuzz: $target for $seconds s ..."
  if ((${#compiler[@]})); then
    "$program" -max_total_time="$seconds" -max_len=512 -timeout=20 -verbosity=0 \
      -print_final_stats=1 -artifact_prefix="$new/" "$new" "tests/fuzz/corpus/$target"
  else
    "$program" --seconds "$seconds" --seed "$RANDOM" --crash "$new/finding" "tests/fuzz/corpus/$target"
  fi
done
