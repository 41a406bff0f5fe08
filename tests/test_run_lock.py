"""One run a directory."""

import os
import signal
import subprocess
import sys

import pytest

from psearch_jax.errors import UserError
from psearch_jax.run_lock import held

HOLDER = """
import sys, time
from psearch_jax.run_lock import held
with held(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path):
    """Also when it is gone by kill -9."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        sentence = rf"{tmp_path.name} is in use by process {holder.pid} on .*run_directory=…"
        with pytest.raises(UserError, match=sentence), held(tmp_path):
            pytest.fail("let in")
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    with held(tmp_path):
        pass
    with held(tmp_path):  # given back
        pass


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    place = held(tmp_path / "file" / "run")
    with pytest.raises(UserError, match="cannot write the run directory .*file/run"), place:
        pytest.fail("let in")
