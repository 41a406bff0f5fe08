"""`psearch index …`: sentences and exit codes, and an index that a recipe can use."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from retrieval.tiny_encoder import tiny_embedder

from psearch_jax import assembly, cli, retrieval_commands
from psearch_jax.config import RetrievalConfig
from psearch_jax.retrieval import collection_search
from psearch_jax.retrieval.collection import open_collection


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    rows = [{"id": str(i), "title": f"T{i}", "text": f"passage number{i}"} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"id": "x"}\n')
    return path


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder that commands load."""
    for module in (retrieval_commands, collection_search):
        monkeypatch.setattr(module, "load_embedder", lambda *args, **more: tiny_embedder())


def test_build_add_delete_and_search(tmp_path: Path, corpus: Path, capsys) -> None:
    index = str(tmp_path / "index")
    arguments = ["index", "build", str(corpus), "--out", index, "--kind", "hybrid"]
    assert cli.main(arguments) == 2
    assert "line 21" in capsys.readouterr().err
    assert cli.main([*arguments, "--skip-bad", "1"]) == 0
    printed = capsys.readouterr()
    assert "passed over line 21: neither" in printed.out
    assert "20 passages of 16 dimensions, hybrid" in printed.err and "GiB of memory" in printed.err
    assert cli.main([*arguments, "--skip-bad", "1"]) == 2
    assert "there already" in capsys.readouterr().err
    more = tmp_path / "more.jsonl"
    more.write_text('{"id": "new", "text": "something fresh"}\n')
    assert cli.main(["index", "add", index, str(more)]) == 0
    (tmp_path / "ids").write_text("3\n4\n")
    assert cli.main(["index", "delete", index, "7", "--from", str(tmp_path / "ids")]) == 0
    assert "deleted 3" in capsys.readouterr().out
    assert cli.main(["index", "delete", index]) == 2
    assert len(open_collection(index)) == 18
    backend = assembly.open_backend(replace(RetrievalConfig(), index=index))
    hits = backend.search(["something fresh", "passage number7", "passage number8"], 2)
    assert [own[0].passage.id for own in hits][::2] == ["new", "8"]
    assert "7" not in [hit.passage.id for hit in hits[1]]


def test_wrong_options_are_sentences(tmp_path: Path, corpus: Path, capsys) -> None:
    build = ["index", "build", str(corpus), "--out", str(tmp_path / "index"), "--skip-bad", "1"]
    for options, says in (
        (["--kind", "flat"], "use one of scann"),
        (["--leaves", "400"], "a shard has 20 rows"),
        (["--leaves-to-search", "4"], "give --leaves too"),
    ):
        assert cli.main([*build, *options]) == 2
        assert says in capsys.readouterr().err
    assert cli.main(["index", "add", str(tmp_path / "none"), str(corpus)]) == 2
    assert "no index of" in capsys.readouterr().err
    assert cli.main(["index", "import", str(corpus), str(corpus), *build[3:]]) == 2
    assert "no flat FAISS index" in capsys.readouterr().err
    assert not (tmp_path / "index").exists()


def test_a_recipe_still_has_its_index(tmp_path: Path, corpus: Path, capsys) -> None:
    assert cli.main(["index", "retrieval.corpus=none.jsonl", "retrieval.kind=exact"]) == 2
    assert "none.jsonl cannot be read" in capsys.readouterr().err
    assert cli.main(["index", "retrieval.device_matrix=int8"]) == 2
    assert "set it to exact" in capsys.readouterr().err


def test_what_wikipedia_needs_is_what_the_readme_says(capsys) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    table = readme.partition("<!-- estimate -->")[2].partition("<!-- /estimate -->")[0]
    for kept in ("float32", "int8", "disk"):
        assert cli.main(["index", "estimate", "21015324", "--reorder-type", kept]) == 0
        said = re.findall(r"[\d.]+ GiB", capsys.readouterr().out)
        [line] = [line for line in table.splitlines() if line.startswith(f"| `{kept}`")]
        assert re.findall(r"[\d.]+ GiB", line) == said
    assert cli.main(["index", "estimate", "10", "--kind", "x"]) == 2
