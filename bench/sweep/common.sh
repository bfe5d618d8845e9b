# Shared by the scripts of the sweep; sourced, never run. Settings come from the environment.
# shellcheck shell=bash
# shellcheck disable=SC2034  # used by the scripts that source this
: "${MODE:=}" "${ROLE:=}"

die() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 2
}

# help FILE: prints the comment at the top of a script
show_help() {
  awk 'NR == 1 { next } !/^#/ { exit } { sub(/^# ?/, ""); print }' "$1"
}

# only_help FILE ARGUMENT: for scripts whose settings are variables; ends with --help
only_help() {
  case $2 in
    -h | --help) show_help "$1" && exit 0 ;;
    "") ;;
    *) die "takes no arguments, but '$2' was given; settings are variables (--help)" ;;
  esac
}

# need NAME "what it is": the variable must be set
need() {
  [[ -n ${!1:-} ]] || die "$1 is not set: $2 (--help explains all variables)"
}

# need_one_of NAME VALUES...: the variable must have one of the values
need_one_of() {
  local name=$1 value
  shift
  need "$name" "one of: $*"
  for value in "$@"; do
    [[ ${!name} != "$value" ]] || return 0
  done
  die "$name is '${!name}': it must be one of: $*"
}

# need_numbers NAME: a list of positive numbers
need_numbers() {
  local number
  need "$1" "numbers with spaces between"
  # shellcheck disable=SC2086  # a list
  for number in ${!1}; do
    [[ $number =~ ^[0-9]+(\.[0-9]+)?$ && ! $number =~ ^0+(\.0+)?$ ]] ||
      die "$1 has '$number': it must hold positive numbers with spaces between"
  done
}

# need_counts NAME: a list of positive whole numbers
need_counts() {
  local number
  need "$1" "whole numbers with spaces between"
  # shellcheck disable=SC2086  # a list
  for number in ${!1}; do
    [[ $number =~ ^[1-9][0-9]*$ ]] ||
      die "$1 has '$number': it must hold whole numbers, 1 or more, with spaces between"
  done
}

# need_count NAME: one positive whole number
need_count() {
  need "$1" "a whole number, 1 or more"
  [[ ${!1} =~ ^[1-9][0-9]*$ ]] || die "$1 is '${!1}': it must be a whole number, 1 or more"
}

# need_port NAME: a TCP port
need_port() {
  need_count "$1"
  ((${!1} <= 65535)) || die "$1 is ${!1}: ports end at 65535"
}

SWEEP_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
REPO_DIR=$(cd "$SWEEP_DIR/../.." && pwd)
MODES=(stock-pull stock-push kvpush-pull kvpush-push)

PYTHON=${PYTHON:-python3}
MODEL=${MODEL:-Qwen/Qwen3-32B}
TP=${TP:-8}
PREFILL_PORT=${PREFILL_PORT:-8100}
DECODE_PORT=${DECODE_PORT:-8200}
PROXY_PORT=${PROXY_PORT:-8000}
PREFILL_SIDE_PORT=${PREFILL_SIDE_PORT:-5600}
DECODE_SIDE_PORT=${DECODE_SIDE_PORT:-5700}
RUN_DIR=${RUN_DIR:-$REPO_DIR/build/sweep}
# Qwen3-32B is loaded, compiled and warm within this time from a slow disk too.
START_LIMIT_S=${START_LIMIT_S:-1800}

# start_group NAME LOG COMMAND...: runs a command in a process group of its own, and remembers it
start_group() {
  local name=$1 log=$2
  shift 2
  mkdir -p "$RUN_DIR" "$(dirname "$log")"
  if [[ -f $RUN_DIR/$name.pid ]] && kill -0 -- "-$(<"$RUN_DIR/$name.pid")" 2>/dev/null; then
    die "$name runs already, as process group $(<"$RUN_DIR/$name.pid"); end it with cleanup.sh first"
  fi
  echo "$name: starting; its log: $log"
  setsid "$@" >"$log" 2>&1 </dev/null &
  echo $! >"$RUN_DIR/$name.pid"
}

# stop_group NAME: ends what start_group started
stop_group() {
  local file=$RUN_DIR/$1.pid group second
  if [[ ! -f $file ]]; then
    echo "$1: not running on this host (RUN_DIR is $RUN_DIR)"
    return 0
  fi
  group=$(<"$file")
  kill -TERM -- "-$group" 2>/dev/null || true
  for ((second = 0; second < 300; ++second)); do
    kill -0 -- "-$group" 2>/dev/null || break
    sleep 0.1
  done
  kill -KILL -- "-$group" 2>/dev/null || true
  rm -f "$file"
  echo "$1: ended"
}

# wait_healthy NAME URL LOG: until /health answers; ends with the log's tail when NAME is gone.
# Interrupted, it ends what it waits for: nobody would know of it.
wait_healthy() {
  local name=$1 url=$2 log=$3 begin=$SECONDS
  trap 'stop_group "$name" >&2; exit 130' INT TERM
  until "$PYTHON" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=5)' \
    "$url/health" >/dev/null 2>&1; do
    # The process itself: it becomes a group's leader only a moment after its start.
    if ! kill -0 "$(<"$RUN_DIR/$name.pid")" 2>/dev/null; then
      tail -n 30 "$log" >&2
      rm -f "$RUN_DIR/$name.pid"
      die "$name ended while starting; its log: $log"
    fi
    if ((SECONDS - begin > START_LIMIT_S)); then
      tail -n 30 "$log" >&2
      stop_group "$name" >&2
      die "$name was not healthy after $START_LIMIT_S s (START_LIMIT_S); its log: $log"
    fi
    sleep 0.5
  done
  trap - INT TERM
}

# need_mode NAME URL: NAME answers at URL, and its servers were not started in another mode than MODE.
# Both kvpush modes have the same router: without this a wrong MODE would only name the results wrong.
need_mode() {
  local name=$1 url=$2 mode
  mode=$(
    "$PYTHON" - "$url/v1/models" <<'PYTHON'
import json
import sys
import urllib.request

try:
    with urllib.request.urlopen(sys.argv[1], timeout=60) as answer:
        names = [model["id"] for model in json.load(answer)["data"]]
except (OSError, ValueError, KeyError, TypeError) as error:
    sys.exit(f"{sys.argv[1]}: {error}")
print(*(name.removeprefix("sweep-") for name in names if name.startswith("sweep-")))
PYTHON
  ) || die "$name does not answer; start it first (serve_pd.sh), on an address that this host reaches"
  # Servers that were started by hand do not say.
  [[ -z $mode || $mode == "$MODE" ]] ||
    die "MODE is '$MODE', but $name at $url was started with MODE=$mode"
}
