"""The recipes over Wikipedia and their overlays: they resolve, say what was published, and what is offered fits."""

import importlib.util
import json
import re
from dataclasses import asdict

import pytest

from psearch_jax.config_files import resolve
from psearch_jax.learning.experience import batch_rows
from psearch_jax.mesh import Layout, row_shards
from psearch_jax.models.decoder_config import DecoderConfig, on_mesh
from psearch_jax.plan_arithmetic import mesh_of_shapes
from psearch_jax.planned_recipe import read_architecture
from psearch_jax.rollout.protocol import control_tags
from psearch_jax.topologies import parse_slice

#: Parameters of the published models, tied tables counted once.
PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "llama-3.2-3b": 3_212_749_824,
    "smollm2-135m": 134_515_008,
}
RECIPES = ("parallel_search", "search_r1")  # research.yaml is about other numbers


@pytest.fixture
def configs(root, monkeypatch):
    monkeypatch.chdir(root)  # overlays name files from here
    return root / "configs"


@pytest.fixture(scope="module")
def plans(root):
    spec = importlib.util.spec_from_file_location("plans", root / "benchmarks" / "plans.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names(directory, pattern):
    return sorted(path.stem for path in directory.glob(pattern))


def parameters(config: DecoderConfig) -> int:
    """By hand: tables, and for each layer q, k, v, o, three matrices of the feed-forward, norms and biases."""
    width, head = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    layer = (
        2 * width * queries + 2 * width * keys + 3 * width * config.intermediate_size + 2 * width
    )
    layer += (queries + 2 * keys) * config.attention_bias + 2 * head * config.qk_norm
    tables = (1 if config.tie_embeddings else 2) * config.vocab_size * width
    return tables + config.num_layers * layer + width


@pytest.mark.parametrize("name", PARAMETERS)
def test_an_architecture_has_the_parameters_of_the_published_model(configs, name):
    config = DecoderConfig.from_hf(json.loads((configs / "models" / f"{name}.json").read_text()))
    assert parameters(config) == PARAMETERS[name]


def test_every_architecture_is_listed(configs):
    assert set(names(configs / "models", "*.json")) == {*PARAMETERS, "e5-base-v2"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_says_what_was_published(configs, recipe):
    config, origins = resolve([configs / f"{recipe}.yaml"])
    assert (config.protocol.top_k, config.protocol.max_search_turns) == (3, 4)
    assert (config.protocol.turn_tokens, config.protocol.observation_tokens) == (500, 500)
    assert (config.rollout.context, config.algorithm.row_length) == (4096, 4096)
    trainer, algorithm = config.trainer, config.algorithm
    assert (trainer.questions_per_step, trainer.group_size, trainer.steps) == (512, 5, 500)
    assert (algorithm.kl_coefficient, algorithm.entropy_coefficient) == (0.001, 0.001)
    assert (algorithm.clip_low, algorithm.clip_high) == (0.2, 0.2)
    assert config.optimizer.learning_rate == 1e-6
    assert config.optimizer.warmup_steps == int(0.285 * trainer.steps)
    assert (config.sampling.temperature, config.sampling.top_p) == (1.0, 1.0)
    assert config.retrieval.kind == "scann"
    assert config.protocol.name == recipe
    assert f"protocols/{recipe}.yaml" in origins["protocol.prompt"]
    parallel = recipe == "parallel_search"
    assert bool(config.protocol.separator) == parallel
    assert config.reward.name == ("parallel_search" if parallel else "exact_match")
    if parallel:
        reward = config.reward
        assert (reward.lambda_decomposition, reward.alpha_decomposition) == (0.15, 3.0)
        assert (reward.lambda_search, reward.lambda_format) == (0.35, 0.1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_published_ppo_goes_over_a_recipe(configs, recipe):
    config, _ = resolve([configs / f"{recipe}.yaml", configs / "ppo.yaml"])
    trainer, algorithm = config.trainer, config.algorithm
    assert (trainer.questions_per_step, trainer.group_size, trainer.steps) == (512, 1, 500)
    assert trainer.questions_per_step // algorithm.minibatches == 256
    assert (algorithm.advantage, algorithm.kl_place, algorithm.kl_estimator) == (
        *("gae", "reward", "k1"),
    )
    assert (config.optimizer.learning_rate, algorithm.critic_learning_rate) == (1e-6, 1e-5)
    updates = trainer.steps * algorithm.minibatches
    assert config.optimizer.warmup_steps == round(0.285 * updates)
    assert algorithm.critic_warmup_steps == round(0.015 * updates)
    assert (algorithm.gamma, algorithm.gae_lambda, algorithm.value_clip) == (1.0, 1.0, 0.5)
    assert (algorithm.kl_coefficient, algorithm.entropy_coefficient) == (0.001, 0.001)


@pytest.mark.parametrize("recipe", [*RECIPES, "research"])
def test_a_header_says_what_a_reader_needs(configs, recipe):
    lines = (configs / f"{recipe}.yaml").read_text(encoding="utf-8").splitlines()
    header = "\n".join(line for line in lines if line.startswith("#"))
    words = ("psearch train", "Hardware:", "Expected (EM", "Source:", "Where they differ:")
    assert all(word in header for word in words)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_prompt_explains_its_protocol(configs, recipe):
    protocol = resolve([configs / f"{recipe}.yaml"])[0].protocol
    assert protocol.prompt.endswith("Question: {question}\n")
    assert all(tag in protocol.prompt for tag in control_tags(protocol))
    assert ("##" in protocol.prompt) == (recipe == "parallel_search")


def test_every_overlay_goes_with_every_recipe(configs):
    models, hardware = names(configs / "models", "*.yaml"), names(configs / "hardware", "*.yaml")
    assert {"qwen2.5-3b", "qwen2.5-7b", "qwen2.5-7b-instruct", "qwen2.5-32b"} <= set(models)
    assert set(hardware) == {"v5e-16", "v5p-32", "v6e-16", "gpu-8"}
    pairs = [(model, "v5e-16") for model in models] + [("lora", machine) for machine in hardware]
    for recipe in (*RECIPES, "research"):
        for model, machine in pairs:
            names_ = (recipe, f"models/{model}", f"hardware/{machine}")
            config, _ = resolve([configs / f"{name}.yaml" for name in names_])
            assert config.hardware.topology or config.hardware.devices
            read_architecture(config)


def test_what_is_offered_can_be_laid_out(configs, plans):
    """Heads, widths, slots and rows divide on the mesh of each pair."""
    for _, overlays, hardware in plans.OFFERED:
        config, _ = resolve(plans.files(overlays, hardware))
        topology = config.hardware.topology
        count = parse_slice(topology).chips if topology else config.hardware.devices
        mesh = mesh_of_shapes(config.mesh, count)
        on_mesh(read_architecture(config), Layout(mesh))
        assert config.rollout.slots % row_shards(mesh, "rollout") == 0
        assert batch_rows(config, row_shards(mesh)) == 2560


def offered_rows(root, plans):
    """The table of docs/recipes.md and of the README, which benchmarks/plans.py prints."""
    from psearch_jax.plan_report import COLUMNS

    texts = [
        (root / name).read_text(encoding="utf-8").split(plans.BEGIN)[1].split(plans.END)[0].strip()
        for name in ("docs/recipes.md", "README.md")
    ]
    assert texts[0] == texts[1]
    table = texts[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert tuple(cells[0]) == COLUMNS
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in cells[2:]]
    assert [(row["model"], row["hardware"]) for row in rows] == [
        (model, hardware) for model, _, hardware in plans.OFFERED
    ]
    return rows


def test_the_table_has_what_is_offered_and_all_of_it_fits(root, plans):
    """A tenth of the memory free, and no more slots asked for than fit."""
    for row in offered_rows(root, plans):
        assert int(row["free"].rstrip("%")) >= 10, row
        assert int(row["slots"]) <= int(row["fit"]), row
        if row["hardware"] != "gpu-8":
            assert re.fullmatch(r"\d+ s", row["update"]), row
            assert 0 < int(row["MFU"].rstrip("%")) < 100, row


def test_an_update_costs_at_most_1_4_times_6nd(root, plans):
    """Whole layers computed again in the backward pass but for attention, rows of 4,096 tokens."""
    rows = offered_rows(root, plans)
    assert {"Qwen2.5-3B", "Llama-3.2-3B", "Qwen2.5-7B"} <= {row["model"] for row in rows}
    assert all(float(row["× 6ND"]) <= 1.4 for row in rows)


def test_search_r1_has_the_device_programs_of_parallel_search(configs):
    """So that one plan holds for both: they differ in what the host reads and rewards."""
    one, other = (asdict(resolve([configs / f"{name}.yaml"])[0]) for name in RECIPES)
    assert {key for key in one if one[key] != other[key]} == {
        *("protocol", "reward", "run_directory")
    }
