"""The report: self-contained, safe with anybody's text, right numbers, and filters that filter."""

from __future__ import annotations

import csv
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from evaluation.made_up import ROWS, records, write_run

from psearch_jax.errors import UserError
from psearch_jax.evaluation.episode_viewer import MOST_BYTES, TRAINING, viewer_data
from psearch_jax.evaluation.report import read_run, write_report
from psearch_jax.evaluation.results import rows_file

EVIL = '</script><script>document.title="owned"</script><img src=x onerror=alert(1)>'
BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A written report in which a passage, a question and an answer try to break out."""
    directory = write_run(tmp_path_factory.mktemp("run"))
    for name in ROWS:
        path = rows_file(directory, name)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[1]["question"] = lines[1]["answer"] = f"evil {EVIL}"
        for line in lines:
            for turn in line["results"]:
                turn["passages"][0][0]["text"] = EVIL
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(directory)
    return directory


@pytest.fixture(scope="module")
def page(run):
    return (run / "report.html").read_text(encoding="utf-8")


class References(HTMLParser):
    """Tags and everything that could load something."""

    def __init__(self):
        super().__init__()
        self.tags, self.references = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
                self.references.append(value)


def test_nothing_is_loaded_from_outside(page):
    parser = References()
    parser.feed(page)
    assert all(reference.startswith("#") for reference in parser.references)
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(parser.tags)
    assert "http:" not in page
    assert "https:" not in page
    assert "@import" not in page
    assert re.search(r"url\((?!#)", page) is None
    assert "default-src 'none'" in page


def test_passages_questions_and_answers_are_escaped(page):
    assert EVIL not in page
    assert page.count("<script") == 2  # the data and the viewer
    assert "<img" not in page
    data = json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1]
    )
    assert EVIL in {text for _, text in data["passages"].values()}


def test_every_id_is_unique_and_every_reference_has_its_target(page):
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    targets = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page))
    assert {a or b for a, b in targets} <= set(ids)


def test_tables_hold_the_numbers_of_the_summary(run):
    summary = json.loads((run / "summary.json").read_text())
    with (run / "tables" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["row"] for row in rows] == [
        "Closed book", "RAG, one query", "Warm start", "EM reward", "ParallelSearch reward", "Gated reward",
    ]  # fmt: skip
    gated = summary["rows"]["gated"]
    assert float(rows[-1]["EM, greedy"]) == gated["em"]
    assert float(rows[-1]["EM, greedy low"]) == gated["intervals"]["em"][0]
    assert float(rows[-1]["EM, sampled"]) == gated["em_sampled"]
    with (run / "tables" / "kinds.csv").open() as file:
        kinds = list(csv.DictReader(file))
    parallel = gated["kinds"]["parallelizable"]
    column = f"parallelizable, n = {parallel['questions']}: Turns"
    assert float(kinds[-1][column]) == parallel["turns"]


def test_every_table_and_figure_lies_beside_the_page(run, page):
    tables = {path.stem for path in (run / "tables").glob("*.csv")}
    assert tables == {"results", "kinds", "comparisons", "evidence", "novelty", "curves"}
    figures = {path.stem for path in (run / "figures").glob("*.png")}
    assert figures == {"accuracy", "cost", "tokens", "curves"}
    for path in (run / "figures").glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    assert page.count("<svg") == 4
    with (run / "tables" / "curves.csv").open() as file:
        curves = list(csv.DictReader(file))
    assert len(curves) == 90
    assert {line["run"] for line in curves} == {"em_reward", "parallel_search", "gated"}


def test_the_page_says_which_sample_it_shows(page):
    text = " ".join(html.unescape(page).split())
    assert "120 of 120 questions" in text
    assert "360 sampled episodes of the training steps" in text


def test_the_sample_is_even_by_kind_and_the_same_for_every_row():
    results = {row: records(row, 200) for row in ROWS}
    results["gated"] = results["gated"][:150]  # an evaluation that is not finished
    data = viewer_data(results, limit=120)
    chosen = {}
    for episode in data["episodes"]:
        chosen.setdefault(episode["row"], []).append((episode["kind"], episode["id"]))
    assert len(data["episodes"]) <= 120
    assert chosen["rag"] == chosen["em_reward"]
    counts = [sum(kind == k for kind, _ in chosen["rag"]) for k in data["kinds"]]
    assert counts == [5, 5, 5, 5]
    assert data == viewer_data(results, limit=120)


def test_several_data_sets_have_a_table_with_their_plain_mean(tmp_path):
    path = rows_file(tmp_path, "rag")
    path.parent.mkdir()
    lines = [
        line | {"dataset": name, "id": f"{name}:{i}", "em": name == "nq"}
        for name in ("nq", "hotpotqa")
        for i, line in enumerate(records("rag", 10 if name == "nq" else 30))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(tmp_path)
    with (tmp_path / "tables" / "datasets.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (float(row["nq, n = 10"]), float(row["hotpotqa, n = 30"]), float(row["Mean"])) == (
        1,
        0,
        0.5,
    )


def test_lines_without_a_summary_are_counted(tmp_path):
    path = rows_file(tmp_path, "rag")
    path.parent.mkdir()
    lines = records("rag", 8)
    cut = json.dumps(lines[7])[:50]  # a crash in the middle of the last line
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[:7]) + cut)
    assert read_run(tmp_path).rows["rag"]["questions"] == 7
    assert write_report(tmp_path).exists()


def test_a_training_run_alone_has_curves(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.6}\n'
    )
    page = write_report(tmp_path).read_text()
    assert page.count("<svg") == 1
    assert 'id="episodes"' not in page


def test_directories_without_results_are_refused(tmp_path):
    with pytest.raises(UserError, match="holds neither results"):
        write_report(tmp_path)
    with pytest.raises(UserError, match="is not a directory"):
        write_report(tmp_path / "missing")
    (tmp_path / "summary.json").write_text("[1]")
    with pytest.raises(UserError, match=r"summary\.json is not a JSON object"):
        write_report(tmp_path)


def opened(path, fragment, profile):
    """The page's DOM after its script ran, in a browser without a network."""
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--proxy-server=127.0.0.1:9", f"--user-data-dir={profile}", "--dump-dom",
        f"{path.as_uri()}{fragment}",
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here; the page's script is not run")
def test_filters_filter_in_a_browser(run, tmp_path):
    dom = opened(run / "report.html", "#row=gated&kind=bridge&verdict=wrong", tmp_path)
    data = viewer_data(read_run(run).greedy, read_run(run).training)
    wanted = [
        episode
        for episode in data["episodes"]
        if (episode["row"], episode["kind"], episode["em"]) == ("gated", "bridge", False)
    ]
    assert wanted
    assert f"{len(wanted)} of {len(data['episodes'])} episodes" in dom
    shown = re.search(r'<ol id="list">(.*?)</ol>', dom, re.S)[1]
    assert shown.count("<li>") == shown.count("Gated reward · bridge") == len(wanted)
    assert "✓" not in shown
    detail = re.search(r'<article id="detail".*?</article>', dom, re.S)[0]
    assert html.escape(wanted[0]["question"], quote=False) in detail
    for role in ("prompt", "policy", "observation"):
        assert f'<span class="role-{role}">' in detail


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here; the page's script is not run")
def test_text_stays_text_in_a_browser(run, tmp_path):
    dom = opened(run / "report.html", "#text=evil", tmp_path)
    assert "<title>owned" not in dom
    detail = re.search(r'<article id="detail".*?</article>', dom, re.S)[0]
    assert "<script" not in detail
    assert "<img" not in detail


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here; the page's script is not run")
def test_flipped_answers_and_training_episodes_in_a_browser(run, tmp_path):
    """What the gated row lost against the EM reward; and the tokens of a training step with their advantage."""
    read = read_run(run)
    right = {row: {r["id"]: r["em"] for r in read.greedy[row]} for row in ("gated", "em_reward")}
    lost = [i for i, em in right["gated"].items() if not em and right["em_reward"][i]]
    assert lost
    dom = opened(run / "report.html", "#row=gated&flipped=lost%3Aem_reward", tmp_path)
    shown = re.search(r'<ol id="list">(.*?)</ol>', dom, re.S)[1]
    assert shown.count("<li>") == len(lost) and "✓" not in shown
    gained = opened(run / "report.html", "#row=em_reward&flipped=gained%3Agated", tmp_path)
    shown = re.search(r'<ol id="list">(.*?)</ol>', gained, re.S)[1]
    assert shown.count("<li>") == len(lost) and "✗" not in shown
    trained = opened(run / "report.html", "#row=gated%20(training)", tmp_path)
    detail = re.search(r'<article id="detail".*?</article>', trained, re.S)[0]
    assert re.search(
        r'data-told="log-probability −0\.01 · probability 0\.99 · advantage −1\.5"', detail
    )
    assert "step 1" in detail and "reward 0" in detail


def test_policy_text_is_stored_once_as_its_tokens(run):
    data = viewer_data(read_run(run).greedy)
    episode = data["episodes"][0]
    record = next(r for r in read_run(run).greedy[episode["row"]] if r["id"] == episode["id"])
    for (role, text, *tokens), (own_role, own) in zip(
        episode["segments"], record["segments"], strict=True
    ):
        assert role == own_role
        assert (text is None) == (role == "policy")
        assert ("".join(t[0] for t in tokens[0]) if tokens else text) == own


def long_record(number):
    """An episode as long as one over Wikipedia: four turns of 150 tokens, six passages of 100 words each turn."""
    words = "passage of a hundred words about something or other that was found " * 9
    passages = [
        [
            {"id": f"{number}-{turn}-{k}", "title": f"T{k}", "text": words, "score": 0.5}
            for k in range(6)
        ]
        for turn in range(3)
    ]
    tokens = [[[" token", -0.25]] * 150 for _ in range(4)]
    policy = " token" * 150
    observation = words * 6
    made = records("gated", 1)[0]
    return made | {
        "id": f"q{number}",
        "kind": ("bridge", "parallelizable")[number % 2],
        "segments": [
            ["prompt", "Which?"],
            *[s for _ in range(3) for s in (["policy", policy], ["observation", observation])],
            ["policy", policy],
        ],
        "tokens": tokens,
        "results": [{"queries": ["q"], "passages": [found]} for found in passages],
    }


def test_a_run_of_long_episodes_stays_under_20_megabytes():
    """Fewer are shown where 2,000 would be too many bytes; every kind stays."""
    data = viewer_data({"gated": [long_record(i) for i in range(2000)]})
    size = len(json.dumps(data))
    assert MOST_BYTES / 3 < size < 20e6
    assert 100 < len(data["episodes"]) < 2000
    assert {episode["kind"] for episode in data["episodes"]} == {"bridge", "parallelizable"}


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here; the page's script is not run")
def test_2000_episodes_open_within_two_seconds(tmp_path):
    path = rows_file(tmp_path / "run", "gated")
    path.parent.mkdir(parents=True)
    lines = records("gated", 2000)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    training = records("em_reward", 400)
    (tmp_path / "run" / "episodes.jsonl").write_text(
        "".join(
            json.dumps({"step": 1, "reward": 0.5, "advantage": 0.1, **r}) + "\n" for r in training
        )
    )
    page = write_report(tmp_path / "run")
    assert page.stat().st_size < 20e6
    data = viewer_data(*(read_run(tmp_path / "run").__dict__[k] for k in ("greedy", "training")))
    assert len(data["episodes"]) == 2000
    assert sum(e["row"].endswith(TRAINING) for e in data["episodes"]) == 400
    dom = opened(page, "", tmp_path / "profile")
    assert int(re.search(r'data-ready="(\d+)"', dom)[1]) < 2000
    assert "1400 more" in dom  # of the row shown first, 200 lines are laid out
