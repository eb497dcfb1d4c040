"""The example with a model of transformers runs as its docstring says, with few steps."""

from __future__ import annotations

import re

import pytest

from tests.people.commands import EXAMPLES, run_python, run_torchrun

pytestmark = pytest.mark.people

SCRIPT = EXAMPLES / "huggingface.py"
STEP = re.compile(r"^step +\d+: loss \d\.\d{6}$", re.MULTILINE)
# GPT-2 uses its embedding as output layer: two stages share it, and add its parts up in turn.
CHECKED = re.compile(r"^gradients equal to the plain model's: \d+; others: (.*)$", re.MULTILINE)


def test_gpt2_learns_the_same_in_threads_and_processes() -> None:
    small = ("--steps=21", "--check")
    in_threads = run_python(SCRIPT, *small)
    in_processes = run_torchrun(2, SCRIPT, *small)
    assert len(STEP.findall(in_threads)) == 2
    assert STEP.findall(in_processes) == STEP.findall(in_threads)
    assert "loss fell from 3.9" in in_threads
    for printed in (in_threads, in_processes):
        found = CHECKED.search(printed)
        assert found is not None, printed
        assert re.fullmatch(r"0|transformer\.wte\.weight within \de-(0[7-9]|1\d)", found[1]), found[
            1
        ]
