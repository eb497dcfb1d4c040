"""Small stages are left whole where a schedule splits their backward: I makes all gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.running.events import ActionDone
from stageline.running.split import worth
from stageline.running.split.worth import VARIABLE, Worth
from stageline.testing import plain_step
from tests.exactness.cases import same

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, MICROBATCHES = 8, 5
SCHEDULES = ("zb-h1", "zb-v", "interleaved-zb", "dualpipe-v", "v-half", "auto")


@pytest.fixture(autouse=True)
def as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def model() -> nn.Sequential:
    torch.manual_seed(5)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(4)]
    return nn.Sequential(*layers)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(6)
    return torch.randn(13, WIDTH), torch.randn(13, WIDTH)


def made_in_i(trained: nn.Sequential, **settings: Any) -> bool:
    """Run a step as a pipeline; return whether I has made gradients of weights."""
    stage = trained[1]
    before_w: dict[str, bool] = {}

    def observe(event: ActionDone) -> None:
        if event.action == "1I0":
            before_w[event.action] = any(p.grad is not None for p in stage.parameters())

    pipe = pipe_of(trained, observer=observe, **settings)
    x, y = batch()
    pipe.step(x, target=y)
    pipe.close()
    return before_w["1I0"]


def pipe_of(trained: nn.Sequential, **settings: Any) -> sl.Pipeline:
    options = {"schedule": "zb-h1", "split": 4, **settings}
    pipe = sl.Pipeline(trained, num_microbatches=MICROBATCHES, loss_fn=F.mse_loss, **options)
    vars(pipe._engine.runner)["_takes_turns"] = False
    return pipe


def check_step(plain: nn.Module, trained: nn.Module, pipe: sl.Pipeline) -> None:
    """Compare the gradients of a step with the plain model's."""
    x, y = batch()
    plain_step(plain, x, target=y, num_microbatches=MICROBATCHES, loss_fn=F.mse_loss)
    pipe.step(x, target=y)
    found = dict(trained.named_parameters())
    wrong = [n for n, p in plain.named_parameters() if not same(found[n].grad, p.grad)]
    assert wrong == []
    pipe.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_to_the_last_bit(schedule: str) -> None:
    plain, trained = model(), model()
    pipe = pipe_of(trained, schedule=schedule, ranks=2)
    x, y = batch()
    for step in range(2):
        wanted = plain_step(
            plain, x, target=y, num_microbatches=MICROBATCHES, loss_fn=F.mse_loss, step=step
        )
        assert torch.equal(pipe.step(x, target=y).loss, wanted.loss)
    found = dict(trained.named_parameters())
    wrong = [n for n, p in plain.named_parameters() if not same(found[n].grad, p.grad)]
    assert wrong == []
    pipe.close()


def test_small_stages_are_whole() -> None:
    assert made_in_i(model())


def test_large_stages_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worth, "BRIDGE", 8)
    assert not made_in_i(model())


def test_all_stages_are_split_if_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    assert not made_in_i(model())


def test_where_somebody_listens_to_gradients_they_wait_for_w() -> None:
    trained = model()
    heard: list[Tensor] = []
    trained[1].get_parameter("0.weight").register_post_accumulate_grad_hook(heard.append)
    assert not made_in_i(trained)
    assert len(heard) == MICROBATCHES


def test_where_i_does_not_ascend_gradients_are_added_in_the_order_of_w() -> None:
    """Left whole, the last microbatch would come first, and the last bits would be others."""
    rows = []
    for stage in range(2):
        order = [*range(MICROBATCHES)]
        row = [f"{stage}F{m}" for m in order]
        row += [f"{stage}I{m}" for m in reversed(order)]
        rows.append(" ".join([*row, *(f"{stage}W{m}" for m in order)]))
    plain, trained = model(), model()
    pipe = pipe_of(trained, split=2, schedule="\n".join(rows))
    check_step(plain, trained, pipe)


def test_uneven_microbatches_are_all_split_or_all_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one decides: or W of one would come after I of the next, in another order."""
    stage = nn.Linear(WIDTH, WIDTH)
    sizes = [3, 2]  # rows of the first microbatches and of the last ones
    work = [rows * (WIDTH * WIDTH + WIDTH) for rows in sizes]
    monkeypatch.setattr(worth, "BRIDGE", (work[0] - 1) / MICROBATCHES)
    given = [torch.ones(rows, WIDTH) for rows in sizes]
    parameters = list(stage.parameters())
    worths = [
        Worth().pays(parameters, [x], num_stages=2, num_microbatches=MICROBATCHES) for x in given
    ]
    assert worths == [True, False]
    torch.manual_seed(5)
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    trained = copy.deepcopy(plain)
    pipe = pipe_of(trained, split=2)
    check_step(plain, trained, pipe)


@pytest.mark.parametrize(
    ("given", "rows"), [([torch.ones(6, 4)], 6), ([torch.ones(2, 3, 4), None], 6), ([], 1)]
)
def test_how_much_work_there_is(given: list[Any], rows: int) -> None:
    parameters = [nn.Parameter(torch.empty(1 << 10, 1 << 9, device="meta"))]  # as many as a bridge

    def is_worth(num_microbatches: int) -> bool:
        return Worth().pays(parameters, given, num_stages=3, num_microbatches=num_microbatches)

    assert is_worth(2 * rows - 1)
    assert not is_worth(2 * rows)


def test_a_single_stage_has_nothing_to_fill() -> None:
    parameters = [nn.Parameter(torch.empty(1 << 15, 1 << 15, device="meta"))]
    given = [torch.empty(1 << 10, 1 << 15, device="meta")]
    assert not Worth().pays(parameters, given, num_stages=1, num_microbatches=1)


def test_what_was_counted_is_worth_more_than_what_was_thought() -> None:
    worth, parameters = Worth(), [nn.Parameter(torch.empty(8, 8))]
    few, many = [torch.ones(4, 8)], [torch.ones(1 << 20, 8)]
    sizes = {"num_stages": 2, "num_microbatches": 1}
    assert worth.pays(parameters, many, **sizes)
    worth.note(many, 1 << 10)
    assert not worth.pays(parameters, many, **sizes)
    worth.note(few, 1 << 30)
    assert worth.pays(parameters, few, **sizes)


def test_a_large_weight_takes_its_time_however_it_was_used() -> None:
    """The gradient of an embedding is as large as itself, though no product waits for W."""
    worth, given = Worth(), [torch.ones(1, 1)]
    worth.note(given, 0)
    parameters = [nn.Parameter(torch.empty(1 << 10, 1 << 10, device="meta"))]
    assert worth.pays(parameters, given, num_stages=2, num_microbatches=1)


def test_no_more_shapes_are_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worth, "_MOST_SHAPES", 2)
    known = Worth()
    for rows in range(5):
        known.note([torch.ones(rows, 1)], rows)
    assert len(known._counted) <= 2


def test_work_is_counted_by_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by rows, narrow ResNets were split, which cost them a quarter of their speed."""
    torch.manual_seed(5)
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(3)]
    plain = nn.Sequential(*layers)
    trained = copy.deepcopy(plain)
    monkeypatch.setattr(worth, "BRIDGE", 1000)
    seen: list[bool] = []

    def observe(event: ActionDone) -> None:
        if event.action == "1I0":
            seen.append(any(p.grad is not None for p in trained[1].parameters()))

    pipe = pipe_of(trained, split=3, observer=observe)
    x, y = torch.randn(2, MICROBATCHES, 4, 6, 6)
    for step in range(2):
        plain.zero_grad()
        trained.zero_grad()
        plain_step(plain, x, target=y, num_microbatches=MICROBATCHES, loss_fn=F.mse_loss, step=step)
        pipe.step(x, target=y)
    assert seen == [False, True]
    for one, other in zip(plain.parameters(), trained.parameters(), strict=True):
        assert same(other.grad, one.grad)
    pipe.close()


class Drops(nn.Module):
    """A first stage of which every other microbatch uses no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 1.5 if self.calls % 2 else self.layer(x)


@pytest.mark.parametrize("splits_all", ["0", "1"])
def test_microbatches_without_a_gradient_to_hand_back(
    splits_all: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their weights waited for W while those of the others were made in I, in another order."""
    monkeypatch.setenv(VARIABLE, splits_all)
    torch.manual_seed(5)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    plain = nn.Sequential(Drops(), *layers)
    trained = copy.deepcopy(plain)
    pipe = pipe_of(trained)
    check_step(plain, trained, pipe)
