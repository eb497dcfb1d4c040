"""train() and eval() of one stage's module, also where code that was cut open reads the flag.

In 0.1 ``F.dropout(h, 0.5, self.training)`` in such code went on to drop, and nothing was said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.capturing.training_flags import TrainingFlags
from stageline.testing import RankPool, plain_step
from tests.running.shipping_cases import differing, handed


class Net(nn.Module):
    """Its own code drops in stages 1 and 2; stage 0 has a layer that does, tied to the last one."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.a, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4)
        if is_tied:
            self.c.weight = self.a.weight
        self.asks_twice = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.a(x))
        h = self.b(F.dropout(h, 0.5, self.training))
        if self.training or self.asks_twice:
            h = h * 2
        h = F.dropout(h, 0.25, self.training)
        made: Tensor = self.c(h)
        return made


CUTS = {"drop": "end", "b": "end"}


def batch(seed: int = 1, rows: int = 7) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(rows, 4), torch.randn(rows, 4)


def models(**kinds: bool) -> tuple[Net, Net]:
    torch.manual_seed(0)
    model, plain = Net(**kinds), Net(**kinds)
    plain.load_state_dict(model.state_dict())
    return model, plain


def built(model: nn.Module, cuts: dict[str, str], **settings: Any) -> sl.Pipeline:
    return sl.Pipeline(
        model,
        example_args=(torch.ones(2, 4),),
        split=cuts,
        num_microbatches=3,
        loss_fn=F.mse_loss,
        timeout=30,
        **settings,
    )


def stages(pipe: sl.Pipeline) -> list[nn.Module]:
    """Return the modules of the stages of this process."""
    return [stage.module for stage in pipe.plan.stages if stage.module is not None]


def wrong_after_a_step(
    pipe: sl.Pipeline, plain: nn.Module, step: int, where: str = "all", rank: int = 0
) -> list[str]:
    x, y = batch(step)
    pipe.zero_grad()
    plain.zero_grad()
    given, named = handed(where, rank, (x,), target=y) if where != "all" else ((x,), {"target": y})
    loss = pipe.step(*given, **named).loss
    wanted = plain_step(
        plain, x, target=y, num_microbatches=3, loss_fn=F.mse_loss, step=step, num_threads=1
    )
    return differing(pipe, plain) + ([] if torch.equal(loss, wanted.loss) else ["loss"])


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.usefixtures("one_thread")
def test_all_stages_follow_their_modules(is_tied: bool) -> None:
    model, plain = models(is_tied=is_tied)
    pipe = built(model, CUTS)
    for step, mode in enumerate((True, False, False, True)):
        for stage in stages(pipe):
            stage.train(mode)
        plain.train(mode)
        # The parts of a tied gradient are added by stage, those of the plain model by microbatch.
        tied = ["a.weight"] if is_tied else []
        assert wrong_after_a_step(pipe, plain, step) in ([], tied)
        grads = dict(pipe.named_parameters())
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(grads[name].grad, parameter.grad)
    pipe.close()


def test_stages_of_a_plan_follow_their_modules() -> None:
    model, plain = models()
    plan = sl.partition(sl.capture(model, (torch.ones(2, 4),)), split=CUTS)
    for stage in plan.stages:
        assert stage.module is not None
        stage.module.eval()
    x, _ = batch()
    assert torch.equal(plan.run(x), plain.eval()(x))


@pytest.mark.usefixtures("one_thread")
def test_a_stage_that_reads_no_flag_may_be_in_a_mode_of_its_own() -> None:
    """As ``model.drop.eval()`` would be in the plain model: the others go on to drop."""
    model, plain = models()
    pipe = built(model, CUTS)
    stages(pipe)[0].eval()
    plain.drop.eval()
    assert wrong_after_a_step(pipe, plain, 0) == []
    pipe.close()


@pytest.mark.usefixtures("one_thread")
def test_stages_that_read_one_flag_must_be_in_one_mode() -> None:
    model, plain = models()
    pipe = built(model, CUTS)
    for first, second in ((1, 2), (2, 1)):
        stages(pipe)[first].eval()
        message = (
            rf"stage {second} was put into training mode, but the training flag of Net, which its "
            "code reads, is that of evaluation mode, as another stage wants it: put both"
        )
        with pytest.raises(sl.CaptureError, match=message):
            pipe.step(*batch()[:1], target=batch()[1])
        with pytest.raises(sl.CaptureError, match=message):
            pipe(batch()[0])
        stages(pipe)[second].eval()
        plain.train()
        plain.eval()
        plain.drop.train()
        step = pipe.step_number
        assert wrong_after_a_step(pipe, plain, step) == []
        pipe.train()
        plain.train()
        assert wrong_after_a_step(pipe, plain, step + 1) == []
    pipe.close()


@pytest.mark.usefixtures("one_thread")
def test_what_is_set_on_the_model_itself_stands() -> None:
    model, plain = models()
    pipe = built(model, CUTS)
    for stage in stages(pipe):
        stage.eval()
    for each in (model, plain):
        each.train()
    assert wrong_after_a_step(pipe, plain, 0) == []
    stages(pipe)[1].eval()
    for each in (model, plain):
        each.training = True
    plain.b.eval()
    assert wrong_after_a_step(pipe, plain, 1) == []
    pipe.close()


def test_what_is_set_on_the_model_ends_what_one_stage_wanted() -> None:
    """Also where another stage is put into a mode before the next call."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    flags = TrainingFlags({"": model}, num_stages=2)
    for stage in (0, 1):
        flags.note_reads(stage, {"": model})
    flags.train(0, False)
    model.train()
    flags.train(1, True)
    flags.check()
    assert model.training


class AsksLater(Net):
    """Its first stage reads the flag only for rows that begin with a negative number."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if x[0, 0] < 0:
            h = F.dropout(h, 0.5, self.training)
        made: Tensor = self.c(F.dropout(self.b(h), 0.5, self.training))
        return made


@pytest.mark.usefixtures("one_thread")
def test_a_stage_that_reads_the_flag_later_keeps_its_mode() -> None:
    torch.manual_seed(0)
    model, plain = AsksLater(), AsksLater()
    plain.load_state_dict(model.state_dict())
    x = torch.ones(6, 4)
    pipe = sl.Pipeline(model, example_args=(x[:2],), split={"b": "end"}, num_microbatches=3)
    stages(pipe)[0].eval()
    pipe(x)  # only the second stage reads it so far, and it is in training mode
    with pytest.raises(sl.CaptureError, match="stage 0 was put into evaluation mode, but the"):
        pipe(-x)
    stages(pipe)[1].eval()
    with torch.no_grad():
        wanted = torch.cat([plain.eval()(-part) for part in x.split(2)])
    assert torch.equal(pipe(-x), wanted)
    pipe.close()


def _raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except sl.StagelineError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _own_modules(rank: int, where: str, cut: str) -> list[str]:
    model, plain = models()
    pipe = built(model, {cut: "end"})
    wrong = []
    for step, mode in enumerate((True, False, False, True, False)):
        for stage in stages(pipe):
            stage.train(mode)
        plain.train(mode)
        found = wrong_after_a_step(pipe, plain, step, where, rank)
        wrong += [f"step {step}: {name}" for name in found]
    x, _ = batch()
    given, _ = handed(where, rank, (x,)) if where != "all" else ((x,), {})
    with torch.no_grad():
        wanted = torch.cat([plain(part) for part in x.tensor_split(3)])
    wrong += [] if torch.equal(pipe(*given), wanted) else ["output"]
    pipe.close()
    return wrong


@pytest.mark.processes
@pytest.mark.parametrize("cut", ["drop", "b"])
@pytest.mark.parametrize("where", ["first", "all"])
def test_each_process_puts_its_own_stage_into_a_mode(
    where: str, cut: str, two_ranks: RankPool
) -> None:
    """With the cut after ``drop`` no code of the first stage reads the flag, but its rank must."""
    assert two_ranks.run(_own_modules, where, cut) == [[], []]


def _one_forgets(rank: int, where: str) -> list[str]:
    model, plain = models()
    pipe = built(model, {"b": "end"})
    said = []
    for step, forgetful in enumerate((0, 1, 0)):  # the last time both recordings are known
        for mode in (False, True):
            if rank != forgetful or mode:
                stages(pipe)[0].train(mode)
            x, y = batch()
            given, named = handed(where, rank, (x,), target=y)
            if not mode:
                said.append(_raised(lambda: pipe.step(*given, **named)))  # noqa: B023
        said += wrong_after_a_step(pipe, plain, step, where, rank)
    pipe.close()
    return said


@pytest.mark.processes
@pytest.mark.parametrize("where", ["first", "all"])
def test_processes_whose_stages_are_in_different_modes_are_told(
    where: str, two_ranks: RankPool
) -> None:
    for said in two_ranks.run(_one_forgets, where):
        assert len(said) == 3
        for sentence in said:
            assert "to the same on every rank" in sentence
