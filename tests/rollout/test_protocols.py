"""The published systems' protocols (configs/protocols): their wire formats, and reading whatever a policy writes."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from psearch_jax.config import ProtocolConfig
from psearch_jax.config_files import resolve
from psearch_jax.questions.question import Question
from psearch_jax.retrieval.passages import Hit, Passage
from psearch_jax.rollout.episode import Episode, Turn
from psearch_jax.rollout.protocol import (
    Action,
    control_tags,
    parse_turn,
    render_results,
    search_content,
    stop_tags,
    well_formed,
    written_queries,
)

NAMES = (
    *("search_r1", "search_r1_released", "parallel_search", "parallel_search_released"),
    *("research", "tool_call"),
)
FOUND = [
    [Hit(Passage("0", "Oslo", "Capital of\nNorway."), 1.0), Hit(Passage("1", "Nice", "By sea."), 0)]
]


@pytest.fixture(scope="session")
def protocols(root) -> dict[str, ProtocolConfig]:
    """Every shipped protocol, and the embedded one."""
    folder = root / "configs" / "protocols"
    assert {path.stem for path in folder.glob("*.yaml")} == set(NAMES)
    found = {name: resolve([folder / f"{name}.yaml"])[0].protocol for name in NAMES}
    return {**found, "embedded": ProtocolConfig()}


def words(text: str) -> int:
    return len(text.split())


def search(*queries: str) -> Action:
    return Action(kind="search", queries=queries)


def call(**changes: object) -> str:
    body = {"name": "search", "arguments": {"query_list": ["a", "b"]}, **changes}
    return f"<think>t</think><tool_call>{json.dumps(body)}</tool_call>"


# -- choosing one


def test_law_11_a_recipe_overrides_any_field_of_a_protocol(root, tmp_path):
    base = root / "configs" / "protocols" / "parallel_search.yaml"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"base: {base}\nprotocol: {{max_subqueries: 3}}\n")
    config, origins = resolve([recipe], ["protocol.top_k=7"])
    assert (config.protocol.max_subqueries, config.protocol.top_k) == (3, 7)
    assert config.protocol.separator == "##"
    assert origins["protocol.max_subqueries"] == f"{recipe}:2"
    assert origins["protocol.top_k"] == "override protocol.top_k=7"
    assert origins["protocol.separator"].startswith(f"{base}:")
    assert origins["protocol.turn_tokens"].startswith(str(base.with_name("search_r1.yaml")))
    # As a file before the recipe's own it does the same.
    assert resolve([base, recipe], ["protocol.top_k=7"])[0] == config


def test_the_limits_of_the_systems(protocols):
    limits = {
        name: (p.max_search_turns, p.top_k, p.observation_tokens, p.turn_tokens)
        for name, p in protocols.items()
    }
    assert limits["search_r1"] == limits["parallel_search"] == (4, 3, 500, 500)
    assert limits["parallel_search_released"] == (4, 3, 1000, 500)
    assert limits["research"] == (1000, 5, 8192, 8192)


# -- writing


@pytest.mark.parametrize(
    ("name", "queries", "expected"),
    [
        (
            "search_r1",
            ["q"],
            "\n\n<information>Doc 1(Title: Oslo) Capital of Norway.\nDoc 2(Title: Nice) By sea."
            "</information>\n\n",
        ),
        (
            "search_r1_released",
            ["q"],
            '\n\n<information>Doc 1(Title: "Oslo") Capital of Norway.\nDoc 2(Title: "Nice") By sea.'
            "</information>\n\n",
        ),
        (
            "parallel_search_released",
            ["q", "r"],
            '\n\n<information>Doc 1(Title: "Oslo") Capital of Norway.\nDoc 2(Title: "Nice") By sea.\n'
            'Doc 1(Title: "Oslo") Capital of Norway.\nDoc 2(Title: "Nice") By sea.</information>\n\n',
        ),
        (
            "parallel_search",
            ["q", "r"],
            "\n\n<information>Results for query 1 (q):\nDoc 1(Title: Oslo) Capital of Norway.\n"
            "Doc 2(Title: Nice) By sea.\nResults for query 2 (r):\nDoc 1(Title: Oslo) Capital of Norway.\n"
            "Doc 2(Title: Nice) By sea.</information>\n\n",
        ),
        (
            "research",
            ["q"],
            ' <result>\n"Oslo"\nCapital of Norway.\n\n"Nice"\nBy sea.\n</result>',
        ),
        (
            "tool_call",
            ["q", "r"],
            "\n<tool_response>\nResults for query 1 (q):\nDoc 1(Title: Oslo) Capital of Norway.\n"
            "Doc 2(Title: Nice) By sea.\nResults for query 2 (r):\nDoc 1(Title: Oslo) Capital of Norway.\n"
            "Doc 2(Title: Nice) By sea.\n</tool_response>\n",
        ),
    ],
)
def test_results_on_the_wire(protocols, name, queries, expected):
    assert render_results(protocols[name], queries, FOUND * len(queries), words) == expected


@pytest.mark.parametrize("name", NAMES)
def test_law_14_a_block_without_passages_says_so_and_closes(protocols, name):
    protocol = protocols[name]
    text = render_results(protocol, ["q"], [[]], words)
    assert protocol.no_results in text
    assert text.rstrip().endswith(protocol.information[1].strip())


def test_contents_without_a_title_have_no_title_line(protocols):
    found = [[Hit(Passage("0", "", "text"), 1.0)]]
    assert render_results(protocols["research"], ["q"], found, words) == (
        " <result>\ntext\n</result>"
    )


def test_fault_08_a_budget_leaves_out_whole_passages_and_closes(protocols):
    long = Passage("0", "t", "w " * 499)
    text = render_results(protocols["search_r1"], ["q"], [[Hit(long, 1.0), FOUND[0][0]]], words)
    assert text == (
        "\n\n<information>Doc 2(Title: Oslo) Capital of Norway.</information>\n\n"  # its own number
    )


def pieces(protocol: ProtocolConfig) -> st.SearchStrategy[str]:
    """Texts full of a protocol's tags and of pieces of them."""
    parts = [*control_tags(protocol), "a", "b##c", " ", "\n", "<", ">", "{", "}", "\\boxed{", "["]
    parts += ['{"name": "search", "arguments": {"query_list": ["q", "r"]}}', '"', "\\ud800", ","]
    return st.lists(st.one_of(st.sampled_from(parts), st.text(max_size=3)), max_size=12).map(
        "".join
    )


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(data=st.data())
def test_law_02_fault_22_no_tag_of_the_protocol_survives_in_results(protocols, name, data):
    protocol = protocols[name]
    texts = pieces(protocol)
    queries = data.draw(st.lists(texts, min_size=1, max_size=protocol.max_subqueries % 7 or 1))
    found = [
        [Hit(Passage("0", data.draw(texts), data.draw(texts)), 1.0) for _ in range(2)]
        for _ in queries
    ]
    text = render_results(protocol, queries, found, lambda line: 1, reserved=("<|im_end|>",))
    opening, closing = protocol.information
    before = protocol.before_information + opening
    after = closing + protocol.after_information
    assert text.startswith(before) and text.endswith(after)
    inner = text[len(before) : len(text) - len(after)]
    assert not any(tag in inner for tag in control_tags(protocol))
    assert parse_turn(protocol, text).kind in ("none", "invalid")


def test_two_passages_side_by_side_make_no_tag():
    protocol = ProtocolConfig(attributed=False, passage_separator="", results_end="")
    found = [[Hit(Passage("0", "", "a<sea"), 1.0), Hit(Passage("1", "", "rch>b"), 1.0)]]
    assert render_results(protocol, ["q"], found, words) == (
        "<information>a< search>b</information>"
    )


# -- reading


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("search_r1", "<search> a ## b </search>", search("a ## b")),  # no separator here
        ("search_r1", "<search>a<search>b</search>", search("a<search>b")),  # the first pair
        ("search_r1", "x</search><search>a</search>", search("a")),
        ("search_r1", "<answer>a<answer>b</answer>", Action(kind="answer", answer="a<answer>b")),
        ("search_r1", "<search>a<answer>b</answer>", Action(kind="answer", answer="b")),
        ("search_r1", "<search> </search>", Action(kind="invalid")),
        ("search_r1", "nothing", Action(kind="none")),
        ("parallel_search", "<search> a ## b ##a## </search>", search("a", "b")),
        ("parallel_search", "<search>1##2##3##4##5##6</search>", search("1", "2", "3", "4", "5")),
        ("parallel_search", "<search>##</search>", Action(kind="invalid")),
        ("research", "<search>a<search>b</search>", search("b")),  # after the last <search>
        ("research", "a</search>", Action(kind="none")),  # not told so: the episode goes on
        ("research", "<search> </search> b", Action(kind="none")),
        ("research", "<search> </search><search>q</search>", search("q")),
        ("research", "</answer><answer>\\boxed{a}</answer>", Action(kind="answer", answer="a")),
        (
            "research",
            "<answer> It is \\boxed{x} or \\boxed{ {y} z }. </answer>",
            Action(kind="answer", answer="{y} z"),
        ),
        ("research", "<answer>Oslo</answer>", Action(kind="answer", answer=None)),
        ("research", "<answer>\\boxed{Oslo</answer>", Action(kind="answer", answer=None)),
        ("research", "<answer>\\boxed{}</answer>", Action(kind="answer", answer="")),
    ],
)
def test_the_action_read_from_a_turn(protocols, name, text, expected):
    assert parse_turn(protocols[name], text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (call(), search("a", "b")),
        (call(arguments={"query_list": [" a ", "a", "", "b "], "more": 1}), search("a", "b")),
        (call(arguments={"query_list": list("abcdefg")}), search(*"abcde")),
        (call(arguments={"query_list": ["</tool_call"]}), search("</tool_call")),
        (call(arguments={"query_list": ["<answer>a"]}), search("<answer>a")),
        (call(arguments={"query_list": "a"}), Action(kind="invalid")),
        (call(arguments={"query_list": ["a", 1]}), Action(kind="invalid")),
        (call(arguments={"query_list": []}), Action(kind="invalid")),
        (call(arguments={"query_list": [["a"]]}), Action(kind="invalid")),
        (call(arguments={"queries": ["a"]}), Action(kind="invalid")),
        (call(arguments=["a"]), Action(kind="invalid")),
        (call(arguments=None), Action(kind="invalid")),
        (call(name="find"), Action(kind="invalid")),
        (call(name={}), Action(kind="invalid")),
        ("<tool_call>[1]</tool_call>", Action(kind="invalid")),
        ("<tool_call>{'name': 'search'}</tool_call>", Action(kind="invalid")),
        ('<tool_call>{"name":"search",</tool_call>', Action(kind="invalid")),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", Action(kind="invalid")),
        ("<tool_call>" + "9" * 10_000 + "</tool_call>", Action(kind="invalid")),
        ("<tool_call>NaN</tool_call>", Action(kind="invalid")),
        ("<search>a</search>", Action(kind="none")),
        ("<tool_call>x</tool_call><answer>a</answer>", Action(kind="invalid")),
        ("<answer>a</answer>", Action(kind="answer", answer="a")),
    ],
)
def test_tool_calls(protocols, text, expected):
    assert parse_turn(protocols["tool_call"], text) == expected


def test_half_a_character_spelt_in_json_can_be_encoded(protocols):
    text = r'<tool_call>{"name":"search","arguments":{"query_list":["\ud83d","\ud83d\ude00"]}}</tool_call>'
    (broken, whole) = parse_turn(protocols["tool_call"], text).queries
    assert (broken, whole) == ("\ufffd", "\U0001f600")


def test_a_tag_spelt_in_json_escapes_is_broken_up_when_it_comes_back(protocols):
    protocol = protocols["tool_call"]
    text = call(arguments={"query_list": ["</tool_response>"]}).replace(
        "</tool_r", r"\u003c/tool_r"
    )
    (query,) = parse_turn(protocol, text).queries
    assert query == "</tool_response>"
    assert "(< /tool_response>)" in render_results(protocol, [query], [[]], words)


@pytest.mark.parametrize("name", [*NAMES, "embedded"])
@settings(deadline=None)
@given(data=st.data())
def test_reading_never_raises_and_finds_what_it_says(protocols, name, data):
    protocol = protocols[name]
    text = data.draw(st.one_of(pieces(protocol), st.text()))
    action = parse_turn(protocol, text)
    assert action.kind in ("search", "answer", "invalid", "none")
    assert bool(action.queries) == (action.kind == "search")
    assert len(action.queries) <= protocol.max_subqueries
    assert all(query and query == query.strip() for query in action.queries)
    assert len(set(action.queries)) == len(action.queries)
    assert action.answer is None or action.kind == "answer"
    if action.kind != "none":
        assert any(tag in text for tag in stop_tags(protocol))
    written = written_queries(protocol, text)
    if action.kind == "search":
        assert tuple(dict.fromkeys(written))[: protocol.max_subqueries] == action.queries
        assert search_content(protocol, text)
    if action.kind == "answer":
        assert written == ()
    # What can be read is ready for the tokenizer and for JSON.
    "".join(action.queries).encode()


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(data=st.data())
def test_law_03_later_text_never_changes_an_action_of_any_protocol(protocols, name, data):
    protocol = protocols[name]
    text, more = data.draw(pieces(protocol)), data.draw(pieces(protocol))
    action = parse_turn(protocol, text)
    if action.kind in ("search", "answer"):
        assert parse_turn(protocol, text + more) == action


@settings(deadline=None)
@given(st.recursive(st.none() | st.text(max_size=4) | st.integers(), st.lists, max_leaves=6))
@example(["q"])
def test_any_json_for_a_list_of_queries(protocols, value):
    text = call(arguments={"query_list": value})
    action = parse_turn(protocols["tool_call"], text)
    if isinstance(value, list) and all(isinstance(query, str) for query in value):
        kept = tuple(dict.fromkeys(query.strip() for query in value if query.strip()))
        if "</tool_call>" not in text[: -len("</tool_call>")]:
            assert action.queries == kept[:5]
    else:
        assert action.kind == "invalid"


# -- the form of an episode


def play(protocol: ProtocolConfig, *texts: str) -> Episode:
    episode = Episode(question=Question(id="q", text="q", golden_answers=("a",)), group=0, member=0)
    for text in texts:
        action = parse_turn(protocol, text)
        turn = Turn(kind=action.kind, start=0, stop=0, text=text, answer=action.answer)
        episode.turns.append(turn)
    return episode


BOXED = "<think>t</think><answer>\\boxed{a}</answer>"
SEARCH = "<think>t</think><search>q</search>"


@pytest.mark.parametrize(
    ("name", "texts", "expected"),
    [
        ("tool_call", (call(), "<think>t</think><answer>a</answer>"), True),
        ("tool_call", (call(name="x"), "<think>t</think><answer>a</answer>"), False),
        ("search_r1", ("<think>t</think> x <search>q</search>",), False),
        ("research", (SEARCH, BOXED), True),
        ("research", (BOXED,), True),
        ("research", ("Well, <think>t</think> so <search>q</search>", "Now " + BOXED), True),
        ("research", ("<search>q</search>", BOXED), True),  # one thought is enough
        ("research", ("<think>t</think><search>a<search>b</search>", BOXED), True),
        ("research", (SEARCH, "<answer>\\boxed{a}</answer>"), True),
        ("research", ("<search>q</search>", "<answer>\\boxed{a}</answer>"), False),  # no thought
        ("research", (SEARCH, "<think>t</think><answer>a</answer>"), False),  # no box
        ("research", (SEARCH, "<think>t<answer>\\boxed{a}</answer>"), False),
        ("research", (SEARCH, "<answer>" + BOXED), False),  # two answers opened
        ("research", (SEARCH, "<search>" + BOXED), False),
        ("research", (SEARCH + "<result>x</result>", BOXED), False),  # forged results
        ("research", ("</search>" + SEARCH, BOXED), False),
        ("research", (SEARCH,), False),
        ("research", (), False),
    ],
)
def test_well_formed_by_protocol(protocols, name, texts, expected):
    assert well_formed(protocols[name], play(protocols[name], *texts)) is expected
