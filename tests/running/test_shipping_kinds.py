"""Data of every kind on some ranks only: as the plain model, or an error on all of them.

Every function that begins with an underscore runs on each of several processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.testing import RankPool, plain_step
from tests.running.shipping_cases import WIDTH, Asking, batch, built, differing, grad_of, handed

pytestmark = pytest.mark.processes


@dataclass
class Made:
    """What ``Odd`` returns; torch does not know how to look into it."""

    logits: Tensor
    more: tuple[Tensor, Tensor]


class Odd(nn.Module):
    """Its last stage uses tensors of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 6)
        self.c, self.d = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, odd: dict[str, Any]) -> Made:
        h = self.c(self.b(self.a(x).relu()).tanh())
        h = h * odd["transposed"] + odd["bfloat16"].float() + odd["pair"][0]
        h = torch.where(odd["truth"], h, -h) * odd["scalar"] + odd["whole"] + odd["expanded"]
        if odd["flag"]:
            h = h + odd["numbers"][:, None]
        return Made(self.d(h), (h, odd["numbers"]))


def odd_batch(rows: int, seed: int) -> tuple[Tensor, dict[str, Any], Tensor]:
    torch.manual_seed(seed)
    x, y = torch.randn(rows, 4), torch.randint(3, (rows,))
    odd = {
        "transposed": torch.randn(6, 2 * rows).t()[::2],
        "bfloat16": torch.randn(rows, 6).bfloat16(),
        "pair": (torch.randn(rows, 1), None),
        "truth": torch.rand(rows, 6) > 0.5,
        "numbers": torch.randint(6, (rows,)),
        "scalar": torch.tensor(1.5),
        "whole": torch.randn(1, 6),
        "expanded": torch.randn(rows, 1).expand(rows, 6),
        "flag": True,
    }
    return x, odd, y


def loss_of(made: Made, target: Tensor) -> Tensor:
    return F.cross_entropy(made.logits, target)


def _odd_tensors(rank: int, schedule: str, where: str) -> list[str]:
    """In a V, rank 0 holds the first stage and the last one."""
    torch.manual_seed(0)
    model, plain = Odd(), Odd()
    plain.load_state_dict(model.state_dict())
    x, odd, _ = odd_batch(2, 0)
    pipe = sl.Pipeline(
        model,
        example_args=(x, odd),
        split={"b": "end"} if schedule == "1f1b" else dict.fromkeys("abc", "end"),
        schedule=schedule,
        num_microbatches=4,
        loss_fn=loss_of,
        keep_outputs=True,
        timeout=30,
    )
    wrong = []
    for step, rows in enumerate((8, 7, 1, 5)):
        x, odd, y = odd_batch(rows, step)
        args = (x, {**odd, "whole": sl.replicate(odd["whole"])})
        given, named = handed(where, rank, args, target=y)
        pipe.zero_grad()
        plain.zero_grad()
        result = pipe.step(*given, **named)
        wanted = plain_step(plain, *args, target=y, num_microbatches=4, loss_fn=loss_of, step=step)
        wrong += [f"{rows} rows: {name}" for name in differing(pipe, plain)]
        wrong += [] if torch.equal(result.loss, wanted.loss) else [f"{rows} rows: loss"]
        for made in (result.outputs, pipe(*given)):
            torch.testing.assert_close(made.logits, wanted.outputs.logits)
            wrong += [] if torch.equal(made.more[1], odd["numbers"]) else ["numbers"]
    pipe.close()
    return wrong


@pytest.mark.parametrize("where", ["first", "ends", "all"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
def test_tensors_of_all_kinds_reach_late_stages(
    schedule: str, where: str, two_ranks: RankPool
) -> None:
    """A dataclass that a model returns goes to every process; in 0.1 it could not cross."""
    assert two_ranks.run(_odd_tensors, schedule, where) == [[], []]


TARGETS: dict[str, Callable[[], Any]] = {
    "a scalar": lambda: torch.tensor(2.0),
    "a number": lambda: 2.0,
    "one for all": lambda: sl.replicate(torch.ones(1, 3)),
    "transposed": lambda: torch.arange(21.0).view(3, 7).t(),
    "truth values": lambda: torch.arange(21).view(7, 3) % 2 == 0,
    "bfloat16": lambda: torch.full((7, 3), 0.3, dtype=torch.bfloat16),
    "a dict": lambda: {"y": torch.arange(21.0).view(7, 3), "w": [2, None]},
}


def squared(output: Tensor, target: Any) -> Tensor:
    if isinstance(target, dict):
        target = target["y"] * target["w"][0]
    target = target.float() if isinstance(target, Tensor) else target
    loss: Tensor = ((output - target) ** 2).mean()
    return loss


def _targets(rank: int, where: str) -> list[str]:
    wrong = []
    for name, make in TARGETS.items():
        torch.manual_seed(0)
        model, plain = Asking(), Asking()
        plain.load_state_dict(model.state_dict())
        pipe = built(model, loss_fn=squared)
        x, mask, _ = batch()
        for _ in range(2):
            given, named = handed(where, rank, (x, mask), target=make())
            pipe.zero_grad()
            plain.zero_grad()
            loss = pipe.step(*given, **named).loss
            wanted = plain_step(
                plain, x, mask, target=make(), num_microbatches=3, loss_fn=squared, num_threads=1
            )
            wrong += [f"{name}: {parameter}" for parameter in differing(pipe, plain)]
            wrong += [] if torch.equal(loss, wanted.loss) else [f"{name}: loss"]
        pipe.close()
    return wrong


@pytest.mark.parametrize("where", ["first", "ends", "all"])
def test_targets_of_all_kinds(where: str, two_ranks: RankPool) -> None:
    """A rank that was given a scalar alone asked for a batch dimension, which others know."""
    assert two_ranks.run(_targets, where) == [[], []]


class Labels(NamedTuple):
    """A batch of labels; torch has no name under which it could cross between processes."""

    y: Tensor


def labelled(output: Tensor, labels: Labels) -> Tensor:
    return F.cross_entropy(output, labels.y)


def _named_tuple(rank: int) -> tuple[list[str], bool]:
    torch.manual_seed(0)
    model, plain = Asking(), Asking()
    plain.load_state_dict(model.state_dict())
    pipe = built(model, loss_fn=labelled)
    x, mask, y = batch()
    said = []
    with pytest.raises(sl.StagelineError) as caught:
        pipe.step(*((x, mask) if rank == 0 else ()), target=Labels(y) if rank == 0 else None)
    said.append(f"{type(caught.value).__name__}: {caught.value}")
    loss = pipe.step(x, mask, target=Labels(y)).loss
    wanted = plain_step(plain, x, mask, target=Labels(y), num_microbatches=3, loss_fn=labelled)
    pipe.close()
    return said, torch.equal(loss, wanted.loss)


def test_a_target_that_cannot_travel_is_named_and_works_where_every_rank_has_it(
    two_ranks: RankPool,
) -> None:
    (first, first_is_right), (second, second_is_right) = two_ranks.run(_named_tuple)
    assert first[0].startswith("BatchError: rank 1 lacks a part of the batch, and rank 0 cannot")
    assert "namedtuple class <class 'tests.running.test_shipping_kinds.Labels'>" in first[0]
    assert "TreeSpec(dict" not in first[0]  # the message as a whole, which is no user's concern
    assert second[0].startswith("PeerError: rank 0 failed in a training step: rank 1 lacks a part")
    assert first_is_right
    assert second_is_right


def _target_with_a_gradient(rank: int) -> list[str]:
    torch.manual_seed(0)
    model, plain = Asking(), Asking()
    plain.load_state_dict(model.state_dict())
    pipe = built(model, loss_fn=F.mse_loss)
    x, _, _ = batch()
    given = (x,) if rank == 0 else ()
    target = torch.ones(7, 3, requires_grad=True) if rank == 0 else None
    with pytest.raises(sl.StagelineError) as caught:
        pipe.step(*given, target=target)
    loss = pipe.step(*given, target=None if target is None else target.detach()).loss
    wanted = plain_step(
        plain, x, target=torch.ones(7, 3), num_microbatches=3, loss_fn=F.mse_loss, num_threads=1
    )
    wrong = differing(pipe, plain) + ([] if torch.equal(loss, wanted.loss) else ["loss"])
    pipe.close()
    return [str(caught.value), *wrong]


def test_a_target_that_requires_a_gradient_must_be_given_where_it_is_used(
    two_ranks: RankPool,
) -> None:
    """Its copy would have got the gradient, and nothing would have been said."""
    first, second = two_ranks.run(_target_with_a_gradient)
    told = "the target requires a gradient, which cannot come back to rank 0: pass it on rank 1"
    assert first[0].startswith(told)
    assert told in second[0]
    assert first[1:] == second[1:] == []


def _another_batch_later(rank: int) -> str:
    """Values are compared in the first calls, and then in one of fifty."""
    torch.manual_seed(0)
    pipe = built(Asking())
    for _ in range(4):
        x, mask, y = batch()
        pipe.step(x, mask, target=y)
        x, mask, y = batch(sign=-1)
        pipe.step(x, mask, target=y)
    with pytest.raises(sl.StepError) as caught:
        pipe.step(x if rank else -x, mask, target=y)
    pipe.close()
    return str(caught.value)


def test_a_batch_that_goes_another_way_on_one_rank_is_told(two_ranks: RankPool) -> None:
    """The message spoke of the state of the model alone, which was the same everywhere."""
    for message in two_ranks.run(_another_batch_later):
        assert "the rank before was given another batch, or its model is in another" in message


Given = tuple[tuple[Any, ...], dict[str, Any]]


def wrong_data(rank: int) -> dict[str, Given]:
    """Return for each wrong combination what a rank is given, of at least three."""
    x, _, y = batch()
    last = dist.get_world_size() - 1
    beside: dict[str, tuple[int, Given]] = {  # what a rank is given beside the first one
        "another x": (1, ((x + 1,), {})),  # values are compared in the first calls
        "another target": (last, ((), {"target": (y + 1) % 3})),
        "fewer targets elsewhere": (last, ((), {"target": y[:5]})),
        "a name that the first lacks": (1, ((), {"mask": torch.ones(7, WIDTH)})),
        "another number": (1, ((None, None, 3.0), {})),
        "another dtype": (1, ((x.double(),), {})),
        "an array elsewhere": (1, ((x.numpy(),), {})),
    }
    alone: dict[str, tuple[int, Given]] = {
        "only in the middle": (1, ((x,), {"target": y})),
        "only on the last": (last, ((x,), {"target": y})),
        "nothing": (0, ((), {})),
        "no target": (0, ((x,), {})),
        "no rows": (0, ((x[:0],), {"target": y[:0]})),
        "fewer targets": (0, ((x,), {"target": y[:5]})),
        "an array": (0, ((x.numpy(),), {"target": y})),
        "an array as target": (0, ((x,), {"target": y.numpy()})),
        "an object": (0, ((x,), {"target": {"y": y, "o": object()}})),
        "an unknown name": (0, ((x,), {"target": y, "unknown": 1})),
    }
    at_first: Given = ((x,), {"target": y})
    if rank == 0:
        found = dict.fromkeys(beside, at_first)
        found["another number"] = ((x, None, 2.0), {"target": y})
    else:
        found = {name: given if rank == who else ((), {}) for name, (who, given) in beside.items()}
    for name, (who, given) in alone.items():
        found[name] = given if rank == who else ((), {})
    return found


def built_of_stages(rank: int, model: Asking) -> sl.Pipeline:
    stages = [model.a, nn.Sequential(nn.ReLU(), model.b), model.c, model.d]
    return sl.Pipeline.from_stages(
        {rank: stages[rank]},
        num_stages=4,
        num_microbatches=3,
        loss_fn=F.cross_entropy,
        timeout=30,
    )


def _wrong_data(rank: int, from_stages: bool) -> list[str]:
    """Make all wrong calls before the first right one, and again with a right one after each."""
    torch.manual_seed(0)
    model, plain = Asking(), Asking()
    plain.load_state_dict(model.state_dict())
    pipe = built_of_stages(rank, model) if from_stages else built(model)
    x, _, y = batch(sign=-1)  # where the model does what its layers do, one after the other
    wanted = plain_step(
        plain, x, target=y, num_microbatches=3, loss_fn=F.cross_entropy, num_threads=1
    )
    grads = [grad_of(parameter) for parameter in plain.parameters()]
    strange = []

    def must_fail(name: str, given: Given) -> None:
        try:
            pipe.step(*given[0], **given[1])
            strange.append(f"{name}: no error")
        except sl.StagelineError:
            pass

    def must_be_right(name: str) -> None:
        pipe.zero_grad()
        loss = pipe.step(*((x,) if rank == 0 else ()), target=y if rank == 0 else None).loss
        found = [grad_of(parameter) for parameter in pipe.parameters()]
        is_right = all(any(torch.equal(one, other) for other in grads) for one in found)
        if not is_right or not torch.equal(loss, wanted.loss):
            strange.append(f"{name}: wrong afterwards")

    for name, given in wrong_data(rank).items():
        must_fail(name, given)
    must_be_right("the first call")
    for name, given in wrong_data(rank).items():
        must_fail(name, given)
        must_be_right(name)
    pipe.close()
    return strange


@pytest.mark.parametrize("from_stages", [False, True])
def test_wrong_combinations_are_errors_on_all_ranks_and_the_next_step_is_right(
    from_stages: bool, four_ranks: RankPool
) -> None:
    assert four_ranks.run(_wrong_data, from_stages) == [[]] * 4


def _one_rank_in_eval_mode(rank: int) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3), nn.Dropout(0.5))
    pipe = sl.Pipeline(model, split=2, num_microbatches=2, loss_fn=F.cross_entropy, timeout=30)
    x, _, y = batch()
    said = []
    with torch.no_grad():
        for call in (lambda: pipe(x), lambda: pipe.step(x, target=y)):
            pipe.train(rank == 0)
            with pytest.raises(sl.PeerError) as caught:
                call()
            said.append(str(caught.value))
            pipe.eval()
            call()
    pipe.close()
    return said


def test_eval_on_one_rank_only_is_told(two_ranks: RankPool) -> None:
    """Half of the model dropped, and nothing was said: both ranks made the same calls."""
    for called, stepped in two_ranks.run(_one_rank_in_eval_mode):
        assert called.startswith("rank 1 is at inference, rank 0 at inference in train mode: every")
        assert stepped.startswith("rank 1 is at an evaluation step, rank 0 at an evaluation step")
