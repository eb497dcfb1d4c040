"""Recorded models through the pipelined engine: everything equal to the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stageline as sl
from stageline.testing import OrderedTransport, RankPool, plain_step
from stageline.torch_private import tree_flatten
from tests.exactness.recorded_cases import CASES, Case, loss_of

TOLERANCE = 1e-6  # of tied parameters, whose uses are added in another order


def pipeline(case: Case, **settings: Any) -> sl.Pipeline:
    inputs, _ = case.batch(4, seed=0)
    usual: dict[str, Any] = {"num_microbatches": 3, "loss_fn": loss_of, "keep_outputs": True}
    settings = usual | settings
    return sl.Pipeline(case.model(), example_kwargs=inputs, split=case.split, **settings)


def plain(case: Case, steps: int = 1, rows: int = 7) -> tuple[nn.Module, Tensor, Any]:
    model = case.model()
    for step in range(steps):
        inputs, target = case.batch(rows, seed=step + 1)
        result = plain_step(
            model,
            kwargs=inputs,
            target=target,
            num_microbatches=3,
            loss_fn=loss_of,
            num_threads=1,
            step=step,
        )
    return model, result.loss, result.outputs


def differences(found: dict[str, Tensor | None], wanted: nn.Module, tied: bool) -> list[str]:
    wrong = []
    for name, parameter in wanted.named_parameters():
        if name not in found:
            continue
        got, want = found[name], parameter.grad
        if got is None or want is None:
            if got is not want:
                wrong.append(name)
        elif not torch.equal(got, want) and not (tied and _is_close(got, want)):
            wrong.append(f"{name}: {(got - want).abs().max() / want.abs().max():.1e}")
    return wrong


def _is_close(got: Tensor, want: Tensor) -> bool:
    return bool((got - want).abs().max() <= TOLERANCE * want.abs().max())


def gradients(pipe: sl.Pipeline) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in pipe.named_parameters()}


def flat(output: Any) -> list[Any]:
    return list(tree_flatten(output)[0])


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one.detach(), other.detach())
    return bool(one == other)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_step_equals_the_plain_model(name: str, schedule: str, one_thread: None) -> None:
    case = CASES[name]
    transport = None if schedule == "gpipe" else OrderedTransport()
    pipe = pipeline(case, schedule=schedule, transport=transport)
    model, loss, outputs = plain(case)
    inputs, target = case.batch(7)
    result = pipe.step(**inputs, target=target)
    assert torch.equal(result.loss, loss)
    assert all(map(same, flat(result.outputs), flat(outputs)))
    assert differences(gradients(pipe), model, case.tied) == []
    buffers = dict(pipe.named_buffers())
    assert all(torch.equal(buffers[name], value) for name, value in model.named_buffers())
    assert set(pipe.state_dict()) == set(model.state_dict())
    pipe.close()


@pytest.mark.parametrize("name", CASES)
def test_a_second_step_accumulates_and_one_row_is_enough(name: str, one_thread: None) -> None:
    case = CASES[name]
    pipe = pipeline(case, ranks=2)  # two stages share a rank
    model, loss, _ = plain(case, steps=2, rows=2)
    for step in range(2):
        inputs, target = case.batch(2, seed=step + 1)
        result = pipe.step(**inputs, target=target)
    assert torch.equal(result.loss, loss)
    assert differences(gradients(pipe), model, case.tied) == []
    pipe.close()


# A call that is differentiated draws other numbers than a step, so there is no plain step like it.
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("draws")])
def test_inference_and_a_call_that_is_differentiated(name: str, one_thread: None) -> None:
    case = CASES[name]
    pipe = pipeline(case, num_microbatches=1)
    model = case.model()
    inputs, target = case.batch(5)
    loss_of(pipe(**inputs), target).backward()
    loss_of(model(**inputs), target).backward()
    assert differences(gradients(pipe), model, case.tied) == []
    pipe.eval()
    model.eval()
    with torch.no_grad():
        assert all(map(same, flat(pipe(**inputs)), flat(model(**inputs))))
    pipe.close()


def test_an_argument_that_requires_a_gradient_gets_it_through_all_its_uses(
    one_thread: None,
) -> None:
    """Late stages take arguments from the batch; one that is differentiated must travel instead."""
    case = CASES["late inputs"]
    pipe = pipeline(case)
    model = case.model()
    inputs, target = case.batch(6)
    mine = {**inputs, "scale": inputs["scale"].clone().requires_grad_()}
    theirs = {**inputs, "scale": inputs["scale"].clone().requires_grad_()}
    pipe.step(**mine, target=target)
    plain_step(
        model, kwargs=theirs, target=target, num_microbatches=3, loss_fn=loss_of, num_threads=1
    )
    assert mine["scale"].grad is not None
    assert torch.equal(mine["scale"].grad, theirs["scale"].grad)
    assert differences(gradients(pipe), model, False) == []
    pipe.close()


def test_copies_of_tied_weights_stay_equal_while_an_optimizer_works(one_thread: None) -> None:
    case = CASES["tied"]
    pipe, model = pipeline(case), case.model()
    mine = torch.optim.Adam(pipe.parameters(), lr=1e-2)
    theirs = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(4):
        inputs, target = case.batch(6, seed=step)
        pipe.step(**inputs, target=target)
        plain_step(
            model, kwargs=inputs, target=target, num_microbatches=3, loss_fn=loss_of, num_threads=1
        )
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    state = pipe.state_dict()
    assert torch.equal(state["stem.weight"], state["out.weight"])
    for name, value in model.state_dict().items():
        assert torch.allclose(state[name], value, rtol=1e-4, atol=1e-6), name
    pipe.close()


Report = tuple[dict[str, Tensor | None], Tensor, list[Any]]


def _in_process(rank: int, name: str, transport: str) -> Report:
    torch.set_num_threads(1)
    case = CASES[name]
    pipe = pipeline(case, timeout=20, transport=transport)
    for step in range(2):
        inputs, target = case.batch(7, seed=step + 1)
        result = pipe.step(**inputs, target=target)
    report = gradients(pipe), result.loss, flat(result.outputs)
    pipe.close()
    return report


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["shared-memory", "process-group"])
@pytest.mark.parametrize("name", CASES)
def test_processes_equal_the_plain_model(name: str, transport: str, two_ranks: RankPool) -> None:
    case = CASES[name]
    reports = two_ranks.run(_in_process, name, transport)
    torch.set_num_threads(1)
    model, loss, outputs = plain(case, steps=2)
    for found, got, values in reports:
        assert torch.equal(got, loss)
        assert all(map(same, values, flat(outputs)))
        assert differences(found, model, case.tied) == []
    names = {name for name, _ in model.named_parameters()}
    assert set().union(*(found for found, _, _ in reports)) == names
