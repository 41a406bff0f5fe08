"""`psearch export`: policies of runs with and without adapters, and what is refused."""

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rollout.toys import PROTOCOL, ROLLOUT, Corpus, make_policy, make_tokenizer
from safetensors.numpy import load_file

from psearch_jax import cli, export
from psearch_jax.assembly import lay_out, open_policy
from psearch_jax.checkpoints import Checkpointer
from psearch_jax.config import (
    AlgorithmConfig,
    ArchitectureConfig,
    Config,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    SupervisedConfig,
    TrainerConfig,
)
from psearch_jax.errors import UserError
from psearch_jax.learning import supervised
from psearch_jax.learning.optimizers import make_optimizer
from psearch_jax.learning.update import init_state
from psearch_jax.mesh import make_mesh
from psearch_jax.models import weights
from psearch_jax.models.decoder import init_params
from psearch_jax.models.decoder_config import DecoderConfig
from psearch_jax.models.export import merge_lora
from psearch_jax.questions.question import Question
from psearch_jax.rollout.engine import Engine
from psearch_jax.run_record import save_run_record
from psearch_jax.trainer import Trainer, recipe_hash

TOKENIZER = make_tokenizer("whole")
FOLLOWS = [
    ("\n", "<search> <answer>"),
    ("<search> ##", "b c"),
    ("b c", "</search> ##"),
    ("<answer>", "1 2"),
    ("1 2", "</answer>"),
]
QUESTIONS = [
    Question(id=f"q{i}", text=text, golden_answers=("1",), kind="bridge")
    for i, text in enumerate(["a b", "b c", "c a"])
]
GENERATION = {"eos_token_id": [1, 5], "pad_token_id": 0, "temperature": 0.7, "do_sample": True}


@pytest.fixture(scope="module", params=[0, 2], ids=["whole", "adapters"])
def trained(request, tmp_path_factory):
    """(configuration, trainer after two steps with a checkpoint of each) of a toy policy."""
    directory = tmp_path_factory.mktemp("run")
    decoder, _, params = make_policy(TOKENIZER, FOLLOWS)
    base = directory / "base"
    weights.save_hf_directory(
        base, decoder, params, dtype="float32", tokenizer=TOKENIZER, generation=GENERATION
    )
    config = Config(
        run_directory=str(directory / "run"),
        policy=str(base),
        protocol=PROTOCOL,
        rollout=ROLLOUT,
        model=ModelConfig(lora_rank=request.param, lora_alpha=16.0),
        reward=RewardConfig(name="gated"),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        algorithm=AlgorithmConfig(row_length=96, micro_rows=2, logprob_chunk=64),
        trainer=TrainerConfig(steps=2, questions_per_step=3, group_size=4, checkpoint_every=1),
    )
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    policy = lay_out(open_policy(config.policy), config, mesh)
    engine = Engine(
        policy.graphdef, policy.config, policy.tokenizer, PROTOCOL, Corpus(), config.rollout
    )
    trainer = Trainer(config, engine, policy.params, QUESTIONS, mesh=mesh)
    save_run_record(config, config.run_directory)
    trainer.run()
    return config, policy, trainer


def tensors_of(params):
    return {tuple(path): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(params)}


def assert_same(params, others):
    ours, theirs = tensors_of(params), tensors_of(others)
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        np.testing.assert_allclose(value, theirs[path], rtol=1e-6, atol=1e-6, err_msg=str(path))


def test_the_newest_checkpoint_is_exported_with_tokenizer_and_generation_settings(
    trained, tmp_path, capsys
):
    config, policy, trainer = trained
    target = tmp_path / "out"
    recipe = f"{config.run_directory}/config.yaml"
    assert cli.main(["export", recipe, "--to", str(target), "--dtype", "float32"]) == 0
    assert capsys.readouterr().out == f"wrote step 2 of {config.run_directory} to {target}\n"
    plain, _, expected = merge_lora(policy.config, policy.graphdef, trainer.params)
    loaded_config, _, loaded = weights.load_hf_directory(target)
    assert loaded_config == plain
    assert_same(loaded, expected)
    again = open_policy(str(target))
    assert again.tokenizer.encode("<search>b c</search>") == TOKENIZER.encode(
        "<search>b c</search>"
    )
    assert json.loads((target / "generation_config.json").read_text()) == GENERATION


def test_an_earlier_step_can_be_asked_for(trained, tmp_path):
    config, _, trainer = trained
    sentence = export.run(config, tmp_path / "one", checkpoint=1, dtype="float32")
    assert sentence.startswith("wrote step 1")
    export.run(config, tmp_path / "two", dtype="float32")
    one, two = (
        tensors_of(weights.load_hf_directory(tmp_path / name)[2]) for name in ("one", "two")
    )
    assert any(np.any(value != two[path]) for path, value in one.items())
    with pytest.raises(UserError, match=r"no checkpoint 7 in .*; there are 1, 2"):
        export.run(config, tmp_path / "x", checkpoint=7)


def test_adapters_alone_go_out_in_pefts_format(trained, tmp_path):
    config, policy, trainer = trained
    if policy.config.lora is None:
        with pytest.raises(UserError, match=r"model\.lora_rank"):
            export.run(config, tmp_path / "adapter", peft=True)
        assert not list(tmp_path.iterdir())
        return
    sentence = export.run(config, tmp_path / "adapter", peft=True)
    assert sentence.startswith("wrote the adapters of step 2")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    values = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert values["base_model_name_or_path"] == config.policy
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    trained_params = tensors_of(trainer.params)
    np.testing.assert_array_equal(
        adapter["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"],
        trained_params["layers", 1, "mlp", "up_proj", "lora_b"].T,
    )


def test_a_run_without_checkpoints_exports_the_policy_that_it_would_start_from(trained, tmp_path):
    config, policy, _ = trained
    fresh = replace(config, run_directory=str(tmp_path / "nothing"))
    sentence = export.run(fresh, tmp_path / "out", dtype="float32")
    assert "which was not trained" in sentence
    assert_same(
        weights.load_hf_directory(tmp_path / "out")[2],
        merge_lora(policy.config, policy.graphdef, policy.params)[2],
    )


def test_what_is_refused_leaves_nothing(trained, tmp_path):
    config, _, _ = trained
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not an empty directory"):
        export.run(config, tmp_path / "full")
    with pytest.raises(UserError, match="not an empty directory"):
        export.run(config, tmp_path / "full" / "notes.txt")
    other = replace(config, reward=RewardConfig(name="exact_match"))
    with pytest.raises(UserError, match=r"another recipe.*config\.yaml"):
        export.run(other, tmp_path / "x")
    copied = tmp_path / "run"
    shutil.copytree(config.run_directory, copied)
    (copied / "checkpoints" / "2" / "extras.json").write_text("{}")
    with pytest.raises(UserError, match=r"2 is damaged.*--checkpoint"):
        export.run(replace(config, run_directory=str(copied)), tmp_path / "x")
    assert {path.name for path in tmp_path.iterdir()} == {"full", "run"}
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_of_a_run_with_a_critic_the_policy_is_exported(trained, tmp_path, critic):
    config, policy, trainer = trained
    beside = jax.tree.map(lambda leaf: leaf + 1, trainer.state)
    arrays = (trainer.state, beside)
    if critic == "shared":
        params = {"trunk": trainer.state.params, "head": {"bias": jnp.float32(1)}}
        arrays = trainer.state._replace(params=params)
    extras = {"recipe": recipe_hash(replace(config, run_directory=str(tmp_path)))}
    Checkpointer(tmp_path / "checkpoints").save(4, arrays, extras)
    export.run(replace(config, run_directory=str(tmp_path)), tmp_path / "out", dtype="float32")
    expected = merge_lora(policy.config, policy.graphdef, trainer.params)[2]
    assert_same(weights.load_hf_directory(tmp_path / "out")[2], expected)


def test_a_supervised_run_is_exported(tmp_path):
    config = Config(
        run_directory=str(tmp_path / "run"),
        supervised=SupervisedConfig(
            architecture=ArchitectureConfig(
                vocab_size=64,
                hidden_size=16,
                intermediate_size=16,
                num_layers=2,
                num_heads=2,
                num_kv_heads=1,
                head_dim=8,
            )
        ),
    )
    decoder = DecoderConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=16,
        intermediate_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
    )
    TOKENIZER.save_pretrained(tmp_path / "run" / "tokenizer")
    _, params = init_params(decoder, jax.random.key(3))
    state = init_state(params, make_optimizer(config.optimizer, 10))
    Checkpointer(tmp_path / "run" / "checkpoints").save(
        5, state, {"recipe": supervised.recipe_hash(config)}
    )
    assert export.run(config, tmp_path / "out", dtype="float32").startswith("wrote step 5")
    loaded_config, _, loaded = weights.load_hf_directory(tmp_path / "out")
    assert loaded_config == decoder
    assert_same(loaded, params)
    shutil.rmtree(tmp_path / "run" / "tokenizer")
    with pytest.raises(UserError, match="tokenizer"):
        export.run(config, tmp_path / "again")
