"""Recompute: the same numbers with fewer graphs alive. (test_recompute_modes.py: autocast ...)"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.scheduling import Kind
from stageline.scheduling.recompute import MODES
from stageline.testing import RankPool, plain_step

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 6
ROWS = 12


def mlp() -> nn.Sequential:
    """Dropout, statistics and an operation in place."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)),
        *(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.2)),
        *(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)),
    )


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, WIDTH), torch.randint(3, (rows,))


def assert_same(pipe: sl.Pipeline, plain: nn.Module) -> None:
    """Compare each named gradient and every buffer, bit by bit."""
    buffers = dict(pipe.named_buffers())
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffers[name], buffer), name
    gradients = dict(pipe.named_parameters())
    for name, parameter in plain.named_parameters():
        mine = gradients[name].grad
        assert mine is not None, name
        assert parameter.grad is not None, name
        assert torch.equal(mine, parameter.grad), f"gradient of {name}"


def odd(stage: int, microbatch: int) -> bool:
    return (stage + microbatch) % 2 == 1


EVERY_MODE = [
    *(pytest.param(mode, id=mode) for mode in MODES),
    pytest.param([1], id="list"),
    pytest.param(odd, id="function"),
]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "varuna"])
@pytest.mark.parametrize("recompute", EVERY_MODE)
def test_a_step_gives_the_plain_models_numbers(recompute: Any, schedule: str) -> None:
    pipe = sl.Pipeline(
        mlp(),
        split=3,
        num_microbatches=4,
        schedule=schedule,
        loss_fn=F.cross_entropy,
        recompute=recompute,
        keep_outputs=True,
    )
    plain = mlp()
    for step, rows in enumerate((ROWS, ROWS, 9)):
        x, y = batch(rows)
        got = pipe.step(x, target=y)
        want = plain_step(
            plain, x, target=y, num_microbatches=4, loss_fn=F.cross_entropy, step=step
        )
        assert torch.equal(got.loss, want.loss)
        assert torch.equal(got.outputs, want.outputs)
    assert_same(pipe, plain)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "interleaved-zb"])
def test_several_stages_on_a_rank(schedule: str) -> None:
    model, plain = mlp(), mlp()
    pipe = sl.Pipeline(
        model,
        split=4,
        ranks=2,
        num_microbatches=4,
        schedule=schedule,
        loss_fn=F.cross_entropy,
        recompute="always",
    )
    x, y = batch()
    got = pipe.step(x, target=y)
    want = plain_step(plain, x, target=y, num_microbatches=4, loss_fn=F.cross_entropy)
    assert torch.equal(got.loss, want.loss)
    assert_same(pipe, plain)


class Opened(nn.Module):
    """Opened where it is cut: reads its training flag, and uses an argument in a later stage."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(F.relu(layer(x)), 0.2, self.training)
        out: Tensor = self.head(x * mask)
        return out


@pytest.mark.parametrize("recompute", ["always", "waiting"])
def test_a_recorded_model(recompute: str) -> None:
    x, y = batch()
    mask = (torch.arange(ROWS * WIDTH).reshape(ROWS, WIDTH) % 3 > 0).float()
    pipe = sl.Pipeline(
        Opened(),
        example_args=(x[:3], mask[:3]),
        split=3,
        num_microbatches=4,
        loss_fn=F.cross_entropy,
        recompute=recompute,
    )
    plain = Opened()
    got = pipe.step(x, mask, target=y)
    want = plain_step(plain, x, mask, target=y, num_microbatches=4, loss_fn=F.cross_entropy)
    assert torch.equal(got.loss, want.loss)
    assert_same(pipe, plain)


def _two_steps(rank: int, recompute: str, schedule: str) -> dict[str, Tensor | None]:
    torch.set_num_threads(1)
    pipe = sl.Pipeline(
        mlp(),
        split=2,
        num_microbatches=4,
        schedule=schedule,
        loss_fn=F.cross_entropy,
        recompute=recompute,
        timeout=20,
    )
    for rows in (ROWS, 9):
        x, y = batch(rows)
        pipe.step(x, target=y)
    pipe.close()
    return {name: parameter.grad for name, parameter in pipe.named_parameters()}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("recompute", "schedule"), [("always", "1f1b"), ("except_last", "gpipe"), ("waiting", "zb-h1")]
)
def test_processes(recompute: str, schedule: str, two_ranks: RankPool) -> None:
    plain = mlp()
    for step, rows in enumerate((ROWS, 9)):
        x, y = batch(rows)
        plain_step(
            plain,
            x,
            target=y,
            num_microbatches=4,
            loss_fn=F.cross_entropy,
            num_threads=1,
            step=step,
        )
    found: dict[str, Tensor | None] = {}
    for part in two_ranks.run(_two_steps, recompute, schedule):
        found.update(part)
    for name, parameter in plain.named_parameters():
        mine = found[name]
        assert mine is not None, name
        assert parameter.grad is not None, name
        assert torch.equal(mine, parameter.grad), f"gradient of {name}"


# pipe(x) and the caller's backward


def drawless() -> nn.Sequential:
    """Without dropout: the plain loop below draws by torch's one generator."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)),
        *(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)),
    )


def plain_call(model: nn.Module, x: Tensor, count: int) -> Tensor:
    return torch.cat([model(part) for part in x.tensor_split(count)])


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "varuna"])
@pytest.mark.parametrize("recompute", EVERY_MODE)
def test_a_call_gives_the_numbers_of_the_plain_loop(recompute: Any, schedule: str) -> None:
    """One backward through torch.cat of the microbatches, twice: gradients accumulate."""
    pipe = sl.Pipeline(
        drawless(), split=3, num_microbatches=4, schedule=schedule, recompute=recompute
    )
    plain = drawless()
    for rows in (ROWS, 9):
        x, y = batch(rows)
        got, want = pipe(x), plain_call(plain, x, 4)
        assert torch.equal(got, want)
        F.cross_entropy(got, y).backward()
        F.cross_entropy(want, y).backward()
    assert_same(pipe, plain)


def test_a_call_repeats_after_manual_seed() -> None:
    """The seed that the caller has set counts, as for the plain model; and the masks are kept."""
    pipe = sl.Pipeline(mlp(), split=3, num_microbatches=4, recompute="always")
    kept = sl.Pipeline(mlp(), split=2, num_microbatches=4)
    x, _ = batch()
    outputs = []
    for each in (pipe, pipe, kept):
        each.zero_grad()
        torch.manual_seed(7)
        outputs.append(each(x))
        outputs[-1].sum().backward()
    other = pipe(x)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], other)
    wanted = dict(kept.named_parameters())
    for name, parameter in pipe.named_parameters():
        if "bias" not in name:  # those before a BatchNorm are zero but for rounding
            assert parameter.grad is not None
            assert wanted[name].grad is not None
    pipe.zero_grad()
    torch.manual_seed(7)
    pipe(x).sum().backward()
    for name, parameter in pipe.named_parameters():
        mine, theirs = parameter.grad, wanted[name].grad
        assert mine is not None
        assert theirs is not None
        assert torch.equal(mine, theirs), name


def test_a_call_that_draws_nothing_leaves_the_generator_alone() -> None:
    pipe = sl.Pipeline(drawless(), split=2, num_microbatches=2)
    x, _ = batch()
    before = torch.get_rng_state()
    pipe(x).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


class Passes(nn.Module):
    """Returns its input as it is, or a view of it, beside what it makes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(WIDTH))
        self.how = how

    def forward(self, x: Tensor) -> Any:
        if self.how == "alone":
            return x
        return x + self.bias, x if self.how == "beside" else x.view(-1, 2, 3)


class ChangesWhatPassed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Any) -> Tensor:
        made, passed = (0.0, value) if isinstance(value, Tensor) else value
        out: Tensor = self.linear(passed.mul_(0.5).reshape(-1, WIDTH)) + made
        return out


@pytest.mark.parametrize("how", ["alone", "beside", "view"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_later_stage_may_change_in_place_what_a_stage_passes_on(how: str, is_first: bool) -> None:
    """It changed the input that was kept for R, at times before R and at times after it."""

    def stages() -> list[nn.Module]:
        torch.manual_seed(0)
        begins = [] if is_first else [nn.Linear(WIDTH, WIDTH)]
        return [*begins, Passes(how), ChangesWhatPassed()]

    mine, plain = stages(), nn.Sequential(*stages())
    pipe = sl.Pipeline.from_stages(mine, num_microbatches=4, recompute="always")
    # 8 rows of 6 are 192 bytes: parts of the batch are aligned to 64 bytes, as copies are. A matrix
    # product of memory that is aligned in another way may have other bits.
    x, y = torch.randn(32, WIDTH), torch.randint(WIDTH, (32,))
    F.cross_entropy(pipe(x.clone()), y).backward()
    parts = [plain(part.clone()) for part in x.tensor_split(4)]
    F.cross_entropy(torch.cat(parts), y).backward()
    for one, other in zip(nn.Sequential(*mine).parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or other.grad is None or torch.equal(one.grad, other.grad)


def test_an_output_may_be_changed_in_place_before_its_backward() -> None:
    pipe = sl.Pipeline.from_stages(
        [nn.Linear(WIDTH, WIDTH), nn.Identity()],
        num_microbatches=1,
        recompute="always",
        merge_outputs=lambda outputs, sizes: outputs[0],
    )
    x, _ = batch()
    pipe(x).mul_(2.0).sum().backward()
    assert all(parameter.grad is not None for parameter in pipe.parameters())


# What a layer sees


class Counts(nn.Module):
    """Counts its runs by kind, and the graphs that are alive behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()
        self.alive: weakref.WeakSet[Token] = weakref.WeakSet()
        self.most = 0

    def forward(self, x: Tensor) -> Tensor:
        kind = "R" if sl.is_recomputing() else "C" if sl.is_checkpointing() else "n"
        self.runs[kind] += 1
        token = Token()
        out: Tensor = Keeps.apply(x, token)  # type: ignore[no-untyped-call]  # untyped in torch
        self.alive.add(token)
        self.most = max(self.most, len(self.alive))
        return out


class Token:
    """Lives as long as the graph that holds it."""


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


RUNS = {
    "never": {"n": 4},
    "except_last": {"C": 3, "R": 3, "n": 1},
    "always": {"C": 4, "R": 4},
}


@pytest.mark.parametrize("mode", RUNS)
def test_runs_and_graphs_of_a_call(mode: str) -> None:
    """All forwards come first: what is kept is alive at once, what is recomputed one by one."""
    first, second = Counts(), Counts()
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), first), nn.Sequential(nn.Linear(6, 6), second)]
    pipe = sl.Pipeline.from_stages(stages, num_microbatches=4, recompute=mode)
    x, _ = batch()
    pipe(x).sum().backward()
    for counts in (first, second):
        assert counts.runs == RUNS[mode]
        assert not counts.alive
    most = 4 if mode == "never" else 1
    assert [first.most, second.most] == [most, most]


@pytest.mark.parametrize("mode", RUNS)
def test_runs_of_a_step_and_of_an_evaluation(mode: str) -> None:
    first, second = Counts(), Counts()
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), first), nn.Sequential(nn.Linear(6, 3), second)]
    pipe = sl.Pipeline.from_stages(
        stages, num_microbatches=4, loss_fn=F.cross_entropy, recompute=mode, schedule="gpipe"
    )
    x, y = batch()
    for _ in range(20):  # small stages may run in turn, where there is no R
        pipe.step(x, target=y)
    for counts in (first, second):
        assert counts.runs == {kind: 20 * count for kind, count in RUNS[mode].items()} or (
            mode == "never"
        )
        counts.runs.clear()
        assert not counts.alive
    most = {"never": 4, "except_last": 2, "always": 1}[mode]  # the last, and one that is recomputed
    assert [first.most, second.most] == [most, most]
    if mode == "except_last":  # the last one that a short batch has
        pipe.step(x[:2], target=y[:2])
        assert first.runs == second.runs == {"C": 1, "R": 1, "n": 1}
        first.runs.clear()
        second.runs.clear()
    pipe.eval()
    pipe.step(x, target=y)
    pipe(x)
    assert first.runs == second.runs == {"n": 8}


def test_waiting_keeps_what_runs_backward_at_once() -> None:
    counts = [Counts(), Counts()]
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), each) for each in counts]
    pipe = sl.Pipeline.from_stages(
        stages, num_microbatches=4, loss_fn=F.cross_entropy, recompute="waiting"
    )
    x, y = batch()
    pipe.step(x, target=y)
    assert counts[0].runs == {"C": 4, "R": 4}
    assert counts[1].runs == {"n": 4}


# What knows of R


def test_schedule_and_picture_show_what_is_recomputed() -> None:
    pipe = sl.Pipeline(
        drawless(), split=2, num_microbatches=3, schedule="gpipe", recompute="except_last"
    )
    assert pipe.schedule == sl.parse("""
        0F0 0F1 0F2 0R0 0B0 0R1 0B1 0B2
        1F0 1F1 1F2 1R0 1B0 1R1 1B1 1B2""")
    assert "gpipe + R" in repr(pipe)
    assert "R0" in pipe.schedule.picture(width=60)
    costs = sl.Costs(activation_bytes=100, input_bytes=1)
    kept = sl.simulate(sl.schedules.gpipe(2, 3), costs).peak_bytes
    again = sl.simulate(pipe.schedule, costs).peak_bytes
    assert kept is not None
    assert again is not None
    assert sum(again) < sum(kept)


def test_a_schedules_own_recomputation_stays() -> None:
    rows = "0F0 0F1 0R0 0B0 0B1\n1F0 1F1 1B0 1R1 1B1"
    for recompute, places in (("never", 2), ("always", 4)):
        pipe = sl.Pipeline(
            drawless(),
            split=2,
            num_microbatches=2,
            schedule=rows,
            loss_fn=F.cross_entropy,
            recompute=recompute,
        )
        found = [a for row in pipe.schedule.rows() for a in row if a.kind is Kind.RECOMPUTE]
        assert len(found) == len(set(found)) == places


# Arguments


@pytest.mark.parametrize(
    ("recompute", "message"),
    [
        ("sometimes", r"recompute='sometimes': wanted one of 'never', 'always', 'except_last'"),
        ([0, 2], r"recompute=\[0, 2\]: the stages are 0 to 1"),
        ([True], r"recompute=\[True\]: wanted one of"),
        (None, r"recompute=None: wanted one of"),
        (1, r"recompute=1: wanted one of"),
    ],
)
def test_wrong_arguments(recompute: Any, message: str) -> None:
    with pytest.raises(sl.ConfigError, match=message):
        sl.Pipeline(drawless(), split=2, num_microbatches=2, recompute=recompute)


def test_a_frozen_stage_is_recomputed_for_nothing_and_harmless() -> None:
    model, plain = mlp(), mlp()
    for each in (model, plain):
        for parameter in each[:2].parameters():
            parameter.requires_grad_(False)
    pipe = sl.Pipeline(
        model, split=3, num_microbatches=4, loss_fn=F.cross_entropy, recompute="always"
    )
    x, y = batch()
    got = pipe.step(x, target=y)
    want = plain_step(plain, x, target=y, num_microbatches=4, loss_fn=F.cross_entropy)
    assert torch.equal(got.loss, want.loss)
    gradients = dict(pipe.named_parameters())
    for name, parameter in plain.named_parameters():
        mine, theirs = gradients[name].grad, parameter.grad
        assert (mine is None) == (theirs is None), name
        assert mine is None or theirs is None or torch.equal(mine, theirs), name
