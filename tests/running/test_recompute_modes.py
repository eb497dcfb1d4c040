"""R runs under what its F ran under, whatever the caller has switched before the backward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import stageline as sl
from tests.running.test_recompute import (
    ROWS,
    WIDTH,
    Opened,
    assert_same,
    batch,
    drawless,
    plain_call,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("forward", ["bfloat16", "none"])
@pytest.mark.parametrize("backward", ["inside", "outside"])
def test_recompute_runs_under_the_autocast_of_the_forward(forward: str, backward: str) -> None:
    """One stage was wrong by up to 5e-3 without a word, two raised StepError."""
    x, y = batch()
    grads = []
    for recompute in ("never", "always"):
        pipe = sl.Pipeline(drawless(), split=2, num_microbatches=4, recompute=recompute)
        with torch.autocast("cpu", torch.bfloat16, enabled=forward == "bfloat16"):
            loss = F.cross_entropy(pipe(x).float(), y)
        with torch.autocast("cpu", torch.bfloat16, enabled=backward == "inside"):
            loss.backward()
        grads.append([parameter.grad for parameter in pipe.parameters()])
    for kept, recomputed in zip(*grads, strict=True):
        assert kept is not None
        assert recomputed is not None
        assert torch.equal(kept, recomputed)


class Sensitive(nn.Module):
    """Computes otherwise by every mode that R must find as F did."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.child = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight * (2.0 if self.training else 3.0)
        x = x * (5.0 if self.child.training else 7.0)
        x = x * (1.0 if torch.zeros(()).dtype is torch.float32 else 1.5)
        x = x * (1.0 if torch.is_grad_enabled() else 1.25)
        x = x * (1.0 if torch.are_deterministic_algorithms_enabled() else 1.75)
        x = x * (1.0 if torch.backends.mkldnn.enabled else 1.625)
        return x * (1.0 if torch.get_float32_matmul_precision() == "highest" else 1.125)


SWITCHES: dict[str, Callable[[sl.Pipeline, nn.Module], object]] = {
    "eval": lambda pipe, model: pipe.eval(),
    "eval of a child": lambda pipe, model: model.get_submodule("1.child").eval(),
    "default dtype": lambda pipe, model: torch.set_default_dtype(torch.float64),
    "deterministic": lambda pipe, model: torch.use_deterministic_algorithms(True),
    "kernels": lambda pipe, model: torch.backends.mkldnn.set_flags(_enabled=False),
    "matmul precision": lambda pipe, model: torch.set_float32_matmul_precision("high"),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_recompute_runs_under_what_the_caller_has_switched_since(switch: str) -> None:
    x, _ = batch()
    grads = []
    for recompute in ("never", "always"):
        model = nn.Sequential(Sensitive(), Sensitive())
        pipe = sl.Pipeline.from_stages(list(model), num_microbatches=4, recompute=recompute)
        out = pipe(x)
        try:
            SWITCHES[switch](pipe, model)
            switched = _state(model)
            out.sum().backward()
            assert _state(model) == switched  # R has put back what it found
        finally:
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(False)
            torch.backends.mkldnn.set_flags(_enabled=True)
            torch.set_float32_matmul_precision("highest")
        grads.append([parameter.grad for parameter in pipe.parameters()])
    for kept, recomputed in zip(*grads, strict=True):
        assert kept is not None
        assert recomputed is not None
        assert torch.equal(kept, recomputed)


def _state(model: nn.Module) -> tuple[Any, ...]:
    flags = [module.training for module in model.modules()]
    deterministic = torch.are_deterministic_algorithms_enabled()
    kernels = torch.backends.mkldnn.enabled
    precision = torch.get_float32_matmul_precision()
    return flags, torch.get_default_dtype(), deterministic, kernels, precision


@pytest.mark.parametrize("frozen", [["2.weight"], ["0.weight", "0.bias"]])
@pytest.mark.parametrize("trains_first", [True, False])
def test_parameters_train_that_did_so_in_the_forward(trains_first: bool, frozen: list[str]) -> None:
    """What was unfrozen since got a gradient that the plain model does not give; what was frozen,
    if it was a whole stage, ended in an error about zip()."""
    x, _ = batch()
    model, plain = drawless(), drawless()
    pipe = sl.Pipeline(model, split=[1, 2, 3], num_microbatches=4, recompute="always")
    found = []
    for each, call in ((model, pipe), (plain, lambda x: plain_call(plain, x, 4))):
        chosen = [parameter for name, parameter in each.named_parameters() if name in frozen]
        for parameter in chosen:
            parameter.requires_grad_(trains_first)
        out = call(x)
        for parameter in chosen:
            parameter.requires_grad_(not trains_first)
        out.square().sum().backward()
        assert all(parameter.requires_grad is not trains_first for parameter in chosen)
        found.append([parameter.grad for parameter in each.parameters()])
    for mine, theirs in zip(*found, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or theirs is None or torch.equal(mine, theirs)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.linear(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)


def test_recompute_takes_the_kernels_of_the_forward() -> None:
    """With another kernel of attention in R than in F, gradients were others in their last bits."""
    torch.manual_seed(0)
    x = torch.randn(8, 20, 16)
    grads = []
    for recompute in ("never", "always"):
        torch.manual_seed(0)
        stages = [Attention(), Attention()]
        pipe = sl.Pipeline.from_stages(stages, num_microbatches=4, recompute=recompute)
        with sdpa_kernel(SDPBackend.MATH):
            out = pipe(x).square().sum()
        out.backward()
        assert torch.backends.cuda.flash_sdp_enabled()
        grads.append([parameter.grad for parameter in pipe.parameters()])
    for kept, recomputed in zip(*grads, strict=True):
        assert kept is not None
        assert recomputed is not None
        assert torch.equal(kept, recomputed)


class AsksAbove(nn.Linear):
    """A layer that goes by the flag of the model that it is a part of."""

    above: list[nn.Module]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if self.above[0].training else 3.0)


def test_a_flag_of_opened_code_is_that_of_the_forward() -> None:
    x, _ = batch()
    mask = torch.ones(ROWS, WIDTH)
    grads = []
    for recompute in ("never", "always"):
        model = Opened()
        torch.manual_seed(3)
        model.head = AsksAbove(WIDTH, 3)
        model.head.above = [model]
        pipe = sl.Pipeline(
            model,
            example_args=(x[:3], mask[:3]),
            split=3,
            num_microbatches=4,
            recompute=recompute,
        )
        torch.manual_seed(3)
        out = pipe(x, mask)
        pipe.eval()
        out.sum().backward()
        grads.append([parameter.grad for parameter in pipe.parameters()])
    for kept, recomputed in zip(*grads, strict=True):
        assert kept is not None
        assert recomputed is not None
        assert torch.equal(kept, recomputed)


def _in_another_thread(backward: Callable[[], None]) -> None:
    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()


def _without_grad(backward: Callable[[], None]) -> None:
    with torch.no_grad():
        backward()


def _in_inference_mode(backward: Callable[[], None]) -> None:
    with torch.inference_mode():
        backward()


PLACES = [_in_another_thread, _without_grad, _in_inference_mode]


@pytest.mark.parametrize("recompute", ["always", "except_last"])
@pytest.mark.parametrize("place", PLACES)
def test_a_backward_may_be_called_anywhere(
    place: Callable[[Callable[[], None]], None], recompute: str
) -> None:
    pipe = sl.Pipeline(drawless(), split=2, num_microbatches=4, recompute=recompute)
    plain = drawless()
    x, y = batch()
    place(F.cross_entropy(pipe(x), y).backward)
    place(F.cross_entropy(plain_call(plain, x, 4), y).backward)
    assert_same(pipe, plain)


@pytest.mark.parametrize("recompute", ["always", "except_last", "waiting"])
def test_calls_that_overlap_and_outputs_that_are_used_in_part(recompute: str) -> None:
    """Each call has first runs of its own."""
    pipe = sl.Pipeline(drawless(), split=2, num_microbatches=4, recompute=recompute)
    plain = drawless()
    x, _ = batch()
    for call in (pipe, lambda x: plain_call(plain, x, 4)):
        first, second, unused = call(x), call(x * 2), call(x * 3)
        second[:5].sum().backward()
        first.square().sum().backward()
        del unused
    assert_same(pipe, plain)


def test_recompute_runs_under_the_saved_tensor_hooks_of_the_forward() -> None:
    """What is kept for the backward is kept where the caller of pipe(x) has said."""
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel())
        return tensor.clone()

    counts = []
    for recompute in ("never", "always"):
        pipe = sl.Pipeline(drawless(), split=2, num_microbatches=4, recompute=recompute)
        plain = drawless()
        x, y = batch()
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = pipe(x)
        F.cross_entropy(out, y).backward()
        F.cross_entropy(plain_call(plain, x, 4), y).backward()
        assert_same(pipe, plain)
        counts.append(len(packed))
    assert counts[1] == 2 * counts[0]  # in F and in R


# Precision of float32, which torch keeps for all backends, some of them, and some operations

Precisions = tuple[str, ...]


def precisions() -> Precisions:
    backends: Any = torch.backends
    owners = (backends, backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul)
    return tuple(owner.fp32_precision for owner in owners)


class SeesPrecisions(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.seen: list[Precisions] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(precisions())
        return super().forward(x)


def _set(*path: str) -> Callable[[], None]:
    *names, precision = path

    def switch() -> None:
        owner: Any = torch.backends
        for name in names:
            owner = getattr(owner, name)
        owner.fp32_precision = precision

    return switch


PRECISIONS: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "all": _set("tf32"),
    "all, exact": _set("ieee"),
    "one": _set("mkldnn", "matmul", "bf16"),
    "another": _set("cuda", "matmul", "tf32"),
    "legacy": lambda: torch.set_float32_matmul_precision("high"),
}


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch before 2.9")
@pytest.mark.parametrize("later", PRECISIONS)
@pytest.mark.parametrize("first", PRECISIONS)
def test_recompute_runs_with_the_precision_of_the_forward(first: str, later: str) -> None:
    """With ``torch.backends.fp32_precision`` set, a call with R was an error of torch's."""
    layer = SeesPrecisions()
    pipe = sl.Pipeline.from_stages([layer], num_microbatches=1, recompute="always")
    x, _ = batch()
    try:
        PRECISIONS[first]()
        out = pipe(x)
        PRECISIONS[later]()
        switched = precisions()
        out.sum().backward()
        assert precisions() == switched
    finally:
        torch.set_float32_matmul_precision("highest")
        for path in ((), ("cuda", "matmul"), ("mkldnn", "matmul")):
            _set(*path, "none")()
    assert layer.seen[0] == layer.seen[1]
    assert torch.get_float32_matmul_precision() == "highest"


# A pipeline inside a stage of another one


class Sees(nn.Module):
    """Notes in which runs of a stage it is called."""

    draws_nothing = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((sl.is_checkpointing(), sl.is_recomputing()))
        made: Tensor = self.linear(x)
        return made


class Calls(nn.Module):
    """Calls a pipeline, and then a module."""

    draws_nothing = True

    def __init__(self, inner: sl.Pipeline) -> None:
        super().__init__()
        self.inner, self.after = inner, Sees()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.after(self.inner(x))
        return made


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_layers_of_a_pipeline_in_a_stage_see_the_runs_of_the_stage(recompute: str) -> None:
    """Its threads did not know of them, and their end was taken for that of the stage's run."""
    inside = [Sees(), Sees()]
    inner = sl.Pipeline.from_stages(inside, num_microbatches=1, recompute=recompute)
    calls = Calls(inner)
    pipe = sl.Pipeline.from_stages(
        [nn.Sequential(nn.Linear(WIDTH, WIDTH), calls), nn.Linear(WIDTH, 3)],
        num_microbatches=1,
        recompute="always",
    )
    x, _ = batch()
    pipe(x).sum().backward()
    again = recompute == "always"
    for layer in inside:
        runs = [(True, False), (again, True)] + [(False, True)] * again
        assert layer.seen == runs
    assert calls.after.seen == [(True, False), (False, True)]


def test_a_stage_that_may_draw_cannot_call_a_pipeline() -> None:
    """The error named a class of ours, and advised to leave it."""
    inner = sl.Pipeline(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), split=2)

    class Unknown(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return inner(x)

    pipe = sl.Pipeline.from_stages([nn.Linear(WIDTH, WIDTH), Unknown()], num_microbatches=2)
    with pytest.raises(sl.StepError, match=r"called another pipeline.*make one pipeline of both"):
        pipe(batch()[0])
