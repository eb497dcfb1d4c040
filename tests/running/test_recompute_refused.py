"""What a stage that is recomputed must not do, because R would make another forward of it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.running.first_runs import FirstRun, samples

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 6
ROWS = 12


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(ROWS, WIDTH), torch.randint(3, (ROWS,))


def stack() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]


# Draws


class Draws(nn.Module):
    """Draws from a generator that is not torch's default one."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.source = source
        self.rng = np.random.default_rng(0)
        self.old = np.random.RandomState(0)
        self.py = random.Random(0)
        self.generator = torch.Generator().manual_seed(0)

    def draw(self) -> float:
        ways: dict[str, Callable[[], float]] = {
            "Python's random": random.random,
            "numpy.random": np.random.rand,
            "the generator rng": self.rng.random,
            "the generator old": self.old.rand,
            "the generator py": self.py.random,
            "the generator generator": lambda: torch.rand((), generator=self.generator).item(),
        }
        return ways[self.source]()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.draw()


SOURCES = (
    *("Python's random", "numpy.random", "the generator rng", "the generator old"),
    *("the generator py", "the generator generator"),
)


@pytest.mark.parametrize("source", SOURCES)
def test_draws_that_cannot_be_repeated_are_refused(source: str) -> None:
    """The second run would draw other numbers: gradients of another forward, without a word."""
    stages = [nn.Linear(WIDTH, WIDTH), Draws(source)]
    pipe = sl.Pipeline.from_stages(stages, num_microbatches=2, recompute=[1], loss_fn=F.mse_loss)
    x, _ = batch()
    with pytest.raises(sl.StepError, match=f"{source} was drawn from while a stage ran that is"):
        pipe.step(x, target=x)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    with pytest.raises(sl.StepError, match="leave the stage out of recompute="):
        pipe(x)
    pipe.eval()
    pipe.step(x, target=x)  # no gradient, no second run


def test_draws_of_a_stage_that_is_not_recomputed_are_its_own_affair() -> None:
    stages = [nn.Linear(WIDTH, WIDTH), Draws("the generator rng")]
    pipe = sl.Pipeline.from_stages(stages, num_microbatches=2, recompute=[0], loss_fn=F.mse_loss)
    x, _ = batch()
    pipe.step(x, target=x)


class DrawsMeanwhile(nn.Module):
    """Draws for the second microbatch while the next stage runs the first one."""

    def __init__(self, draw: Callable[[], float], begun: threading.Event) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.draw, self.begun, self.drawn = draw, begun, threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if sl.current_microbatch() == 1:
            assert self.begun.wait(timeout=60)
            x = x * self.draw()
            self.drawn.set()
        made: Tensor = self.linear(x)
        return made


class Waits(nn.Module):
    def __init__(self, meanwhile: DrawsMeanwhile) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.wait = meanwhile.drawn.wait
        self.begin = meanwhile.begun.set

    def forward(self, x: Tensor) -> Tensor:
        self.begin()
        assert self.wait(timeout=60)
        made: Tensor = self.linear(x)
        return made


@pytest.mark.parametrize("own", [True, False])
def test_a_draw_of_another_stage_is_told_apart_if_its_generator_is_its_own(own: bool) -> None:
    """Ranks are threads, and Python's random is one for all of them: the error says the way out."""
    draw = random.Random(0).random if own else random.random
    draws = DrawsMeanwhile(draw, threading.Event())
    stages = [draws, Waits(draws)]
    pipe = sl.Pipeline.from_stages(stages, num_microbatches=2, recompute=[1], loss_fn=F.mse_loss)
    x, _ = batch()
    if own:
        pipe.step(x, target=x)
        return
    with pytest.raises(sl.StepError, match=r"another stage or thread .* own: random\.Random\(\)"):
        pipe.step(x, target=x)


def test_a_draw_in_a_single_microbatch_is_refused() -> None:
    stages = [nn.Linear(WIDTH, WIDTH), Draws("Python's random")]
    pipe = sl.Pipeline.from_stages(
        stages,
        num_microbatches=4,
        recompute=lambda stage, microbatch: (stage, microbatch) == (1, 3),
        loss_fn=F.mse_loss,
    )
    x, _ = batch()
    with pytest.raises(sl.StepError, match=r"1F3 failed.*Python's random was drawn from"):
        pipe.step(x, target=x)


class DropsOne(Draws):
    """Draws which one of many values it drops, and not for the first microbatch."""

    def forward(self, x: Tensor) -> Tensor:
        if not sl.current_microbatch():
            return x * self.weight
        kept = torch.ones(x.numel())
        kept[int(self.draw() * x.numel())] = 0
        return x * self.weight * kept.view_as(x)


@pytest.mark.parametrize("source", SOURCES)
def test_a_late_draw_that_changes_few_values_is_refused(source: str) -> None:
    """Generators were looked at in the first microbatch alone, outputs compared by 61 values: the
    gradient of another forward was returned without a word."""
    stages = [nn.Linear(64, 64), DropsOne(source)]
    pipe = sl.Pipeline.from_stages(stages, num_microbatches=2, recompute=[1], loss_fn=F.mse_loss)
    x = torch.ones(128, 64)
    with pytest.raises(sl.StepError, match=f"{source} was drawn from while a stage ran that is"):
        pipe.step(x, target=x)
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_a_draw_in_the_loss_is_refused() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * random.random()

    pipe = sl.Pipeline.from_stages(stack(), num_microbatches=2, recompute=[2], loss_fn=loss)
    x, _ = batch()
    with pytest.raises(sl.StepError, match=r"2F0 failed.*Python's random was drawn from"):
        pipe.step(x, target=x)


def test_a_source_of_entropy_that_is_not_asked_has_no_say() -> None:
    """SystemRandom is a Random without a state: to read it was an error."""
    first, *others = stack()
    first.entropy = random.SystemRandom()  # type: ignore[assignment]  # no module
    pipe = sl.Pipeline.from_stages(
        [first, *others], num_microbatches=2, recompute="always", loss_fn=F.mse_loss
    )
    x, _ = batch()
    pipe.step(x, target=x)


# Other values in R


OF_THE_FILE = np.random.default_rng(0)


class Varies(nn.Module):
    """Makes other values in every call, by what no one can see from outside."""

    mean: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.how, self.calls = how, 0
        self.rngs = [np.random.default_rng(0)]
        self.entropy = random.SystemRandom()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.linear(x)
        return x * self.factor(x)

    def factor(self, x: Tensor) -> float:
        if self.how == "buffer":
            self.mean = self.mean * 0.5 + x.detach().mean()
        ways: dict[str, Callable[[], float]] = {
            "global": OF_THE_FILE.random,
            "list": self.rngs[0].random,
            "entropy": self.entropy.random,
            "count": lambda: self.calls,
            "buffer": lambda: float(self.mean),
        }
        return ways[self.how]()


@pytest.mark.parametrize("how", ["global", "list", "entropy", "count", "buffer"])
@pytest.mark.parametrize("ends", [True, False])
def test_a_stage_that_makes_other_values_when_it_is_recomputed(how: str, ends: bool) -> None:
    """Generators in a list or a global, and counters, went unseen: gradients of another forward."""
    varies = Varies(how)
    stages = [nn.Linear(WIDTH, WIDTH), *([varies] if ends else [varies, nn.Linear(WIDTH, WIDTH)])]
    pipe = sl.Pipeline.from_stages(stages, num_microbatches=4, recompute=[1], loss_fn=F.mse_loss)
    x, _ = batch()
    with pytest.raises(sl.StepError, match=r"1R\d failed.*made other values when it was recomp"):
        pipe.step(x, target=x)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    varies.calls = 0
    out = pipe(x)
    with pytest.raises(sl.StepError, match=r"1R\d failed.*made other values when it was recomp"):
        out.sum().backward()


class Averages(nn.Module):
    """Puts another buffer in place of its own, as a moving average often does."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.5 + x.detach().mean()
        made: Tensor = self.linear(x)
        return made


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("buffer", "changes one of its buffers in place.*put another tensor in its place"),
        ("argument", "changes one of the model's arguments, in place.*work on a copy"),
        ("input", "changes its input in place.*work on a copy"),
    ],
)
def test_what_a_stage_changes_in_place_is_refused_with_a_way_out(what: str, told: str) -> None:
    """A spectral norm, for one; the errors spoke of schedules, and not of recompute=."""

    class Changes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if what == "argument" or (what == "input" and sl.current_microbatch() == 1):
                x.mul_(2)
            return super().forward(x)

    changes: nn.Module = Changes(WIDTH, WIDTH)
    if what == "buffer":
        changes = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    stages = [changes, nn.Tanh()] if what == "argument" else [nn.Tanh(), changes]
    pipe = sl.Pipeline.from_stages(stages, num_microbatches=2, recompute="always")
    with pytest.raises(sl.StepError, match=f"{told}.*or leave the stage out of recompute="):
        pipe(batch()[0])


def test_a_stage_may_change_its_input_in_some_microbatches_and_not_in_others() -> None:
    """Changed in the first one and not in the second, it was refused in the third."""

    class Changes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            index = sl.current_microbatch()
            assert index is not None
            return super().forward(x if index % 2 else x.mul_(2))

    grads = []
    for recompute in ("never", "always"):
        torch.manual_seed(0)
        stages = [nn.Tanh(), Changes(WIDTH, WIDTH)]
        pipe = sl.Pipeline.from_stages(
            stages, num_microbatches=4, recompute=recompute, loss_fn=F.mse_loss
        )
        x, _ = batch()
        pipe.step(x, target=x)
        grads.append([parameter.grad for parameter in pipe.parameters()])
    for kept, recomputed in zip(*grads, strict=True):
        assert kept is not None
        assert recomputed is not None
        assert torch.equal(kept, recomputed)


def test_a_buffer_that_the_stage_replaces_counts_once() -> None:
    """R put a third value in its place: twice as many updates as microbatches."""
    averages, plain = Averages(), Averages()
    pipe = sl.Pipeline.from_stages(
        [averages, nn.Linear(WIDTH, WIDTH)],
        num_microbatches=4,
        recompute="always",
        loss_fn=F.mse_loss,
    )
    x, _ = batch()
    for _ in range(2):
        pipe.step(x, target=x)
        for part in x.tensor_split(4):
            plain(part)
        assert torch.equal(averages.mean, plain.mean)


def test_values_that_differ_by_rounding_are_the_same() -> None:
    """Kernels of accelerators may add in any order."""
    made = torch.linspace(-3.0, 3.0, 1000)
    made[7] = torch.nan
    first = FirstRun(None, [], samples([made]))
    first.check_made([made * (1 + 1e-6)])
    FirstRun(None, []).check_made([made])
    for other in (made * 1.01, made[:500], made.double()):
        with pytest.raises(sl.EdgeError, match="made other values"):
            first.check_made([other])
    with pytest.raises(sl.EdgeError, match="made other values"):
        first.check_made([])


# What happens between F and R


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_weights_that_change_between_a_call_and_its_backward_are_refused(recompute: str) -> None:
    """R ran with the new weights and gave gradients that belong to no call, without a word."""
    pipe = sl.Pipeline.from_stages(stack(), num_microbatches=4, recompute=recompute)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-6)
    x, _ = batch()
    first, second = pipe(x), pipe(x)
    second.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(sl.StepError, match=r"modified (in place|by an inplace operation)"):
        first.sum().backward()
    assert all(parameter.grad is None for parameter in pipe.parameters())


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_batch_that_changes_between_a_call_and_its_backward_is_refused(recompute: str) -> None:
    """Each microbatch is cut off from the batch, so that autograd does not see the change."""
    pipe = sl.Pipeline.from_stages(stack(), num_microbatches=4, recompute=recompute)
    x, _ = batch()
    out = pipe(x)
    x[-1] = 0.0
    with pytest.raises(sl.PipeError, match="the batch was modified in place between the call and"):
        out.sum().backward()
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_weights_that_change_during_a_step_are_refused() -> None:
    """An optimizer in a gradient hook: later microbatches have run forward with the old weights."""
    pipe = sl.Pipeline.from_stages(
        stack(), num_microbatches=4, schedule="gpipe", recompute="always", loss_fn=F.mse_loss
    )

    def update(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.add_(1e-6)

    for parameter in pipe.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    x, _ = batch()
    with pytest.raises(sl.StepError, match=r"R1 failed.*was modified in place after its forward"):
        pipe.step(x, target=x)


def test_a_buffer_that_changes_between_a_call_and_its_backward_is_refused() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    pipe = sl.Pipeline.from_stages(
        [nn.Sequential(nn.Linear(WIDTH, WIDTH), norm), nn.Linear(WIDTH, 3)],
        num_microbatches=4,
        recompute="always",
    )
    norm.eval()
    x, _ = batch()
    out = pipe(x)
    assert norm.running_var is not None
    norm.running_var.mul_(2)
    with pytest.raises(sl.StepError, match="was modified in place after its forward"):
        out.sum().backward()


class FailsAgain(nn.Module):
    """Fails when it runs for the second time, after its BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.norm(x)
        if sl.is_recomputing():
            raise ValueError("asked to")
        return made


@pytest.mark.parametrize("deferred", [False, True])
def test_a_second_run_that_fails_leaves_running_statistics_as_they_were(deferred: bool) -> None:
    """In a step they are those before it, in the backward of a call those that its forward left."""
    fails = FailsAgain()
    pipe = sl.Pipeline.from_stages(
        [nn.Linear(WIDTH, WIDTH), fails],
        num_microbatches=4,
        recompute="always",
        loss_fn=F.mse_loss,
        deferred_batch_norm=deferred,
    )
    x, _ = batch()
    with pytest.raises(sl.StepError, match="asked to"):
        pipe.step(x, target=x)
    for buffer, fresh in zip(fails.norm.buffers(), nn.BatchNorm1d(WIDTH).buffers(), strict=True):
        assert torch.equal(buffer, fresh)
    out = pipe(x)
    counted = [buffer.clone() for buffer in fails.norm.buffers()]
    with pytest.raises(sl.StepError, match="asked to"):
        out.sum().backward()
    for buffer, before in zip(fails.norm.buffers(), counted, strict=True):
        assert torch.equal(buffer, before)
