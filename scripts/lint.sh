#!/usr/bin/env bash
# All linters, each to its end, so that one run shows everything. LINT_ONLY="ruff mypy" picks some.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
jobs=${CMAKE_BUILD_PARALLEL_LEVEL:-2}
failed=()

# check NAME COMMAND...: runs a linter, shows what it says only when it fails
check() {
  local name=$1 output
  shift
  [[ -z ${LINT_ONLY:-} || " $LINT_ONLY " == *" $name "* ]] || return 0
  local start=$SECONDS
  if output=$("$@" 2>&1); then
    printf 'lint: %-13s ok (%d s)\n' "$name" $((SECONDS - start))
  else
    printf '%s\nlint: %-13s FAILED\n' "$output" "$name"
    failed+=("$name")
  fi
}

# Our files: what git tracks, and what it would.
files() { git ls-files --cached --others --exclude-standard -z -- "$@" | sort -zu; }

clang_format() {
  files 'csrc/*.h' 'csrc/*.cpp' 'tests/cpp/*.h' 'tests/cpp/*.cpp' 'tests/fuzz/*.h' 'tests/fuzz/*.cpp' \
    'bench/core/*.h' 'bench/core/*.cpp' |
    xargs -0r clang-format --dry-run -Werror
}

# GoogleTest's macros trip many checks; the tests are held to format and warnings alone.
clang_tidy() {
  cmake --preset tidy >build/tidy.log 2>&1 || { cat build/tidy.log; return 1; }
  files 'csrc/*.cpp' | xargs -0r -n 1 -P "$jobs" clang-tidy -p build/tidy --quiet
}

stubtest() {
  python -m mypy.stubtest kvpush._core --mypy-config-file pyproject.toml \
    --allowlist scripts/stubtest_allowlist.txt
}

shell_check() { files '*.sh' | xargs -0r shellcheck -x; }

# Nothing in the repository may lead to one machine's folders or depend on one package registry.
no_places() {
  local registries='pypi\.org|pythonhosted\.org|registry\.npmjs\.org|deb\.debian\.org|proxy\.golang\.org'
  local paths='(^|[^A-Za-z0-9_.$}/-])/(work|root|home/[a-z])(/|[^A-Za-z0-9_.-]|$)'
  ! files | xargs -0r grep -nIE "$registries|$paths" -- /dev/null | grep -v '^scripts/lint\.sh:'
}

mkdir -p build
check ruff ruff check .
check ruff-format ruff format --check .
check mypy mypy
check stubtest stubtest
check clang-format clang_format
check shellcheck shell_check
check places no_places
check clang-tidy clang_tidy

if ((${#failed[@]})); then
  echo "lint: ${#failed[@]} failed: ${failed[*]}" >&2
  exit 1
fi
