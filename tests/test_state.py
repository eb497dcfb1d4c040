"""Parameters and state of a pipeline bear the names they have in the plain model."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import stageline as sl
from stageline.partitioning.sources import cut_model
from stageline.running.assembly import Parts, hold, tie
from stageline.running.timetable import Timetable
from stageline.testing import plain_step
from tests.wrappers import Doubled


def model(seed: int = 0) -> nn.Sequential:
    """Names, nesting, buffers, a layer that stands twice, and one without parameters."""
    torch.manual_seed(seed)
    twice = nn.Linear(6, 6)
    return nn.Sequential(
        OrderedDict(
            stem=nn.Linear(4, 6),
            body=nn.Sequential(nn.BatchNorm1d(6), nn.Sequential(nn.ReLU(), twice), twice),
            head=nn.Linear(6, 3),
        )
    )


def norms(seed: int = 0) -> nn.Sequential:
    """Two BatchNorms, which carry a counter of another dtype."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6))


SPLITS: list[Any] = [1, 2, 3, [1, 1, 1], [2, 1]]


def assert_same_state(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert list(got) == list(want)
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("split", SPLITS)
def test_names_are_those_of_the_plain_model(split: Any) -> None:
    plain = model()
    pipe = sl.Pipeline(model(), split=split)
    assert_same_state(pipe.state_dict(), plain.state_dict())
    assert_same_state(dict(pipe.named_parameters()), dict(plain.named_parameters()))
    assert_same_state(dict(pipe.named_buffers()), dict(plain.named_buffers()))
    assert [id(p) for p in pipe.parameters()] == [id(p) for _, p in pipe.named_parameters()]


@pytest.mark.parametrize("split", [4, 5])
def test_an_opened_sequential_keeps_its_names(split: int) -> None:
    """Four stages need the body opened; its children are still called body.0, body.1, ..."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        OrderedDict(
            stem=nn.Linear(4, 6),
            body=nn.Sequential(nn.BatchNorm1d(6), nn.Sequential(nn.ReLU(), nn.Linear(6, 6))),
            head=nn.Linear(6, 3),
        )
    )
    pipe = sl.Pipeline(plain, split=split, num_microbatches=2)
    assert list(pipe.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in pipe.named_parameters()] == [n for n, _ in plain.named_parameters()]
    x = torch.randn(6, 4)
    plain.eval()
    want = torch.cat([plain(part) for part in x.tensor_split(2)])
    assert torch.equal(pipe.eval()(x), want)


def test_the_parameters_are_the_users_own() -> None:
    plain = model()
    pipe = sl.Pipeline(plain, split=2)
    assert all(a is b for a, b in zip(pipe.parameters(), plain.parameters(), strict=True))


def test_a_tensor_that_stands_twice_in_a_stage_is_yielded_once() -> None:
    pipe = sl.Pipeline(model(), split=2)
    assert len({id(p) for p in pipe.parameters()}) == len(list(pipe.parameters()))
    assert "body.1.1.weight" in pipe.state_dict()
    assert "body.2.weight" in pipe.state_dict()


@pytest.mark.parametrize("split", SPLITS)
def test_a_plain_state_loads_into_a_pipeline_and_back(split: Any) -> None:
    other = model(seed=1)
    pipe = sl.Pipeline(model(seed=0), split=split)
    assert pipe.load_state_dict(other.state_dict()) == ([], [])
    assert_same_state(pipe.state_dict(), other.state_dict())

    back = model(seed=2)
    assert str(back.load_state_dict(pipe.state_dict())) == "<All keys matched successfully>"
    assert_same_state(back.state_dict(), other.state_dict())


def test_a_trained_state_goes_on_training_elsewhere() -> None:
    """State of a pipeline of three goes into one of two, buffers and counters included."""
    first = sl.Pipeline(norms(), split=3, num_microbatches=2, loss_fn=F.mse_loss)
    first.step(torch.randn(6, 4), target=torch.randn(6, 6))
    state = {name: value.clone() for name, value in first.state_dict().items()}
    assert state["1.num_batches_tracked"] == 2
    second = sl.Pipeline(norms(seed=5), split=2, num_microbatches=2, loss_fn=F.mse_loss)
    second.load_state_dict(state)
    x, y = torch.randn(6, 4), torch.randn(6, 6)
    for pipe in (first, second):
        pipe.zero_grad()
        pipe.step(x, target=y)
    assert_same_state(second.state_dict(), first.state_dict())
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad), name


def test_loading_copies_into_the_parameters_that_an_optimizer_holds() -> None:
    pipe = sl.Pipeline(model(seed=0), split=2)
    before = [id(p) for p in pipe.parameters()]
    pipe.load_state_dict(model(seed=1).state_dict())
    assert [id(p) for p in pipe.parameters()] == before


def test_a_state_that_does_not_fit_is_listed_whole_and_not_loaded() -> None:
    pipe = sl.Pipeline(norms(seed=0), split=2)
    wrong = dict(norms(seed=1).state_dict())
    wrong["0.weight"] = torch.zeros(6, 5)
    wrong["3.running_mean"] = torch.zeros(7)
    del wrong["2.bias"], wrong["1.weight"]
    wrong["4.weight"] = wrong["module.0.weight"] = torch.zeros(1)
    with pytest.raises(sl.StateError) as caught:
        pipe.load_state_dict(wrong)
    message = str(caught.value)
    for finding in (
        "nothing was loaded",
        "- 0.weight has shape (6, 5), the model wants (6, 4)",
        "- 3.running_mean has shape (7,), the model wants (6,)",
        "- 2.bias is missing",
        "- 1.weight is missing",
        "- 4.weight is not part of the model",
        "- module.0.weight is not part of the model",
    ):
        assert finding in message
    assert message.count("\n  - ") == 6
    assert_same_state(pipe.state_dict(), norms(seed=0).state_dict())


def test_not_strict_loads_what_fits_and_says_what_did_not() -> None:
    other = norms(seed=1).state_dict()
    part = {"0.weight": other["0.weight"], "9.weight": torch.zeros(1)}
    pipe = sl.Pipeline(norms(seed=0), split=2)
    loaded = pipe.load_state_dict(part, strict=False)
    assert loaded.unexpected_keys == ["9.weight"]
    assert loaded.missing_keys == [name for name in other if name != "0.weight"]
    assert torch.equal(pipe.state_dict()["0.weight"], other["0.weight"])
    assert torch.equal(pipe.state_dict()["0.bias"], norms(seed=0).state_dict()["0.bias"])


def test_a_wrong_shape_is_refused_even_where_names_may_differ() -> None:
    pipe = sl.Pipeline(norms(), split=2)
    with pytest.raises(sl.StateError, match=r"0.bias has shape \(1,\), the model wants \(6,\)"):
        pipe.load_state_dict({"0.bias": torch.zeros(1)}, strict=False)


def test_from_stages_names_as_a_sequential_of_the_stages() -> None:
    def stages(seed: int) -> list[Any]:
        torch.manual_seed(seed)
        return [nn.Linear(4, 4), torch.relu, nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))]

    made = stages(0)
    plain = nn.Sequential(made[0], nn.ReLU(), made[2])
    pipe = sl.Pipeline.from_stages(made)
    assert list(pipe.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in pipe.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in pipe.named_buffers()] == [n for n, _ in plain.named_buffers()]
    other = sl.Pipeline.from_stages(stages(1))
    other.load_state_dict(plain.state_dict())
    assert_same_state(other.state_dict(), plain.state_dict())


class Counting(nn.Module):
    """State that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return x

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def test_extra_state_travels_too() -> None:
    counting, other = Counting(), Counting()
    counting.calls = 7
    state = sl.Pipeline(nn.Sequential(nn.ReLU(), counting), split=2).state_dict()
    assert state == {"1._extra_state": 7}
    sl.Pipeline(nn.Sequential(nn.ReLU(), other), split=2).load_state_dict(state)
    assert other.calls == 7


# Gradients and flags


def test_zero_grad() -> None:
    pipe = sl.Pipeline(norms(), split=2, num_microbatches=2, loss_fn=F.mse_loss)
    pipe.zero_grad(set_to_none=False)  # nothing there yet
    pipe.step(torch.randn(4, 4), target=torch.randn(4, 6))
    kept = [p.grad for p in pipe.parameters()]
    pipe.zero_grad(set_to_none=False)
    for parameter, before in zip(pipe.parameters(), kept, strict=True):
        assert parameter.grad is before
        assert before is not None
        assert not before.any()
    pipe.zero_grad()
    assert all(p.grad is None for p in pipe.parameters())


def test_train_and_eval_reach_every_layer() -> None:
    plain = model()
    pipe = sl.Pipeline(plain, split=[1, 1, 1])
    layers = [module for child in plain.children() for module in child.modules()]
    assert pipe.training
    assert pipe.eval() is pipe
    assert not pipe.training
    assert not any(module.training for module in layers)
    assert pipe.train() is pipe
    assert pipe.training
    assert all(module.training for module in layers)


def test_a_model_that_comes_in_eval_mode_computes_as_the_plain_one() -> None:
    """Pretrained models come so; building a pipeline changes no layer's mode.

    The pipeline itself begins in train mode: a step gives gradients, as backward of the plain
    model would.
    """
    model = norms().eval()
    pipe = sl.Pipeline(model, split=2, num_microbatches=2, loss_fn=F.mse_loss)
    assert pipe.training
    assert not any(module.training for module in model)
    plain = norms().eval()
    x, y = torch.randn(4, 4), torch.randn(4, 6)
    pipe.step(x, target=y)
    plain_step(plain, x, target=y, num_microbatches=2, loss_fn=F.mse_loss, num_threads=1)
    assert_same_state(dict(pipe.named_buffers()), dict(plain.named_buffers()))
    for parameter, want in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        assert want.grad is not None
        assert torch.equal(parameter.grad, want.grad)


def test_a_layer_frozen_in_eval_mode_stays_so() -> None:
    plain = norms()
    plain[1].eval()
    pipe = sl.Pipeline(plain, split=2, num_microbatches=2, loss_fn=F.mse_loss)
    pipe.step(torch.randn(4, 4), target=torch.randn(4, 6))
    assert pipe.training
    assert pipe.state_dict()["1.num_batches_tracked"] == 0
    assert pipe.state_dict()["3.num_batches_tracked"] == 2


# wrap_stage


class Scaled(nn.Module):
    """A wrapper with a parameter of its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * self.scale


def test_a_wrapper_does_not_change_names() -> None:
    pipe = sl.Pipeline(norms(), split=2, wrap_stage=lambda module, index: Doubled(module))
    assert_same_state(pipe.state_dict(), norms().state_dict())
    assert_same_state(dict(pipe.named_parameters()), dict(norms().named_parameters()))
    pipe.load_state_dict(norms(seed=1).state_dict())
    assert_same_state(pipe.state_dict(), norms(seed=1).state_dict())


def test_what_wrappers_add_is_trained_under_names_of_its_own() -> None:
    pipe = sl.Pipeline(
        norms(),
        split=2,
        num_microbatches=2,
        loss_fn=F.mse_loss,
        wrap_stage=lambda module, index: Scaled(module),
    )
    pipe.step(torch.randn(4, 4), target=torch.randn(4, 6))
    names = [name for name, _ in pipe.named_parameters()]
    assert len(names) == len(list(norms().parameters())) + 2
    assert all(p.grad is not None for p in pipe.parameters())
    assert len(set(names)) == len(names), "two parameters bear one name"


def test_what_wrappers_add_is_saved_and_loaded() -> None:
    """What is trained and not saved is lost without a word."""

    def pipeline() -> sl.Pipeline:
        return sl.Pipeline(norms(), split=2, wrap_stage=lambda module, index: Scaled(module))

    trained, fresh = pipeline(), pipeline()
    for _, parameter in trained.named_parameters():
        nn.init.constant_(parameter, 3.0)
    fresh.load_state_dict(trained.state_dict())
    for parameter in fresh.parameters():
        assert torch.equal(parameter, torch.full_like(parameter, 3.0))


def test_what_a_wrapper_adds_in_another_process_is_left_to_it() -> None:
    """A full state loads on every rank; rank 0 must not take rank 1's scale for a stranger."""

    def pipeline() -> sl.Pipeline:
        return sl.Pipeline(norms(), split=2, wrap_stage=lambda module, index: Scaled(module))

    state = pipeline().state_dict()
    sources, _ = cut_model(norms(), 2)
    parts = Parts(Timetable(sl.schedules.gpipe(2, 2)), [torch.device("cpu")] * 2, ranks_here=(0,))
    held = hold(sources, parts, tie([], parts), lambda module, index: Scaled(module), "sl.Pipeline")
    assert held.load_state_dict(state, strict=True) == ([], [])


def test_a_parametrization_made_in_wrap_stage_is_seen_by_the_optimizer() -> None:
    def wrap(module: nn.Module, index: int) -> nn.Module:
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                parametrizations.weight_norm(layer)
        return module

    plain = norms()
    wrap(plain, 0)
    pipe = sl.Pipeline(norms(), split=2, num_microbatches=2, loss_fn=F.mse_loss, wrap_stage=wrap)
    assert [n for n, _ in pipe.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert "0.parametrizations.weight.original0" in pipe.state_dict()
    pipe.step(torch.randn(4, 4), target=torch.randn(4, 6))
    assert all(p.grad is not None for p in pipe.parameters())
