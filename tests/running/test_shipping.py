"""Data where it is needed: a rank that is given nothing computes what the model computes.

Every function that begins with an underscore runs on each of several processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.running.control import Member
from stageline.running.processes import ProcessRunner
from stageline.testing import RankPool, plain_step
from tests.running.shipping_cases import (
    WIDTH,
    Asking,
    batch,
    built,
    differing,
    grad_of,
    handed,
    trained,
)

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("transport", [None, "process-group"])
@pytest.mark.parametrize("where", ["first", "ends", "all"])
def test_a_recorded_model_trains_wherever_its_data_is(
    where: str, transport: str | None, two_ranks: RankPool
) -> None:
    assert two_ranks.run(trained, where, {"transport": transport}) == [[], []]


@pytest.mark.parametrize("where", ["first", "all"])
def test_a_model_that_began_on_meta_is_recorded_again(where: str, four_ranks: RankPool) -> None:
    """A rank has made only its own stages real, and could record nothing but the example."""
    assert four_ranks.run(trained, where, {}, True) == [[]] * 4


def _evaluated(rank: int, where: str, kind: str) -> list[str]:
    torch.manual_seed(0)
    model, plain = Asking(dropout=0.25), Asking(dropout=0.25)
    plain.load_state_dict(model.state_dict())
    pipe = built(model, keep_outputs=True)
    x, mask, y = batch()
    wrong = []
    given, named = handed(where, rank, (x, mask), target=y)
    pipe.step(*given, **named)  # as it was recorded; what follows is not
    pipe.eval()
    plain.eval()
    parts = zip(x.tensor_split(3), mask.tensor_split(3), strict=True)
    with torch.no_grad():
        wanted = torch.cat([plain(*part) for part in parts])
    outputs = [pipe.step(*given, **named).outputs] if kind == "step" else []
    named.pop("target", None)
    outputs += [pipe(*given, **named) for _ in range(2)]
    wrong = [f"{i}" for i, output in enumerate(outputs) if not torch.equal(output, wanted)]
    pipe.close()
    return wrong


@pytest.mark.parametrize("where", ["first", "ends"])
@pytest.mark.parametrize("kind", ["step", "call"])
def test_evaluation_and_inference_get_their_data_too(
    where: str, kind: str, two_ranks: RankPool
) -> None:
    """The first time in eval mode is a new recording, which only the first rank can make."""
    assert two_ranks.run(_evaluated, where, kind) == [[], []]


def weight_of(part: Any, whole: Any) -> float:
    return float(part.target.sum() + 1) / float(whole.target.sum() + len(whole.args[0]))


def _own_stages(rank: int, where: str, weighed: bool) -> list[str]:
    torch.manual_seed(0)
    layers = [nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)]
    plain = nn.Sequential(*(nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)))
    plain.load_state_dict(nn.Sequential(*layers).state_dict())
    reduction: Any = weight_of if weighed else "mean"
    pipe = sl.Pipeline.from_stages(
        {rank: layers[rank]},
        num_stages=2,
        num_microbatches=3,
        loss_fn=F.cross_entropy,
        loss_reduction=reduction,
        timeout=30,
    )
    wrong = []
    for rows in (7, 2):
        x, _, y = batch(rows)
        given, named = handed(where, rank, (x,), target=y)
        pipe.zero_grad()
        plain.zero_grad()
        loss = pipe.step(*given, **named).loss
        wanted = plain_step(
            plain,
            x,
            target=y,
            num_microbatches=3,
            loss_fn=F.cross_entropy,
            loss_reduction=reduction,
        )
        wrong += [] if torch.equal(loss, wanted.loss) else [f"{rows} rows: loss"]
        wrong += differing(pipe, plain)
        output = pipe(*given)
        parts = x.tensor_split(min(3, rows))
        if not torch.equal(output, torch.cat([plain(part) for part in parts])):
            wrong.append(f"{rows} rows: output")
    pipe.close()
    return wrong


@pytest.mark.parametrize(("where", "weighed"), [("first", False), ("ends", False), ("first", True)])
def test_stages_of_ones_own_get_their_data(where: str, weighed: bool, two_ranks: RankPool) -> None:
    """A rank that gives the target also weighs the losses, and sees the whole batch for it."""
    assert two_ranks.run(_own_stages, where, weighed) == [[], []]


class OwnLoss(Asking):
    """Computes its loss itself, with labels that are an argument of its last stage."""

    def forward(self, x: Tensor, mask: Tensor, labels: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(x, mask), labels["y"])


def _with_a_loss_of_its_own(rank: int) -> list[str]:
    torch.manual_seed(0)
    model, plain = OwnLoss(), OwnLoss()
    plain.load_state_dict(model.state_dict())
    example = (torch.ones(2, 4), torch.ones(2, WIDTH), {"y": torch.zeros(2, dtype=torch.long)})
    pipe = sl.Pipeline(
        model, example_args=example, split={"a": "end"}, num_microbatches=3, timeout=30
    )
    x, mask, y = batch()
    args = (x, mask, {"y": y})
    loss = pipe.step(*(args if rank == 0 else ())).loss
    wanted = plain_step(plain, *args, num_microbatches=3)
    wrong = differing(pipe, plain) + ([] if torch.equal(loss, wanted.loss) else ["loss"])
    pipe.close()
    return wrong


def test_labels_that_are_arguments_reach_the_last_stage(two_ranks: RankPool) -> None:
    assert two_ranks.run(_with_a_loss_of_its_own) == [[], []]


def _with_a_gradient_of_the_input(rank: int, where: str) -> list[str]:
    torch.manual_seed(0)
    model, plain = Asking(), Asking()
    plain.load_state_dict(model.state_dict())
    pipe = built(model)
    x, mask, y = batch()
    mine, theirs = mask.clone().requires_grad_(), mask.clone().requires_grad_()
    given, named = handed(where, rank, (x, mine), target=y)
    loss = pipe.step(*given, **named).loss
    wanted = plain_step(plain, x, theirs, target=y, num_microbatches=3, loss_fn=F.cross_entropy)
    wrong = differing(pipe, plain) + ([] if torch.equal(loss, wanted.loss) else ["loss"])
    if rank == 0 and (mine.grad is None or not torch.equal(mine.grad, grad_of(theirs))):
        wrong.append("the mask")
    pipe.close()
    return wrong


@pytest.mark.parametrize("where", ["first", "all"])
def test_an_argument_of_a_late_stage_gets_its_gradient(where: str, two_ranks: RankPool) -> None:
    assert two_ranks.run(_with_a_gradient_of_the_input, where) == [[], []]


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count what this rank sends, but for heartbeats: to the hub, and from rank to rank."""
    counts = Counter[str]()
    send, tell = Member._send, ProcessRunner.tell

    def noted_send(member: Member, message: Any, files: Any = ()) -> None:
        counts[message["kind"]] += message["kind"] != "beat"
        send(member, message, files)

    def noted_tell(runner: ProcessRunner, rank: int, number: int, value: Any) -> None:
        counts[f"D{number}"] += 1
        tell(runner, rank, number, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Member, "_send", noted_send)
        patch.setattr(ProcessRunner, "tell", noted_tell)
        yield counts


def _messages(rank: int, where: str, kind: str = "training") -> list[dict[str, int]]:
    torch.manual_seed(0)
    pipe = built(Asking()).train(kind == "training")
    x, mask, y = batch()
    found = []
    for _ in range(3):
        given, named = handed(where, rank, (x, mask), target=y)
        with counted() as counts:
            pipe(*given) if kind == "inference" else pipe.step(*given, **named)
        # Memory is handed over by a post: more of it, while the pipeline is new.
        found.append({kind: n for kind, n in counts.items() if n and kind != "post"})
    pipe.close()
    return found


@pytest.mark.parametrize("kind", ["training", "evaluation", "inference"])
def test_nothing_is_sent_where_every_rank_has_the_batch(kind: str, two_ranks: RankPool) -> None:
    """In the first call ranks tell the hub what they were given; from then on nothing at all."""
    settling: dict[str, int] = {"begin": 1, "done": 1}
    for first, *others in two_ranks.run(_messages, "all", kind):
        assert first == settling
        assert others == [{}, {}]


def test_what_is_lacking_is_sent_in_one_piece(two_ranks: RankPool) -> None:
    (_, *first), (_, *second) = two_ranks.run(_messages, "first")
    assert first == [{"begin": 1, "done": 1, "D0": 1, "D1": 1}] * 2
    assert second == [{"begin": 1, "done": 1}] * 2


def _raised(pipe: sl.Pipeline | None, call: Callable[[], Any]) -> str:
    """Return what a call raises; of gradients that it may have spoiled it need not speak."""
    if pipe is not None:
        pipe.zero_grad()
    try:
        call()
    except sl.StagelineError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _other_data_than_settled(rank: int) -> list[str]:
    torch.manual_seed(0)
    pipe = built(Asking())
    x, mask, y = batch()

    def step(where: str) -> str:
        given, named = handed(where, rank, (x, mask), target=y)
        return _raised(pipe, lambda: pipe.step(*given, **named))

    said = [step(where) for where in ("first", "all", "first", "ends", "first")]
    pipe.eval()
    said += [step(where) for where in ("all", "all")]
    pipe.close()
    return said


def test_ranks_that_hold_other_data_than_in_the_first_call_are_told(two_ranks: RankPool) -> None:
    """Training and evaluation are settled apart, and a call that fails settles nothing else."""
    first, second = two_ranks.run(_other_data_than_settled)
    sentence = (
        "rank 1 was given arguments and a target, but nothing in the first call of this kind (a "
        "training step), where it was settled which ranks hold data: give it the same in every "
        "such call, or build another pipeline"
    )
    assert second[1] == f"BatchError: {sentence}"
    assert first[1] == f"PeerError: rank 1 failed in a training step: {sentence}"
    assert [first[i] for i in (0, 2, 4, 5, 6)] == ["nothing"] * 5
    assert [second[i] for i in (0, 2, 4, 5, 6)] == ["nothing"] * 5
    # Here both ranks are given something else, and either may be the first to say so.
    assert "in the first call of this kind (a training step)" in first[3]
    assert "in the first call of this kind (a training step)" in second[3]


def _different_data(rank: int) -> list[str]:
    torch.manual_seed(0)
    pipe = built(Asking())
    x, mask, y = batch()
    said = []
    for first, second in (
        ((x, mask), (x + 1, mask)),
        ((x, mask), (x,)),
        ((x,), (x, mask)),
    ):
        said.append(_raised(pipe, lambda: pipe.step(*(second if rank else first), target=y)))  # noqa: B023
    said.append(_raised(pipe, lambda: pipe.step(*([x, mask] if rank == 0 else []), target=None)))
    said.append(_raised(pipe, lambda: pipe.step(x, mask, target=y)))
    said.append(_raised(pipe, lambda: pipe.step(*((x,) if rank else (x, mask)), target=y)))
    said.append(_raised(pipe, lambda: pipe.step(x, mask, target=y)))
    pipe.close()
    return said


def test_ranks_that_are_given_different_data_are_told(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_different_data)
    assert "rank 1 was given another batch than rank 0: args[0] is" in first[0]
    # A rank with a part of the arguments lacks the others, and is sent what it needs.
    assert first[1] == second[1] == "nothing"
    assert first[2] == second[2]
    assert first[2].startswith("PeerError: rank 0 was not given args[1], which rank 1 was given")
    # Both ranks are given something else, and either may be the first to say so.
    assert "where it was settled which ranks hold data" in first[3]
    assert "where it was settled which ranks hold data" in second[3]
    assert first[4] == second[4] == "nothing"


def _two_kinds(rank: int) -> list[str]:
    torch.manual_seed(0)
    pipe = built(Asking())
    x, mask, y = batch()
    said = [
        _raised(pipe, lambda: pipe.step(x, mask, target=y)),
        _raised(pipe, lambda: pipe.step(*((x,) if rank else (x, mask)), target=y)),
        _raised(pipe, lambda: pipe.step(x, target=y)),
    ]
    pipe.eval()
    said.append(_raised(pipe, lambda: pipe.step(*((x, mask) if rank else (x,)), target=y)))
    said.append(_raised(pipe, lambda: pipe.step(*((x, mask) if rank == 0 else ()))))
    said.append(_raised(pipe, lambda: pipe.step(x, mask, target=y)))
    pipe.close()
    return said


def test_an_argument_that_only_one_rank_was_given_is_named(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_two_kinds)
    told = (
        "PeerError: rank 1 was not given args[1], which rank 0 was given: in the first call rank 1 "
        "was given all arguments, so pass this one there too"
    )
    assert first[:3] == second[:3] == ["nothing", told, "nothing"]
    assert second[3] == (
        "BatchError: rank 1 was given args[1], but rank 0, which holds stage 0, was not: pass the "
        "whole batch there"
    )
    assert second[4] == (
        "BatchError: rank 1 holds the last stage and needs a target for loss_fn, but no rank was "
        "given one: step(x, target=y)"
    )
    assert first[5] == second[5] == "nothing"


class Fuse(nn.Linear):
    """Raises in its next call, once it was lit."""

    is_lit = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_lit:
            self.is_lit = False
            raise ValueError("boom")
        return super().forward(x)


def _fails_and_goes_on(rank: int, where: str, transport: str) -> list[str]:
    """A first call, a new recording and a later call fail on either rank; the next one is right."""
    torch.manual_seed(0)
    model, plain = Asking(), Asking()
    model.a, model.d = Fuse(4, WIDTH), Fuse(WIDTH, 3)
    plain.load_state_dict(model.state_dict())
    pipe = built(model, transport=transport)
    own = model.d if rank else model.a
    assert isinstance(own, Fuse)
    wrong = []
    for sign, victim in ((1, 0), (1, 1), (-1, 1), (-1, 0), (1, 1)):
        x, mask, y = batch(sign=sign)
        given, named = handed(where, rank, (x, mask), target=y)
        own.is_lit = rank == victim
        raised = _raised(pipe, lambda: pipe.step(*given, **named))  # noqa: B023
        wrong += [] if "boom" in raised else [raised]
        own.is_lit = False
        bad = (x, mask[:3]) if rank == 0 else given
        raised = _raised(pipe, lambda: pipe.step(*bad, **named))  # noqa: B023
        wrong += [] if "args[1] has 3 rows" in raised else [raised]
        pipe.zero_grad()
        plain.zero_grad()
        loss = pipe.step(*given, **named).loss
        wanted = plain_step(plain, x, mask, target=y, num_microbatches=3, loss_fn=F.cross_entropy)
        wrong += differing(pipe, plain) + ([] if torch.equal(loss, wanted.loss) else ["loss"])
    pipe.close()
    return wrong


@pytest.mark.parametrize("transport", ["shared-memory", "process-group"])
@pytest.mark.parametrize("where", ["first", "all"])
def test_a_call_that_fails_leaves_the_next_one_right(
    where: str, transport: str, two_ranks: RankPool
) -> None:
    assert two_ranks.run(_fails_and_goes_on, where, transport) == [[], []]


def _other_state(rank: int) -> list[str]:
    torch.manual_seed(0)
    model = Asking(dropout=0.25)
    pipe = built(model)
    x, mask, y = batch()
    given, named = handed("first", rank, (x, mask), target=y)
    said = [_raised(pipe, lambda: pipe.step(*given, **named))]
    with torch.autocast("cpu", torch.bfloat16, enabled=rank == 0):
        said.append(_raised(pipe, lambda: pipe.step(*given, **named)))
    model.factor = 1 + rank
    said.append(_raised(pipe, lambda: pipe.step(*given, **named)))
    model.factor = 1
    odd = {"scale": 1j} if rank == 0 else {}
    said.append(_raised(pipe, lambda: pipe.step(*given, **named, **odd)))
    said.append(_raised(pipe, lambda: pipe.step(*given, **named)))
    pipe.close()
    return said


def test_a_rank_whose_model_is_in_another_state_is_told(two_ranks: RankPool) -> None:
    """It would compute something else than the rank that was given the batch, silently."""
    first, second = two_ranks.run(_other_state)
    assert first[0] == second[0] == "nothing"
    assert "rank 1 calls under another autocast than rank 0" in first[1]
    assert "rank 1 calls under another autocast than rank 0" in second[1]
    assert "the model does something else on this rank" in second[2]
    assert first[3].startswith("BatchError: rank 1 lacks a part of the batch, and rank 0 cannot")
    assert "(kwargs['scale'] is a complex)" in first[3]
    assert first[4] == second[4] == "nothing"


def _seeded_differently(rank: int, dropout: float) -> list[str]:
    torch.manual_seed(0)
    layer = nn.Dropout(dropout)
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 3))
    x, _, y = batch()
    torch.manual_seed(100 + rank)
    said = []
    pipes: list[sl.Pipeline] = []

    def build() -> None:
        pipes.append(
            sl.Pipeline(
                model, split=[1, 2], num_microbatches=3, loss_fn=F.cross_entropy, timeout=30
            )
        )

    said.append(_raised(None, build))
    for pipe in pipes:
        said.append(_raised(pipe, lambda: pipe.step(x, target=y)))  # noqa: B023
        layer.p = 0.5  # now something draws, on the second rank alone
        said.append(_raised(pipe, lambda: pipe.step(x, target=y)))  # noqa: B023
        pipe.eval()
        said.append(_raised(pipe, lambda: pipe.step(x, target=y)))  # noqa: B023
        pipe.train()
        torch.manual_seed(5)
        said.append(_raised(pipe, lambda: pipe.step(x, target=y)))  # noqa: B023
        pipe.close()
    torch.manual_seed(0)
    return said


def test_seeds_may_differ_where_nothing_draws(two_ranks: RankPool) -> None:
    for said in two_ranks.run(_seeded_differently, 0.0):
        assert [said[i] for i in (0, 1, 3, 4)] == ["nothing"] * 4
        assert said[2].startswith("PeerError: rank 1 has another seed than rank 0")
    for said in two_ranks.run(_seeded_differently, 0.5):
        assert len(said) == 1
        assert said[0].startswith("PeerError: rank 1 has another seed than rank 0")


class DrawsLate(Asking):
    """Draws in code that is recorded only in training mode."""

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        h = self.c(self.b(self.a(x)))
        if self.training:
            h = F.dropout(h, 0.5, True)
        made: Tensor = self.d(h)
        return made


def _seeded_differently_and_recorded_late(rank: int) -> list[str]:
    """The recording that draws is made in the call itself, when seeds were compared already."""
    torch.manual_seed(0)
    model = DrawsLate().eval()
    pipe = built(model)
    x, mask, y = batch()
    torch.manual_seed(100 + rank)
    pipe.eval()
    said = [_raised(pipe, lambda: pipe.step(x, mask, target=y))]
    pipe.train()
    said.append(_raised(pipe, lambda: pipe.step(x, mask, target=y)))
    pipe.close()
    torch.manual_seed(0)
    return said


def test_seeds_are_compared_when_a_new_recording_draws(two_ranks: RankPool) -> None:
    for said in two_ranks.run(_seeded_differently_and_recorded_late):
        assert said[0] == "nothing"
        assert said[1].startswith("PeerError: rank 1 has another seed than rank 0")


def _on_meta_and_seeded_differently(rank: int) -> str:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    torch.manual_seed(100 + rank)
    said = _raised(None, lambda: sl.Pipeline(model, split=2, loss_fn=F.mse_loss, timeout=30))
    torch.manual_seed(0)
    return said


def test_a_model_that_is_made_real_needs_one_seed(two_ranks: RankPool) -> None:
    """Its weights are drawn when it is built: stages of one model with the seeds of two."""
    for said in two_ranks.run(_on_meta_and_seeded_differently):
        assert said.startswith("PeerError: rank 1 has another seed than rank 0")


def test_the_data_of_threads_is_that_of_all_ranks() -> None:
    pipe = sl.Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), split=2, loss_fn=F.mse_loss)
    with pytest.raises(sl.BatchError, match="needs a target for loss_fn"):
        pipe.step(torch.ones(4, 4))
    pipe.close()
