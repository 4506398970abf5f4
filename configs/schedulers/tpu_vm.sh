#!/bin/bash
# Train on one Cloud TPU slice: copy the configuration to each of its hosts, install jaxpar, start the same command.
#
#   configs/schedulers/tpu_vm.sh NAME ZONE CONFIG [--set KEY=VALUE ...]
#
# The slice must exist: gcloud compute tpus tpu-vm create NAME --zone ZONE --accelerator-type v5litepod-16 \
#   --version v2-alpha-tpuv5-lite
# jaxpar finds the other hosts from the TPU's metadata. With several hosts, `output` must be on storage that all see.
# JAXPAR names what pip installs: by default the wheel of this checkout (`uv build`), as dist/jaxpar-*.whl.
set -euo pipefail

usage="usage: tpu_vm.sh NAME ZONE CONFIG [--set KEY=VALUE ...]"
name=${1:?$usage} zone=${2:?$usage} config=${3:?$usage}
shift 3
wheel=${JAXPAR:-$(ls dist/jaxpar-*.whl)}

gcloud compute tpus tpu-vm scp "$config" "$wheel" "$name:" --zone "$zone" --worker=all
words=$(printf ' %q' "$@")
gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all --command "
  set -e
  python3 -m venv --upgrade-deps jaxpar-env
  jaxpar-env/bin/pip install --quiet \"./$(basename "$wheel")[train,tpu]\"
  jaxpar-env/bin/jaxpar train '$(basename "$config")' --set checkpoint.resume=auto$words"
