#!/usr/bin/env bash
# run_sweep.sh: vLLM's serving benchmark through the proxy, over request rates and prompt lengths
#
#   MODE=kvpush-push PREFILL_IP=10.0.0.1 DECODE_IP=10.0.0.2 bench/sweep/run_sweep.sh
#
# Both servers run already (serve_pd.sh). The proxy is started on this host and ended again; this
# host needs vLLM and the model's tokenizer, but no GPU. For each point and iteration:
# results/<mode>_qps<q>_in<in>_out<out>_iter<i>.json and .log. Points whose JSON is there are left
# out, so that a sweep can be taken up again. A measurement with a failed request leaves no JSON, and
# the sweep goes on; one that does not end within LIMIT_S ends the sweep.
#
# needed:
#   MODE         stock-pull, stock-push, kvpush-pull or kvpush-push, as the servers'
#   PREFILL_IP, DECODE_IP   the servers' addresses
# optional:
#   QPS_LIST     requests per second, "1 2 3 4 5 6 7 8"
#   INPUT_LENS   tokens of each prompt, "1024 2048 4096 8192 16384"
#   OUTPUT_LENS  tokens of each answer, "128"
#   ITERATIONS   times each point is measured, 3
#   NUM_PROMPTS  requests of one measurement; else as many as come in DURATION_S
#   DURATION_S   60
#   LIMIT_S      longest time of one measurement, 1800
#   RESULTS_DIR  results
#   PROXY_URL    a proxy that runs already, instead of one of our own
#   BENCH_ARGS   more arguments for the benchmark, e.g. "--goodput ttft:500"
# and those of serve_pd.sh (--help there): MODEL, TP, PYTHON, the ports, RUN_DIR.
#
# Every mode gets the same prompts and arrivals; each point and iteration has its own.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

only_help "$0" "${1:-}"
QPS_LIST=${QPS_LIST-1 2 3 4 5 6 7 8}
INPUT_LENS=${INPUT_LENS-1024 2048 4096 8192 16384}
OUTPUT_LENS=${OUTPUT_LENS-128}
ITERATIONS=${ITERATIONS-3}
DURATION_S=${DURATION_S-60}
LIMIT_S=${LIMIT_S-1800}
RESULTS_DIR=${RESULTS_DIR:-results}
need_one_of MODE "${MODES[@]}"
need PREFILL_IP "the prefill server's address"
need DECODE_IP "the decode server's address"
need_numbers QPS_LIST
need_counts INPUT_LENS
need_counts OUTPUT_LENS
need_count ITERATIONS
need_count DURATION_S
need_count LIMIT_S
[[ -z ${NUM_PROMPTS:-} ]] || need_count NUM_PROMPTS

# The benchmark ends in its own way on Ctrl-C, which would otherwise pass for a failed measurement.
trap 'exit 130' INT
mkdir -p "$RESULTS_DIR"
if [[ -z ${PROXY_URL:-} ]]; then
  ROLE=proxy "$SWEEP_DIR/serve_pd.sh"
  trap '"$SWEEP_DIR/cleanup.sh" proxy' EXIT
  PROXY_URL=http://127.0.0.1:$PROXY_PORT
else
  need_mode "the proxy" "$PROXY_URL"
fi

# prompts QPS: how many requests one measurement has
prompts() {
  if [[ -n ${NUM_PROMPTS:-} ]]; then
    echo "$NUM_PROMPTS"
  else
    awk -v qps="$1" -v duration="$DURATION_S" 'BEGIN { n = int(qps * duration); print n < 1 ? 1 : n }'
  fi
}

# measure QPS INPUT OUTPUT ITERATION: false if a request failed; ends the sweep if one hangs
measure() {
  local qps=$1 input=$2 output=$3 iteration=$4 name count seed begun status=0 more=()
  name=${MODE}_qps${qps}_in${input}_out${output}_iter${iteration}
  if [[ -s $RESULTS_DIR/$name.json ]]; then
    echo "$name: there already"
    return 0
  fi
  count=$(prompts "$qps")
  # The mode has no part in it; cksum's result is the same everywhere.
  seed=$(printf '%s ' "$qps" "$input" "$output" "$iteration" | cksum | cut -d ' ' -f 1)
  read -r -a more <<<"${BENCH_ARGS:-}"
  echo "$name: $count requests"
  begun=$SECONDS
  # In the foreground, so that Ctrl-C reaches it.
  PYTHONUNBUFFERED=1 PYTHONPATH=$REPO_DIR${PYTHONPATH:+:$PYTHONPATH} \
    timeout --foreground -k 10 "$LIMIT_S" "$PYTHON" \
    -m bench.sweep.serving_benchmark \
    --result "$RESULTS_DIR/$name.json" -- \
    --backend openai --base-url "$PROXY_URL" --endpoint /v1/completions --model "$MODEL" \
    --dataset-name random --random-input-len "$input" --random-output-len "$output" \
    --random-range-ratio 0 --ignore-eos --num-prompts "$count" --request-rate "$qps" --seed "$seed" \
    --num-warmups 2 --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,99 \
    --disable-tqdm "${more[@]}" >"$RESULTS_DIR/$name.log" 2>&1 || status=$?
  ((status)) || return 0
  tail -n 5 "$RESULTS_DIR/$name.log" >&2
  # 137 that late: it did not end on SIGTERM either. Before, somebody else has killed it.
  if ((status == 124 || (status == 137 && SECONDS - begun >= LIMIT_S))); then
    die "$name did not end within $LIMIT_S s (LIMIT_S); its log: $RESULTS_DIR/$name.log. If it had begun" \
      "there, requests hang and may still hold the servers' KV cache: see the servers' logs and start" \
      "them again. Else LIMIT_S is too short for this host"
  fi
  echo "$name: FAILED; its log: $RESULTS_DIR/$name.log" >&2
  return 1
}

failed=0
for ((iteration = 0; iteration < ITERATIONS; ++iteration)); do
  for output in $OUTPUT_LENS; do
    for input in $INPUT_LENS; do
      for qps in $QPS_LIST; do
        measure "$qps" "$input" "$output" "$iteration" || failed=$((failed + 1))
      done
    done
  done
done
if ((failed)); then
  die "$failed measurements failed"
fi
echo "done; charts: $PYTHON $SWEEP_DIR/plot.py --results-dir $RESULTS_DIR --metric ttft"
