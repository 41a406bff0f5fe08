"""The judge model against a local server: what it is asked, what it is worth, and all that can go wrong."""

import json
import logging
import sqlite3
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rewards.episodes import PROTOCOL, make_question, play

from psearch_jax.config import JudgeConfig, RewardConfig, RewardParts
from psearch_jax.errors import UserError
from psearch_jax.rewards.composition import score_group
from psearch_jax.rewards.judge import Case, Judge, Verdict, read_verdict


class Handler(BaseHTTPRequestHandler):
    """Answers as the server's `behave` says: it is given the request and returns (status, body), or ("drip", bytes)."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((self.path, dict(self.headers), body))
        status, reply = self.server.behave(body)
        if status == "drip":
            self.send_response(200)
            self.end_headers()
            for _ in range(reply):
                self.wfile.write(b" ")
                time.sleep(0.02)
            return
        data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def says(text):
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


def fair(body):
    """Right if the answer says Turin."""
    data = json.loads(body["messages"][1]["content"])
    return says(json.dumps({"correct": "turin" in data["answer"].lower()}))


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests, server.lock, server.behave = [], threading.Lock(), fair
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def judge(server, tmp_path):
    def judge(**settings) -> Judge:
        settings = {"cache": str(tmp_path / "deep" / "judge.sqlite"), "timeout": 10.0} | settings
        endpoint = f"http://127.0.0.1:{server.server_port}/v1"
        return Judge(
            config=JudgeConfig(endpoint=endpoint, model="m", fallback=0.25, **settings), pause=0.001
        )

    return judge


def case(answer: str) -> Case:
    return Case(question="Which?", golden_answers=("Turin", "Torino"), answer=answer)


FAILED = Verdict(value=0.25, failed=True)
RIGHT, WRONG = Verdict(value=1.0), Verdict(value=0.0)


def test_what_is_asked_and_what_it_is_worth(server, judge):
    one = judge(reply_tokens=99)
    assert one.judge([case("in Turin"), case("Lyon"), case("in Turin")]) == [RIGHT, WRONG, RIGHT]
    assert len(server.requests) == 2  # equal cases once
    path, headers, body = next(r for r in server.requests if "in Turin" in str(r[2]))
    assert path == "/v1/chat/completions"
    assert "Authorization" not in headers
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0, 99)
    assert json.loads(body["messages"][1]["content"]) == {
        "question": "Which?",
        "reference_answers": ["Turin", "Torino"],
        "answer": "in Turin",
    }
    assert (one.counts.asked, one.counts.calls, one.counts.failed) == (2, 2, 0)
    assert one.judge([]) == []


def test_judgements_are_kept_on_disk_under_all_that_was_asked(server, judge):
    assert judge().judge([case("in Turin"), case("Lyon")]) == [RIGHT, WRONG]
    again = judge()
    assert again.judge([case("Lyon"), case("in Turin")]) == [WRONG, RIGHT]
    assert (again.counts.cached, again.counts.calls) == (2, 0)
    judge(reply_tokens=7).judge([case("Lyon")])  # another request
    assert len(server.requests) == 3
    nowhere = judge(cache="")
    nowhere.judge([case("Lyon")])
    nowhere.judge([case("Lyon")])
    assert nowhere.counts.calls == 2


BAD = {
    "server error": (500, {}),
    "busy": (429, {}),
    "no JSON": (200, b"<html>"),
    "no UTF-8": (200, b"\xff\xfe"),
    "no choices": (200, {"choices": []}),
    "another shape": (200, [1]),
    "deep": (200, b"[" * 100_000),
    "no text": (200, {"choices": [{"message": {"content": None}}]}),
    "nonsense": says("It depends."),
    "both": says('{"correct": true} {"correct": false}'),
    "cut short": (200, b""),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_failure_is_repeated_then_counted_and_worth_the_fallback(server, judge, bad):
    server.behave = lambda body: bad
    one = judge(retries=2)
    assert one.judge([case("Lyon")]) == [FAILED]
    assert len(server.requests) == one.counts.calls == 3
    assert one.counts.failed == 1
    # Nothing of it was kept: the next batch has its own chance.
    server.behave = fair
    assert one.judge([case("Lyon")]) == [WRONG]


def test_a_repetition_may_succeed(server, judge):
    server.behave = lambda body: (503, {}) if len(server.requests) < 3 else fair(body)
    one = judge(retries=2)
    assert one.judge([case("in Turin")]) == [RIGHT]
    assert (one.counts.calls, one.counts.failed) == (3, 0)


@pytest.mark.parametrize("status", [302, 400, 401, 404])
def test_what_a_repetition_cannot_change_is_not_repeated(server, judge, status):
    server.behave = lambda body: (status, {})
    assert judge(retries=5).judge([case("Lyon")]) == [FAILED]
    assert len(server.requests) == 1  # a redirect is not followed: the key would go along


def test_a_slow_judge_is_not_waited_for(server, judge):
    done = threading.Event()
    server.behave = lambda body: (done.wait(5), fair(body))[1]
    began = time.monotonic()
    assert judge(timeout=0.1, retries=1).judge([case("Lyon")]) == [FAILED]
    assert time.monotonic() - began < 3
    done.set()


def test_a_judge_that_drips_is_not_waited_for(server, judge):
    server.behave = lambda body: ("drip", 50)
    began = time.monotonic()
    assert judge(timeout=0.1, retries=0).judge([case("Lyon")]) == [FAILED]
    assert time.monotonic() - began < 0.8


def test_a_judge_that_never_stops_talking_is_cut_off(server, judge):
    server.behave = lambda body: (200, b" " * 3_000_000)
    assert judge(retries=0).judge([case("Lyon")]) == [FAILED]


def test_a_judge_that_is_not_there(server, judge):
    one = judge(retries=1)
    address = server.server_address
    server.server_close()
    assert address and one.judge([case("Lyon")]) == [FAILED]
    assert one.counts.calls == 2


def test_a_dead_endpoint_does_not_cost_a_timeout_for_every_answer(server, judge):
    server.behave = lambda body: (500, {})
    one = judge(retries=1, concurrency=1, give_up_after=2)
    assert one.judge([case(f"{i}") for i in range(20)]) == [FAILED] * 20
    assert len(server.requests) == 4  # two answers, twice each
    assert one.counts.failed == 20
    server.behave = fair
    assert one.judge([case("Lyon")]) == [WRONG]  # the next batch tries again


def test_single_failures_do_not_add_up_to_a_dead_endpoint(server, judge):
    server.behave = lambda body: (500, {}) if len(server.requests) % 2 else fair(body)
    one = judge(retries=0, concurrency=1, give_up_after=2)
    verdicts = one.judge([case(f"{i}") for i in range(10)])
    assert verdicts == [FAILED, WRONG] * 5


def test_the_key_goes_to_the_endpoint_and_nowhere_else(
    server, judge, monkeypatch, caplog, tmp_path
):
    monkeypatch.setenv("JUDGE_KEY_FOR_TESTS", " canary-7 \n")
    server.behave = lambda body: (500, {}) if len(server.requests) < 2 else fair(body)
    with caplog.at_level(logging.DEBUG):
        one = judge(key_variable="JUDGE_KEY_FOR_TESTS")
        one.judge([case("Lyon")])
    assert server.requests[-1][1]["Authorization"] == "Bearer canary-7"
    assert caplog.records and "canary" not in caplog.text
    assert "canary" not in repr(one) + str(server.requests[-1][2])
    assert all(b"canary" not in path.read_bytes() for path in (tmp_path / "deep").iterdir())


def test_a_key_that_is_not_set(judge, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY_FOR_TESTS", raising=False)
    with pytest.raises(UserError, match="JUDGE_KEY_FOR_TESTS, which is not set"):
        judge(key_variable="JUDGE_KEY_FOR_TESTS")


def test_a_cache_that_is_something_else(judge, tmp_path):
    foreign = tmp_path / "notes.txt"
    foreign.write_text("not a database " * 100)
    for path in (foreign, tmp_path, foreign / "judge.sqlite"):
        with pytest.raises(UserError, match="judge.cache .* cannot be used"):
            judge(cache=str(path))
    assert foreign.read_text().startswith("not a database")
    with sqlite3.connect(tmp_path / "other.sqlite") as other:
        other.execute("CREATE TABLE judgements (something TEXT)")
    other.close()
    with pytest.raises(UserError, match="cannot be used"):
        judge(cache=str(tmp_path / "other.sqlite"))


def test_a_cache_that_breaks_on_the_way_costs_no_judgement(server, judge, tmp_path):
    path = tmp_path / "judge.sqlite"
    one = judge(cache=str(path))
    path.write_bytes(b"broken" * 1000)
    assert one.judge([case("in Turin")]) == [RIGHT]
    assert one.counts.unsaved == 1


def test_two_judges_share_a_cache_at_the_same_time(server, judge):
    cases = [case(f"{i} Turin") for i in range(30)]
    judges = [judge(concurrency=4) for _ in range(3)]
    results = {}
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: judges[i].judge(cases)}))
        for i in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(3), [RIGHT] * 30)
    assert all(one.counts.unsaved == 0 for one in judges)


def test_failures_stand_in_the_parts_of_the_reward(server, judge):
    server.behave = lambda body: (400, {}) if "fail" in str(body) else fair(body)
    question = make_question("single")
    episodes = [play(question, 1, answer=a) for a in ("Turin", "it is Turin", "Lyon", "fail", None)]
    config = RewardConfig(name="composed", parts=RewardParts(exact_match=0.5, judge=1.0))
    rewards = score_group(config, PROTOCOL, episodes, question, judge=judge())
    assert [reward.total for reward in rewards] == [1.5, 1.0, 0.0, 0.25, 0.0]
    assert [reward.parts["judge_failed"] for reward in rewards] == [0, 0, 0, 1.0, 0]
    assert len(server.requests) == 3


def test_the_judge_of_the_configuration_is_opened_when_it_is_needed(server, tmp_path):
    question = make_question("single")
    config = RewardConfig(
        name="judge",
        judge=JudgeConfig(
            endpoint=f"http://127.0.0.1:{server.server_port}/v1/",
            model="m",
            cache=str(tmp_path / "x.sqlite"),
        ),
    )
    for _ in range(2):
        (reward,) = score_group(config, PROTOCOL, [play(question, 1, answer="a Turin b")], question)
        assert reward.total == 1.0
    assert len(server.requests) == 1
    assert server.requests[0][0] == "/v1/chat/completions"


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ('{"correct": true}', True),
        ('```json\n{"correct": false}\n```', False),
        ('{"correct": "Yes"}', True),
        ('<think>{"correct": true}? no</think> {"correct": false}', False),
        ('The data was {"a": 1}. {"correct": true}', True),
        ('{"correct": true} so {"correct": true}', True),
        ("Yes.", True),
        ("**no**", False),
        ("yes, but no", None),
        ('{"correct": "maybe"}', None),
        ('{"correct": null}', None),
        ('{"correct": 1}', None),
        ('{"correct": true} {"correct": false}', None),
        ('{"correct": tru', None),
        ("", None),
        ("{" * 1000, None),
    ],
)
def test_reading_a_judgement(reply, verdict):
    assert read_verdict(reply) is verdict
