"""Play one episode in front of somebody: text as it is drawn, coloured by role, searches side by side."""

from __future__ import annotations

import json as json_text
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from io import TextIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psearch_jax.config import Config, SamplingConfig
from psearch_jax.errors import UserError
from psearch_jax.questions.question import Question

if TYPE_CHECKING:
    from rich.console import Console

    from psearch_jax.retrieval.passages import Hit
    from psearch_jax.rollout.engine import Engine
    from psearch_jax.rollout.loop import Event

#: What `make demo` leaves.
DEMO_POLICY = Path("runs/demo/parallel_search/policy")
STYLES = {"prompt": "dim", "policy": "bold cyan", "observation": "yellow", "verdict": "bold green"}


def play(
    engine: Engine,
    params: Any,
    question_text: str,
    *,
    sampling: SamplingConfig | None = None,
    seed: int = 0,
    as_json: bool = False,
    stream: TextIOBase | None = None,
    started: float | None = None,
) -> dict[str, Any]:
    """Plays one episode and writes it to `stream`.

    Args:
      engine: an engine of one or more slots.
      params: the policy's parameters.
      question_text: what is asked.
      sampling: greedy if None.
      seed: of the sampling.
      as_json: write nothing but the returned object, on one line.
      stream: standard output if None; colours and columns only on a terminal.
      started: `time.perf_counter()` at the start of the command, so that `seconds` holds the loading too.

    Returns:
      `metrics.episode_facts` with "seconds".

    Raises:
      UserError: the question is empty.
    """
    import jax

    from psearch_jax.evaluation.records import episode_facts
    from psearch_jax.rollout.protocol import well_formed

    text = _words(question_text)
    started = time.perf_counter() if started is None else started
    stream = stream or sys.stdout
    question = Question(id="ask", text=text, golden_answers=("",))
    view = None if as_json else View(engine, stream)
    if view:
        view.question(text)
    (episode,) = engine.rollout(
        params,
        engine.requests([question]),
        key=jax.random.key(seed),
        sampling=sampling or SamplingConfig(temperature=0.0),
        on_event=view.event if view else None,
    )
    facts = episode_facts(
        episode,
        decode=engine.decode_text,
        well_formed=lambda played: well_formed(engine.protocol, played),
    )
    facts["seconds"] = round(time.perf_counter() - started, 3)
    if view:
        view.verdict(facts)
    else:
        stream.write(json_text.dumps(facts, ensure_ascii=False) + "\n")
        stream.flush()
    return facts


def run(config: Config, question: str, *, json: bool = False) -> None:
    """`psearch ask`: opens the policy and the index of a recipe and plays one episode greedily.

    Without a policy in the recipe it is the one that the demo trained with the ParallelSearch reward, and before
    the demo has run, the packaged warm start. The engine has one slot and compiles only what this episode needs.
    """
    from psearch_jax.assembly import (
        keep_compiled_programs,
        open_backend,
        open_engine,
        open_policy,
    )

    started = time.perf_counter()
    _words(question)  # an empty question need not wait for the index
    keep_compiled_programs(config)
    source = config.policy
    if source == "embedded" and (DEMO_POLICY / "config.json").is_file():
        source = str(DEMO_POLICY)
    policy = open_policy(source)
    if not json:
        sys.stderr.write(f"policy: {source}\n")
    # One seat and one shape of each program: an episode is short, compiling is what takes time here.
    context = config.rollout.context
    seat = replace(
        config.rollout,
        slots=1,
        window_buckets=(context,),
        append_buckets=(min(64, context),),
        decode_block=8,
    )
    alone = replace(config, rollout=seat)
    engine = open_engine(alone, policy, open_backend(config.retrieval))
    play(
        engine, policy.params, question, seed=config.evaluation.seed, as_json=json, started=started
    )


def _words(question: str) -> str:
    """The question on one line.

    Raises:
      UserError: there is nothing in it.
    """
    text = " ".join(question.split())
    if not text:
        raise UserError("the question is empty; ask something, for example about two cities.")
    return text


def printable(text: str) -> str:
    """The text without control characters (a passage must not steer the terminal); newlines stay."""
    return "".join(
        letter if letter == "\n" or letter.isprintable() else "\N{REPLACEMENT CHARACTER}"
        for letter in text
    )


def verdict_line(facts: dict[str, Any]) -> str:
    """Answer, turns, searches, seconds in one line."""

    def count(number: int, one: str, many: str) -> str:
        return f"{number} {one if number == 1 else many}"

    answer = printable(facts["answer"]) if facts["answer"] else f"no answer ({facts['end_reason']})"
    return (
        f"{answer}  ·  {count(facts['turns'], 'turn', 'turns')}, "
        f"{count(facts['searches'], 'search', 'searches')}, "
        f"{count(facts['subqueries'], 'sub-query', 'sub-queries')}, {facts['seconds']:.1f} s"
    )


class View:
    """Writes the events of one episode as they come."""

    def __init__(self, engine: Engine, stream: TextIOBase) -> None:
        from rich.console import Console

        self._engine = engine
        self._console: Console = Console(file=stream, highlight=False)
        self._queries: list[str] = []

    def question(self, text: str) -> None:
        """The question, as the prompt's colour."""
        self._write(text + "\n", "prompt")

    def event(self, event: Event) -> None:
        """One event of the engine (`Engine.rollout(on_event=…)`)."""
        if event.kind == "policy":
            self._write(event.text, "policy")
        elif event.kind == "search":
            self._queries = event.text.split("\n")
            self._write("\n", "policy")
        elif event.kind == "observation":
            if self._queries:
                self._results(self._queries)
            else:  # the protocol's feedback to a turn that did nothing
                self._write("\n" + event.text.strip("\n") + "\n", "observation")
            self._queries = []
        elif event.kind == "end":
            self._write("\n", "policy")

    def verdict(self, facts: dict[str, Any]) -> None:
        """The last line."""
        self._write(verdict_line(facts) + "\n", "verdict")

    def _write(self, text: str, role: str) -> None:
        from rich.text import Text

        # A Text, so that square brackets in it are no markup.
        self._console.print(Text(printable(text), style=STYLES[role]), end="", soft_wrap=True)
        self._console.file.flush()

    def _results(self, queries: Sequence[str]) -> None:
        """The hits of a search turn: a column a sub-query on a terminal, else one below the other."""
        # Events carry text; the hits come from the searcher's cache, where this search has just put them.
        (found,) = self._engine.environment.search([queries], self._engine.protocol.top_k)
        if self._console.is_terminal:
            self._console.print(_columns(queries, found.hits))
            return
        for query, hits in zip(queries, found.hits, strict=True):
            self._write(f"  search: {query}\n", "observation")
            for line in _lines(hits):
                self._write(f"    {line}\n", "observation")


def _lines(hits: Sequence[Hit]) -> list[str]:
    texts = [" ".join(hit.passage.text.split()) for hit in hits]
    return [printable(text) for text in texts] or ["no results"]


def _columns(queries: Sequence[str], found: Sequence[Sequence[Hit]]) -> Any:
    """Panels of equal width side by side, titled with the sub-query."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(expand=True, padding=(0, 1))
    for _ in queries:
        grid.add_column(ratio=1)
    panels = []
    for query, hits in zip(queries, found, strict=True):
        body = Text("\n".join(_lines(hits)), style=STYLES["observation"])
        title = Text(printable(query), style=STYLES["policy"])
        panels.append(Panel(body, title=title, title_align="left", border_style="dim"))
    grid.add_row(*panels)
    return grid
