#!/usr/bin/env bash
# A recipe on a Slurm cluster: Ray's head on the first node, Ray workers on the others, then `conveyor train` on the first.
#
#   sbatch                    launch/slurm.sh recipes/llama3_8b_ppo_8gpu.yaml        #   8 GPUs
#   sbatch --gpus-per-node=1  launch/slurm.sh recipes/llama3_8b_grpo_lora_1gpu.yaml  #   1
#   sbatch --nodes=4          launch/slurm.sh recipes/llama3_70b_ppo_32gpu.yaml      #  32
#   sbatch --nodes=16         launch/slurm.sh recipes/llama3_70b_ppo_128gpu.yaml     # 128
#
# Further arguments are the recipe's keys: --train.steps 100. Submit from a folder that all nodes see, with the environment in which
# `conveyor` and `ray` are installed active. A job that was preempted and queued again resumes from its newest checkpoint.
#
#   START_SECONDS             for all nodes to join (600)
#   REQUEUE_AT_LIMIT=1        queue the job again when its time is nearly up
#   OBJECT_STORE_GIB          Ray's object store on each node (Ray's own default)
#
#SBATCH --job-name=conveyor
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --requeue
#SBATCH --signal=B:TERM@180
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

if [[ $# -lt 1 ]]; then
  echo "usage: sbatch [--nodes=N] launch/slurm.sh RECIPE.yaml [--key value ...]" >&2
  exit 2
fi
# Slurm runs a copy of this file from elsewhere, in the folder that the job was submitted from.
launch="${SLURM_SUBMIT_DIR:?run it with sbatch}/launch"
gpus="${SLURM_GPUS_ON_NODE:?the job has no GPUs: sbatch --gpus-per-node=8}"
# Jobs that share a node keep apart by their numbers.
port=$((20000 + SLURM_JOB_ID % 10000))
export RAY_USAGE_STATS_ENABLED=0
unset RAY_ADDRESS

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
read -r -a addresses <<<"$(hostname --ip-address)"
ip="${addresses[0]}"
for address in "${addresses[@]}"; do
  if [[ $address != *:* ]]; then # the first that is no IPv6 address
    ip="$address"
    break
  fi
done
address="$ip:$port"

driver=""
stopped=""
ray_steps=()

stop() { # Preemption, or the time is nearly up: end the driver; what follows happens below.
  stopped=1
  if [[ -n $driver ]]; then
    kill -TERM "$driver" 2>/dev/null || true
  fi
}
finish() {
  local status=$?
  trap - EXIT
  trap '' INT TERM
  for step in "${ray_steps[@]}"; do
    kill -TERM "$step" 2>/dev/null || true
  done
  wait || true
  exit "$status"
}
trap stop INT TERM
trap finish EXIT

start_ray() { # NODE ARGUMENT...
  local node="$1"
  shift
  local options=(--block --num-gpus="$gpus" --num-cpus="${SLURM_CPUS_ON_NODE:-8}")
  if [[ -n ${OBJECT_STORE_GIB:-} ]]; then
    options+=(--object-store-memory="$((OBJECT_STORE_GIB * 1024 ** 3))")
  fi
  srun --nodes=1 --ntasks=1 --overlap --nodelist="$node" ray start "$@" "${options[@]}" &
  ray_steps+=("$!")
}

deadline=$((SECONDS + ${START_SECONDS:-600}))
start_ray "${nodes[0]}" --head --node-ip-address="$ip" --port="$port" --include-dashboard=false --temp-dir="/tmp/ray_$SLURM_JOB_ID"
until ray health-check --address "$address" >/dev/null 2>&1; do
  if [[ -n $stopped ]]; then
    exit 143
  fi
  if ((SECONDS >= deadline)) || ! kill -0 "${ray_steps[0]}" 2>/dev/null; then
    echo "slurm.sh: Ray's head on ${nodes[0]} does not answer at $address" >&2
    exit 1
  fi
  sleep 1
done
for node in "${nodes[@]:1}"; do
  start_ray "$node" --address="$address"
done

run() { # COMMAND...: until it ends, whatever signals come; returns its status
  if [[ -n $stopped ]]; then
    return 143
  fi
  "$@" &
  driver=$!
  if [[ -n $stopped ]]; then # the signal came just before there was a driver
    stop
  fi
  local status
  while true; do # a signal ends a wait before the driver has ended
    status=0
    wait "$driver" || status=$?
    kill -0 "$driver" 2>/dev/null || break
  done
  driver=""
  return "$status"
}

run python "$launch/wait_for_gpus.py" "$address" "$((${#nodes[@]} * gpus))" "$((deadline > SECONDS ? deadline - SECONDS : 1))"
arguments=("$@" --ray.address "$address")
if ((${SLURM_RESTART_COUNT:-0} > 0)); then
  arguments+=(--checkpoint.resume true)
fi
status=0
run conveyor train "${arguments[@]}" || status=$?
if [[ -n $stopped && $status -ne 0 && ${REQUEUE_AT_LIMIT:-0} == 1 ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
