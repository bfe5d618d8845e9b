#!/usr/bin/env bash
# serve_pd.sh: starts one server of a prefill/decode pair, or the proxy in front of it
#
#   ROLE=prefill MODE=kvpush-push PREFILL_IP=10.0.0.1 DECODE_IP=10.0.0.2 bench/sweep/serve_pd.sh
#
# Run it on the host of that server; it returns when the server is healthy, which goes on running.
# cleanup.sh ends it. Every server of a pair needs the same MODE, addresses and ports; the proxy
# comes last, and run_sweep.sh starts one by itself. The two hosts have to reach each other on the ports
# below and on those that NIXL's transport picks. For both servers on one host, give each its own GPUs
# (CUDA_VISIBLE_DEVICES).
#
# needed:
#   ROLE               prefill, decode or proxy
#   MODE               stock-pull, stock-push, kvpush-pull or kvpush-push
#   PREFILL_IP         the prefill server's address, as the decode server reaches it
#   DECODE_IP          the decode server's address
# optional:
#   MODEL              Qwen/Qwen3-32B
#   TP                 tensor-parallel size, 8
#   PYTHON             the interpreter with vLLM, NIXL and kvpush, python3
#   PREFILL_PORT       8100      the prefill server's API
#   DECODE_PORT        8200      the decode server's API
#   PROXY_PORT         8000      the proxy, on 127.0.0.1
#   PREFILL_SIDE_PORT  5600      the prefill server's NIXL side channel; the decode server and the proxy ask
#   DECODE_SIDE_PORT   5700      the decode server's; with stock-push the prefill server asks
#   SERVER_ARGS        more arguments for both servers, e.g. "--block-size 64"
#   KV_EXTRA           kv_connector_extra_config, as JSON, {}
#   RUN_DIR            process ids and logs, build/sweep in the repository
#   START_LIMIT_S      longest wait for a healthy server, 1800
#
# The decode server runs without prefix caching: each of its prompts comes over the wire.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

only_help "$0" "${1:-}"
need_one_of ROLE prefill decode proxy
need_one_of MODE "${MODES[@]}"
need PREFILL_IP "the prefill server's address, as the decode server reaches it"
need DECODE_IP "the decode server's address"
need_count TP
for name in PREFILL_PORT DECODE_PORT PROXY_PORT PREFILL_SIDE_PORT DECODE_SIDE_PORT; do
  need_port "$name"
done

# The stock push connector's decode leg has to name the prefill engine.
prefill_id=prefill-$PREFILL_IP-$PREFILL_PORT

transfer_config() {
  local role=$1 id=$2 name module=
  case $MODE in
    stock-pull) name=NixlConnector ;;
    stock-push) name=NixlPushConnector ;;
    kvpush-pull) name=KvPullConnector module=kvpush.vllm ;;
    kvpush-push) name=KvPushConnector module=kvpush.vllm ;;
  esac
  "$PYTHON" - "$name" "$module" "$role" "$id" "${KV_EXTRA:-{\}}" <<'PYTHON'
import json
import sys

name, module, role, engine_id, extra = sys.argv[1:]
try:
    config = {
        "kv_connector": name,
        "kv_role": role,
        "engine_id": engine_id,
        "kv_connector_extra_config": json.loads(extra),
    }
except ValueError as error:
    sys.exit(f"KV_EXTRA is not JSON: {error}: {extra}")
if module:
    config["kv_connector_module_path"] = module
print(json.dumps(config))
PYTHON
}

serve() {
  local address=$1 port=$2 side_port=$3 role=$4 id=$5 config more=()
  config=$(transfer_config "$role" "$id") || die "no connector configuration"
  read -r -a more <<<"${SERVER_ARGS:-}"
  [[ $ROLE == prefill ]] || more+=(--no-enable-prefix-caching)
  # Where a host has several addresses, both listen on the one that the peer is told.
  export VLLM_NIXL_SIDE_CHANNEL_HOST=$address VLLM_NIXL_SIDE_CHANNEL_PORT=$side_port
  # The second name tells run_sweep.sh the mode.
  start_group "$ROLE" "$log" "$PYTHON" -m vllm.entrypoints.openai.api_server \
    --model "$MODEL" --served-model-name "$MODEL" "sweep-$MODE" \
    --host "$address" --port "$port" --tensor-parallel-size "$TP" \
    --no-enable-log-requests --kv-transfer-config "$config" "${more[@]}"
  wait_healthy "$ROLE" "http://$address:$port" "$log"
}

proxy() {
  local prefill=http://$PREFILL_IP:$PREFILL_PORT decode=http://$DECODE_IP:$DECODE_PORT
  local command=("$PYTHON" -m)
  need_mode "the prefill server" "$prefill"
  need_mode "the decode server" "$decode"
  export PYTHONPATH=$REPO_DIR${PYTHONPATH:+:$PYTHONPATH}
  if [[ $MODE == kvpush-* ]]; then
    command+=(kvpush proxy --prefill "$prefill,kv=$PREFILL_IP:$PREFILL_SIDE_PORT")
  else
    command+=(bench.sweep.stock_proxy "--legs" "${MODE#stock-}" --prefill "$prefill"
      --side-channel "$PREFILL_IP:$PREFILL_SIDE_PORT" --engine-id "$prefill_id" --tp "$TP")
  fi
  start_group proxy "$log" "${command[@]}" --decode "$decode" --port "$PROXY_PORT"
  wait_healthy proxy "http://127.0.0.1:$PROXY_PORT" "$log"
}

log=$RUN_DIR/$ROLE.log
case $ROLE in
  prefill) serve "$PREFILL_IP" "$PREFILL_PORT" "$PREFILL_SIDE_PORT" kv_producer "$prefill_id" ;;
  decode)
    serve "$DECODE_IP" "$DECODE_PORT" "$DECODE_SIDE_PORT" kv_consumer \
      "decode-$DECODE_IP-$DECODE_PORT"
    ;;
  proxy) proxy ;;
esac
echo "$ROLE ($MODE): healthy; its log: $log"
