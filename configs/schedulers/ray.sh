#!/bin/bash
# Train on a running Ray cluster; the run survives lost nodes, and uses new ones after its next restart.
#
#   RAY_ADDRESS=HOST:PORT configs/schedulers/ray.sh CONFIG PROCESSES [--set KEY=VALUE ...]
#
# All nodes need the same paths, and jaxpar with the extra `ray`. The configuration needs `checkpoint:`.
set -euo pipefail

config=${1:?usage: ray.sh CONFIG PROCESSES [--set KEY=VALUE ...]}
processes=${2:?usage: ray.sh CONFIG PROCESSES [--set KEY=VALUE ...]}
shift 2
: "${RAY_ADDRESS:?set RAY_ADDRESS=HOST:PORT of the cluster}"

exec jaxpar train "$config" --ray --processes "$processes" \
  --set supervise.elastic=true --set checkpoint.resume=auto "$@"
