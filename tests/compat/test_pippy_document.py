"""PiPPy's page about unrolling runs as it stands, and prints what it says."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import stageline as sl
from stageline.compat.pippy import PipelineStage, ScheduleGPipe
from tests.compat.documents import code_blocks, document, missing_lines

TEXT = document("000")
MODEL, SPLIT, COMMAND, PIPE, STAGE = code_blocks(TEXT)

# What the page uses and does not show: imports, the model, the pipe, and the lines that print.
BEFORE = """
import torch
from stageline.compat.pippy import Pipe, PipeSplitWrapper, annotate_split_points
"""
BETWEEN = """
torch.manual_seed(0)
model = IterativeNetwork(d_hid=512, num_iters=3)
"""
AFTER = """
x = torch.randn(32, 512)
pipe = Pipe.from_tracing(model, 4, example_args=(x,))
"""
SCRIPT = "\n".join((BEFORE, MODEL.code, BETWEEN, SPLIT.code, AFTER))


@pytest.fixture(scope="module")
def ran() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "document"}
    exec(compile(SCRIPT, "document", "exec"), names)
    return names


def normalised(text: str) -> str:
    """Return a print-out without what depends on the version of a tracer.

    Names of modules and values that the old tracer has mangled become those of the model; its title
    lines and empty lines go.
    """
    for old, new in (
        ("L__self___iter_block_mod_lin", "iter_block.lin"),
        ("l__self___iter_block_mod_lin", "iter_block_lin"),
        ("L__self___output_proj", "output_proj"),
        ("l_x_", "x"),
    ):
        text = text.replace(old, new)
    lines = [line.rstrip() for line in text.splitlines()]
    return "\n".join(line for line in lines if line and not re.fullmatch(r"\*+ \w+ \*+", line))


def test_every_line_of_the_page_runs() -> None:
    assert missing_lines([MODEL, SPLIT], SCRIPT) == []


def test_the_pipe_prints_as_on_the_page(ran: dict[str, Any]) -> None:
    assert normalised(str(ran["pipe"])) == normalised(PIPE.code)


def test_a_stage_prints_as_on_the_page(ran: dict[str, Any]) -> None:
    assert normalised(str(ran["pipe"].split_gm.submod_0)) == normalised(STAGE.code)


def test_the_command_of_the_page() -> None:
    """The example is run with this command, as it stands, by the tests of examples."""
    assert COMMAND.code.strip() == "$ torchrun --nproc-per-node 4 pippy_unroll.py"


def test_a_stage_per_iteration(ran: dict[str, Any]) -> None:
    """The page: "We can see 4 stages as expected (3 iterations plus 1 output projection)"."""
    assert ran["pipe"].num_stages == 4
    assert torch.equal(ran["pipe"](ran["x"])[0], ran["model"](ran["x"]))


def test_the_pipe_trains(ran: dict[str, Any]) -> None:
    model, pipe, x = ran["model"], ran["pipe"], ran["x"]
    y = torch.randint(10, (32,))
    schedule = ScheduleGPipe(
        [PipelineStage(pipe, i, "cpu") for i in range(4)], 4, loss_fn=F.cross_entropy
    )
    schedule.step(x, target=y)
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_n_iterations_on_n_ranks_process_n_samples_at_any_time(n: int) -> None:
    """The page: "at any timeslot, the pipeline is processing n samples"."""
    samples = 16 * n
    schedule = sl.schedules.forward_only(num_stages=n, num_microbatches=samples)
    found = sl.simulate(schedule, sl.Costs(forward=1, latency=0))
    assert samples + n - 1 == found.T  # one device takes n slots for each sample
    in_slot = Counter(int(start) for starts in found.start for start in starts)
    assert [in_slot[slot] for slot in range(n - 1, samples)] == [n] * (samples - n + 1)
    assert list(found.busy) == [samples] * n
