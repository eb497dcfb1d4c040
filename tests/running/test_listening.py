"""The thread that listens is a thread like others: it can be joined, and left behind by a fork."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from stageline.running.control.listening import Listener

FORKED = """
import os, sys
from stageline.running.control.listening import Listener

strange = []
sys.unraisablehook = lambda told: strange.append(told.exc_value)
listener = Listener("stageline-control-0", interval=10)
listener.start()
child = os.fork()
if child == 0:
    os._exit(len(strange))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_listener_that_is_stopped_ends() -> None:
    listener = Listener("stageline-control-0", interval=10)
    listener.start()
    listener.stop()
    listener.join(10)
    assert not listener.is_alive()


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_worker_of_a_data_loader_begins_in_silence() -> None:
    """Each printed "TypeError: 'int' object is not callable": a name of Python's was taken."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "0\n", done.stderr
