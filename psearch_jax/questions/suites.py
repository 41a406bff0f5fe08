"""The benchmarks by name: where their questions are, which split is scored, and what kinds they hold.

A suite's files are looked for in `data.directory` first, since clusters are often offline; the hub is asked only where
there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from psearch_jax.errors import UserError

#: FlashRAG's collection on the hub: every benchmark in the same columns.
_FLASHRAG = "hf:RUC-NLPIR/FlashRAG_datasets"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A benchmark.

    Attributes:
      name: the data set's name in results.
      hub: its source where there is no local file.
      kind: of its questions where a row does not say ("unknown" where it should have said).
      splits: our split → the data set's; benchmarks whose test answers are not public are scored on dev.
      stems: what local files may begin with, besides the name.
    """

    name: str
    hub: str
    kind: str
    splits: Mapping[str, str] = field(default_factory=dict)
    stems: tuple[str, ...] = ()

    def split(self, asked: str) -> str:
        """The data set's split for ours."""
        return self.splits.get(asked, asked)

    def local(self, directory: str | Path, asked: str) -> Path | None:
        """Its file in a directory: NAME/SPLIT.jsonl, NAME_SPLIT*.jsonl or NAME*questions.jsonl, or .parquet.

        Raises:
          UserError: several files could be meant.
        """
        folder, split = Path(directory), self.split(asked)
        for stem in (self.name, *self.stems):
            for pattern in (f"{stem}/{split}", f"{stem}_{split}", f"{stem}_{split}*"):
                files = [p for e in ("jsonl", "parquet") for p in folder.glob(f"{pattern}.{e}")]
                if files:
                    return self._only(files)
        for stem in (self.name, *self.stems):
            if files := sorted(folder.glob(f"{stem}*questions.jsonl")):
                return self._only(files)
        return None

    def _only(self, files: list[Path]) -> Path:
        if len(files) > 1:
            raise UserError(
                f"suite {self.name}: {' and '.join(map(str, sorted(files)))} could all be meant; name one as "
                f"suite:{self.name}=FILE."
            )
        return files[0]


_DEV = {"test": "dev"}
SUITES = {
    suite.name: suite
    for suite in (
        Suite(name="nq", hub=f"{_FLASHRAG}:nq", kind="single"),
        Suite(name="triviaqa", hub=f"{_FLASHRAG}:triviaqa", kind="single"),
        Suite(name="popqa", hub=f"{_FLASHRAG}:popqa", kind="single"),
        Suite(name="hotpotqa", hub=f"{_FLASHRAG}:hotpotqa", kind="unknown", splits=_DEV),
        Suite(
            name="2wikimultihopqa",
            hub=f"{_FLASHRAG}:2wikimultihopqa",
            kind="unknown",
            splits=_DEV,
            stems=("2wiki",),
        ),
        # Every question of these two is a chain, or a graph whose shape MuSiQue's ids tell.
        Suite(name="musique", hub=f"{_FLASHRAG}:musique", kind="bridge", splits=_DEV),
        Suite(name="bamboogle", hub=f"{_FLASHRAG}:bamboogle", kind="bridge"),
        Suite(
            name="multihop_rag",
            hub="hf:yixuantt/MultiHopRAG:MultiHopRAG",
            kind="unknown",
            splits={"test": "train", "dev": "train"},  # it has one split
            stems=("multihoprag", "MultiHopRAG"),
        ),
    )
}
ALIASES = {"2wiki": "2wikimultihopqa", "multihop-rag": "multihop_rag"}
#: The seven of the published tables, in their order.
GROUPS = {
    "seven": ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
}


def suites_named(name: str) -> list[Suite]:
    """A suite by name or alias, or the suites of a group.

    Raises:
      UserError: there is none of that name.
    """
    names = GROUPS.get(name, (ALIASES.get(name, name),))
    if names[0] not in SUITES:
        raise UserError(
            f"suite {name!r} is not known; there are {', '.join(SUITES)} and the group {', '.join(GROUPS)}."
        )
    return [SUITES[each] for each in names]
