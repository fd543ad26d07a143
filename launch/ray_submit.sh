#!/usr/bin/env bash
# A recipe on a running Ray cluster, as a Ray job: its output is shown, its end is this script's, Ctrl-C ends it.
#
#   launch/ray_submit.sh RECIPE.yaml [--key value ...]
#
# Run it on the head, in a folder that all machines see at the same path; or elsewhere with the head's job port forwarded.
#
#   RAY_JOBS_ADDRESS     where jobs are submitted (http://127.0.0.1:8265)
#   FOLDER               the folder on the cluster (default: this one)
set -euo pipefail

if [[ $# -lt 1 ]]; then
  echo "usage: ray_submit.sh RECIPE.yaml [--key value ...]" >&2
  exit 2
fi
for word in "$@" "${FOLDER:-$PWD}"; do
  # Ray puts the words together again for a shell of its own.
  if [[ ! $word =~ ^[A-Za-z0-9_./:=,@%+~-]+$ ]]; then
    echo "ray_submit.sh: $word: does not come through ray job submit unchanged; set it in the recipe" >&2
    exit 2
  fi
done
export RAY_USAGE_STATS_ENABLED=0
address="${RAY_JOBS_ADDRESS:-http://127.0.0.1:8265}"
job="conveyor-$(date +%Y%m%d-%H%M%S)-$$"

submitted=""
stop() {
  trap '' INT TERM
  ray job stop --address "$address" "$job" || true
  if [[ -n $submitted ]]; then
    wait "$submitted" || true
  fi
  exit 130
}
trap stop INT TERM

ray job submit --address "$address" --submission-id "$job" -- env -C "${FOLDER:-$PWD}" conveyor train "$@" &
submitted=$!
status=0
wait "$submitted" || status=$?
exit "$status"
