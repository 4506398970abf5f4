#!/bin/bash
# Train on one host with GPUs, and start again after a failure that a new start may mend.
#
#   configs/schedulers/gpu_host.sh CONFIG [--set KEY=VALUE ...]
#
# One process drives all GPUs of the host. The configuration needs `checkpoint:`. JAXPAR_MOST_RESTARTS (default 20)
# bounds the restarts. Ctrl-C and SIGTERM reach the run, which saves and ends; it is then not started again.
set -uo pipefail

config=${1:?usage: gpu_host.sh CONFIG [--set KEY=VALUE ...]}
shift
most=${JAXPAR_MOST_RESTARTS:-20}
stopped=
trap 'stopped=yes; kill -TERM "$run" 2>/dev/null' TERM
trap 'stopped=yes' INT

for ((attempt = 0; ; attempt++)); do
  jaxpar train "$config" --set checkpoint.resume=auto "$@" &
  run=$!
  until wait "$run"; status=$?; ! kill -0 "$run" 2>/dev/null; do :; done
  case $status in
    75 | 134 | 137 | 139) ;;  # a device or storage failed, or something killed the process
    *) break ;;
  esac
  [ -z "$stopped" ] && [ "$attempt" -lt "$most" ] || break
  echo "status $status, restart $((attempt + 1)) of at most $most" >&2
  sleep "${JAXPAR_RESTART_DELAY:-5}"
done
exit "$status"
