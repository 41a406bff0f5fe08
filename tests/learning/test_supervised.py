"""The warm start: its head start, its checks, and that a stopped run ends like an unbroken one."""

import json
import signal
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from psearch_jax.assembly import open_policy
from psearch_jax.config import (
    ArchitectureConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    SupervisedConfig,
)
from psearch_jax.errors import Interrupted, UserError
from psearch_jax.learning import supervised
from psearch_jax.learning.episode_files import EpisodeStream, read_episodes
from psearch_jax.metrics_log import read_metrics
from psearch_jax.models import attention
from psearch_jax.models.decoder import DecoderConfig, init_params
from psearch_jax.models.lora import split_trainable
from psearch_jax.questions.facts import Facts
from psearch_jax.questions.world import SPLITS, World

DECODER = DecoderConfig(
    vocab_size=300,
    hidden_size=128,
    intermediate_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
)
CONFIG = Config(
    optimizer=OptimizerConfig(learning_rate=3e-3),
    supervised=SupervisedConfig(
        architecture=ArchitectureConfig(
            vocab_size=420,
            hidden_size=32,
            intermediate_size=32,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
        ),
        steps=4,
        rows_per_step=8,
        row_length=256,
        micro_rows=8,
        drill_steps=2,
        check_every=2,
        checkpoint_every=4,
        keep=1,
    ),
)


def weights_by_offset(params, layer: int) -> np.ndarray:
    """Mean attention weight [N heads, 4 offsets] on the tokens 1…4 before, over random sequences."""
    model = nnx.merge(init_params(DECODER, jax.random.key(0))[0], params)
    B, L = 4, 96
    tokens_BxL = jax.random.randint(jax.random.key(1), (B, L), 0, DECODER.vocab_size)
    positions_BxL = jnp.broadcast_to(jnp.arange(L), (B, L))
    tables = attention.rotary_tables(positions_BxL, DECODER.head_dim, DECODER.rope_theta)
    block = model.layers[layer]
    x_BxLxD = model.embed(tokens_BxL, jnp.float32)
    q, k, _ = block.self_attn.project(block.input_layernorm(x_BxLxD), tables)
    k = jnp.repeat(k, DECODER.num_heads // DECODER.num_kv_heads, axis=2)
    scores_BxNxLxL = jnp.einsum("bthd,bshd->bhts", q, k) / DECODER.head_dim**0.5
    scores_BxNxLxL = jnp.where(jnp.tri(L, dtype=bool), scores_BxNxLxL, -jnp.inf)
    weights = np.asarray(jax.nn.softmax(scores_BxNxLxL, axis=-1))[:, :, 8:]
    t = np.arange(8, L)
    return np.stack([weights[:, :, t - 8, t - d].mean((0, 2)) for d in range(1, 5)], axis=1)


def test_the_first_two_heads_start_out_looking_one_and_two_tokens_back():
    _, fresh = init_params(DECODER, jax.random.key(0))
    params = supervised.with_previous_token_heads(DECODER, fresh)
    shares_Nx4 = weights_by_offset(params, 0)
    assert shares_Nx4[0, 0] > 0.5  # one back
    assert shares_Nx4[1, 1] > 0.5  # two back
    assert np.all(shares_Nx4[2:] < 0.1)  # the other key/value head's heads are as they were
    np.testing.assert_array_equal(weights_by_offset(params, 1), weights_by_offset(fresh, 1))
    changed = [
        jax.tree_util.keystr(path)
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(fresh), strict=True
        )
        if not np.array_equal(a, b)
    ]
    assert len(changed) == 2 and all("[0]" in name and "bias" in name for name in changed)
    assert np.all(weights_by_offset(fresh, 0) < 0.1)


@pytest.fixture(scope="module")
def small_world(world):
    """The real world with a fortieth of its cities and its questions."""
    entities = world.facts.entities
    capitals = {e.facts.get("capital") for e in entities if e.kind == "country"}
    kept = tuple(
        e for i, e in enumerate(entities) if e.kind != "city" or e.name in capitals or i % 40 == 0
    )
    with pytest.MonkeyPatch.context() as patch:
        for split in SPLITS:
            patch.setitem(SPLITS, split, 60)
        small = World(Facts(entities=kept))
        assert len(small.splits["train"]) >= 50
    return small


def train(config, world, monkeypatch, on_step=None):
    """`run`, and the float32 parameters that it saves."""
    saved = []
    save = supervised.save_hf_directory

    def keep(directory, decoder, params, **options):
        saved.append(jax.device_get(jax.tree.leaves(params)))
        save(directory, decoder, params, **options)

    monkeypatch.setattr(supervised, "save_hf_directory", keep)
    out = supervised.run(config, on_step, world)
    monkeypatch.undo()
    return out, saved[0]


def test_law_13_a_stopped_warm_start_ends_with_the_same_parameters(
    small_world, tmp_path, monkeypatch
):
    whole = replace(CONFIG, run_directory=str(tmp_path / "whole"))
    seen = []
    out, unbroken = train(
        whole, small_world, monkeypatch, lambda step, steps, row: seen.append((step, row))
    )
    assert [step for step, _ in seen] == [2, 4]
    rows = [row for _, row in seen]
    assert all(np.isfinite(row["loss"]) and row["applied"] == 1 for row in rows)
    assert rows[1]["loss"] != rows[0]["loss"]
    assert set(json.loads((out.parent / "checks.json").read_text())) == {
        "copy", "compare", "share", "bare",
    }  # fmt: skip

    stopped = replace(CONFIG, run_directory=str(tmp_path / "stopped"))

    def press(step, steps, row):
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted, match="after step 2 of 4; the same command goes on"):
        supervised.run(stopped, press, small_world)
    assert not (tmp_path / "stopped" / "policy").exists()
    other = replace(stopped, supervised=replace(CONFIG.supervised, seed=1))
    with pytest.raises(UserError, match="holds a run of another recipe"):
        supervised.run(other, None, small_world)
    other = replace(stopped, supervised=replace(CONFIG.supervised, seed=1))
    with pytest.raises(UserError, match="another recipe"):
        supervised.run(other, None, small_world)
    resumed = []
    _, again = train(
        stopped, small_world, monkeypatch, lambda step, steps, row: resumed.append((step, row))
    )
    assert [step for step, _ in resumed] == [4]
    assert resumed[0][1]["loss"] == rows[1]["loss"]
    assert [row["step"] for row in read_metrics(tmp_path / "stopped")] == [2, 4]
    for a, b in zip(unbroken, again, strict=True):
        np.testing.assert_array_equal(a, b)

    policy = open_policy(str(out))
    assert policy.config.hidden_size == 32 and policy.config.vocab_size == len(policy.tokenizer)
    for a, b in zip(unbroken, jax.tree.leaves(policy.params), strict=True):
        np.testing.assert_array_equal(np.asarray(jnp.asarray(a, jnp.bfloat16), np.float32), b)
    assert policy.tokenizer.encode("<search>") == [
        policy.tokenizer.convert_tokens_to_ids("<search>")
    ]

    # The policy that came out is itself a start, also for one with more hidden units; its tokenizer stays.
    wider = replace(
        CONFIG.supervised,
        architecture=ArchitectureConfig(),
        start=str(out),
        widen_to=40,
        steps=2,
        drill_steps=0,
    )
    second = replace(CONFIG, run_directory=str(tmp_path / "wider"), supervised=wider)
    before = supervised.beginning(second, small_world)
    assert before.config.intermediate_size == 40
    wide, leaves = train(second, small_world, monkeypatch)
    widened = open_policy(str(wide))
    assert widened.config.intermediate_size == 40
    assert widened.tokenizer.get_vocab() == policy.tokenizer.get_vocab()
    shapes = [leaf.shape for leaf in jax.tree.leaves(before.params)]
    assert [leaf.shape for leaf in leaves] == shapes
    assert any(
        np.any(np.asarray(a) != b)
        for a, b in zip(jax.tree.leaves(before.params), leaves, strict=True)
    )

    # And it learns episodes of a file, here with adapters alone; only what the policy wrote counts.
    path = tmp_path / "episodes.jsonl"
    texts = [
        [
            ["prompt", f"Which is larger, {n} or 7?\n"],
            ["policy", f"<think>size</think><search>size of {n}</search>"],
            ["observation", f"<information>1:size 10^{n}*2.50 {n}\n</information>"],
            ["policy", f"<think>found</think><answer> {n}</answer>"],
        ]
        for n in range(3)
    ]
    path.write_text("".join(json.dumps({"segments": segments}) + "\n" for segments in texts))
    counted = sum(
        len(policy.tokenizer.encode(text)) for segments in texts for role, text in segments[1::2]
    )
    settings = replace(wider, widen_to=0, episodes=str(path), steps=4)
    learns = replace(
        CONFIG,
        run_directory=str(tmp_path / "episodes"),
        model=ModelConfig(lora_rank=2),
        supervised=replace(settings, drill_steps=500, row_length=160, checkpoint_every=2),
    )
    told = []
    final, leaves = train(
        learns, None, monkeypatch, lambda step, steps, row: told.append((step, row))
    )
    sequences = read_episodes(path, policy.tokenizer)
    assert sum(float(np.sum(sequence.weights)) for sequence in sequences) == counted
    stream = EpisodeStream(sequences, 160, settings.rows_per_step, settings.seed)
    assert [row["weight"] for _, row in told] == [stream.batch(i).weights_RxL.sum() for i in (1, 3)]
    assert told[1][1]["loss"] < told[0][1]["loss"]
    start = supervised.beginning(learns, None)
    moved = [
        np.any(np.asarray(a) != b)
        for a, b in zip(jax.tree.leaves(start.params), leaves, strict=True)
    ]
    adapters = len(jax.tree.leaves(split_trainable(start.params)[0]))
    assert sum(moved) == adapters == 2 * 7
    assert open_policy(str(final)).config.lora is None  # merged
    path.write_text(path.read_text() + "\n".join(path.read_text().splitlines()[:1]) + "\n")
    with pytest.raises(UserError, match="another recipe .or of other episodes."):
        supervised.run(learns, None, None)
