#!/usr/bin/env bash
# One machine of a Ray cluster without Slurm or Kubernetes. The first machine first, then every other one, then the job:
#
#   launch/ray_node.sh head                    # on the first; prints what the others are to run
#   launch/ray_node.sh worker 10.0.0.1:6379    # on every other machine
#   launch/ray_submit.sh RECIPE.yaml           # on the first
#   launch/ray_node.sh stop                    # on each, at the end: ends all Ray processes of this user on the machine
#
#   GPUS                 of this machine (default: all that are there)
#   PORT                 of the head (6379)
#   HEAD_IP              the head's address, as the others reach it (default: the first that is no IPv6 address)
#   OBJECT_STORE_GIB     Ray's object store (Ray's own default)
set -euo pipefail

usage() {
  echo "usage: ray_node.sh head | worker HEAD:PORT | stop" >&2
  exit 2
}
export RAY_USAGE_STATS_ENABLED=0
unset RAY_ADDRESS

first_address() { # of this machine, that is no IPv6 address
  local addresses address
  read -r -a addresses <<<"$(hostname --ip-address)"
  for address in "${addresses[@]}"; do
    if [[ $address != *:* ]]; then
      echo "$address"
      return
    fi
  done
  echo "ray_node.sh: this machine has no IPv4 address; name one in HEAD_IP" >&2
  return 1
}

options=()
if [[ -n ${GPUS:-} ]]; then
  options+=(--num-gpus="$GPUS")
fi
if [[ -n ${OBJECT_STORE_GIB:-} ]]; then
  options+=(--object-store-memory="$((OBJECT_STORE_GIB * 1024 ** 3))")
fi

case "${1:-}" in
  head)
    [[ $# -eq 1 ]] || usage
    port="${PORT:-6379}"
    ip="${HEAD_IP:-$(first_address)}"
    # The dashboard, through which jobs are submitted, stays on the machine's own address: who reaches it can run anything.
    ray start --head --node-ip-address="$ip" --port="$port" --dashboard-host=127.0.0.1 "${options[@]}"
    echo "on every other machine: launch/ray_node.sh worker $ip:$port"
    ;;
  worker)
    [[ $# -eq 2 && $2 == *:* ]] || usage
    ray start --address="$2" "${options[@]}"
    ;;
  stop)
    [[ $# -eq 1 ]] || usage
    ray stop
    ;;
  *)
    usage
    ;;
esac
