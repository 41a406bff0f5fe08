"""Test settings: CPU with eight virtual devices, and run-time checks of types and array shapes."""

import os

# Both are read when JAX is first imported, so they are set before anything else is.
os.environ["JAX_PLATFORMS"] = "cpu"
# The tests compile hundreds of programs and run each a few times: without LLVM's optimisation they take two thirds of
# the time. `XLA_FLAGS=--xla_backend_optimization_level=3 make test` runs them as users' programs are compiled.
_flags = os.environ.get("XLA_FLAGS", "")
if "xla_backend_optimization_level" not in _flags:
    _flags += " --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = (_flags + " --xla_force_host_platform_device_count=8").strip()

from pathlib import Path

import pytest
from jaxtyping import install_import_hook

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
#: Pure Python that draws hundreds of thousands of small things: checking every call takes minutes, and none of it
#: has an array's shape in its annotations.
UNCHECKED = {
    "psearch_jax.learning.demonstrations",
    "psearch_jax.questions.facts",
    "psearch_jax.questions.shadow",
    "psearch_jax.questions.templates",
    "psearch_jax.retrieval.passages",
}


def checked_modules() -> list[str]:
    """The modules of the package whose annotations are checked while the tests run."""
    files = (ROOT / "psearch_jax").rglob("*.py")
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files}
    return sorted(n for n in names - UNCHECKED if not n.endswith("__"))


# Every annotated function checks its arguments; jaxtyping annotations check shapes and dtypes.
install_import_hook(checked_modules(), "typechecking.checked")


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data kept beside the repository; a clone without it skips the tests that read it."""
    directory = SHARED / "data"
    if not directory.is_dir():
        pytest.skip("no ../shared/data beside this repository")
    return directory


@pytest.fixture(scope="session")
def world():
    """The embedded world, built once for all tests that read it (a quarter of a minute)."""
    from psearch_jax.questions.facts import real_facts
    from psearch_jax.questions.world import World

    return World(real_facts())
