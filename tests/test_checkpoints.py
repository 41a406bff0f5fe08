"""Checkpoints: bit-identical, atomic, verified, restored anywhere."""

import errno
import json
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from psearch_jax import mesh as mesh_lib
from psearch_jax.checkpoints import Checkpointer, DamagedCheckpoint
from psearch_jax.config import MeshConfig
from psearch_jax.errors import UserError


def small_state(seed: int = 0):
    """Every kind of leaf a run has: float32, bfloat16 (with its odd values), ints, a key, NumPy."""
    w = jax.random.normal(jax.random.key(seed), (16, 8))
    return {
        "params": {"w": w, "low": w.astype(jnp.bfloat16).at[0, 0].set(jnp.nan).at[0, 1].set(-0.0)},
        "opt": optax.adam(1e-3).init({"w": w}),
        "step": jnp.int32(7),
        "flags": jnp.array([True, False]),
        "key": jax.random.fold_in(jax.random.key(3), 9),
        "order": np.arange(5, dtype=np.int64)[::-1].copy(),
    }


def bits(leaf) -> tuple:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.shape, str(array.dtype), array.tobytes()


def assert_identical(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert bits(x) == bits(y)


def test_law_13_round_trip_is_bit_identical(tmp_path):
    state = small_state()
    extras = {"position": [3, 14], "hash": "ab", "Zürich": 0.1}
    Checkpointer(tmp_path).save(7, state, extras)
    back = Checkpointer(tmp_path).restore_latest(small_state(seed=1))  # other values, same shapes
    assert (back.step, back.extras) == (7, extras)
    assert_identical(back.state, state)
    assert isinstance(back.state["order"], np.ndarray)
    assert jax.random.key_impl(back.state["key"]) == jax.random.key_impl(state["key"])


def test_module_state_and_abstract_leaves(tmp_path):
    _, params = nnx.split(nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
    Checkpointer(tmp_path).save(1, params)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    assert_identical(Checkpointer(tmp_path).restore_latest(abstract).state, params)


def test_nothing_saved_is_none(tmp_path):
    assert Checkpointer(tmp_path / "none").restore_latest(small_state()) is None
    assert Checkpointer(tmp_path / "none").steps() == []


def test_keeps_the_newest(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step in (2, 9, 10, 11):  # 9 < 10 as numbers, not as text
        checkpointer.save(step, {"x": jnp.float32(step)})
    assert checkpointer.steps() == [10, 11]
    assert sorted(os.listdir(tmp_path)) == ["10", "11"]
    with pytest.raises(UserError, match="at least 1"):
        Checkpointer(tmp_path, keep=0)


def test_one_checkpoint_may_be_spared_and_later_ones_dropped(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=1, keep_best=False)
    checkpointer.spare = 1
    for step in (1, 2, 3):
        checkpointer.save(step, {"x": jnp.float32(step)})
    checkpointer.wait()
    assert checkpointer.steps() == [1, 3]
    checkpointer.drop_after(1)
    assert os.listdir(tmp_path) == ["1"]
    assert checkpointer.restore_latest({"x": jnp.float32(0)}).state["x"] == 1


def test_the_same_step_is_replaced(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(3, {"x": jnp.float32(1)})
    checkpointer.save(3, {"x": jnp.float32(2)})
    assert checkpointer.restore_latest({"x": jnp.float32(0)}).state["x"] == 2
    assert os.listdir(tmp_path) == ["3"]


@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_any_damaged_file_means_the_one_before(tmp_path, damage):
    """Each file of the checkpoint in turn, one bit, half of it, or all of it."""
    checkpointer = Checkpointer(tmp_path, keep=3)
    states = {step: {"x": jnp.arange(300.0) + step} for step in (1, 2)}
    for step, state in states.items():
        checkpointer.save(step, state)
    files = [p for p in (tmp_path / "2").rglob("*") if p.is_file() and p.stat().st_size]
    assert len(files) > 5
    for path in files:
        content = path.read_bytes()
        if damage == "flip":
            path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        elif damage == "cut":
            path.write_bytes(content[: len(content) // 2])
        else:
            path.unlink()
        with pytest.warns(UserWarning, match="skipping checkpoint .*2"):
            back = checkpointer.restore_latest(states[1])
        assert back.step == 1
        assert_identical(back.state, states[1])
        (tmp_path / "2.damaged").rename(tmp_path / "2")
        path.write_bytes(content)
    assert checkpointer.restore_latest(states[1]).step == 2


def test_all_damaged_is_said_not_started_over(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"x": jnp.float32(1)})
    (tmp_path / "1" / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpoint):
        checkpointer.restore(1, {"x": jnp.float32(1)})
    with (
        pytest.warns(UserWarning, match="skipping"),
        pytest.raises(UserError, match="delete the directory"),
    ):
        checkpointer.restore_latest({"x": jnp.float32(1)})


@pytest.mark.parametrize("when", ["arrays", "manifest", "swap"])
def test_law_13_a_killed_save_changes_nothing(tmp_path, monkeypatch, when):
    """A save that dies at three moments leaves the last checkpoint, and the next save clears up."""

    class Killed(BaseException):
        pass

    def kill(*args, **kwargs):
        raise Killed

    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(5, {"x": jnp.float32(5)})
    with monkeypatch.context() as patch:
        if when == "arrays":
            patch.setattr(ocp.StandardCheckpointer, "save", kill)
        elif when == "manifest":
            patch.setattr("psearch_jax.checkpoints._write_json", kill)
        else:
            patch.setattr("psearch_jax.checkpoints._sync_directory", kill)
        with pytest.raises(Killed):
            checkpointer.save(6, {"x": jnp.float32(6)})
    back = Checkpointer(tmp_path).restore_latest({"x": jnp.float32(0)})
    assert back.state["x"] == back.step == (6 if when == "swap" else 5)
    checkpointer.save(7, {"x": jnp.float32(7)})
    assert os.listdir(tmp_path) == ["7"]


def test_killed_between_the_two_renames(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(5, {"x": jnp.float32(5)})
    (tmp_path / "5").rename(tmp_path / ".old-5")
    back = checkpointer.restore_latest({"x": jnp.float32(0)})
    assert back is not None
    assert back.state["x"] == 5


def test_a_save_in_the_background_is_of_the_arrays_as_they_were(tmp_path):
    """What the caller gives away after `save` returns does not reach the checkpoint; errors come with the next call."""
    forget = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    mesh = mesh_lib.make_mesh(MeshConfig(fsdp=4), jax.devices()[:4])
    values = {"w": jax.random.normal(jax.random.key(0), (512, 256)), "b": jnp.arange(8.0)}
    checkpointer = Checkpointer(tmp_path, keep=3)
    for step, state in enumerate(
        (values, jax.device_put(values, mesh_lib.param_shardings(mesh, values)))
    ):
        wanted = jax.tree.map(np.array, state)
        given = jax.tree.map(lambda x: x.copy(), state)
        checkpointer.save(step, given, wait=False)
        given = forget(forget(given))
        jax.block_until_ready(given)
        back = checkpointer.restore_latest(values)
        assert back is not None and back.step == step  # restoring waits
        for name, array in wanted.items():
            np.testing.assert_array_equal(back.state[name], array)
    with pytest.MonkeyPatch.context() as patch:

        def full(path):
            raise OSError(errno.ENOSPC, "full")

        patch.setattr("psearch_jax.checkpoints._digest", full)
        checkpointer.save(8, values, wait=False)
        with pytest.raises(UserError, match="no space left"):
            checkpointer.wait()
    checkpointer.wait()  # said once
    assert checkpointer.steps() == [0, 1] and not (tmp_path / ".new-8").exists()


def test_last_best_and_every_so_many_are_kept(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=2, keep_best=True, keep_every=4)
    scores = [0.1, 0.9, 0.2, None, 0.3, 0.9, 0.4, 0.2, 0.1, 0.0]
    for step, score in enumerate(scores, start=1):
        checkpointer.save(step, {"x": jnp.float32(step)}, score=score)
        assert {step, step - 1} & set(range(1, 11)) <= set(checkpointer.steps())
    assert checkpointer.steps() == [4, 6, 8, 9, 10]  # of two best ones the newer
    assert checkpointer.score(6) == 0.9 and checkpointer.score(4) is None
    assert Checkpointer(tmp_path).restore(6, {"x": jnp.float32(0)}).state["x"] == 6


def test_another_model_is_named(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"a": {"w": jnp.zeros((4, 3))}})
    for other, sentence in (
        ({"a": {"w": jnp.zeros((4, 2))}}, r"'a/w', which is float32\(4, 3\) there.*\(4, 2\) here"),
        ({"a": {"w": jnp.zeros((4, 3), jnp.bfloat16)}}, r"bfloat16\(4, 3\) here"),
        ({"a": {"v": jnp.zeros((4, 3))}}, r"2 array\(s\) differ.*'a/w'.*absent here"),
    ):
        with pytest.raises(UserError, match=sentence):
            checkpointer.restore_latest(other)
    assert checkpointer.steps() == [1]  # it is whole, so it is not set aside


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), ValueError("x: No space left on device")]
)
def test_a_full_disk_is_a_sentence(tmp_path, monkeypatch, error):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"x": jnp.float32(1)})

    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr(ocp.StandardCheckpointer, "save", full)
    with pytest.raises(UserError, match="no space left"):
        checkpointer.save(2, {"x": jnp.float32(2)})
    assert os.listdir(tmp_path) == ["1"]


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="cannot write checkpoints"):
            Checkpointer(directory).save(1, {"x": jnp.float32(1)})


def test_a_foreign_error_stays_what_it_is(tmp_path):
    with pytest.raises(TypeError, match="JSON"):
        Checkpointer(tmp_path).save(1, {"x": jnp.float32(1)}, {"bad": object()})
    assert os.listdir(tmp_path) == []


def test_restores_onto_another_mesh(tmp_path):
    """Saved from four shards, read onto eight and onto one, bit for bit."""
    values = jax.random.normal(jax.random.key(0), (32, 64))
    params = {"w": values, "b": values[0]}
    four = mesh_lib.make_mesh(MeshConfig(fsdp=4), jax.devices()[:4])
    Checkpointer(tmp_path).save(1, jax.device_put(params, mesh_lib.param_shardings(four, params)))
    eight = mesh_lib.make_mesh(MeshConfig(fsdp=4, tensor=2))
    shardings = mesh_lib.param_shardings(eight, params)
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, shardings
    )
    back = Checkpointer(tmp_path).restore_latest(abstract).state
    assert_identical(back, params)
    assert back["w"].sharding == shardings["w"]
    assert_identical(Checkpointer(tmp_path).restore_latest(params).state, params)


def test_a_small_state_is_saved_quickly(tmp_path):
    """A million parameters with two Adam moments; the bar is well above what it takes (0.1–0.2 s)."""
    params = {f"layer{i}": jnp.ones((128, 512)) * i for i in range(16)}
    state = {"params": params, "opt": optax.adam(1e-3).init(params)}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(0, state)
    seconds = []
    for step in (1, 2, 3):
        start = time.perf_counter()
        checkpointer.save(step, state)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 2.0, seconds
    manifest = json.loads((tmp_path / "3" / "manifest.json").read_text())
    assert manifest["leaves"]["params/layer0"] == [[128, 512], "float32"]
