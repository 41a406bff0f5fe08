#!/usr/bin/env bash
# A trace of three steps of a recipe, for TensorBoard (Profile) or ui.perfetto.dev. The first step, which compiles, is left
# out; the run goes into a directory of its own.
#
#   launch/profile.sh configs/parallel_search.yaml configs/hardware/v5p-32.yaml
#   launch/profile.sh --dry-run RECIPE…
#   OUT=runs/profile-b PSEARCH_FLAGS=async_collectives launch/profile.sh RECIPE…
set -euo pipefail

dry=0
if [[ ${1:-} == --dry-run ]]; then dry=1; shift; fi
if [[ $# -eq 0 ]]; then
  echo "profile.sh: name a recipe" >&2
  exit 2
fi
out=${OUT:-runs/profile}
here=$(dirname "$0")
command=("${PSEARCH:-.venv/bin/psearch}" train "$@" --profile "run_directory=$out" trainer.steps=5 trainer.checkpoint_every=5)
if [[ $dry == 1 ]]; then
  "$here/env.sh" --dry-run
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi
# shellcheck source=launch/env.sh
source "$here/env.sh"
"${command[@]}"
echo "trace: $out/profile (tensorboard --logdir $out/profile, or open the .trace.json.gz in ui.perfetto.dev)"
