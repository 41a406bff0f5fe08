"""`psearch export`: a recipe's policy, as far as it was trained, as a directory that other programs load.

Of a checkpoint only the parameters are read, not the optimiser's state; of a run with adapters these are the adapters,
and the rest comes from the recipe's policy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding
from transformers import PreTrainedTokenizerFast

from psearch_jax import trainer
from psearch_jax.assembly import Policy, lay_out, open_policy
from psearch_jax.checkpoints import (
    ARRAYS,
    EXTRAS,
    Checkpointer,
    DamagedCheckpoint,
    verified_manifest,
)
from psearch_jax.config import Config
from psearch_jax.errors import UserError
from psearch_jax.learning import supervised
from psearch_jax.mesh import make_mesh, param_shardings
from psearch_jax.models.decoder import abstract_params
from psearch_jax.models.decoder_config import DecoderConfig
from psearch_jax.models.export import save_hf_directory, save_peft_directory


def run(
    config: Config,
    target: Path,
    *,
    checkpoint: int | None = None,
    peft: bool = False,
    dtype: str | None = None,
) -> str:
    """Write the policy of `config` to `target` and return a sentence that says what was written.

    checkpoint: a step of the run directory; default the newest, and where there is none the recipe's policy itself.
    peft: the adapters alone, in PEFT's format; else they are merged. dtype: as stored; default "bfloat16", of
    adapters "float32".

    Raises:
      UserError: a target that holds something, a step that is not there or is damaged, a checkpoint of another
        recipe, or a policy that cannot be read.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is there already and not an empty directory; name another.")
    policy, origin = trained_policy(config, checkpoint)
    if peft:
        save_peft_directory(
            target, policy.config, policy.params, base=config.policy, dtype=dtype or "float32"
        )
        return f"wrote the adapters of {origin} to {target}"
    save_hf_directory(
        target,
        policy.config,
        policy.params,
        dtype=dtype or "bfloat16",
        tokenizer=policy.tokenizer,
        generation=policy.generation,
    )
    return f"wrote {origin} to {target}"


def trained_policy(config: Config, checkpoint: int | None = None) -> tuple[Policy, str]:
    """The policy of a recipe with the parameters of its run's checkpoint, and where these come from, in words.

    The run may be of `psearch train` or of `psearch sft`. On one device the recipe's mesh is not used.

    Raises:
      UserError: as `run`.
    """
    checkpoints = Checkpointer(Path(config.run_directory) / "checkpoints")
    steps = checkpoints.steps()
    if checkpoint is not None and checkpoint not in steps:
        there = f"there are {', '.join(map(str, steps))}" if steps else "there is none"
        raise UserError(f"no checkpoint {checkpoint} in {checkpoints.directory}; {there}.")
    mesh = make_mesh(config.mesh) if len(jax.devices()) > 1 else None
    if not steps:
        return _start(config, mesh), f"policy {config.policy}, which was not trained,"
    step = steps[-1] if checkpoint is None else checkpoint
    path = checkpoints.directory / str(step)
    try:
        saved = verified_manifest(path)["leaves"]
        recipe = json.loads((path / EXTRAS).read_text(encoding="utf-8")).get("recipe")
    except (DamagedCheckpoint, OSError, ValueError) as error:
        raise UserError(
            f"checkpoint {path} is damaged ({error}); name another step with --checkpoint."
        ) from error
    if recipe == trainer.recipe_hash(config):
        policy = _start(config, mesh)
    elif recipe == supervised.recipe_hash(config):
        policy = _supervised_start(config)
    else:
        raise UserError(
            f"checkpoint {path} is of another recipe; export with the run's own configuration, "
            f"{Path(config.run_directory) / 'config.yaml'}."
        )
    return _with_saved(policy, path, saved, mesh), f"step {step} of {config.run_directory}"


def _start(config: Config, mesh: Mesh | None) -> Policy:
    """Where `psearch train` begins."""
    dtype = jnp.dtype(config.model.param_dtype)
    return lay_out(open_policy(config.policy, dtype=dtype, mesh=mesh), config, mesh)


def _supervised_start(config: Config) -> Policy:
    """What `psearch sft` trains: where it began from a policy, that one; else shapes, as every parameter is in the
    checkpoint."""
    if config.supervised.start:
        return supervised.beginning(config, None)
    directory = Path(config.run_directory) / "tokenizer"
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the run's tokenizer in {directory} cannot be read; run psearch sft with this recipe again."
        ) from error
    sizes = asdict(config.supervised.architecture) | {"vocab_size": len(tokenizer)}
    decoder = DecoderConfig(**sizes)
    graphdef, shapes = abstract_params(decoder)
    return Policy(config=decoder, graphdef=graphdef, params=shapes, tokenizer=tokenizer)


def _with_saved(policy: Policy, path: Path, saved: Mapping[str, Any], mesh: Mesh | None) -> Policy:
    """The policy with every parameter that the checkpoint has in place of its own."""
    # A run with a critic saves the states of both, the policy's first; one with a shared critic has a head in it.
    prefixes = ("0/params/", "params/trunk/", "params/")
    prefix = next((p for p in prefixes if any(name.startswith(p) for name in saved)), "params/")
    keys, tree = jax.tree_util.tree_flatten_with_path(policy.params)
    names = [prefix + jax.tree_util.keystr(key, simple=True, separator="/") for key, _ in keys]
    shapes = {name: tuple(leaf.shape) for name, (_, leaf) in zip(names, keys, strict=True)}
    stored = {name: entry for name, entry in saved.items() if name.startswith(prefix)}
    wrong = [n for n, (shape, _) in stored.items() if shapes.get(n) != tuple(shape)]
    if wrong or not stored:
        raise UserError(
            f"checkpoint {path} does not fit policy and recipe: {len(wrong)} array(s) differ, first "
            f"{wrong[0] if wrong else 'all'}; export with what the run was made with."
        )
    one = SingleDeviceSharding(jax.devices()[0])
    where = (
        dict.fromkeys(names, one)
        if mesh is None
        else dict(zip(names, jax.tree.leaves(param_shardings(mesh, policy.params)), strict=True))
    )
    targets = {
        name: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=where[name])
        for name, (shape, dtype) in stored.items()
    }
    # The parameters that are to be replaced make room for those that replace them.
    kept = {n: leaf for n, (_, leaf) in zip(names, keys, strict=True) if n not in stored}
    policy = replace(policy, params=nnx.State({}))
    del keys
    with ocp.PyTreeCheckpointer() as reader:
        arrays = reader.restore(
            path / ARRAYS,
            args=ocp.args.PyTreeRestore(
                item=targets,
                restore_args=ocp.checkpoint_utils.construct_restore_args(targets),
                partial_restore=True,
            ),
        )
    leaves = [(kept | arrays)[name] for name in names]
    return replace(policy, params=jax.tree.unflatten(tree, leaves))
