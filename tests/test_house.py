"""The house rules: what lies where, what may import what, what must not be in a file."""

import ast
import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

#: Data flows one way: a module or room imports only what stands before it here.
ORDER = (
    *(
        "__init__",
        "errors",
        "config_learning",
        "config",
        "config_values",
        "mesh",
        "processes",
        "checkpoints",
        "interruption",
        "run_lock",
        "device_memory",
    ),
    *("models", "retrieval", "questions"),
    *("config_checks", "config_files", "recipe_identity", "run_record", "metrics_log", "display"),
    *("rollout", "assembly", "rewards", "learning", "step_metrics", "evaluation"),
    *("topologies", "throughput", "stability"),
    *("trainer", "ask", "sample", "demo", "export"),
    *("program_costs", "hlo_text", "hlo_costs", "planned_recipe"),
    *("planned_programs", "plan_figures", "plan_arithmetic", "planning", "plan_report"),
    *("retrieval_commands", "serve", "cli_retrieval", "cli", "__main__"),
)
ROOMS = {"questions", "retrieval", "models", "rollout", "rewards", "learning", "evaluation"}
ABOVE = {"configs", "launch", "benchmarks", "tests", "docs", "psearch_jax"}


def modules(root: Path) -> list[Path]:
    return sorted((root / "psearch_jax").rglob("*.py"))


def tracked(root: Path) -> list[Path]:
    """What git has or would add; every file in a tree without git."""
    done = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard"],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip("no git checkout")
    return [root / line for line in done.stdout.splitlines() if (root / line).is_file()]


def place(root: Path, path: Path) -> str:
    """The room, or the module at the top."""
    inside = path.relative_to(root / "psearch_jax")
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def imports(path: Path) -> set[str]:
    """Rooms and top modules of psearch_jax that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "psearch_jax":
            names = [f"psearch_jax.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [node.module or ""]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "psearch_jax" and len(parts) > 1:
                found.add("__init__" if parts[1].startswith("__v") else parts[1])
    return found


def test_the_rooms_are_those_of_the_design(root):
    package = root / "psearch_jax"
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    assert rooms == ROOMS
    assert not [p for p in modules(root) if "util" in p.stem or "helper" in p.stem]
    folders = {path.relative_to(root).parts[0] for path in tracked(root) if path.parent != root}
    assert {name for name in folders if not name.startswith(".")} <= ABOVE


def test_tests_mirror_the_package(root):
    folders = {p.parent.name for p in (root / "tests").glob("*/test_*.py")}
    assert folders == ROOMS


def test_every_module_is_in_the_order(root):
    assert {place(root, path) for path in modules(root)} <= set(ORDER)


def test_nothing_upstream_imports_anything_downstream(root):
    wrong = []
    for path in modules(root):
        own = ORDER.index(place(root, path))
        wrong += [
            f"{path.relative_to(root)} imports {name}"
            for name in imports(path)
            if name not in ORDER or ORDER.index(name) > own
        ]
    assert not wrong


def test_the_reader_of_imports_sees_each_form(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(
        "import psearch_jax.rollout.engine\n"
        "from psearch_jax import trainer, __version__\n"
        "def f():\n    from psearch_jax.learning.losses import kl\n"
        "import os, jax\nfrom psearch_jaxer.models import x\n"
    )
    assert imports(path) == {"rollout", "trainer", "__init__", "learning"}


def test_files_stay_short(root):
    long = {
        str(path.relative_to(root)): lines
        for folder in ("psearch_jax", "tests", "benchmarks")
        for path in (root / folder).rglob("*.py")
        if (lines := path.read_text(encoding="utf-8").count("\n")) >= 450
    }
    assert not long


def test_every_module_says_what_it_is(root):
    silent = [p for p in modules(root) if not ast.get_docstring(ast.parse(p.read_text()))]
    assert not silent


def test_no_machine_path_and_nothing_left_undone(root):
    """Paths of one machine, hosts of one network, and marks of unfinished work."""
    forbidden = re.compile(
        r"(?<![\w.~-])/(?:work|root|home|Users)/\w|file:/{3}|\b(?:10|192\.168)\.\d+\.\d+\.\d+\b"
        r"|\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b|NotImplemented" + r"Error\("
    )
    found = []
    for path in tracked(root):
        content = path.read_bytes()
        if b"\0" in content or path.suffix in (".json", ".jsonl"):
            continue  # binary, or data
        for number, line in enumerate(content.decode("utf-8").splitlines(), start=1):
            if match := forbidden.search(line):
                found.append(f"{path.relative_to(root)}:{number}: {match.group()}")
    assert not found


def test_no_module_sets_the_environment_when_imported(root):
    found = []
    for path in modules(root):
        for node in ast.parse(path.read_text()).body:  # top level only
            if not isinstance(
                node, (ast.FunctionDef, ast.ClassDef)
            ) and "os.environ[" in ast.unparse(node):
                found.append(str(path))
    assert not found


def requirements(root: Path) -> dict[str, set[str]]:
    """Extra (or "") → names of its packages."""
    parser = configparser.ConfigParser()
    parser.read(root / "setup.cfg")
    sections = {"": parser["options"]["install_requires"], **parser["options.extras_require"]}
    return {
        extra: {re.split(r"[\[<>=~!; ]", line)[0] for line in text.splitlines() if line.strip()}
        for extra, text in sections.items()
    }


def test_every_dependency_is_explained(root):
    text = (root / "docs" / "dependencies.md").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w-]+", text))
    for extra, names in requirements(root).items():
        assert names, extra
        assert names <= named, extra


def test_every_dependency_is_pinned(root):
    """All that `make test` installs is in the constraints; local build tags (+cpu) are not."""
    pins = {}
    for line in (root / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, _, version = line.partition("==")
            assert re.fullmatch(r"[\w.]+", version), line
            pins[re.sub(r"[-_.]+", "-", name).lower()] = version
    wanted = requirements(root)
    names = {re.sub(r"[-_.]+", "-", name).lower() for name in wanted[""] | wanted["test"]}
    assert names <= set(pins)


def test_every_import_is_a_dependency(root):
    """What the package imports is in setup.cfg, so that a fresh environment has it."""
    provided = {
        "yaml": "PyYAML",
        "orbax": "orbax-checkpoint",
        "tensorflow_datasets": "tensorflow-datasets",
        "prometheus_client": "prometheus-client",
    }
    declared = requirements(root)
    known = {name.lower() for name in declared[""] | declared["serve"] | declared["track"]}
    missing = set()
    for path in modules(root):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in {n.split(".")[0] for n in names}:
                if name in sys.stdlib_module_names or name == "psearch_jax":
                    continue
                if provided.get(name, name).lower() not in known:
                    missing.add(f"{path.relative_to(root)}: {name}")
    assert not missing


def test_license_and_entry_points(root):
    assert "Apache License" in (root / "LICENSE").read_text()
    assert len((root / "LICENSE").read_text()) > 11_000
    script = root / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "make" in script.read_text()
    makefile = (root / "Makefile").read_text()
    for target in ("venv", "demo", "test", "lint", "bench", "clean", "help"):
        assert re.search(rf"^{target}:.* ## ", makefile, re.MULTILINE), target
