"""Test settings: CPU with eight virtual devices, and run-time checks of types and array shapes."""

import os

# Both are read when JAX is first imported, so they are set before anything else is.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

from pathlib import Path

import pytest
from jaxtyping import install_import_hook

# Every annotated function checks its arguments; jaxtyping annotations check shapes and dtypes.
install_import_hook("psearch_jax", "typechecking.checked")

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"


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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="slow: run with --slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)
