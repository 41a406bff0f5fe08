#!/usr/bin/env bash
# A TPU slice by itself (Cloud TPU VM), from creation to deletion.
#
#   export PROJECT=… ZONE=… NAME=search-run TYPE=v5p-32 VERSION=v2-alpha-tpuv5
#   launch/tpu_vm.sh create            # SPOT=1: a preemptible slice
#   launch/tpu_vm.sh setup             # this checkout and its environment onto every worker
#   launch/tpu_vm.sh run configs/parallel_search.yaml configs/hardware/v5p-32.yaml run_directory=/mnt/runs/a
#   launch/tpu_vm.sh logs
#   launch/tpu_vm.sh stop              # SIGTERM: saves and exits; `run` goes on from there
#   launch/tpu_vm.sh delete
#
# --dry-run before the command prints what would run. run_directory must be a place that all workers see (a mounted
# bucket or a file server): each writes its part of a checkpoint there.
set -euo pipefail

dry=0
if [[ ${1:-} == --dry-run ]]; then dry=1; shift; fi
command=${1:-help}
[[ $# -eq 0 ]] || shift

need() {
  local variable
  for variable in "$@"; do
    if [[ -z ${!variable:-} ]]; then
      echo "tpu_vm.sh: set $variable (export $variable=…)" >&2
      exit 2
    fi
  done
}

run() {
  if [[ $dry == 1 ]]; then printf '%q ' "$@"; echo; else "$@"; fi
}

on_all_workers() {
  run gcloud compute tpus tpu-vm ssh "$NAME" --project "$PROJECT" --zone "$ZONE" --worker=all --command "$1"
}

case $command in
  create)
    need PROJECT ZONE NAME TYPE VERSION
    spot=()
    if [[ ${SPOT:-0} == 1 ]]; then spot=(--spot); fi
    run gcloud compute tpus tpu-vm create "$NAME" --project "$PROJECT" --zone "$ZONE" \
      --accelerator-type "$TYPE" --version "$VERSION" "${spot[@]}"
    ;;
  setup)
    need PROJECT ZONE NAME
    archive=$(mktemp -u).tar.gz
    run git archive --format=tar.gz --output "$archive" HEAD
    run gcloud compute tpus tpu-vm scp "$archive" "$NAME:psearch_jax.tar.gz" --project "$PROJECT" --zone "$ZONE" --worker=all
    on_all_workers "mkdir -p psearch_jax && tar xzf psearch_jax.tar.gz -C psearch_jax && cd psearch_jax && make venv && .venv/bin/pip install -q -c constraints.txt -e '.[tpu]' && .venv/bin/python launch/check_devices.py"
    run rm -f "$archive"
    ;;
  run)
    need PROJECT ZONE NAME
    if [[ $# -eq 0 ]]; then echo "tpu_vm.sh run: name a recipe" >&2; exit 2; fi
    arguments=$(printf '%q ' "$@")
    on_all_workers "cd psearch_jax && nohup bash -c 'source launch/env.sh && exec .venv/bin/psearch train $arguments' >> ../psearch.log 2>&1 < /dev/null & echo started"
    ;;
  logs)
    need PROJECT ZONE NAME
    run gcloud compute tpus tpu-vm ssh "$NAME" --project "$PROJECT" --zone "$ZONE" --worker=0 --command "tail -n 100 -f psearch.log"
    ;;
  stop)
    need PROJECT ZONE NAME
    on_all_workers "pkill -TERM -u \"\$USER\" -f 'psearch train' || true"
    ;;
  delete)
    need PROJECT ZONE NAME
    run gcloud compute tpus tpu-vm delete "$NAME" --project "$PROJECT" --zone "$ZONE" --quiet
    ;;
  *)
    sed -n '2,13s/^# \{0,1\}//p' "$0"
    [[ $command == help ]]
    ;;
esac
