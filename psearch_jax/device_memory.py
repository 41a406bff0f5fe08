"""A device that has not enough memory, as a sentence that says what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from psearch_jax.errors import UserError

#: What to change where a device's memory does not hold what a phase of a step needs.
ROLLOUT_MEMORY = (
    "the rollout",
    "lower rollout.slots or rollout.context, or raise mesh.tensor or mesh.fsdp",
)
UPDATE_MEMORY = (
    "the update",
    "lower algorithm.micro_rows or algorithm.logprob_chunk, set model.remat=full, or raise mesh.fsdp",
)


@contextmanager
def memory_explained(phase: tuple[str, str], step: int) -> Iterator[None]:
    """Turn a device without enough memory into a sentence (UserError); checkpoints are as they were. In a profiler's
    trace the phase has its name and step."""
    try:
        with jax.profiler.StepTraceAnnotation(phase[0], step_num=step):
            yield
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "RESOURCE_EXHAUSTED" not in text and "out of memory" not in text.lower():
            raise
        what, remedy = phase
        raise UserError(
            f"a device had not enough memory for {what} of step {step} ({text.splitlines()[0][:200]}): {remedy}; "
            "`psearch plan` says what fits"
        ) from error
