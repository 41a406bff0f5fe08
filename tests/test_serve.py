"""`psearch serve` as a process: it answers, and stops when it is told to."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from psearch_jax import cli


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("serve")
    corpus = directory / "c.jsonl"
    corpus.write_text(json.dumps({"id": "a", "title": "Lyon", "text": "a city"}) + "\n")
    out = str(directory / "index")
    assert cli.main(["index", "build", str(corpus), "--out", out, "--kind", "bm25"]) == 0
    return directory / "index"


def test_it_answers_and_stops_gracefully(index: Path, root: Path) -> None:
    command = [sys.executable, "-m", "psearch_jax", "serve", str(index), "--port", "0"]
    environment = {**os.environ, "PSEARCH_TOKEN": "secret", "PYTHONPATH": str(root)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            said = next(line for line in process.stderr if "passages" in line)
            url = re.search(r"http://127\.0\.0\.1:\d+", said).group()
            assert httpx.post(url + "/retrieve", json={"queries": ["lyon"]}).status_code == 401
            headers = {"Authorization": "Bearer secret"}
            body = {"queries": ["lyon"], "topk": 1, "return_scores": True}
            answer = httpx.post(url + "/retrieve", json=body, headers=headers).json()
            assert answer["result"][0][0]["document"]["id"] == "a"
            # A connection outlives the five seconds after which clients let go of idle ones.
            with closing(http.client.HTTPConnection(url.removeprefix("http://"))) as connection:
                for pause in (5.5, 0):
                    connection.request("GET", "/health", headers=headers)
                    assert connection.getresponse().read() and connection.sock is not None
                    time.sleep(pause)
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
        finally:
            process.kill()  # where an assertion failed; else it has ended
    assert process.returncode in (0, -signal.SIGTERM)  # uvicorn raises the signal again
    assert "Traceback" not in rest


def test_what_cannot_be_served(index: Path, tmp_path: Path, capsys) -> None:
    assert cli.main(["serve", str(tmp_path / "none"), "--port", "0"]) == 2
    assert "no index of" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", str(index), "--port", port]) == 2
    assert "cannot be listened at" in capsys.readouterr().err
    assert cli.main(["serve", str(index), "--port", "0", "--device-matrix", "int8"]) == 2
    assert "has no vectors to put on devices" in capsys.readouterr().err
