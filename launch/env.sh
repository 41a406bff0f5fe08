#!/usr/bin/env bash
# Flags of the TPU compiler and of JAX, by group, with what each is for. All are off by default: a group is switched on by
# its name, and what it brings must be measured (launch/profile.sh) before it is kept.
#
#   PSEARCH_FLAGS="async_collectives memory" source launch/env.sh
#   PSEARCH_FLAGS="async_collectives" launch/env.sh --dry-run      prints what would be exported
set -u

flags=()
for group in ${PSEARCH_FLAGS:-}; do
  case $group in
    async_collectives)
      # Gathers and reductions of weights run beside matrix products. On v5p they stay synchronous without these.
      flags+=(--xla_tpu_enable_async_collective_fusion=true)
      flags+=(--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true)
      flags+=(--xla_tpu_enable_async_collective_fusion_multiple_steps=true)
      flags+=(--xla_tpu_overlap_compute_collective_tc=true)
      flags+=(--xla_enable_async_all_gather=true)
      ;;
    data_parallel)
      # The sum of gradients over `data` is overlapped with the backward pass; between slices this is what counts.
      flags+=(--xla_tpu_enable_data_parallel_all_reduce_opt=true)
      flags+=(--xla_tpu_data_parallel_opt_different_sized_ops=true)
      ;;
    memory)
      # Scoped VMEM of 96 MiB for v6e: larger fusions, fewer trips to HBM. Not for v5e, which has less of it.
      flags+=(--xla_tpu_scoped_vmem_limit_kib=98304)
      ;;
    deterministic)
      # Nothing that may change the order of additions between two compilations.
      flags+=(--xla_tpu_enable_latency_hiding_scheduler=false)
      ;;
    *)
      echo "env.sh: PSEARCH_FLAGS names $group; there are async_collectives, data_parallel, memory, deterministic" >&2
      exit 2
      ;;
  esac
done

if [[ ${1:-} == --dry-run ]]; then
  echo "export LIBTPU_INIT_ARGS='${flags[*]-}'"
else
  export LIBTPU_INIT_ARGS="${LIBTPU_INIT_ARGS:-} ${flags[*]-}"
fi
