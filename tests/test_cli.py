"""The command line: help, exit codes, sentences."""

import errno
import importlib
import subprocess
import sys
from pathlib import Path

import click
import pytest

from psearch_jax import cli
from psearch_jax.config import Config
from psearch_jax.errors import Interrupted, UserError


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_help_lists_every_command_with_one_whole_line(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    listed = out.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == sorted(cli.cli.commands)
    assert not any(line.endswith("...") for line in listed)


def test_help_is_immediate():
    """`python -m psearch_jax` is the command, and its help imports none of the heavy packages."""
    heavy = ("jax", "numpy", "flax", "transformers", "scann", "yaml", "pydantic")
    program = (
        "import sys; from psearch_jax.cli import main; code = main(['--help']);"
        f"print([m for m in {heavy!r} if m in sys.modules], code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("[] 0\n")
    module = subprocess.run(
        [sys.executable, "-m", "psearch_jax", "--help"], capture_output=True, text=True, check=True
    )
    assert module.stdout == done.stdout.removesuffix("[] 0\n")


@pytest.mark.parametrize(
    ("module", "function"),
    [
        ("psearch_jax.questions.world", "write_world"),
        ("psearch_jax.assembly", "open_backend"),
        ("psearch_jax.learning.supervised", "train"),
        ("psearch_jax.trainer", "train"),
        ("psearch_jax.evaluation.evaluate", "run"),
        ("psearch_jax.evaluation.comparison_view", "show"),
        ("psearch_jax.evaluation.runs", "show"),
        ("psearch_jax.evaluation.report", "write_report"),
        ("psearch_jax.ask", "run"),
        ("psearch_jax.demo", "run"),
        ("psearch_jax.export", "run"),
    ],
)
def test_every_listed_command_has_its_room(module, function):
    assert callable(getattr(importlib.import_module(module), function))


def test_files_and_overrides_in_any_order(capsys, tmp_path):
    path = tmp_path / "a=b.yaml"  # a file may have an equals sign in its name
    path.write_text("trainer:\n  steps: 5\n")
    code, out, err = run(capsys, "config", "trainer.seed=3", str(path), "trainer.steps=6")
    assert (code, err) == (0, "")
    assert f"# {path}:2" not in out
    assert "# override trainer.steps=6" in out
    assert "# override trainer.seed=3" in out
    code, out, _ = run(capsys, "config", str(path))
    assert f"# {path}:2" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["config", "none.yaml"], "error: no configuration file none.yaml"),
        (["config", "trainer.stepz=3"], "error: override trainer.stepz=3: unknown key"),
        (["config", "--bogus"], "No such option"),
        (["bogus"], "No such command 'bogus'"),
        (["report", "no-such-directory"], "does not exist"),
        (["ask"], "Missing argument 'QUESTION'"),
        ([], "Usage: psearch"),
    ],
)
def test_what_the_user_can_mend_is_exit_2(capsys, arguments, sentence):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (UserError("mend it"), 2, "error: mend it\n"),
        (Interrupted("saved; run it again"), 130, "saved; run it again\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (click.Abort(), 130, "interrupted\n"),
        (OSError(errno.ENOSPC, "full", "x.bin"), 2, "error: no space left for x.bin: free"),
    ],
)
def test_exit_codes(capsys, monkeypatch, error, code, sentence):
    def fail(*arguments):
        raise error

    monkeypatch.setattr("psearch_jax.config_files.resolve", fail)
    got, out, err = run(capsys, "config")
    assert (got, out) == (code, "")
    assert err.startswith(sentence)
    assert err.count("\n") == 1
    got, _, err = run(capsys, "config", "--traceback")
    assert got == code
    assert "Traceback" in err
    assert sentence in err


def test_our_own_defects_keep_their_traceback(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("a defect")

    monkeypatch.setattr("psearch_jax.config_files.resolve", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        cli.main(["config"])


def test_a_reader_that_leaves_is_no_error():
    done = subprocess.run(
        f"set -o pipefail; {sys.executable} -m psearch_jax config | true",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert done.returncode in (0, 141)  # 0 where it had written all before the reader left


def test_law_11_a_run_is_recorded_before_it_starts(capsys, monkeypatch, tmp_path):
    """`train` hands the resolved configuration on, and its run directory holds it with the origins."""
    trainer = pytest.importorskip("psearch_jax.trainer")
    seen: list[Config] = []
    monkeypatch.setattr(trainer, "train", lambda config, profile: seen.append(config))
    directory = tmp_path / "run"
    code, _, err = run(capsys, "train", f"run_directory={directory}", "trainer.steps=3")
    assert (code, err) == (0, "")
    assert seen[0].trainer.steps == 3
    assert "# override trainer.steps=3" in (directory / "config.yaml").read_text()


def test_world_writes_into_a_directory(capsys, monkeypatch, tmp_path):
    def write(directory: Path) -> None:
        directory.mkdir()
        (directory / "corpus.jsonl").write_text("")

    monkeypatch.setattr("psearch_jax.questions.world.write_world", write)
    code, out, _ = run(capsys, "world", str(tmp_path / "w"))
    assert (code, out) == (0, f"wrote corpus.jsonl to {tmp_path / 'w'}\n")


def test_where_compiled_programs_are_kept(tmp_path):
    """In the run directory, where nothing else is said; a bucket's address stays as it is."""
    from psearch_jax.assembly import compile_cache

    assert compile_cache(Config(run_directory=str(tmp_path / "a"))) == str(tmp_path / "a/compiled")
    assert compile_cache(Config(compile_cache="gs://bucket/x")) == "gs://bucket/x"
    assert compile_cache(Config(compile_cache="")) == ""
