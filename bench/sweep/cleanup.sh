#!/usr/bin/env bash
# cleanup.sh proxy|server: ends what serve_pd.sh started on this host
#
#   proxy    the proxy
#   server   the prefill and the decode server
#
# optional:
#   RUN_DIR  as for serve_pd.sh
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case ${1:-} in
  -h | --help) show_help "$0" ;;
  proxy) stop_group proxy ;;
  server)
    stop_group decode
    stop_group prefill
    ;;
  "") die "say what to end: proxy or server" ;;
  *) die "'$1' can't be ended: it must be proxy or server" ;;
esac
