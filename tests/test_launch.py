"""launch/: every script says what it would run, is linted, names what it lacks, and hands signals on."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
SHELL = ("tpu_vm.sh", "xpk.sh", "env.sh", "profile.sh", "until_done.sh", "slurm.sbatch")
CLOUD = {
    "PROJECT": "p",
    "ZONE": "z",
    "NAME": "n",
    "TYPE": "v5p-32",
    "VERSION": "v",
    "CLUSTER": "c",
    "IMAGE": "i:1",
}


def run(root: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "."), **environment}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=60)


def load(root: Path, name: str):
    spec = importlib.util.spec_from_file_location(f"launch_{name}", root / "launch" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_folder_has_what_its_readme_lists(root):
    files = {path.name for path in (root / "launch").iterdir() if path.is_file()}
    text = (root / "launch" / "README.md").read_text()
    assert {*SHELL, "jobset.yaml", "retriever.yaml", "Dockerfile", "check_devices.py"} < files
    assert [name for name in sorted(files - {"README.md"}) if f"`{name}`" not in text] == []


@pytest.mark.skipif(not (BIN / "shellcheck").exists(), reason="the test extra is not installed")
def test_linters_have_nothing_to_say(root):
    done = run(root, str(BIN / "shellcheck"), *(f"launch/{name}" for name in SHELL))
    assert (done.returncode, done.stdout) == (0, "")
    if (BIN / "hadolint").exists():
        done = run(root, str(BIN / "hadolint"), "launch/Dockerfile")
        assert (done.returncode, done.stdout) == (0, "")


def test_manifests_fit_their_schemas(root, tmp_path):
    pytest.importorskip("kubernetes_validate")
    render = load(root, "render")
    for name in ("jobset.yaml", "retriever.yaml"):
        render.check(root / "launch" / name)
    text = (root / "launch" / "jobset.yaml").read_text()
    for wrong in ("restartPolicies: Never", "restartPolicy: 7"):
        (tmp_path / "bad.yaml").write_text(text.replace("restartPolicy: Never", wrong))
        with pytest.raises(Exception, match="restartPolic"):
            render.check(tmp_path / "bad.yaml")


def test_a_manifest_is_filled_in_or_says_what_is_missing(root):
    render = load(root, "render")
    text = "# ${COMMENT}\nname: ${NAME}\nsize: ${SIZE}\n"
    assert render.render(text, {"NAME": "a", "SIZE": "3"}) == "name: a\nsize: 3\n"
    for values, sentence in (
        ({"NAME": "a"}, "give SIZE=…; the values are NAME, SIZE"),
        ({"NAME": "a", "SIZE": "3", "X": "1"}, "X is not asked for"),
        ({"NAME": 'a"\nevil: 1', "SIZE": "3"}, "NAME has a quote"),
    ):
        with pytest.raises(SystemExit, match=sentence):
            render.render(text, values)


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        (("tpu_vm.sh", "--dry-run", "create"), "gcloud compute tpus tpu-vm create n"),
        (("tpu_vm.sh", "--dry-run", "setup"), "git archive"),
        (("tpu_vm.sh", "--dry-run", "run", "a.yaml"), "psearch"),
        (("tpu_vm.sh", "--dry-run", "logs"), "psearch.log"),
        (("tpu_vm.sh", "--dry-run", "stop"), "pkill"),
        (("tpu_vm.sh", "--dry-run", "delete"), "tpu-vm delete n"),
        (("xpk.sh", "--dry-run", "image"), "docker build"),
        (("xpk.sh", "--dry-run", "run", "a.yaml", "run_directory=/r/a"), "--tpu-type v5p-32"),
        (("xpk.sh", "--dry-run", "list"), "xpk workload list"),
        (("xpk.sh", "--dry-run", "logs"), "kubectl logs"),
        (("xpk.sh", "--dry-run", "delete"), "xpk workload delete"),
        (("profile.sh", "--dry-run", "a.yaml"), "train a.yaml --profile"),
        (("env.sh", "--dry-run"), "export LIBTPU_INIT_ARGS=''\n"),
        (("slurm.sbatch", "--dry-run", "a.yaml", "run_directory=/r"), "srun"),
        (("until_done.sh", "--dry-run", "/r", "psearch", "train"), "psearch train # until /r"),
    ],
)
def test_dry_runs_print_and_do_nothing(root, command, printed):
    """None of the programs that would be called is on this machine's path."""
    done = run(root, "bash", f"launch/{command[0]}", *command[1:], **CLOUD)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout and not done.stderr


def test_python_scripts_have_a_dry_run_too(root):
    python = sys.executable
    done = run(root, python, "launch/check_devices.py", "--dry-run", "--mesh", "fsdp=4")
    assert done.returncode == 0 and "fsdp=4" in done.stdout
    done = run(root, python, "launch/requirements.py", "tpu", "--dry-run")
    assert "jax[tpu]" in done.stdout.splitlines() and "#" not in done.stdout


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (("tpu_vm.sh", "create"), "set PROJECT"),
        (("xpk.sh", "run", "a.yaml"), "set PROJECT"),
        (("slurm.sbatch", "a.yaml"), "run_directory="),
        (("profile.sh",), "name a recipe"),
        (("until_done.sh",), "RUN_DIRECTORY COMMAND"),
    ],
)
def test_what_is_missing_is_named(root, command, sentence):
    done = run(root, "bash", f"launch/{command[0]}", *command[1:])
    assert done.returncode == 2 and sentence in done.stderr


def test_flags_are_off_until_their_group_is_named(root):
    done = run(root, "bash", "launch/env.sh", "--dry-run", PSEARCH_FLAGS="memory data_parallel")
    assert "--xla_tpu_scoped_vmem_limit_kib=98304" in done.stdout
    assert done.stdout.count("--xla") == 3
    done = run(root, "bash", "launch/env.sh", "--dry-run", PSEARCH_FLAGS="nonsense")
    assert done.returncode == 2 and "nonsense" in done.stderr


def test_nothing_of_one_cloud_account_is_written_down(root):
    for path in (root / "launch").iterdir():
        text = path.read_text() if path.is_file() else ""
        for mark in ("gs://", "gcr.io/", "us-central", "europe-west", "us-east"):
            assert mark not in text, (path.name, mark)
        for flag in ("--project", "--zone", "--cluster"):
            for rest in text.split(flag + " ")[1:]:
                assert rest.startswith('"$'), (path.name, flag, rest[:20])


PROGRAM = """
import pathlib, signal, sys, time
def stop(*_):
    time.sleep(0.3)  # saving
    pathlib.Path(sys.argv[1], "saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(30)
"""


def test_until_done_hands_sigterm_on_and_asks_for_another_start(root, tmp_path):
    command = ["bash", "launch/until_done.sh", str(tmp_path), sys.executable, "-c", PROGRAM]
    process = subprocess.Popen(
        [*command, str(tmp_path)], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 75 and time.monotonic() - began < 15
    assert (tmp_path / "saved").exists()
    process.stdout.close()
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    assert run(root, "bash", "launch/until_done.sh", str(tmp_path), "true").returncode == 0
    assert (
        run(root, "bash", "launch/until_done.sh", str(tmp_path), "bash", "-c", "exit 3").returncode
        == 3
    )
