#!/usr/bin/env bash
# Run a training command under a scheduler that takes exit code 0 for "finished".
#
#   launch/until_done.sh RUN_DIRECTORY psearch train …
#   launch/until_done.sh --dry-run RUN_DIRECTORY psearch train …
#
# A run that SIGTERM stopped has saved itself and ends with 0, too. So: SIGTERM is handed on to the command, and where that
# ends with 0 but has not written its policy yet, this ends with 75 ("try again later"), and the scheduler starts it again.
set -uo pipefail

dry=0
if [[ ${1:-} == --dry-run ]]; then dry=1; shift; fi
if [[ $# -lt 2 ]]; then
  echo "until_done.sh: RUN_DIRECTORY COMMAND…" >&2
  exit 2
fi
directory=$1
shift
if [[ $dry == 1 ]]; then
  printf '%q ' "$@"
  echo "# until $directory/policy/config.json is there"
  exit 0
fi

"$@" &
child=$!
trap 'kill -TERM "$child" 2>/dev/null' TERM
wait "$child"
code=$?
# A signal ends the first wait; the command still has something to save.
while kill -0 "$child" 2>/dev/null; do
  wait "$child"
  code=$?
done
if [[ $code == 0 && ! -e $directory/policy/config.json ]]; then exit 75; fi
exit "$code"
