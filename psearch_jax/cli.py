"""The command line: one function a command, no logic of its own.

Rooms are imported inside the commands, so that `psearch --help` is immediate. Exit codes: 0 done,
1 a defect of ours (with a traceback), 2 something the user can mend (one sentence), 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import psearch_jax
from psearch_jax.cli_retrieval import COMMANDS as retrieval_commands
from psearch_jax.errors import Interrupted, UserError

if TYPE_CHECKING:
    from psearch_jax.config import Config
    from psearch_jax.config_files import Origins


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    show_traceback = "--traceback" in arguments
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except click.ClickException as error:
        error.show()
        return 2
    except UserError as error:
        return _say(f"error: {error}", 2, show_traceback)
    except Interrupted as error:
        return _say(str(error), error.code, show_traceback)
    except (KeyboardInterrupt, click.Abort):
        return _say("interrupted", 130, show_traceback)
    except BrokenPipeError:
        # The reader has left (`psearch config … | head`); Python must not complain when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" for {error.filename}" if error.filename else ""
        return _say(f"error: no space left{where}: free some and run again", 2, show_traceback)


def _run(arguments: list[str]) -> int:
    """Parse and call; `click.Group.main` would turn a closed pipe and Ctrl-C into codes of its own."""
    try:
        with cli.make_context("psearch", arguments) as context:
            cli.invoke(context)
    except click.exceptions.Exit as finished:  # --help and --version
        return finished.exit_code
    return 0


def _say(sentence: str, code: int, show_traceback: bool) -> int:
    if show_traceback:
        traceback.print_exc()
    click.echo(sentence, err=True)
    return code


def _resolve(sources: Sequence[str]) -> tuple[Config, Origins]:
    """The configuration that FILE and KEY=VALUE arguments describe, and the origin of each value."""
    from psearch_jax.config_files import resolve

    overrides = [s for s in sources if "=" in s and not Path(s).is_file()]
    return resolve([s for s in sources if s not in overrides], overrides)


@contextmanager
def _recorded(sources: Sequence[str], *, first: bool = True) -> Iterator[Config]:
    """As `_resolve`, written into the run directory, which nobody else can use meanwhile; by the first process."""
    from psearch_jax.run_lock import held
    from psearch_jax.run_record import save_run_record

    config, origins = _resolve(sources)
    with held(config.run_directory) if first else nullcontext():
        if first:
            save_run_record(config, config.run_directory, sys.argv, origins)
        yield config


def _traceback_option(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--traceback",
        is_flag=True,
        expose_value=False,  # `main` looks for it, wherever it stands
        help="Show where in the program an error was found.",
    )(function)


def _recipe(function: Callable[..., Any]) -> Callable[..., Any]:
    """FILE… and KEY=VALUE… in any order; files are merged left to right, then the overrides."""
    return _traceback_option(
        click.argument("sources", nargs=-1, metavar="[FILE|KEY=VALUE]...")(function)
    )


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(psearch_jax.__version__, prog_name="psearch")
@_traceback_option
def cli() -> None:
    """Train language models to search while they reason, and to search several things at once.

    Most commands take recipe FILEs (YAML) and KEY=VALUE overrides in any order:

    \b
        psearch train configs/embedded/search_r1.yaml trainer.steps=3
    """


@cli.command()
@_recipe
def config(sources: tuple[str, ...]) -> None:
    """Print the resolved configuration and where each value came from."""
    from psearch_jax.config_files import to_yaml

    click.echo(to_yaml(*_resolve(sources)), nl=False)


@cli.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@_traceback_option
def world(directory: Path) -> None:
    """Write the embedded world's corpus and questions into DIRECTORY."""
    from psearch_jax.questions.world import write_world

    write_world(directory)
    click.echo(f"wrote {', '.join(sorted(p.name for p in directory.iterdir()))} to {directory}")


@cli.command()
@_recipe
@click.option("--topology", default="", metavar="NAME", help="A TPU slice: v5p:4x4x2 or v5p-64.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
def plan(sources: tuple[str, ...], topology: str, as_json: bool) -> None:
    """Say whether a recipe fits a TPU slice, and how fast it runs."""
    from psearch_jax import plan_report as room

    room.run(_resolve(sources)[0], topology, json=as_json)


@cli.command()
@_recipe
def sft(sources: tuple[str, ...]) -> None:
    """Train a policy on scripted episodes (the warm start)."""
    from psearch_jax.learning import supervised

    with _recorded(sources) as config:
        supervised.train(config)


@cli.command()
@_recipe
def sample(sources: tuple[str, ...]) -> None:
    """Let a policy play, and keep what it gets right."""
    from psearch_jax import sample as room

    with _recorded(sources) as config:
        room.run(config)


@cli.command()
@_recipe
@click.option("--profile", is_flag=True, help="Write a trace of three steps to RUN/profile.")
@click.option(
    "--coordinator",
    default="",
    metavar="HOST:PORT",
    help="Of several processes: where process 0 is.",
)
@click.option("--processes", default=0, help="Of several processes: how many.")
@click.option("--process", default=-1, help="Of several processes: which this is, from 0.")
def train(
    sources: tuple[str, ...], profile: bool, coordinator: str, processes: int, process: int
) -> None:
    """Train a policy by reinforcement; the same command resumes it.

    The hosts of a TPU slice and the tasks of srun find each other by themselves.
    """
    from psearch_jax import processes as room
    from psearch_jax import trainer

    several = room.start(coordinator, processes, process)
    with room.explained(), _recorded(sources, first=not several or room.is_first()) as config:
        trainer.train(config, profile=profile)


@cli.command("eval")
@_recipe
@click.option("--json", "as_json", is_flag=True, help="Print the row as one JSON object.")
def evaluate(sources: tuple[str, ...], as_json: bool) -> None:
    """Score a policy or a baseline on a whole split, with error bars.

    The same command goes on where an evaluation was stopped.
    """
    from psearch_jax.evaluation import evaluate as room

    room.run(_resolve(sources)[0], json=as_json)


@cli.command()
@click.argument("run_a")
@click.argument("run_b")
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as one JSON object.")
@_traceback_option
def compare(run_a: str, run_b: str, as_json: bool) -> None:
    """Compare RUN_B with RUN_A, question by question.

    Each is a run's directory, DIRECTORY:ROW, or a results file.
    """
    from psearch_jax.evaluation.comparison import result_lines
    from psearch_jax.evaluation.comparison_view import show

    show(*result_lines(run_a), *result_lines(run_b), json=as_json)


@cli.command()
@click.argument("directory", default="runs", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
@_traceback_option
def runs(directory: Path, as_json: bool) -> None:
    """List the runs under DIRECTORY: state, step, best score."""
    from psearch_jax.evaluation.runs import show

    show(directory, json=as_json)


@cli.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@_traceback_option
def report(directory: Path) -> None:
    """Write report.html and its figures for the run in DIRECTORY."""
    from psearch_jax.evaluation.report import write_report

    click.echo(f"wrote {write_report(directory)}")


@cli.command()
@click.argument("question")
@_recipe
@click.option("--json", "as_json", is_flag=True, help="Print the episode as one JSON object.")
def ask(question: str, sources: tuple[str, ...], as_json: bool) -> None:
    """Play one episode for QUESTION in the terminal."""
    from psearch_jax import ask as room

    room.run(_resolve(sources)[0], question, json=as_json)


@cli.command()
@_recipe
@click.option(
    "--to",
    "target",
    required=True,
    type=click.Path(path_type=Path),
    help="The directory to write; it must be new or empty.",
)
@click.option("--checkpoint", type=int, help="A step of the run; default: the newest.")
@click.option("--peft", is_flag=True, help="Write the adapters alone, in PEFT's format.")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    help="How numbers are stored; default: bfloat16, adapters float32.",
)
def export(
    sources: tuple[str, ...], target: Path, checkpoint: int | None, peft: bool, dtype: str | None
) -> None:
    """Write a trained policy as a Hugging Face directory."""
    from psearch_jax import export as room

    resolved, _ = _resolve(sources)
    click.echo(room.run(resolved, target, checkpoint=checkpoint, peft=peft, dtype=dtype))


@cli.command()
@_recipe
def demo(sources: tuple[str, ...]) -> None:
    """Learn to search in parallel within twenty minutes, and report."""
    from psearch_jax import demo as room
    from psearch_jax.run_lock import held

    config, _ = _resolve(sources)
    with held(config.run_directory):
        room.run(config)


for command in retrieval_commands:
    cli.add_command(command)
