"""The supervised stage: cross-entropy over episodes, from random weights or a policy to one worth improving."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int

from psearch_jax.assembly import Policy, keep_compiled_programs, lay_out, open_policy
from psearch_jax.checkpoints import Checkpointer
from psearch_jax.config import Config
from psearch_jax.config_files import config_hash
from psearch_jax.errors import Interrupted, UserError
from psearch_jax.interruption import GracefulStop
from psearch_jax.learning.batches import Batch, Sequence, fill
from psearch_jax.learning.demonstrations import DemonstrationStream, Piece, Scene, think
from psearch_jax.learning.episode_files import EpisodeStream, file_digest, read_episodes
from psearch_jax.learning.optimizers import make_optimizer
from psearch_jax.learning.update import (
    Compute,
    TrainState,
    init_state,
    make_supervised_update,
    place_batch,
)
from psearch_jax.mesh import Layout, make_mesh, param_shardings, resolve_dtype
from psearch_jax.metrics_log import MetricsLog
from psearch_jax.models.decoder import DecoderConfig, hidden_states, init_params, unembed
from psearch_jax.models.lora import join, split_trainable
from psearch_jax.models.weights import save_hf_directory
from psearch_jax.models.widening import widen
from psearch_jax.questions.facts import real_facts
from psearch_jax.questions.tokenizer import train_tokenizer, world_texts
from psearch_jax.questions.world import World
from psearch_jax.rollout.episode import Role
from psearch_jax.rollout.protocol import prompt_text

OnStep = Callable[[int, int, dict[str, float]], None]


def step_batch(stream: DemonstrationStream, step: int) -> Batch:
    """The packed batch of a step, drawn in order until the rows are full.

    Sequences are dropped from the end only, so that short ones are not preferred.
    """
    config = stream.config
    capacity = config.rows_per_step * config.row_length
    drawn: list[Sequence] = []
    total = 0
    for sequence in stream.sequences(step):
        if len(sequence.ids) > config.row_length:
            continue
        if total + len(sequence.ids) > 0.98 * capacity:
            break
        drawn.append(sequence)
        total += len(sequence.ids)
    while True:
        batch, left = fill(drawn, config.row_length, config.rows_per_step)
        if not left:
            return batch
        drawn.pop()


@partial(jax.jit, static_argnums=0)
def _matches(
    graphdef: nnx.GraphDef,
    params: Any,
    tokens_BxL: Int[Array, "B L"],
    segments_BxL: Int[Array, "B L"],
) -> Bool[Array, "B L"]:
    """Whether the most likely token at each index, given the tokens before it, is the one that is there."""
    B, L = tokens_BxL.shape
    positions_BxL = jnp.broadcast_to(jnp.arange(L), (B, L))
    hidden_BxLxD = hidden_states(graphdef, params, tokens_BxL, positions_BxL, segments_BxL)
    best_BxL = jnp.argmax(unembed(graphdef, params, hidden_BxLxD), axis=-1)
    hit_BxL = best_BxL[:, :-1] == tokens_BxL[:, 1:]
    return jnp.concatenate([jnp.zeros((B, 1), bool), hit_BxL], axis=1)


class Checks:
    """Teacher-forced checks on entities that no demonstration names.

    `copy`: sub-queries all of whose tokens are the most likely ones. `compare`, `share`: answers given the findings.
    """

    def __init__(self, stream: DemonstrationStream, world: World, count: int = 128) -> None:
        make = stream.demonstrations
        rng = np.random.default_rng(7)
        scene = Scene.of(world.facts, True, lambda index: world.unseen[index])
        templates = world.templates_unseen
        tags = (make.protocol.search[0], make.protocol.separator, make.protocol.search[1])
        open_id, separator_id, close_id = map(make.tokenizer.convert_tokens_to_ids, tags)
        self.rows: dict[str, list[tuple[list[int], list[tuple[int, int]]]]] = {
            "copy": [],
            "compare": [],
            "share": [],
            "bare": [],
        }
        for _ in range(count):
            ids = list(make.bare_drill(rng).ids)
            self.rows["bare"].append((ids, [(ids.index(make.answer_open) + 1, len(ids))]))
        for name, draw in (("compare", templates.compare), ("share", templates.shared)):
            while len(self.rows[name]) < count:
                script = draw(rng)
                if script is None:
                    continue
                turn = make.answer_turn(script, think(script.findings))
                sequence = make.sequence(
                    [
                        Piece(Role.PROMPT, prompt_text(make.protocol, script.text, make.tokenizer)),
                        Piece(Role.POLICY, turn),
                    ]
                )
                ids = list(sequence.ids)
                start = ids.index(make.answer_open) + 1
                self.rows[name].append((ids, [(start, len(ids))]))
        while len(self.rows["copy"]) < count:
            sequence = make.sequence(make.episode(rng, scene))
            ids, spans, start = list(sequence.ids), [], None
            for place, token in enumerate(ids):
                if start is not None and token in (separator_id, close_id):
                    spans.append((start, place))
                    start = None
                if sequence.weights[place] and token in (open_id, separator_id):
                    start = place + 1
            if spans and len(ids) <= stream.config.row_length:
                self.rows["copy"].append((ids, spans))
        self.length = stream.config.row_length

    def __call__(self, graphdef: nnx.GraphDef, params: Any) -> dict[str, float]:
        """Shares between 0 and 1."""
        result = {}
        for name, rows in self.rows.items():
            right = []
            for first in range(0, len(rows), 32):
                part = rows[first : first + 32]
                tokens_BxL = np.zeros((32, self.length), np.int32)
                segments_BxL = np.zeros((32, self.length), np.int32)
                for i, (ids, _) in enumerate(part):
                    tokens_BxL[i, : len(ids)], segments_BxL[i, : len(ids)] = ids, 1
                hit_BxL = np.asarray(_matches(graphdef, params, tokens_BxL, segments_BxL))
                right += [
                    bool(hit_BxL[i, start:stop].all())
                    for i, (_, spans) in enumerate(part)
                    for start, stop in spans
                ]
            result[name] = float(np.mean(right))
        return result


def with_previous_token_heads(config: DecoderConfig, params: Any) -> Any:
    """Let the first heads of the first layer start out looking at the last token and the one before it.

    Copying needs such heads, and finding them is what a small model spends its first thousand steps on. Rotary
    embeddings and the biases of Qwen2's queries and keys suffice to set them by hand: with key bias a(1, 0) and query
    bias a(cos sθ, −sin sθ) in a frequency's pair of channels, the score of offset d has the term a² cos((d − s)θ).
    The four highest frequencies tell neighbours apart. Training may change the biases like any others.
    """
    half, used, a = config.head_dim // 2, 4, 5.0
    theta = config.rope_theta ** (-np.arange(used) / half)
    keys_KxH = np.zeros((config.num_kv_heads, config.head_dim), np.float32)
    queries_NxH = np.zeros((config.num_heads, config.head_dim), np.float32)
    keys_KxH[0, :used] = a
    for head in range(config.num_heads // config.num_kv_heads):
        queries_NxH[head, :used] = a * np.cos((head + 1) * theta)
        queries_NxH[head, half : half + used] = -a * np.sin((head + 1) * theta)
    new = {"k_proj": keys_KxH.reshape(-1), "q_proj": queries_NxH.reshape(-1)}

    def place(path: Any, leaf: Array) -> Array:
        name = jax.tree_util.keystr(path)
        for part, bias in new.items():
            if f"['layers'][0]['self_attn']['{part}']['bias']" in name:
                return jnp.asarray(bias)
        return leaf

    return jax.tree_util.tree_map_with_path(place, params)


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is trained on: the batch of each step, checks of parameters, and the digest of a file of episodes."""

    batch: Callable[[int], Batch]
    checks: Callable[[nnx.GraphDef, Any], dict[str, float]]
    digest: str = ""


def training_data(config: Config, tokenizer: Any, world: World | None) -> Data:
    """Episodes of a file, or scripted ones. Checks are of scripts, and of tokenizers that have the tags as tokens.

    Raises:
      UserError: the file cannot be used.
    """
    settings = config.supervised
    if settings.episodes:
        sequences = read_episodes(settings.episodes, tokenizer)
        sizes = (settings.row_length, settings.rows_per_step, settings.seed)
        stream = EpisodeStream(sequences, *sizes)
        return Data(batch=stream.batch, checks=_no_checks, digest=file_digest(settings.episodes))
    assert world is not None
    scripts = DemonstrationStream(world, config.protocol, settings, tokenizer)
    checks = Checks(scripts, world) if scripts.demonstrations.whole_tags else _no_checks
    return Data(batch=partial(step_batch, scripts), checks=checks)


def _no_checks(graphdef: nnx.GraphDef, params: Any) -> dict[str, float]:
    return {}


def run(config: Config, on_step: OnStep | None = None, world: World | None = None) -> Path:
    """Train, checkpoint, resume, and save a Hugging Face directory `policy/` in the run directory.

    The batch of a step follows from the seed and the step alone, so a run that was killed ends with the same weights.

    Raises:
      Interrupted: Ctrl-C; the state was saved.
      UserError: files that cannot be used, or a run directory that holds another run.
    """
    settings = config.supervised
    directory = Path(config.run_directory)
    if world is None and not (settings.start and settings.episodes):
        world = World(real_facts())
    policy = beginning(config, world)
    mesh = make_mesh(config.mesh)
    trainable, frozen = split_trainable(policy.params)
    optimizer = make_optimizer(config.optimizer, settings.steps)
    compute = Compute(
        dtype=resolve_dtype(config.model.compute_dtype, Layout(mesh)),
        remat=config.model.remat,
        attention=config.model.attention,
    )
    update = make_supervised_update(policy.graphdef, optimizer, mesh, settings, compute=compute)
    state = init_state(trainable, optimizer, mesh)
    frozen = jax.device_put(frozen, param_shardings(mesh, frozen))
    data = training_data(config, policy.tokenizer, world)
    checkpointer = Checkpointer(directory / "checkpoints", keep=settings.keep)
    restored = checkpointer.restore_latest(state)
    extras = {"recipe": recipe_hash(config), "episodes": data.digest}
    first = 0
    if restored is not None:
        if {name: restored.extras.get(name, "") for name in extras} != extras:
            raise UserError(
                f"{checkpointer.directory} holds a run of another recipe (or of other episodes); choose another "
                "run_directory, or delete that one to start anew."
            )
        state, first = restored.state, restored.step
    log = MetricsLog(directory, resumed_step=first or None)

    def whole(state: TrainState) -> nnx.State:
        return join(state.params, frozen)

    try:
        state = _loop(
            settings,
            first,
            state,
            lambda state, batch: update(state, place_batch(batch, mesh), frozen=frozen),
            data.batch,
            lambda state: data.checks(policy.graphdef, whole(state)),
            log,
            partial(checkpointer.save, extras=extras),
            on_step,
        )
    finally:
        log.close()
    scores = data.checks(policy.graphdef, whole(state))
    out = directory / "policy"
    save_hf_directory(
        out,
        policy.config,
        whole(state),
        dtype="bfloat16",
        tokenizer=policy.tokenizer,
        generation=policy.generation,
    )
    if scores:
        (directory / "checks.json").write_text(json.dumps(scores, indent=1) + "\n")
    return out


def beginning(config: Config, world: World | None) -> Policy:
    """The policy before the first step: random weights and a tokenizer of the world, or `supervised.start`, widened;
    with fresh adapters where the recipe asks for them."""
    settings = config.supervised
    key = jax.random.key(settings.seed)
    if not settings.start:
        assert world is not None
        tokenizer = train_tokenizer(
            world_texts(world),
            config.protocol,
            settings.architecture.vocab_size,
            Path(config.run_directory) / "tokenizer",
        )
        sizes = {name: getattr(settings.architecture, name) for name in _SIZES}
        decoder = DecoderConfig(**sizes | {"vocab_size": len(tokenizer)})
        graphdef, params = init_params(decoder, key)
        params = with_previous_token_heads(decoder, params)
        policy = Policy(config=decoder, graphdef=graphdef, params=params, tokenizer=tokenizer)
    else:
        policy = open_policy(settings.start, dtype=jnp.dtype(config.model.param_dtype))
    if settings.widen_to:
        decoder, graphdef, params = widen(policy.config, policy.params, settings.widen_to, key)
        policy = replace(policy, config=decoder, graphdef=graphdef, params=params)
    return lay_out(policy, config, None) if config.model.lora_rank else policy


_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)


def _loop(
    settings: Any,
    first: int,
    state: TrainState,
    update: Callable[[TrainState, Batch], tuple[TrainState, Any]],
    batch_of: Callable[[int], Batch],
    checks: Callable[[TrainState], dict[str, float]],
    log: MetricsLog,
    save: Callable[[int, TrainState], Any],
    on_step: OnStep | None,
) -> TrainState:
    # The next batch is made while the device works; the first Ctrl-C lets the step in progress finish.
    with ThreadPoolExecutor(1) as pool, GracefulStop() as stop:
        ahead: Future[Batch] = pool.submit(batch_of, first)
        began, tokens = time.monotonic(), 0.0
        for step in range(first, settings.steps):
            batch = ahead.result()
            ahead = pool.submit(batch_of, step + 1)
            state, metrics = update(state, batch)
            done, last = step + 1, step + 1 == settings.steps
            tokens += float(metrics["tokens"])
            if done % settings.check_every == 0 or last:
                row = {name: float(value) for name, value in metrics.items()}
                row |= {f"check/{k}": v for k, v in checks(state).items()}
                row["tokens_per_second"] = tokens / (time.monotonic() - began)
                log.write(done, row)
                if on_step:
                    on_step(done, settings.steps, row)
            if done % settings.checkpoint_every == 0 or last or stop.asked:
                save(done, state)
            if stop.asked and not last:
                raise Interrupted(
                    f"Stopped after step {done} of {settings.steps}; the same command goes on from there.",
                    code=0 if stop.preempted else 130,
                )
    return state


def recipe_hash(config: Config) -> str:
    """Changes with everything that decides what is learned; not with where, or how often it is checked and saved."""
    settings = replace(config.supervised, check_every=1, checkpoint_every=1, keep=1)
    return config_hash(
        Config(
            supervised=settings,
            optimizer=config.optimizer,
            protocol=config.protocol,
            model=config.model,
        )
    )


def train(config: Config) -> Path:
    """`psearch sft`: `run` with a line for every check."""
    from psearch_jax.display import Display

    keep_compiled_programs(config)
    with Display() as display:

        def on_step(step: int, steps: int, row: dict[str, float]) -> None:
            shown = {k: v for k, v in row.items() if k in ("loss", "tokens_per_second") or "/" in k}
            display.note(
                f"step {step} of {steps}: " + ", ".join(f"{k} {v:.4g}" for k, v in shown.items())
            )
            display.update(step, steps)

        display.phase("supervised training", config.supervised.steps)
        out = run(config, on_step)
        display.note(f"saved the policy to {out}")
    return out
