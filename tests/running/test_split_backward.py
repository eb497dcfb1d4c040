"""I and W give what B gives, whatever the graph: to the bit, strides and order of sums included."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.running.events import ActionDone
from stageline.running.split.mode import Splitting
from stageline.testing import plain_step
from tests.exactness.cases import same
from tests.running.placements import looped, recomputed, zb_h1
from tests.running.split_cases import MIDDLES, WIDTH, Checkpointed, Custom, Square, stages_of

pytestmark = pytest.mark.usefixtures("one_thread")

MICROBATCHES = 3


def _batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(6)
    return torch.randn(7, WIDTH), torch.randn(7, WIDTH)


def _autocast(precision: str) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def _differences(
    stages: Sequence[nn.Module], schedule: str, precision: str = "fp32", steps: int = 2
) -> list[str]:
    """Run stages as a pipeline; return in what they differ from the plain model."""
    plain = copy.deepcopy(nn.Sequential(*stages))
    x, y = _batch()
    pipe = sl.Pipeline.from_stages(
        stages, num_microbatches=MICROBATCHES, schedule=schedule, loss_fn=F.mse_loss, timeout=30
    )
    wrong = []
    for step in range(steps):
        with _autocast(precision):
            wanted = plain_step(
                plain, x, target=y, num_microbatches=MICROBATCHES, loss_fn=F.mse_loss, step=step
            )
            got = pipe.step(x, target=y)
        if not torch.equal(got.loss, wanted.loss):
            wrong.append(f"loss of step {step}")
    expected = dict(plain.named_parameters())
    wrong += [n for n, p in pipe.named_parameters() if not same(p.grad, expected[n].grad)]
    buffers = dict(plain.named_buffers())
    wrong += [n for n, b in pipe.named_buffers() if not torch.equal(b, buffers[n])]
    pipe.close()
    return wrong


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MIDDLES)
def test_two_halves_equal_the_plain_model(name: str, precision: str) -> None:
    assert _differences(stages_of(name), zb_h1(3, MICROBATCHES), precision) == []


@pytest.mark.parametrize("name", MIDDLES)
def test_a_frozen_input_starves_nobody(name: str) -> None:
    """Nobody waits for the gradient of the input: I does nothing, and W the whole backward."""
    stages = stages_of(name, frozen_input=True)
    assert _differences(stages, zb_h1(3, MICROBATCHES)) == []


@pytest.mark.parametrize("name", MIDDLES)
def test_forward_again_equals_the_plain_model(name: str) -> None:
    schedule = recomputed(zb_h1(3, MICROBATCHES))
    assert _differences(stages_of(name), schedule) == []


def _pipe(stages: Sequence[nn.Module], schedule: str, **settings: Any) -> sl.Pipeline:
    return sl.Pipeline.from_stages(
        stages,
        num_microbatches=MICROBATCHES,
        schedule=schedule,
        loss_fn=F.mse_loss,
        timeout=30,
        **settings,
    )


def _all_i_then_all_w() -> str:
    """One rank; every I of every stage stands before the first W."""
    return looped(lambda _: range(3), 1, MICROBATCHES, letters="IW")


def test_the_backward_of_a_custom_function_runs_once_for_each_microbatch() -> None:
    stages = stages_of("custom Function")
    assert isinstance(stages[1], Custom)
    pipe = _pipe(stages, zb_h1(3, MICROBATCHES))
    before = Square.calls
    x, y = _batch()
    pipe.step(x, target=y)
    assert Square.calls - before == MICROBATCHES


@pytest.mark.parametrize("kind", ["non-reentrant", "reentrant"])
def test_a_checkpoint_computes_again_once_for_each_microbatch(kind: str) -> None:
    stages = stages_of(f"checkpoint, {kind}")
    assert isinstance(stages[1], Checkpointed)
    pipe = _pipe(stages, zb_h1(3, MICROBATCHES))
    x, y = _batch()
    pipe.step(x, target=y)
    assert stages[1].calls == 2 * MICROBATCHES


# What is made in I: nobody can see the parameters go into these, or take them apart.
NOT_DEFERRED = {
    "custom Function": {"1.weight"},
    "checkpoint, non-reentrant": {"1.inner.0", "1.inner.2"},
    "checkpoint, reentrant": {"1.inner.0", "1.inner.2"},
    "differentiates inside": {"1.linear", "1.norm"},
    "changes weights in place": {"1.w"},
}


@pytest.mark.parametrize("name", MIDDLES)
def test_i_leaves_the_gradients_of_parameters_to_w(name: str) -> None:
    stages = stages_of(name)
    seen: dict[str, set[str]] = {}

    def observe(event: ActionDone) -> None:
        filled = {n for n, p in nn.Sequential(*stages).named_parameters() if p.grad is not None}
        seen[event.action] = filled

    pipe = _pipe(stages, _all_i_then_all_w(), observer=observe)
    x, y = _batch()
    pipe.step(x, target=y)
    early = seen[f"0I{MICROBATCHES - 1}"]
    undeferred = tuple(NOT_DEFERRED.get(name, ()))
    assert {parameter for parameter in early if not parameter.startswith(undeferred)} == set()
    assert all(any(p.startswith(prefix) for p in early) for prefix in undeferred)
    assert seen[f"2W{MICROBATCHES - 1}"] == {
        n for n, p in nn.Sequential(*stages).named_parameters() if p.requires_grad
    }


@pytest.mark.parametrize("name", [name for name in MIDDLES if name not in NOT_DEFERRED])
def test_hooks_on_parameters_see_every_gradient_once_and_whole(name: str) -> None:
    def watched(schedule: str) -> dict[str, list[Tensor]]:
        stages = stages_of(name)
        seen: dict[str, list[Tensor]] = {}
        counts: dict[str, int] = {}
        for key, parameter in nn.Sequential(*stages).named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(
                    lambda gradient, key=key: seen.setdefault(key, []).append(gradient.clone())
                )
                parameter.register_post_accumulate_grad_hook(
                    lambda _, key=key: counts.__setitem__(key, counts.get(key, 0) + 1)
                )
        x, y = _batch()
        _pipe(stages, schedule).step(x, target=y)
        assert counts == {key: MICROBATCHES for key in seen}
        return seen

    wanted, got = watched("1f1b"), watched(zb_h1(3, MICROBATCHES))
    assert wanted.keys() == got.keys()
    for key, gradients in wanted.items():
        assert all(map(torch.equal, gradients, got[key])), key


class _Both(nn.Module):
    """One weight in a product, and in a custom Function that nobody can see into."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = Square.apply
        out: Tensor = apply(torch.tanh(x @ self.weight), self.weight)
        return out


def test_a_weight_with_parts_in_i_and_in_w_is_right_to_the_last_bits() -> None:
    """The one case in which sums come in another order: the part of I first, that of W after."""
    torch.manual_seed(5)
    stages = [nn.Linear(WIDTH, WIDTH), _Both(), nn.Linear(WIDTH, WIDTH)]
    plain = copy.deepcopy(nn.Sequential(*stages))
    x, y = _batch()
    _pipe(stages, zb_h1(3, MICROBATCHES)).step(x, target=y)
    plain_step(plain, x, target=y, num_microbatches=MICROBATCHES, loss_fn=F.mse_loss)
    for got, want in zip(nn.Sequential(*stages).parameters(), plain.parameters(), strict=True):
        assert got.grad is not None
        assert want.grad is not None
        assert (got.grad - want.grad).abs().max() <= 1e-6 * want.grad.abs().max()


class _Forgets(nn.Linear):
    """Changes its weight in place after it was used."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        with torch.no_grad():
            self.weight.mul_(2)
        return out


def test_a_weight_changed_in_place_between_forward_and_i_is_noticed() -> None:
    stages = [nn.Linear(WIDTH, WIDTH), _Forgets(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    x, y = _batch()
    with pytest.raises(sl.StepError) as failure:
        _pipe(stages, zb_h1(3, MICROBATCHES)).step(x, target=y)
    assert "modified by an inplace operation" in str(failure.value.__cause__)


def test_saved_tensor_hooks_of_the_caller_are_respected() -> None:
    """Under hooks nothing is deferred: what they see is what the plain model saves."""
    packed: list[int] = []

    def run(schedule: str) -> dict[str, Tensor | None]:
        stages = stages_of("attention")
        x, y = _batch()
        packed.append(0)

        def pack(tensor: Tensor) -> Tensor:
            packed[-1] += 1
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            _pipe(stages, schedule).step(x, target=y)
        return {n: p.grad for n, p in nn.Sequential(*stages).named_parameters()}

    wanted, got = run("1f1b"), run(zb_h1(3, MICROBATCHES))
    assert packed[0] == packed[1] > 0
    assert all(same(got[name], wanted[name]) for name in wanted)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler looks at it
def test_a_stage_that_is_compiled_is_right_and_not_deferred() -> None:
    stages = stages_of("one weight twice")
    compiled = stages_of("one weight twice")
    compiled[1].compile(backend="eager")
    x, y = _batch()
    for each in (stages, compiled):
        _pipe(each, zb_h1(3, MICROBATCHES)).step(x, target=y)
    for want, got in zip(
        *(nn.Sequential(*s).parameters() for s in (stages, compiled)), strict=True
    ):
        assert same(got.grad, want.grad)


def test_a_call_that_is_differentiated_runs_i_w_and_r() -> None:
    schedule = recomputed(_all_i_then_all_w(), but=[1])
    stages = stages_of("attention")
    plain = copy.deepcopy(nn.Sequential(*stages))
    x, y = _batch()
    x.requires_grad_()
    twin = x.detach().clone().requires_grad_()
    F.mse_loss(_pipe(stages, schedule)(x), y).backward()
    F.mse_loss(torch.cat([plain(part) for part in twin.tensor_split(MICROBATCHES)]), y).backward()
    # One graph for all microbatches there, one for each here: other sums.
    for got, want in zip(nn.Sequential(*stages).parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(x.grad, twin.grad)


class _Counts(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * 2


def test_what_forward_again_would_do_twice_is_an_error() -> None:
    stages = [nn.Linear(WIDTH, WIDTH), _Counts(), nn.Linear(WIDTH, WIDTH)]
    x, y = _batch()
    with pytest.raises(sl.StepError, match="1F0") as failure:
        _pipe(stages, recomputed(zb_h1(3, MICROBATCHES))).step(x, target=y)
    assert "changes one of its buffers" in str(failure.value.__cause__)


def test_an_input_that_is_changed_in_place_is_kept_for_forward_again() -> None:
    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2).add_(1)

    torch.manual_seed(5)
    stages = [nn.Linear(WIDTH, WIDTH), Doubles(), nn.Linear(WIDTH, WIDTH)]
    assert _differences(stages, recomputed(zb_h1(3, MICROBATCHES))) == []


class _Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_only_the_user_s_own_code_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten looks of ours at tensors used to be asked about in every F, a fifth of its time."""
    asked: list[Any] = []
    follow = Splitting.__torch_function__

    def noted(mode: Splitting, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked.append(func)
        return follow(mode, func, types, args, kwargs)

    monkeypatch.setattr(Splitting, "__torch_function__", noted)
    x, y = _batch()
    stages = [nn.Linear(WIDTH, WIDTH), _Doubled(WIDTH, WIDTH)]
    _pipe(stages, zb_h1(2, MICROBATCHES)).step(x, target=y)
    # The second stage; nobody waits for I of the first. The loss is one of torch's.
    seen = [getattr(func, "__name__", "") for func in asked]
    assert seen == ["linear", "mul"] * MICROBATCHES
