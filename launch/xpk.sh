#!/usr/bin/env bash
# A run on a GKE cluster that XPK made: builds the image, hands in the workload, shows or deletes it.
#
#   export PROJECT=… ZONE=… CLUSTER=… IMAGE=…-docker.pkg.dev/…/psearch:1 TYPE=v5p-32 NAME=search-run
#   launch/xpk.sh image                # build and push
#   launch/xpk.sh run configs/parallel_search.yaml configs/hardware/v5p-32.yaml run_directory=/mnt/runs/a
#   launch/xpk.sh list | logs | delete
#
# --dry-run before the command prints what would run. XPK restarts a preempted workload (RESTARTS, default 100) with the
# same command, which goes on from the last checkpoint.
set -euo pipefail

dry=0
if [[ ${1:-} == --dry-run ]]; then dry=1; shift; fi
command=${1:-help}
[[ $# -eq 0 ]] || shift

need() {
  local variable
  for variable in "$@"; do
    if [[ -z ${!variable:-} ]]; then
      echo "xpk.sh: set $variable (export $variable=…)" >&2
      exit 2
    fi
  done
}

run() {
  if [[ $dry == 1 ]]; then printf '%q ' "$@"; echo; else "$@"; fi
}

case $command in
  image)
    need IMAGE
    run docker build --file launch/Dockerfile --build-arg EXTRA=tpu --tag "$IMAGE" .
    run docker push "$IMAGE"
    ;;
  run)
    need PROJECT ZONE CLUSTER IMAGE TYPE NAME
    directory=""
    for argument in "$@"; do
      if [[ $argument == run_directory=* ]]; then directory=${argument#run_directory=}; fi
    done
    if [[ -z $directory ]]; then
      echo "xpk.sh run: name run_directory=… on storage that all hosts see" >&2
      exit 2
    fi
    arguments=$(printf '%q ' "$@")
    run xpk workload create --project "$PROJECT" --zone "$ZONE" --cluster "$CLUSTER" --workload "$NAME" \
      --docker-image "$IMAGE" --tpu-type "$TYPE" --num-slices "${SLICES:-1}" --max-restarts "${RESTARTS:-100}" \
      --command "launch/until_done.sh $(printf '%q' "$directory") psearch train $arguments"
    ;;
  list)
    need PROJECT ZONE CLUSTER
    run xpk workload list --project "$PROJECT" --zone "$ZONE" --cluster "$CLUSTER"
    ;;
  logs)
    need NAME
    run kubectl logs --follow --selector "jobset.sigs.k8s.io/jobset-name=$NAME,batch.kubernetes.io/job-completion-index=0"
    ;;
  delete)
    need PROJECT ZONE CLUSTER NAME
    run xpk workload delete --project "$PROJECT" --zone "$ZONE" --cluster "$CLUSTER" --workload "$NAME"
    ;;
  *)
    sed -n '2,10s/^# \{0,1\}//p' "$0"
    [[ $command == help ]]
    ;;
esac
