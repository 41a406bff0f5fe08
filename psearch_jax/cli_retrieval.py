"""The commands about indexes: `psearch index …`. One function a command, no logic of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


class _RecipesToo(click.Group):
    """A group in which anything that is no command's name begins a recipe: `psearch index FILE KEY=VALUE`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the name of the hidden command in front of a recipe."""
        first = args[0] if args else ""
        if first not in self.commands and first not in ctx.help_option_names:
            args = ["recipe", *args]
        return super().parse_args(ctx, args)


def _traceback(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--traceback",
        is_flag=True,
        expose_value=False,  # `cli.main` looks for it, wherever it stands
        help="Show where in the program an error was found.",
    )(function)


def _corpus(function: Callable[..., Any]) -> Callable[..., Any]:
    function = click.option(
        "--skip-bad",
        type=click.IntRange(0),
        default=0,
        metavar="N",
        help="Pass over up to N rows that are no passages.",
    )(function)
    return _traceback(function)


def _encoder(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--encoder", default="all-MiniLM-L6-v2", help="A directory or a known name."),
        click.option("--pooling", default="auto", help="mean, cls or auto."),
        click.option("--query-prefix", default="auto", help="Written before queries."),
        click.option("--passage-prefix", default="auto", help="Written before passages."),
        click.option("--encoder-dtype", default="float32", help="float32 or bfloat16."),
        click.option(
            "--batch-tokens",
            type=click.IntRange(0),
            default=0,
            help="Of one device; 0: 1,024 on a CPU, 8,192 elsewhere.",
        ),
    ):
        function = option(function)
    return function


def _build(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--out", required=True, type=click.Path(path_type=Path), help="To write."),
        click.option("--replace", is_flag=True, help="Put it in the place of an index there."),
    ):
        function = option(function)
    return _how(function)


def _how(function: Callable[..., Any]) -> Callable[..., Any]:
    number = click.IntRange(0)
    for option in (
        click.option("--kind", default="scann", help="scann, exact, bm25 or hybrid."),
        click.option("--embed", default="contents", help="contents (with the title) or text."),
        click.option("--vectors", default="float32", help="How they are stored: float32, float16."),
        click.option("--shard-rows", type=number, default=0, help="Rows of one ScaNN searcher."),
        click.option(
            "--reorder-type", default="float32", help="float32, bfloat16, int8 or disk (none kept)."
        ),
        click.option("--reorder", type=number, default=0, help="Candidates that are scored again."),
        click.option("--leaves", type=number, default=0, help="Of ScaNN's tree."),
        click.option("--leaves-to-search", type=number, default=0, help="Of a query."),
        click.option("--dimensions-per-block", type=number, default=0, help="Hashed together."),
        click.option("--anisotropic-threshold", type=click.FloatRange(0), default=0.0),
        click.option("--training-sample", type=number, default=0, help="Vectors to train with."),
    ):
        function = option(function)
    return function


@click.group(cls=_RecipesToo)
def index() -> None:
    """Build, import and change search indexes. `psearch index [FILE|KEY=VALUE]...`: the index of a recipe."""


@index.command(hidden=True)
@_traceback
@click.argument("sources", nargs=-1, metavar="[FILE|KEY=VALUE]...")
def recipe(sources: tuple[str, ...]) -> None:
    """Build the search index of a recipe, or check the one that is there."""
    from psearch_jax import retrieval_commands as room

    click.echo(room.open_of_recipe(sources))


@index.command()
@_corpus
@_build
@_encoder
@click.argument("corpus", type=click.Path(path_type=Path))
def build(corpus: Path, **options: Any) -> None:
    """Build an index of CORPUS: JSONL (also .gz, .zst), Parquet or a saved dataset. A killed build goes on."""
    from psearch_jax import retrieval_commands as room

    click.echo(room.build(corpus, **options))


@index.command()
@_traceback
@_how
@click.argument("passages", type=click.IntRange(1))
@click.option("--dims", type=click.IntRange(1), default=768, help="Of a vector: the encoder's.")
@click.option(
    "--passage-bytes", type=click.IntRange(1), default=700, help="Text of one; a hundred words."
)
def estimate(passages: int, dims: int, passage_bytes: int, **options: Any) -> None:
    """Say what memory and disk an index of so many PASSAGES will need; nothing is built."""
    from psearch_jax.retrieval import build_options as room

    asked = room.BuildOptions(**options)
    needs = room.estimate(asked, passages, dims, passages * passage_bytes)
    click.echo(room.describe_needs(needs, passages, dims, asked))


@index.command("import")
@_corpus
@_build
@_encoder
@click.argument("faiss", type=click.Path(path_type=Path))
@click.argument("corpus", type=click.Path(path_type=Path))
def import_(faiss: Path, corpus: Path, **options: Any) -> None:
    """Build an index of CORPUS with the vectors of FAISS, a flat index of them that --encoder made."""
    from psearch_jax import retrieval_commands as room

    click.echo(room.build(corpus, faiss=faiss, **options))


@index.command()
@_corpus
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("corpus", type=click.Path(path_type=Path))
@click.option("--encoder", default="", help="Where the index's encoder is now.")
def add(directory: Path, corpus: Path, encoder: str, skip_bad: int) -> None:
    """Add the passages of CORPUS to the index in DIRECTORY; who searches it finds them at once."""
    from psearch_jax import retrieval_commands as room

    click.echo(room.add(directory, corpus, encoder=encoder, skip_bad=skip_bad))


@index.command()
@_traceback
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("ids", nargs=-1)
@click.option("--from", "file", type=click.Path(path_type=Path), help="A file with an id a line.")
def delete(directory: Path, ids: tuple[str, ...], file: Path | None) -> None:
    """Delete passages by their IDS from the index in DIRECTORY."""
    from psearch_jax import retrieval_commands as room

    click.echo(room.delete(directory, ids, file))


@click.command()
@_traceback
@click.argument("directory", metavar="INDEX", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="0.0.0.0: for everybody.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option("--topk", type=click.IntRange(1), default=3, show_default=True, help="By default.")
@click.option("--encoder", default="", help="Where the index's encoder is now.")
@click.option("--reranker", default="", help="A cross-encoder's directory.")
@click.option("--rerank-depth", type=click.IntRange(1), default=50, show_default=True)
@click.option(
    "--device-matrix",
    type=click.Choice(["none", "bfloat16", "int8"]),
    default="none",
    help="Search exactly, with all vectors on the devices.",
)
@click.option("--batch", type=click.IntRange(1), default=256, help="Queries of one search.")
@click.option("--queue", type=click.IntRange(1), default=4096, help="Queries that may wait.")
@click.option("--deadline", type=click.FloatRange(0.001), default=30.0, help="Seconds.")
@click.option("--max-bytes", type=click.IntRange(1), default=4 << 20, help="Of a request.")
@click.option("--token-variable", default="PSEARCH_TOKEN", show_default=True)
@click.option("--no-verify", is_flag=True, help="Do not compare checksums when opening.")
def serve(**options: Any) -> None:
    """Answer searches of INDEX over HTTP until it is stopped.

    In every published form. A bearer token is asked for where the environment variable of --token-variable holds one.
    """
    from psearch_jax import serve as room

    room.run(**options)


COMMANDS: tuple[click.Command, ...] = (index, serve)
