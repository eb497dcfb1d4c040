"""Random models, cuts, batches and schedules: whatever is drawn equals the plain model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.testing import OrderedTransport, plain_step

LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda width: nn.Linear(width, width),
    "narrow": lambda width: nn.Sequential(nn.Linear(width, 3), nn.Linear(3, width)),
    "relu": lambda width: nn.ReLU(),
    "relu_": lambda width: nn.ReLU(inplace=True),
    "norm": lambda width: nn.BatchNorm1d(width),
    "layer norm": lambda width: nn.LayerNorm(width),
    "tanh": lambda width: nn.Sequential(nn.Tanh(), nn.Linear(width, width)),
    "frozen": lambda width: nn.Linear(width, width).requires_grad_(False),
}


@st.composite
def runs(draw: st.DrawFn) -> dict[str, object]:
    names = draw(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=7))
    # An op in place behind one that saves its output is refused by the plain model too.
    names = [n for i, n in enumerate(names) if n != "relu_" or (i and names[i - 1] == "linear")]
    blocks = len(names) + 1
    cuts = (
        sorted(draw(st.sets(st.integers(1, blocks - 1), max_size=blocks - 1))) if blocks > 1 else []
    )
    ends = [0, *cuts, blocks]
    split = [stop - start for start, stop in pairwise(ends)]
    return {
        "names": names,
        "split": split,
        "ranks": draw(st.integers(1, len(split))),
        "microbatches": draw(st.integers(1, 6)),
        # BatchNorm needs two rows in every microbatch.
        "rows": draw(st.integers(1, 12)) * (2 if "norm" not in names else 12),
        "schedule": draw(st.sampled_from(["gpipe", "1f1b", "sequential"])),
        "reduction": draw(st.sampled_from(["mean", "sum"])),
        "ordered": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**16)),
    }


def _build(run: dict[str, object]) -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(int(str(run["seed"])))
    width = 6
    names = run["names"]
    assert isinstance(names, list)
    layers = [nn.Linear(width, width), *(LAYERS[name](width) for name in names)]
    rows = int(str(run["rows"]))
    return nn.Sequential(*layers), torch.randn(rows, width), torch.randn(rows, width)


@pytest.mark.usefixtures("one_thread")
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(runs())
def test_whatever_is_drawn_equals_the_plain_model(run: dict[str, object]) -> None:
    microbatches, reduction = int(str(run["microbatches"])), str(run["reduction"])
    plain, x, y = _build(run)
    wanted = plain_step(
        plain,
        x,
        target=y,
        num_microbatches=microbatches,
        loss_fn=F.mse_loss,
        loss_reduction=reduction,
    )
    model, x, y = _build(run)
    pipe = sl.Pipeline(
        model,
        split=run["split"],  # type: ignore[arg-type]
        ranks=int(str(run["ranks"])),
        num_microbatches=microbatches,
        schedule=str(run["schedule"]),
        loss_fn=F.mse_loss,
        loss_reduction=reduction,
        transport=OrderedTransport() if run["ordered"] else "memory",
        keep_outputs=True,
    )
    result = pipe.step(x, target=y)
    assert torch.equal(result.loss, wanted.loss)
    assert torch.equal(result.outputs, wanted.outputs)
    for (name, got), (_, want) in zip(
        pipe.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert (got.grad is None) == (want.grad is None), name
        assert got.grad is None or want.grad is None or torch.equal(got.grad, want.grad), name
    for (name, mine), (_, theirs) in zip(pipe.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(mine, theirs), name
    pipe.close()
