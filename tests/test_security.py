"""What a configuration, a corpus or a key must not be able to do."""

import ast
import re
import subprocess
import sys

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
