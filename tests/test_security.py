"""What a configuration, a corpus or a key must not be able to do."""

import ast
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from psearch_jax.config import Config
from psearch_jax.config_files import resolve
from psearch_jax.run_record import save_run_record

CANARY = "canary-4711-secret"


def calls(root):
    """(file, function as written, node) of every call in the package and the launch scripts."""
    for folder in ("psearch_jax", "launch"):
        for path in sorted((root / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    yield path, ast.unparse(node.func), node


def test_nothing_is_unpickled_evaluated_or_handed_to_a_shell(root):
    forbidden = re.compile(
        r"(^|\.)(pickle|dill|cloudpickle|marshal|shelve)\.|^(eval|exec|__import__|compile)$"
        r"|^os\.(system|popen|exec\w*|spawn\w*)$|^torch\.load$|^joblib\.load$|^yaml\.(unsafe|full)_load"
    )
    found = []
    for path, name, node in calls(root):
        arguments = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if forbidden.search(name) or arguments.get("shell", "False") != "False":
            found.append((path.name, name))
        if arguments.get("allow_pickle", "False") != "False":
            found.append((path.name, name))
        if name == "yaml.load" and arguments.get("Loader") != "_Loader":
            found.append((path.name, name))  # _Loader is a SafeLoader; tests/test_config.py
    assert not found


def test_a_configuration_cannot_make_objects(tmp_path):
    path = tmp_path / "evil.yaml"
    path.write_text("policy: !!python/object/apply:os.system ['touch pwned']\n")
    program = "from psearch_jax.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, "config", str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and str(path) in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["evil.yaml"]


def test_a_key_stands_nowhere(tmp_path, monkeypatch):
    """The run directory names the variable that holds a key, and never the key."""
    monkeypatch.setenv("JUDGE_KEY", CANARY)
    config, origins = resolve(
        [],
        [
            "reward.name=judge",
            "reward.judge.endpoint=http://localhost:1/v1",
            "reward.judge.model=m",
            "reward.judge.key_variable=JUDGE_KEY",
            f"run_directory={tmp_path / 'run'}",
        ],
    )
    assert isinstance(config, Config)
    save_run_record(config, config.run_directory, ["psearch", "train"], origins)
    texts = [p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()]
    assert any(b"JUDGE_KEY" in text for text in texts)
    assert not any(CANARY.encode() in text for text in texts)


class Gossip(BaseHTTPRequestHandler):
    """A retrieval server and a judge that repeat the key that they were sent, in answers and in errors."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.keys.append(self.headers.get("Authorization"))
        if "queries" in asked and len(self.server.keys) % 5:
            passage = {"document": {"id": "0", "contents": '"Lyon"\n522,250 people.'}, "score": 1.0}
            status, body = 200, {"result": [[passage]] * len(asked["queries"])}
        else:
            status, body = 500, {"error": f"{self.headers.get('Authorization')} is not welcome"}
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def gossip():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Gossip)
    server.keys = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_key_is_nowhere_after_a_whole_run(root, tmp_path, gossip):
    """Trained, evaluated and reported, with servers that send the key back: no file and no line of output has it."""
    url, run = f"http://127.0.0.1:{gossip.server_port}", tmp_path / "run"
    settings = [
        str(root / "configs/embedded/search_r1.yaml"),
        *(f"run_directory={run}", f"compile_cache={tmp_path / 'compiled'}"),
        *(f"retrieval.urls=[{url}]", "retrieval.token_variable=RETRIEVAL_KEY"),
        *("reward.name=judge", f"reward.judge.endpoint={url}/v1", "reward.judge.model=m"),
        *("reward.judge.key_variable=JUDGE_KEY", f"reward.judge.cache={tmp_path / 'judge.sqlite'}"),
        *("trainer.steps=1", "trainer.questions_per_step=2", "trainer.group_size=2"),
        *("rollout.slots=4", "rollout.context=256", "rollout.append_buckets=[64]"),
        *("rollout.window_buckets=[256]", "algorithm.row_length=256", "algorithm.micro_rows=2"),
    ]
    evaluated = ["evaluation.judge=true", "evaluation.limit=3", "retrieval.timeout=5"]
    environment = os.environ | {
        "JUDGE_KEY": CANARY,
        "RETRIEVAL_KEY": CANARY,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",  # one device, compiled quickly
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    told = b""
    for command in (
        ["train", *settings],
        ["eval", *settings, *evaluated],
        ["report", str(run)],
        ["runs", str(tmp_path)],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "psearch_jax", *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        told += done.stdout + done.stderr
    assert set(gossip.keys) == {f"Bearer {CANARY}"}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"metrics.jsonl", "report.html", "judge.sqlite"} <= {path.name for path in files}
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []
    assert CANARY.encode() not in told
