"""Small stages in the caller's thread: the same bits as in threads, and never a step in between."""

from __future__ import annotations

import threading
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.errors import PipeError, StepError
from stageline.running import in_turn
from stageline.running.in_turn import AGAIN, LONGEST, TRIALS, WARM_UP, Tempo
from stageline.testing import OrderedTransport, plain_step

pytestmark = pytest.mark.usefixtures("one_thread")


class Watch:
    """Stands in for F.linear, for a module of ours might draw random numbers and never take turns.

    Attributes:
        threads: In which threads linear layers ran since somebody asked.
        fails: Where a layer fails; and which one.
    """

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.fails = ""
        self.weight: Tensor | None = None
        self._linear = F.linear

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        self.threads.add(threading.current_thread().name)
        fails = self.fails if weight is self.weight else ""
        if fails == "forward":
            raise ValueError("asked to")
        if fails == "interrupt":
            raise KeyboardInterrupt
        y = self._linear(x, weight, bias)
        if fails == "backward":
            y.register_hook(_fail)
        return y

    def ran_in(self) -> set[str]:
        """Return in which threads layers ran since last asked."""
        threads, self.threads = self.threads, set()
        return threads

    def fail(self, layer: nn.Module, where: str) -> None:
        """Let a layer fail from now on."""
        assert isinstance(layer, nn.Linear)
        self.fails, self.weight = where, layer.weight


def _fail(gradient: Tensor) -> None:
    raise ValueError("asked to")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    monkeypatch.setattr(F, "linear", watch)
    return watch


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))


def batch(rows: int = 10) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, 4), torch.randn(rows, 4)


def pipeline(model: nn.Module, **options: Any) -> sl.Pipeline:
    settings = {"num_microbatches": 4, "loss_fn": F.mse_loss, "ranks": 2, **options}
    return sl.Pipeline(model, split=settings.pop("split", 2), **settings)


@pytest.fixture
def in_turn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every call run in turn that can; the first one cannot, its graphs are looked at."""
    monkeypatch.setattr(Tempo, "prefers_turns", True)


RANKS = {"stageline-rank-0", "stageline-rank-1"}
CALLER = {"MainThread"}


@pytest.mark.usefixtures("in_turn_at_once")
@pytest.mark.parametrize(
    ("schedule", "split"),
    [("1f1b", 2), ("gpipe", 2), ("zb-h1", 2), ("interleaved", 4), ("zb-v", 4)],
)
def test_every_step_is_that_of_the_plain_model(schedule: str, split: int, watch: Watch) -> None:
    """The first step runs in threads, the next ones in turn, on batches of any size."""
    model, plain = net(), net()
    pipe = pipeline(model, schedule=schedule, split=split, keep_outputs=True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, plain)]
    for number, rows in enumerate((12, 12, 9, 16, 12)):
        x, y = batch(rows)
        got = pipe.step(x, target=y)
        assert watch.ran_in() <= (CALLER if number else RANKS)
        want = plain_step(plain, x, target=y, num_microbatches=4, loss_fn=F.mse_loss)
        watch.ran_in()
        assert torch.equal(got.loss, want.loss)
        assert torch.equal(got.outputs, want.outputs)
        for (name, mine), theirs in zip(pipe.named_parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            assert torch.equal(mine.grad, theirs.grad), name
        for name, value in plain.state_dict().items():
            assert torch.equal(pipe.state_dict()[name], value), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.usefixtures("in_turn_at_once")
@pytest.mark.parametrize("recompute", ["always", [1]])
def test_what_is_recomputed_runs_in_threads(recompute: Any, watch: Watch) -> None:
    """In turn nothing is recomputed: after some steps, graphs of all microbatches were kept."""
    pipe = pipeline(net(), recompute=recompute)
    for rows in (12, 12, 9):
        x, y = batch(rows)
        pipe.step(x, target=y)
        assert watch.ran_in() == RANKS


@pytest.mark.usefixtures("in_turn_at_once")
def test_gradients_of_the_arguments_come_too(watch: Watch) -> None:
    x, y = batch()
    model = net().eval()  # statistics stand still, so that steps can be compared
    pipe = pipeline(model)
    pipe.training = True
    found = []
    for _ in range(2):
        wanting = x.clone().requires_grad_()
        pipe.step(wanting, target=y)
        found.append(wanting.grad)
    assert watch.ran_in() == CALLER | RANKS
    assert found[0] is not None
    assert found[1] is not None
    assert torch.equal(found[0], found[1])


@pytest.mark.usefixtures("in_turn_at_once")
def test_evaluation_and_inference_in_turn(watch: Watch) -> None:
    x, y = batch()
    model = net()
    pipe = pipeline(model)
    pipe.eval()
    loss = pipe.step(x, target=y).loss
    assert torch.equal(pipe(x), torch.cat([model(part) for part in x.tensor_split(4)]))
    assert torch.equal(
        loss, plain_step(model, x, target=y, num_microbatches=4, loss_fn=F.mse_loss).loss
    )
    assert watch.ran_in() == CALLER


@pytest.mark.usefixtures("in_turn_at_once")
def test_a_failing_forward_names_its_stage_and_leaves_no_gradient(watch: Watch) -> None:
    x, y = batch()
    model = net()
    pipe = pipeline(model)
    pipe.step(x, target=y)
    pipe.zero_grad()
    statistics = {name: value.clone() for name, value in model[1].named_buffers()}
    watch.fail(model[-1], "forward")
    with pytest.raises(StepError, match="rank 1, stage 1, microbatch 0: action 1F0 failed: Value"):
        pipe.step(x, target=y)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    for name, value in model[1].named_buffers():
        assert torch.equal(value, statistics[name]), name


@pytest.mark.usefixtures("in_turn_at_once")
def test_a_failing_backward_says_that_stages_ran_as_one(watch: Watch) -> None:
    x, y = batch()
    model = net()
    pipe = pipeline(model)
    pipe.step(x, target=y)
    watch.fail(model[0], "backward")
    with pytest.raises(StepError, match=r"asked to \(All stages .* any of them\.\) \(Gradients"):
        pipe.step(x, target=y)


@pytest.mark.usefixtures("in_turn_at_once")
def test_an_interrupt_stays_one(watch: Watch) -> None:
    x, y = batch()
    model = net()
    pipe = pipeline(model)
    pipe.step(x, target=y)
    watch.fail(model[0], "interrupt")
    with pytest.raises(KeyboardInterrupt):
        pipe.step(x, target=y)


@pytest.mark.usefixtures("in_turn_at_once")
def test_a_mode_of_the_callers_is_refused_either_way() -> None:
    """Otherwise a script would break in the step in which threads turn out to be faster."""
    from torch.utils.flop_counter import FlopCounterMode

    x, y = batch()
    pipe = pipeline(net())
    pipe.step(x, target=y)
    with (
        pytest.raises(PipeError, match="FlopCounterMode is active"),
        FlopCounterMode(display=False),
    ):
        pipe.step(x, target=y)


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def noisy() -> nn.Sequential:
    return nn.Sequential(*net(), nn.Dropout(0.5))


@pytest.mark.usefixtures("in_turn_at_once")
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (
            tied,
            {"split": 4, "schedule": "interleaved"},
        ),  # one graph would add up what two stages give before it adds up microbatches
        (noisy, {}),  # streams belong to stages
        (net, {"transport": OrderedTransport()}),  # a test wants to see packets travel
        (net, {"observer": lambda event: None}),  # somebody wants to see the ranks
    ],
)
def test_what_cannot_run_in_turn_runs_in_threads(
    make: Any, options: dict[str, Any], watch: Watch
) -> None:
    x, y = batch()
    pipe = pipeline(make(), **options)
    for _ in range(3):
        pipe.step(x, target=y)
    assert watch.ran_in() == RANKS


@pytest.mark.usefixtures("in_turn_at_once")
def test_an_order_of_its_own_is_kept(watch: Watch) -> None:
    """This schedule takes the second microbatch first; sums depend on it in the last bit."""
    x, y = batch()
    schedule = sl.parse("0F1 0F0 0B1 0B0\n1F1 1B1 1F0 1B0")
    pipe = pipeline(net(), schedule=schedule, num_microbatches=2)
    for _ in range(3):
        pipe.step(x, target=y)
    assert watch.ran_in() == RANKS


def test_both_ways_are_tried(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_turn, "LONGEST", 60.0)  # however slow the machine is,
    monkeypatch.setattr(in_turn, "HOPELESS", 1e9)  # and whatever else it does in between
    x, y = batch()
    pipe = pipeline(net())
    for _ in range(1 + WARM_UP + TRIALS):  # in the first one graphs are looked at
        pipe.step(x, target=y)
    assert watch.ran_in() == RANKS
    for _ in range(TRIALS):
        pipe.step(x, target=y)
    assert watch.ran_in() == CALLER


def test_large_stages_never_try_turns() -> None:
    tempo = Tempo(num_actions=10, num_ranks=2)
    for _ in range(2 * AGAIN):
        assert not tempo.prefers_turns
        tempo.note(LONGEST * 10, in_turn=False)


def test_turns_that_are_far_slower_are_taken_twice() -> None:
    """With many ranks a turn may take many times as long as a step in threads."""
    tempo = Tempo(num_actions=100, num_ranks=2)
    seconds = {True: 9e-3, False: 2e-3}
    tried = []
    for _ in range(2 * AGAIN):
        tried.append(tempo.prefers_turns)
        tempo.note(seconds[tried[-1]], in_turn=tried[-1])
    assert tried.count(True) == 2


def test_the_slower_way_gets_another_chance() -> None:
    """A machine that was busy in the first steps must not decide for all of them."""
    tempo = Tempo(num_actions=100, num_ranks=2)
    seconds = {True: 3e-3, False: 2e-3}
    for _ in range(WARM_UP + 2 * TRIALS):
        in_turn_now = tempo.prefers_turns
        tempo.note(seconds[in_turn_now], in_turn=in_turn_now)
    seconds[True] = 1e-3  # the machine is quiet again
    tried = []
    for _ in range(AGAIN):
        tried.append(tempo.prefers_turns)
        tempo.note(seconds[tried[-1]], in_turn=tried[-1])
    first = 16 - WARM_UP - 2 * TRIALS
    assert not any(tried[:first])
    assert all(tried[first : first + 32])
    assert tried.count(False) <= first + 4 * (WARM_UP + 1)


def test_threads_that_were_slow_at_first_are_found_again() -> None:
    """A race began while others still built their models: turns were kept for all of it.

    One call in threads, once in a while, did not help. It comes after calls in turn, and is slow.
    """
    tempo = Tempo(num_actions=100, num_ranks=2)
    before = True
    tried = []
    for number in range(64):
        in_turn_now = tempo.prefers_turns
        in_threads = 9e-3 if number < 12 or before else 2e-3
        tempo.note(3e-3 if in_turn_now else in_threads, in_turn=in_turn_now)
        before = in_turn_now
        tried.append(in_turn_now)
    assert all(tried[1 + TRIALS : 16])
    assert not any(tried[20:31])


@pytest.mark.parametrize("slower", [True, False])
def test_a_way_that_is_clearly_slower_is_given_up_at_once(slower: bool) -> None:
    """Each time both ways were compared anew cost a race one round in twenty."""
    tempo = Tempo(num_actions=100, num_ranks=2)
    seconds = {slower: 1.5e-3, not slower: 1e-3}
    taken = []
    for _ in range(AGAIN + 8):
        taken.append(tempo.prefers_turns)
        tempo.note(seconds[taken[-1]], in_turn=taken[-1])
    again = [number for number, way in enumerate(taken) if way is slower and number >= 16]
    assert again == [16, 17, 64, 65, 256, 257, AGAIN, AGAIN + 1]


def test_threads_that_are_fast_by_luck_are_not_chosen() -> None:
    """A race of tiny layers ran in threads, a fifth slower: the fastest call of four was compared.

    Two threads that do not meet at the interpreter lock are fast once in a while; turns never are.
    """
    tempo = Tempo(num_actions=100, num_ranks=2)
    threads = cycle([4.2e-3, 4.1e-3, 3.0e-3, 4.3e-3])
    chosen = []
    for _ in range(200):
        chosen.append(tempo.prefers_turns)
        tempo.note(3.5e-3 if chosen[-1] else next(threads), in_turn=chosen[-1])
    assert chosen[20:].count(False) <= 2 * (WARM_UP + TRIALS)


def test_threads_have_to_earn_their_cores() -> None:
    """Another race of tiny layers: noise let threads pass turns by a tenth, and they were kept.

    In the calls that followed they were slower again, for hundreds of steps.
    """
    tempo = Tempo(num_actions=100, num_ranks=2)
    chosen = []
    for number in range(64):
        chosen.append(tempo.prefers_turns)
        turns = 3.9e-3 if number < 16 else 3.5e-3  # noise, while both are timed
        tempo.note(turns if chosen[-1] else 3.6e-3, in_turn=chosen[-1])
    assert all(chosen[WARM_UP + 2 * TRIALS : 16])
    assert chosen[16:].count(False) <= WARM_UP + TRIALS
