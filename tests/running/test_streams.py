"""Random streams: a step draws what the plain model draws, however it is cut."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.errors import PipeError, StepError
from stageline.testing import OrderedTransport, RankPool, plain_step
from tests.running.streaming import (
    SEED,
    WIDTH,
    batch,
    chain,
    differences,
    layers,
    noisy_loss,
    plain_steps,
)

# A reentrant checkpoint at the very beginning of a stage-less test has an input without gradient.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]
TIED = ("1.",)  # the layer that is used twice


def pipeline(model: nn.Module | None = None, **settings: Any) -> sl.Pipeline:
    usual: dict[str, Any] = {"split": 3, "num_microbatches": 3, "loss_fn": F.cross_entropy}
    return sl.Pipeline(chain() if model is None else model, **(usual | settings))


@pytest.fixture
def closing() -> Iterator[list[sl.Pipeline]]:
    pipes: list[sl.Pipeline] = []
    yield pipes
    for pipe in pipes:
        pipe.close()


SETTINGS: dict[str, dict[str, Any]] = {
    "one stage": {"split": 1},
    "two stages, gpipe": {"split": 2, "schedule": "gpipe"},
    "five stages": {"split": 5},
    "five stages on two ranks": {"split": 5, "ranks": 2},
    "nested Sequentials opened": {"split": 15},
    "ordered transport": {"split": 4, "transport": "ordered"},
    "sequential": {"split": 3, "schedule": "sequential"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_whatever_draws_equals_the_plain_model(name: str) -> None:
    settings = dict(SETTINGS[name])
    if settings.get("transport"):
        settings["transport"] = OrderedTransport()
    plain = chain()
    wanted = plain_steps(plain, 2)
    pipe = pipeline(**settings)
    x, y = batch()
    got = [pipe.step(x, target=y).loss for _ in range(2)]
    assert all(map(torch.equal, got, wanted))
    assert not torch.equal(wanted[0], wanted[1])  # another step draws other numbers
    assert differences(pipe, plain, TIED) == []
    pipe.close()


def test_stages_of_ones_own_are_named_as_in_a_sequential() -> None:
    plain = chain()
    wanted = plain_steps(plain, 1)
    torch.manual_seed(SEED)
    pipe = sl.Pipeline.from_stages(list(layers()), num_microbatches=3, loss_fn=F.cross_entropy)
    x, y = batch()
    assert torch.equal(pipe.step(x, target=y).loss, wanted[0])
    assert differences(pipe, plain, TIED) == []
    pipe.close()


def test_a_loss_may_draw() -> None:
    plain = chain()
    wanted = plain_steps(plain, 1, noisy_loss)
    pipe = pipeline(loss_fn=noisy_loss)
    x, y = batch()
    assert torch.equal(pipe.step(x, target=y).loss, wanted[0])
    assert differences(pipe, plain, TIED) == []
    pipe.close()


def test_the_seed_decides(closing: list[sl.Pipeline]) -> None:
    pipe = pipeline()
    closing.append(pipe)
    x, y = batch()
    losses = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        pipe.step_number = 0
        losses.append(pipe.step(x, target=y).loss)
    assert torch.equal(losses[0], losses[2])
    assert not torch.equal(losses[0], losses[1])


def test_the_users_own_random_numbers_are_untouched(closing: list[sl.Pipeline]) -> None:
    pipe = pipeline()
    closing.append(pipe)
    x, y = batch()
    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index]
    pipe.step(x, target=y)
    with torch.no_grad():
        pipe(x)
    pipe.eval().step(x, target=y)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])  # type: ignore[index]
    assert torch.random.default_generator is torch._C.default_generator  # type: ignore[attr-defined]


def test_a_call_that_can_be_differentiated_takes_one_number(closing: list[sl.Pipeline]) -> None:
    """It is the seed of all its draws, so that manual_seed before the call repeats them."""
    pipe = pipeline()
    closing.append(pipe)
    x, _ = batch()
    torch.manual_seed(1)
    pipe(x).sum().backward()
    after = torch.get_rng_state()
    torch.manual_seed(1)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(torch.get_rng_state(), after)


def test_evaluation_does_not_shift_what_training_draws(closing: list[sl.Pipeline]) -> None:
    plain = chain()
    wanted = plain_steps(plain, 2)
    pipe = pipeline()
    closing.append(pipe)
    x, y = batch()
    got = []
    for _ in range(2):
        pipe.eval().step(x, target=y)
        pipe.train()
        with torch.no_grad():
            pipe(x)
        got.append(pipe.step(x, target=y).loss)
    assert all(map(torch.equal, got, wanted))


def test_calls_in_train_mode_do_not_depend_on_the_cuts(closing: list[sl.Pipeline]) -> None:
    x, _ = batch()
    results = []
    for split in (1, 4):
        pipe = pipeline(split=split)
        closing.append(pipe)
        first = pipe(x)
        with torch.no_grad():
            results.append((first, pipe(x), pipe(x)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(results[0][1], results[0][2])


def test_training_goes_on_after_a_restart_as_if_there_had_been_none(
    closing: list[sl.Pipeline],
) -> None:
    x, y = batch()
    torch.manual_seed(SEED)
    whole = pipeline()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    losses, state = [], {}
    for step in range(5):
        if step == 3:
            state = {name: value.clone() for name, value in whole.state_dict().items()}
        losses.append(whole.step(x, target=y).loss)
        optimizer.step()
        optimizer.zero_grad()
    assert whole.step_number == 5
    again = pipeline(split=5)
    closing += [whole, again]
    again.load_state_dict(state)
    again.step_number = 3
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
    assert torch.equal(again.step(x, target=y).loss, losses[3])
    optimizer.step()
    optimizer.zero_grad()
    assert torch.allclose(again.step(x, target=y).loss, losses[4], atol=1e-5)  # a tied layer


@pytest.mark.parametrize("number", [-1, 1.5, True, "3"])
def test_a_step_number_is_a_whole_number(number: Any, closing: list[sl.Pipeline]) -> None:
    pipe = pipeline()
    closing.append(pipe)
    with pytest.raises(ValueError, match="step_number: wanted a whole number"):
        pipe.step_number = number


class Failing(nn.Module):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError("on purpose")
        return F.dropout(x, 0.5)


def test_a_failed_step_does_not_count(closing: list[sl.Pipeline]) -> None:
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(WIDTH, 4), Failing(), nn.Dropout(0.5))
    pipe = pipeline(model, split=2)
    closing.append(pipe)
    x, y = batch()
    first = pipe.step(x, target=y).loss
    Failing.fails = True
    try:
        with pytest.raises(StepError, match="on purpose"):
            pipe.step(x, target=y)
    finally:
        Failing.fails = False
    assert pipe.step_number == 1
    second = pipe.step(x, target=y).loss
    pipe.step_number = 0
    assert torch.equal(pipe.step(x, target=y).loss, first)
    assert torch.equal(pipe.step(x, target=y).loss, second)


class Escaping(nn.Module):
    """Draws where no mode of Python can see it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return x * self.weight + torch.rand(WIDTH)


def test_a_draw_past_the_streams_is_an_error_and_leaves_no_gradients(
    closing: list[sl.Pipeline],
) -> None:
    pipe = pipeline(nn.Sequential(Escaping(), nn.Linear(WIDTH, 4)), split=2)
    closing.append(pipe)
    x, y = batch()
    with pytest.raises(PipeError, match="drew from torch's default generator"):
        pipe.step(x, target=y)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    assert pipe.step_number == 0
    with pytest.raises(PipeError, match="drew from torch's default generator"):
        plain_step(
            nn.Sequential(Escaping(), nn.Linear(WIDTH, 4)),
            x,
            target=y,
            num_microbatches=3,
            loss_fn=F.cross_entropy,
        )


class Promising(nn.Module):
    """Says that it draws nothing."""

    draws_nothing = True

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.weight, self.p) if self.p else x * self.weight


def test_a_promise_to_draw_nothing_is_believed(closing: list[sl.Pipeline]) -> None:
    pipe = pipeline(nn.Sequential(Promising(), nn.Linear(WIDTH, 4)), split=2)
    closing.append(pipe)
    assert pipe._engine.streams.of_call("TRAIN", lambda: 0, 0) is None
    pipe = pipeline(nn.Sequential(Promising(), nn.Dropout(0.5), nn.Linear(WIDTH, 4)), split=2)
    closing.append(pipe)
    assert (
        pipe._engine.streams.of_call("TRAIN", lambda: 0, 0) is not None
    )  # the dropout draws all the same


def test_a_promise_that_is_broken_is_an_error(closing: list[sl.Pipeline]) -> None:
    pipe = pipeline(nn.Sequential(Promising(0.5), nn.Linear(WIDTH, 4)), split=2)
    closing.append(pipe)
    x, y = batch()
    with pytest.raises(PipeError, match="drew from torch's default generator"):
        pipe.step(x, target=y)
    assert all(parameter.grad is None for parameter in pipe.parameters())


class Around(nn.Module):
    """A block of somebody's own, whose code says that it draws nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + changed(self.inner(x)))


def changed(x: Tensor) -> Tensor:
    return x * 0.5


def drawn(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


def own_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) + output.square().mean()


def test_code_that_draws_nothing_is_not_followed(closing: list[sl.Pipeline]) -> None:
    """Following every operation of a small ResNet took a tenth of its time."""
    torch.manual_seed(SEED)
    model = nn.Sequential(Around(), Around(), nn.Linear(WIDTH, 4))
    x, y = batch()
    wanted = plain_step(model, x, target=y, num_microbatches=3, loss_fn=own_loss)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    pipe = pipeline(model, split=3, loss_fn=own_loss)
    closing.append(pipe)
    assert pipe._engine.streams.of_call("TRAIN", lambda: 0, 0) is None
    assert torch.equal(pipe.step(x, target=y).loss, wanted.loss)
    for name, parameter in pipe.named_parameters():
        wanted_gradient = gradients[name]
        assert parameter.grad is not None
        assert wanted_gradient is not None
        assert torch.equal(parameter.grad, wanted_gradient), name


def test_code_that_is_changed_later_is_not_silently_wrong(
    closing: list[sl.Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a name leads to is looked at when the pipeline is built."""
    pipe = pipeline(nn.Sequential(Around(), nn.Linear(WIDTH, 4)), split=2)
    closing.append(pipe)
    monkeypatch.setitem(globals(), "changed", drawn)
    x, y = batch()
    with pytest.raises(PipeError, match="drew from torch's default generator"):
        pipe.step(x, target=y)
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_a_model_that_cannot_draw_is_not_followed(closing: list[sl.Pipeline]) -> None:
    """Dropout with p = 0 and eval mode count as not drawing; what is unknown may draw."""
    dropout = nn.Dropout(0.0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), dropout, nn.Linear(WIDTH, 4))
    pipe = pipeline(model, split=2)
    closing.append(pipe)
    streams = pipe._engine.streams
    assert streams.of_call("TRAIN", lambda: 0, 0) is None
    dropout.p = 0.5
    drawing = streams.of_call("TRAIN", lambda: 0, 0)
    assert drawing is not None
    assert len(drawing.stages) == 1
    pipe.eval()
    assert streams.of_call("TRAIN", lambda: 0, 0) is None


def test_a_wrapper_around_a_stage_is_no_part_of_the_model(closing: list[sl.Pipeline]) -> None:
    plain = chain()
    wanted = plain_steps(plain, 1)
    pipe = pipeline(split=4, wrap_stage=lambda module, index: nn.Sequential(nn.Sequential(module)))
    closing.append(pipe)
    x, y = batch()
    assert torch.equal(pipe.step(x, target=y).loss, wanted[0])


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_block_that_draws_runs_uncompiled(
    in_place: bool, closing: list[sl.Pipeline], caplog: pytest.LogCaptureFixture
) -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(SEED)
        block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))
        if in_place:
            block.compile(backend="eager")
        compiled: Any = block if in_place else torch.compile(block, backend="eager")
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), compiled, nn.Dropout(0.3), nn.Tanh())

    plain = model()
    wanted = plain_steps(plain, 2)
    pipe = pipeline(model(), split=3)
    closing.append(pipe)
    x, y = batch()
    assert all(torch.equal(pipe.step(x, target=y).loss, loss) for loss in wanted)
    assert differences(pipe, plain) == []
    assert "runs uncompiled" in caplog.text


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's own doing
def test_a_compiled_block_that_draws_nothing_stays_compiled(closing: list[sl.Pipeline]) -> None:
    torch.compiler.reset()  # after a few recompilations, by whichever test, it gives up
    compiled = []

    def backend(graph: Any, example: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def wrap(module: nn.Module, index: int) -> Any:
        return torch.compile(module, backend=backend)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0), nn.Linear(WIDTH, 4))
    pipe = pipeline(model, split=2, wrap_stage=wrap)
    closing.append(pipe)
    x, y = batch()
    pipe.step(x, target=y)
    assert compiled


def _in_process(rank: int, transport: str) -> tuple[Tensor, list[str], int]:
    torch.set_num_threads(1)
    plain = chain()
    wanted = plain_steps(plain, 2)
    pipe = pipeline(split=4, transport=transport)
    x, y = batch()
    torch.manual_seed(SEED)
    losses = [pipe.step(x, target=y).loss for _ in range(2)]
    wrong = differences(pipe, plain, TIED)
    wrong += [f"loss {i}" for i in range(2) if not torch.equal(losses[i], wanted[i])]
    number = pipe.step_number
    pipe.close()
    return losses[1], wrong, number


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["shared-memory", "process-group"])
def test_processes_equal_the_plain_model(transport: str, two_ranks: RankPool) -> None:
    reports = two_ranks.run(_in_process, transport)
    assert [(wrong, number) for _, wrong, number in reports] == [([], 2), ([], 2)]


def _unseeded(rank: int) -> tuple[int, float, float]:
    model = chain()
    torch.seed()
    pipe = pipeline(model, split=4)
    x, y = batch()
    loss = pipe.step(x, target=y).loss.item()
    seed = pipe._engine.runner.seed
    plain = chain()
    torch.manual_seed(seed)
    pipe.close()
    return seed, loss, plain_steps(plain, 1)[0].item()


@pytest.mark.processes
def test_processes_that_nobody_seeded_use_the_seed_of_rank_0(two_ranks: RankPool) -> None:
    """torch makes up a seed for every process; dropout would not be that of any plain model."""
    first, second = two_ranks.run(_unseeded)
    assert first == second
    assert first[1] == first[2]


def _other_steps(rank: int) -> str:
    torch.manual_seed(SEED)
    pipe = pipeline(split=4)
    x, y = batch()
    pipe.step_number = 3 + rank
    with pytest.raises(sl.PeerError) as caught:
        pipe.step(x, target=y)
    pipe.close()
    return str(caught.value)


@pytest.mark.processes
def test_processes_at_different_steps_are_told(two_ranks: RankPool) -> None:
    for message in two_ranks.run(_other_steps):
        assert message.startswith("rank 1 is at step 4, rank 0 at step 3: set pipe.step_number")
