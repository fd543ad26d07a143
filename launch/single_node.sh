#!/usr/bin/env bash
# A recipe on one machine with GPUs; Conveyor starts a Ray of its own. Ctrl-C ends everything.
#
#   launch/single_node.sh recipes/llama3_8b_ppo_8gpu.yaml [--key value ...]            # all GPUs
#   GPUS=1 launch/single_node.sh recipes/llama3_8b_grpo_lora_1gpu.yaml                 # the first one
#
#   GPUS          how many of the machine's GPUs (default: all that are there)
#   ATTEMPTS      start again so often after a failure, each time from the newest checkpoint (1: not again)
set -euo pipefail

if [[ $# -lt 1 ]]; then
  echo "usage: single_node.sh RECIPE.yaml [--key value ...]" >&2
  exit 2
fi
export RAY_USAGE_STATS_ENABLED=0
unset RAY_ADDRESS # of another cluster
if [[ -n ${GPUS:-} ]]; then
  CUDA_VISIBLE_DEVICES="$(seq --separator=, 0 "$((GPUS - 1))")"
  export CUDA_VISIBLE_DEVICES
fi

run=""
stop() {
  trap '' INT TERM
  if [[ -n $run ]]; then
    kill -TERM "$run" 2>/dev/null || true
    wait "$run" || true
  fi
  exit 130
}
trap stop INT TERM

arguments=("$@")
for ((attempt = 1; ; attempt++)); do
  conveyor train "${arguments[@]}" &
  run=$!
  status=0
  wait "$run" || status=$?
  # 2: bad input, which no second try makes better
  if ((status == 0 || status == 2 || attempt >= ${ATTEMPTS:-1})); then
    exit "$status"
  fi
  echo "single_node.sh: ended with status $status; attempt $((attempt + 1)) of $ATTEMPTS resumes" >&2
  arguments=("$@" --checkpoint.resume true)
done
