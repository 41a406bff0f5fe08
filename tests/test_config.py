"""Reading, merging, checking and printing configurations (law 11)."""

import dataclasses
import json
import math
import re
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from psearch_jax.config import Config, ProtocolConfig, TrainerConfig
from psearch_jax.config_files import config_hash, fields, flatten, resolve, to_yaml
from psearch_jax.config_values import ABOVE_ZERO, ANY_SIGN, CHOICES, SHARES
from psearch_jax.errors import UserError
from psearch_jax.run_record import code_version, save_run_record


@pytest.fixture
def write(tmp_path):
    """Write a YAML file and return its path."""

    def write(name: str, text: str):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_nothing_given_is_the_default():
    config, origins = resolve([])
    assert config == Config()
    assert set(origins.values()) == {"default"}
    assert set(origins) == set(fields())


def test_files_merge_left_to_right_then_overrides(write):
    a = write("a.yaml", "trainer:\n  steps: 5\n  seed: 1\nreward: {name: gated}\n")
    b = write("b.yaml", "trainer:\n  seed: 2\n  group_size: 4\n")
    config, origins = resolve([a, b], ["trainer.group_size=6", "run_directory=runs/x"])
    assert config.trainer == TrainerConfig(steps=5, seed=2, group_size=6)
    assert config.reward.name == "gated"
    assert config.run_directory == "runs/x"
    assert origins["trainer.steps"] == f"{a}:2"
    assert origins["trainer.seed"] == f"{b}:2"
    assert origins["reward.name"] == f"{a}:4"
    assert origins["trainer.group_size"] == "override trainer.group_size=6"
    assert origins["trainer.keep"] == "default"


def test_a_base_comes_first_and_only_once(write):
    base = write("bases/base.yaml", "trainer: {steps: 1, seed: 1, keep: 1}\n")
    a = write("a.yaml", "trainer:\n  steps: 2\nbase: bases/base.yaml\n")
    b = write("b.yaml", "base: bases/base.yaml\ntrainer:\n  seed: 3\n")
    config, origins = resolve([a, b])
    # b's base must not set `steps` back to 1: a has said 2.
    assert (config.trainer.steps, config.trainer.seed, config.trainer.keep) == (2, 3, 1)
    assert origins["trainer.keep"] == f"{base}:1"


def test_several_bases_are_merged_in_order(write):
    write("one.yaml", "trainer: {steps: 1, seed: 1}\n")
    write("two.yaml", "trainer: {seed: 2, keep: 2}\n")
    config, origins = resolve([write("a.yaml", "base: [one.yaml, two.yaml]\ntrainer: {keep: 3}\n")])
    assert (config.trainer.steps, config.trainer.seed, config.trainer.keep) == (1, 2, 3)
    assert origins["trainer.seed"].endswith("two.yaml:1")


def test_a_circle_of_bases_is_an_error(write):
    write("a.yaml", "base: b.yaml\n")
    b = write("b.yaml", "base: a.yaml\n")
    with pytest.raises(UserError, match="leads back to itself"):
        resolve([b])


def test_scalars_are_those_of_yaml_1_2(write):
    path = write(
        "a.yaml",
        "run_directory: no\npolicy: 010\noptimizer: {learning_rate: 3e-4, clip_norm: 1}\n"
        "data: {questions: 2024-01-01}\nrollout: {slots: 1_000}\n",
    )
    config, _ = resolve([path])
    assert (config.run_directory, config.policy) == ("no", "010")
    assert config.data.questions == "2024-01-01"
    assert config.optimizer.learning_rate == 3e-4
    assert type(config.optimizer.clip_norm) is float
    assert config.rollout.slots == 1000


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("protocol.prompt={question}", "{question}"),  # a mapping in YAML, text for a text setting
        ('protocol.prompt="{question}\\n"', "{question}\n"),
        ("run_directory=12", "12"),
        ("run_directory=a=b: c", "a=b: c"),
        ("protocol.before_information=", ""),
        ("rollout.append_buckets=[8, 16]", (8, 16)),
        ("protocol.think=[<t>, </t>]", ("<t>", "</t>")),
        ("protocol.attributed=false", False),
        ("trainer.kinds=[single, bridge]", ("single", "bridge")),
        ("optimizer.weight_decay=1e-2", 0.01),
    ],
)
def test_override_values(override, value):
    config, _ = resolve([], [override])
    assert flatten(config)[override.partition("=")[0]] == value


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ("trainer:\n  stepz: 3\n", 2, "unknown key trainer.stepz; did you mean trainer.steps"),
        ("steps: 3\n", 1, "unknown key steps; did you mean trainer.steps"),
        (
            "supervised:\n  architecture:\n    sizes: 3\n",
            3,
            "unknown key supervised.architecture.sizes",
        ),
        ("supervised:\n  architecture: 3\n", 2, "supervised.architecture is a section"),
        ("<<: 3\n", 1, "unknown key <<"),
        ("trainer:\n  steps: 3\n  steps: 4\n", 3, "trainer.steps is set twice, first in line 2"),
        ("trainer: {steps: 1}\n\ntrainer: {keep: 1}\n", 3, "trainer is set twice, first in line 1"),
        ("trainer:\n  steps: three\n", 2, "trainer.steps must be an integer, not 'three'"),
        ("trainer:\n  steps: '3'\n", 2, "trainer.steps must be an integer, not '3'"),
        ("trainer:\n  steps: 3.0\n", 2, "trainer.steps must be an integer, not 3.0"),
        ("trainer:\n  steps: true\n", 2, "trainer.steps must be an integer, not True"),
        ("trainer:\n  steps:\n", 2, "trainer.steps must be an integer, not None"),
        ("protocol:\n  attributed: 1\n", 2, "protocol.attributed must be a boolean"),
        ("protocol:\n  label: 7\n", 2, "protocol.label must be a string, not 7"),
        ("protocol:\n  think: [a]\n", 2, r"protocol.think\[1\] must be given"),
        (
            "rollout:\n  append_buckets: [8, x]\n",
            2,
            r"rollout.append_buckets\[1\] must be an integer",
        ),
        ("rollout:\n  append_buckets: 8\n", 2, "rollout.append_buckets must be"),
        ("trainer:\n  steps: {a: 1}\n", 2, "trainer.steps is a single value, but has keys below"),
        ("trainer: 3\n", 1, "trainer is a section"),
        ("trainer:\n  ? [a]\n  : 1\n", 2, "a key must be a plain word"),
        ("base: [a, 1]\n", 1, "base must be the path"),
        ("base: []\n", 1, "base must be the path"),
        ("- a\n", 1, "a configuration file is a list of"),
        ("trainer:\n  steps: [1\nreward:\n", 3, "not valid YAML"),
        ("trainer:\n\tsteps: 1\n", 2, "not valid YAML"),
        ("a: 1\n---\nb: 2\n", 2, "not valid YAML"),
        ("trainer: *x\n", 1, "not valid YAML"),
        ("trainer:\n  kinds: !!python/object:os.system [x]\n", 2, "cannot be read"),
        ("trainer:\n  steps: &x [*x]\n", 2, "cannot be read"),
        ("run_directory: a\x07b\n", 1, "not valid YAML"),
        ("optimizer:\n  learning_rate: .nan\n", 2, "must be a finite number"),
    ],
)
def test_law_11_a_bad_line_is_named(write, text, line, sentence):
    path = write("bad.yaml", text)
    with pytest.raises(UserError, match=f"^{re.escape(str(path))}:{line}: .*{sentence}") as error:
        resolve([path])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.stepz=3", "unknown key trainer.stepz; did you mean trainer.steps"),
        ("trainer=3", "trainer is a section"),
        ("trainer.steps", "written key=value"),
        ("trainer.steps=[1", "not valid YAML"),
        ("trainer.steps=x", "must be an integer, not 'x'"),
        ("base=other.yaml", "unknown key base"),
        ("optimizer.name=Adam", "'Adam', but must be one of adam, muon"),
        ("mesh.fsdp=0", "above 0"),
        ("trainer.steps=-1", "at least 0"),
        ("sampling.top_p=1.5", "at most 1"),
    ],
)
def test_law_11_a_bad_override_is_named(override, sentence):
    with pytest.raises(UserError, match=f"^override {re.escape(override)}: .*{sentence}"):
        resolve([], [override])


def test_files_that_cannot_be_read(write, tmp_path):
    with pytest.raises(UserError, match=r"no configuration file .*none.yaml"):
        resolve([tmp_path / "none.yaml"])
    with pytest.raises(UserError, match=r"cannot read configuration file .*: Is a directory"):
        resolve([tmp_path])
    (tmp_path / "latin.yaml").write_bytes("policy: caf\xe9".encode("latin-1"))
    with pytest.raises(UserError, match="not UTF-8"):
        resolve([tmp_path / "latin.yaml"])
    a = write("a.yaml", "base: gone.yaml\n")
    with pytest.raises(UserError, match=r"gone.yaml \(the base of .*a.yaml\)"):
        resolve([a])


def test_empty_files_and_sections_set_nothing(write):
    assert resolve([write("a.yaml", "# nothing\n"), write("b.yaml", "trainer:\n")])[0] == Config()


@pytest.mark.parametrize(
    ("overrides", "keys", "sentence"),
    [
        (["trainer.group_size=1"], ["trainer.group_size"], "use 2 or more"),
        (
            ["algorithm.minibatches=7"],
            ["algorithm.minibatches", "trainer.group_size"],
            "12 questions × 8 members are 96 episodes, which algorithm.minibatches=7 does not divide",
        ),
        (
            ["rollout.context=513", "algorithm.row_length=600"],
            ["rollout.window_buckets", "rollout.context"],
            "largest of rollout.window_buckets is 512",
        ),
        (
            ["rollout.append_buckets=[32, 1024]"],
            ["rollout.append_buckets", "rollout.context"],
            "larger than rollout.context=512",
        ),
        (["rollout.window_buckets=[512, 64]"], ["rollout.window_buckets"], "rising order"),
        (["rollout.append_buckets=[]"], ["rollout.append_buckets"], "rising order"),
        (["protocol.turn_tokens=512"], ["protocol.turn_tokens"], "leaves no room"),
        (["algorithm.row_length=511"], ["algorithm.row_length"], "cannot hold an episode"),
        (["sampling.temperature=0"], ["sampling.temperature"], "above 0"),
        (
            ["supervised.architecture.num_heads=3"],
            ["supervised.architecture.num_kv_heads"],
            "multiple",
        ),
        (["supervised.styles=[1, 2]"], ["supervised.styles"], "four shares"),
        (["trainer.kinds=[single, foo]"], ["trainer.kinds"], "'foo'"),
        (["protocol.answer=[<search>, </answer>]"], ["protocol.answer"], "different texts"),
        (["protocol.separator="], ["protocol.separator"], "max_subqueries is 4"),
        (["protocol.prompt=hello"], ["protocol.prompt"], "fields are {question}"),
        (["supervised.widen_to=8"], ["supervised.widen_to"], "supervised.start, which is empty"),
        (
            ["supervised.start=embedded", "supervised.architecture.num_layers=3"],
            ["supervised.start"],
            "brings its own",
        ),
        (["protocol.passage={text} {x}"], ["protocol.passage"], "{number}, {text}, {title}"),
        (["protocol.label={query_number"], ["protocol.label"], "not a format text"),
    ],
)
def test_law_11_impossible_combinations_name_keys_and_origins(overrides, keys, sentence):
    with pytest.raises(UserError) as error:
        resolve([], overrides)
    assert sentence in str(error.value)
    for key in keys:
        assert f"{key} from " in str(error.value)
    assert f"from override {overrides[0]}" in str(error.value)


def test_law_11_every_number_is_checked():
    """The tables name existing keys, and each number and choice of the schema has a rule or a default."""
    for table in (CHOICES, ABOVE_ZERO, ANY_SIGN, SHARES):
        assert set(table) <= set(fields())
    for key, value in flatten(Config()).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and key not in ANY_SIGN:
            with pytest.raises(UserError, match=re.escape(key)):
                resolve([], [f"{key}=-1"])
        if key in CHOICES:
            assert value in CHOICES[key]


def test_the_printed_configuration_says_where_from(write):
    path = write("a.yaml", "trainer:\n  steps: 5\n")
    text = to_yaml(*resolve([path], ["trainer.seed=3"]))
    assert re.search(rf"^  steps: 5 +# {re.escape(str(path))}:2$", text, re.MULTILINE)
    assert re.search(r"^  seed: 3 +# override trainer.seed=3$", text, re.MULTILINE)
    assert re.search(r'^  prompt: "\{question\}\\n" +# default$', text, re.MULTILINE)
    # One line a value, and one for each section.
    sections = {k.rpartition(".")[0] for k in fields()} - {""}
    assert len(text.splitlines()) == len(fields()) + len(sections)


PRINTABLE = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    texts=st.tuples(PRINTABLE, PRINTABLE, PRINTABLE),
    rate=st.floats(min_value=1e-30, max_value=1e30),
    seed=st.integers(0, 2**70),
    flag=st.booleans(),
)
def test_printing_and_reading_is_the_identity(tmp_path, texts, rate, seed, flag):
    """Whatever the values, the printed file (with and without comments) reads back equal."""
    config = dataclasses.replace(
        Config(),
        run_directory=texts[0],
        policy=texts[1],
        protocol=ProtocolConfig(feedback=texts[2], attributed=flag),
        trainer=TrainerConfig(seed=seed),
        optimizer=dataclasses.replace(Config().optimizer, learning_rate=rate),
    )
    for origins in (None, dict.fromkeys(fields(), "somewhere: # else")):
        path = tmp_path / "printed.yaml"
        path.write_text(to_yaml(config, origins), encoding="utf-8", newline="")
        assert resolve([path])[0] == config


def test_the_hash_changes_with_any_value():
    config = Config()
    assert config_hash(config) == config_hash(Config())
    assert re.fullmatch("[0-9a-f]{16}", config_hash(config))
    changed = {config_hash(config)}
    overrides = ["trainer.seed=1", "policy=x", "rollout.append_buckets=[32]", "reward.name=gated"]
    for override in overrides:
        changed.add(config_hash(resolve([], [override])[0]))
    assert len(changed) == len(overrides) + 1


def test_law_11_the_run_directory_says_what_ran(tmp_path):
    config, origins = resolve([], ["trainer.seed=7"])
    directory = tmp_path / "runs" / "x"
    save_run_record(config, directory, ["psearch", "train", "a b.yaml"], origins)
    save_run_record(Config(), directory, ["psearch", "train"])
    assert resolve([directory / "config.yaml"])[0] == Config()
    first, second = map(json.loads, (directory / "run.jsonl").read_text().splitlines())
    assert first["command"] == "psearch train 'a b.yaml'"
    assert first["seeds"]["trainer.seed"] == 7
    assert set(first["seeds"]) == {k for k in fields() if k.endswith("seed")}
    assert first["config"]["trainer.seed"] == 7
    assert first["config_hash"] == config_hash(config) != second["config_hash"]
    assert first["packages"]["jax"]
    assert first["code_version"] == code_version() != ""
    assert sorted(p.name for p in directory.iterdir()) == ["config.yaml", "run.jsonl"]


def test_a_run_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the run directory"):
        save_run_record(Config(), tmp_path / "file" / "run", ["psearch"])


def test_shipped_recipes_are_valid(root):
    """Every file under configs/ resolves, by itself or, as a hardware overlay, over the defaults."""
    for path in sorted((root / "configs").rglob("*.yaml")):
        config, _ = resolve([path])
        assert math.isfinite(config.optimizer.learning_rate)
        assert set(config.run_directory) <= set(string.ascii_letters + string.digits + "_-/.")
