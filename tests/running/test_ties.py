"""One tensor that several stages use: one gradient, one value, all of its names."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import stageline as sl
from tests.running.tied import (
    CASES,
    MICROBATCHES,
    WIDTH,
    Make,
    batch,
    differences,
    first_and_last,
    gradients,
    linears,
    loss_of,
    made,
    pipeline,
    plain,
    three_times,
    tie,
    tied_names,
    two_parameters,
    wanted_gradients,
    weight,
)


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Untied gradients are compared to the last bit."""


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_plain_model(name: str, schedule: str) -> None:
    """Over two steps: what the first one accumulated is not counted again."""
    make, settings = CASES[name]
    pipe, model = pipeline(make, schedule=schedule, **settings), made(make)
    for seed in (1, 2):
        x, y = batch(make, seed)
        pipe.step(x, target=y)
        plain(make, model, x, y)
        assert differences(gradients(pipe), wanted_gradients(model), tied_names(make)) == []


# Over two Parameters the plain model's optimizer would have two states for one tensor.
@pytest.mark.parametrize("name", [n for n, (make, _) in CASES.items() if make != two_parameters])
def test_training_goes_as_in_the_plain_model(name: str) -> None:
    make, settings = CASES[name]
    pipe, model = pipeline(make, **settings), made(make)
    ours = torch.optim.Adam(pipe.parameters(), lr=1e-2)
    theirs = torch.optim.Adam(model.parameters(), lr=1e-2)
    for seed in range(5):
        x, y = batch(make, seed)
        pipe.step(x, target=y)
        plain(make, model, x, y)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for key, value in model.state_dict().items():
        assert torch.allclose(pipe.state_dict()[key], value, rtol=1e-3, atol=1e-5), key


@pytest.mark.parametrize("name", CASES)
def test_the_order_of_additions_is_always_the_same(name: str) -> None:
    make, settings = CASES[name]
    x, y = batch(make)
    seen = []
    for _ in range(3):
        pipe = pipeline(make, **settings)
        pipe.step(x, target=y)
        seen.append(gradients(pipe))
    for key, value in seen[0].items():
        assert all(torch.equal(other[key], value) for other in seen[1:]), key


@pytest.mark.parametrize("name", CASES)
def test_a_tied_parameter_is_yielded_once_and_saved_under_all_names(name: str) -> None:
    make, settings = CASES[name]
    model = made(make)
    pipe = pipeline(make, model, **settings)
    names = [key for key, _ in pipe.named_parameters()]
    addresses = [parameter.data_ptr() for parameter in pipe.parameters()]
    assert len(set(names)) == len(names)
    assert len(set(addresses)) == len(addresses)
    plain_names = dict(model.named_parameters())
    assert all(plain_names[key] is parameter for key, parameter in pipe.named_parameters())
    if make is not two_parameters:
        assert names == list(plain_names)
    state = pipe.state_dict()
    assert list(state) == list(model.state_dict())
    for key, value in model.state_dict().items():
        assert state[key].data_ptr() == value.data_ptr(), key


def test_a_gradient_that_was_there_stays_the_same_tensor() -> None:
    pipe = pipeline(first_and_last)
    x, y = batch(first_and_last)
    pipe.step(x, target=y)
    own = next(pipe.parameters())
    before = own.grad
    pipe.step(x, target=y)
    assert own.grad is before


def test_the_users_own_modules_are_not_changed() -> None:
    """The last rank works on a copy of what it shares; the model keeps its own parameters."""
    model = made(first_and_last)
    modules, own = list(model), weight(model, 0)
    pipe = pipeline(first_and_last, model)
    x, y = batch(first_and_last)
    pipe.step(x, target=y)
    assert all(a is b for a, b in zip(model, modules, strict=True))
    assert weight(model, 3) is own is weight(model, 0)
    assert next(pipe.parameters()) is own
    assert model[3].bias.grad is not None  # what is not tied is still the user's own


@pytest.mark.parametrize("how", ["in place", "data", "load", "data and save"])
def test_every_way_to_change_a_weight_reaches_all_stages(how: str) -> None:
    model, other = made(first_and_last), made(first_and_last, seed=9)
    pipe = pipeline(first_and_last, model)
    x, _ = batch(first_and_last)
    pipe.eval()(x)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            if how == "in place":
                mine.copy_(theirs)
            elif how != "load":
                mine.data = theirs.detach().clone()
    if how == "load":
        pipe.load_state_dict(other.state_dict())
    if how == "data and save":
        assert all(torch.equal(v, other.state_dict()[k]) for k, v in pipe.state_dict().items())
    want = torch.cat([other(part) for part in x.tensor_split(MICROBATCHES)])
    assert torch.equal(pipe(x), want)


def test_load_state_dict_takes_all_names_and_misses_what_torch_misses() -> None:
    state = made(first_and_last, seed=9).state_dict()
    pipe, model = pipeline(first_and_last), made(first_and_last)
    assert pipe.load_state_dict(state) == ([], [])
    assert all(torch.equal(value, state[name]) for name, value in pipe.state_dict().items())
    del state["3.weight"]
    with pytest.raises(sl.StateError, match=r"3\.weight is missing"):
        pipe.load_state_dict(state)
    loaded = pipeline(first_and_last).load_state_dict(state, strict=False)
    assert loaded.missing_keys == model.load_state_dict(state, strict=False).missing_keys


def test_the_last_name_wins_where_a_state_contradicts_itself() -> None:
    """As in torch, which copies one after the other into the same tensor."""
    state = {k: v.clone() for k, v in made(first_and_last).state_dict().items()}
    state["0.weight"], state["3.weight"] = torch.zeros(WIDTH, WIDTH), torch.ones(WIDTH, WIDTH)
    pipe, model = pipeline(first_and_last), made(first_and_last)
    pipe.load_state_dict(state)
    model.load_state_dict(state)
    assert torch.equal(weight(model, 0), torch.ones(WIDTH, WIDTH))
    assert torch.equal(next(pipe.parameters()), weight(model, 0))


@pytest.mark.parametrize("make", [first_and_last, three_times])
def test_a_frozen_tied_parameter_gets_no_gradient(make: Make) -> None:
    pipe, model = pipeline(make, split=3), made(make)
    x, y = batch(make)
    frozen = tied_names(make)
    for parameters in (dict(pipe.named_parameters()), dict(model.named_parameters())):
        for name in frozen:
            parameters[name].requires_grad_(False)
    pipe.step(x, target=y)
    plain(make, model, x, y)
    for (name, got), want in zip(pipe.named_parameters(), model.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None) == (name in frozen)
        assert got.grad is None or torch.equal(got.grad, want.grad)  # type: ignore[arg-type]
    for name, parameter in pipe.named_parameters():
        parameter.requires_grad_(name in frozen)
    pipe.step(x, target=y)
    assert all(parameter.grad is not None for parameter in pipe.parameters())


def test_evaluation_and_inference_touch_no_gradient() -> None:
    pipe, model = pipeline(first_and_last), made(first_and_last)
    x, y = batch(first_and_last)
    loss = pipe.eval().step(x, target=y).loss
    want = [F.mse_loss(model(a), b) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
    assert torch.allclose(loss, torch.stack(want).mean())
    assert torch.equal(pipe(x), torch.cat([model(part) for part in x.chunk(4)]))
    assert all(parameter.grad is None for parameter in pipe.parameters())


@pytest.mark.parametrize("name", CASES)
def test_a_call_can_be_differentiated(name: str) -> None:
    make, settings = CASES[name]
    pipe, model = pipeline(make, **settings), made(make)
    for seed in (1, 2):
        x, y = batch(make, seed)
        loss_of(make)(pipe(x), y).backward()
        loss_of(make)(model(x), y).backward()
    wanted = wanted_gradients(model)
    for key, got in gradients(pipe).items():
        assert torch.allclose(got, wanted[key], rtol=1e-4, atol=1e-6), key


def test_two_calls_before_one_backward() -> None:
    pipe, model = pipeline(first_and_last), made(first_and_last)
    (x, y), (v, w) = batch(first_and_last, 1), batch(first_and_last, 2)
    (F.mse_loss(pipe(x), y) + F.mse_loss(pipe(v), w)).backward()
    (F.mse_loss(model(x), y) + F.mse_loss(model(v), w)).backward()
    wanted = wanted_gradients(model)
    for key, got in gradients(pipe).items():
        assert torch.allclose(got, wanted[key], rtol=1e-4, atol=1e-6), key


def test_a_weight_changed_before_its_backward_is_noticed_in_every_copy() -> None:
    """Only the last stage needs the weight in its backward, and it works on the copy."""
    model = tie(linears(2), 1, 0)
    pipe = pipeline(first_and_last, model, split=2)
    x, y = batch(first_and_last)
    loss = F.mse_loss(pipe(x), y)
    with torch.no_grad():
        weight(model, 0).mul_(2)
    with pytest.raises(sl.StepError, match="modified by an inplace operation"):
        loss.backward()
