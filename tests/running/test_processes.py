"""One rank per process: the same script, the loss on every rank, every process its own part."""

from __future__ import annotations

import pickle
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.running.control import Member
from stageline.testing import RankPool
from tests.running.shipping_cases import trained

pytestmark = pytest.mark.processes


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 4), torch.randint(3, (8,))


def pipeline(**settings: Any) -> sl.Pipeline:
    return sl.Pipeline(
        model(), split=2, num_microbatches=4, loss_fn=F.cross_entropy, timeout=20, **settings
    )


def _loss_on_every_rank(rank: int) -> tuple[float, str]:
    pipe = pipeline()
    x, y = batch()
    result = pipe.step(x, target=y)
    return result.loss.item(), repr(result)


def test_the_loss_is_the_same_on_every_rank(two_ranks: RankPool) -> None:
    x, y = batch()
    wanted = sl.Pipeline(model(), split=2, num_microbatches=4, loss_fn=F.cross_entropy)
    loss = wanted.step(x, target=y).loss.item()
    answers = two_ranks.run(_loss_on_every_rank)
    assert [answer[0] for answer in answers] == [loss, loss]
    assert answers[0][1] == answers[1][1] == f"StepResult(loss={loss:.6g}, num_microbatches=4)"


def _losses_asked_for_late(rank: int) -> list[tuple[float, bool, float]]:
    pipe = pipeline()
    x, y = batch()
    results = [pipe.step(x * factor, target=y) for factor in (1, 2)]
    pickled = [pickle.dumps(result) for result in results]
    with torch.inference_mode():
        losses = [result.loss for result in results]
    pipe.close()
    again = [pickle.loads(text).loss.item() for text in pickled]
    return [(a.item(), a.is_inference(), b) for a, b in zip(losses, again, strict=True)]


def test_results_can_be_kept_pickled_and_asked_in_inference_mode(two_ranks: RankPool) -> None:
    """Where another rank has the loss, its tensor is made when somebody asks for it."""
    one, other = two_ranks.run(_losses_asked_for_late)
    assert one == other
    assert all(loss == again and not is_inference for loss, is_inference, again in one)
    assert one[0][0] != one[1][0]


class ChangesTheMode(nn.Linear):
    """Computes something without a graph, and fails in between if it is told to."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        scale = x.abs().mean()
        if self.fails:
            raise ValueError("a bad batch")
        torch.set_grad_enabled(True)
        return super().forward(x) / (1 + scale)


def _fails_without_gradients(rank: int) -> list[str]:
    torch.manual_seed(0)
    last = ChangesTheMode(4, 4)
    stages = nn.Sequential(ChangesTheMode(4, 4), last)
    pipe = sl.Pipeline(stages, split=2, num_microbatches=2, loss_fn=F.mse_loss, timeout=20)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    seen = []
    for step in range(3):
        last.fails = step == 1
        pipe.zero_grad()
        try:
            pipe.step(x, target=y)
        except sl.StepError:
            seen.append("failed")
        else:
            seen.append("trained" if all(p.grad is not None for p in pipe.parameters()) else "?")
        seen.append("enabled" if torch.is_grad_enabled() else "disabled")
    pipe.close()
    return seen


def test_the_callers_grad_mode_comes_back_after_a_stage_that_failed(two_ranks: RankPool) -> None:
    """Else that rank would evaluate in its next step, where the others train."""
    wanted = ["trained", "enabled", "failed", "enabled", "trained", "enabled"]
    assert two_ranks.run(_fails_without_gradients) == [wanted] * 2


def _ask_on_one_rank_only(rank: int, who: int) -> list[float]:
    pipe = pipeline()
    x, y = batch()
    losses = []
    for _ in range(5):
        result = pipe.step(x, target=y)
        if rank == who:
            losses.append(result.loss.item())
    pipe.eval()
    for _ in range(5):
        result = pipe.step(x, target=y)
        if rank == who:
            losses.append(result.loss.item())
    pipe.close()
    return losses


@pytest.mark.parametrize("who", [0, 1])
def test_asking_for_the_loss_on_one_rank_alone_never_hangs(who: int, two_ranks: RankPool) -> None:
    answers = two_ranks.run(_ask_on_one_rank_only, who)
    assert [len(answer) for answer in answers] == ([10, 0] if who == 0 else [0, 10])


def _only_what_a_rank_needs(rank: int) -> tuple[float, list[list[float]]]:
    pipe = pipeline()
    x, y = batch()
    loss = pipe.step(x if rank == 0 else None, target=y if rank == 1 else None).loss.item()
    logits = pipe.eval()(x if rank == 0 else None)
    return loss, logits.tolist()


def _shown(rank: int, transport: str | None) -> str:
    return repr(pipeline(transport=transport)).splitlines()[0]


@pytest.mark.parametrize(
    ("transport", "told"),
    [
        (None, "processes, shared memory"),
        ("shared-memory", "processes, shared memory"),
        ("process-group", "processes, gloo"),
    ],
)
def test_a_pipeline_says_what_carries_its_packets(
    transport: str | None, told: str, two_ranks: RankPool
) -> None:
    """On one host that is shared memory, unless somebody says otherwise."""
    for line in two_ranks.run(_shown, transport):
        assert f"2 stages on 2 ranks ({told})" in line


def _everything(rank: int) -> tuple[float, list[list[float]]]:
    pipe = pipeline()
    x, y = batch()
    return pipe.step(x, target=y).loss.item(), pipe.eval()(x).tolist()


def test_a_rank_may_be_given_only_what_it_needs(two_ranks: RankPool) -> None:
    assert two_ranks.run(_only_what_a_rank_needs) == two_ranks.run(_everything)


def _middle_rank_without_batch(rank: int, rows: int) -> float:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    pipe = sl.Pipeline(layers, split=4, num_microbatches=6, loss_fn=F.mse_loss, timeout=20)
    x, y = torch.randn(rows, 4), torch.randn(rows, 4)
    if rank in (1, 2):
        return pipe.step(None).loss.item()
    return pipe.step(x, target=y).loss.item()


@pytest.mark.parametrize("rows", [12, 7, 2])
def test_middle_ranks_learn_the_number_of_microbatches(rows: int, four_ranks: RankPool) -> None:
    """With 2 rows there are 2 microbatches instead of 6; a rank without a batch must know."""
    losses = four_ranks.run(_middle_rank_without_batch, rows)
    assert len(set(losses)) == 1


@pytest.mark.parametrize("where", ["first", "middle"])
def test_ranks_in_the_middle_are_given_nothing_or_the_target(
    where: str, four_ranks: RankPool
) -> None:
    assert four_ranks.run(trained, where, {}) == [[]] * 4


def _outputs(rank: int, share: bool) -> Any:
    pipe = pipeline(share_outputs=share, keep_outputs=True)
    x, y = batch()
    outputs = pipe.step(x, target=y).outputs
    logits = pipe.eval()(x)
    return [None if value is None else tuple(value.shape) for value in (outputs, logits)]


def test_outputs_reach_every_rank_or_stay_on_the_last(two_ranks: RankPool) -> None:
    assert two_ranks.run(_outputs, True) == [[(8, 3)] * 2, [(8, 3)] * 2]
    assert two_ranks.run(_outputs, False) == [[None, None], [(8, 3)] * 2]


def _state(rank: int) -> tuple[list[str], bool]:
    pipe = pipeline()
    whole = {name: torch.full_like(value, 2) for name, value in model().state_dict().items()}
    pipe.load_state_dict(whole)
    mine = pipe.state_dict()
    return list(mine), all(torch.equal(value, whole[name]) for name, value in mine.items())


def test_every_process_has_its_part_of_the_state_under_original_names(two_ranks: RankPool) -> None:
    (first, loaded_first), (second, loaded_second) = two_ranks.run(_state)
    assert first + second == list(model().state_dict())
    assert first
    assert second
    assert loaded_first
    assert loaded_second


def _strange_state(rank: int) -> str:
    pipe = pipeline()
    state = dict(model().state_dict())
    del state["0.weight" if rank == 0 else "3.weight"]
    state["4.weight"] = torch.zeros(1)
    with pytest.raises(sl.StateError) as caught:
        pipe.load_state_dict(state)
    return str(caught.value)


def test_a_state_that_does_not_fit_is_refused_where_it_matters(two_ranks: RankPool) -> None:
    for name, message in zip(["0.weight", "3.weight"], two_ranks.run(_strange_state), strict=True):
        assert f"{name} is missing" in message
        assert "4.weight is not part of the model" in message


def _own_stages_only(rank: int) -> tuple[float, list[str], str]:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Linear(8, 3)]
    pipe = sl.Pipeline.from_stages(
        {rank: layers[rank]}, num_stages=2, num_microbatches=4, loss_fn=F.cross_entropy, timeout=20
    )
    x, y = batch()
    loss = pipe.step(x, target=y).loss.item()
    return loss, [name for name, _ in pipe.named_parameters()], repr(pipe)


def test_from_stages_takes_only_the_stages_of_this_process(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_own_stages_only)
    assert first[0] == second[0]
    assert first[1] == ["0.weight", "0.bias"]
    assert second[1] == ["1.weight", "1.bias"]
    assert "in another process" in first[2]


def _wrong_stages(rank: int) -> str:
    with pytest.raises(sl.ConfigError) as caught:
        sl.Pipeline.from_stages({1 - rank: nn.Linear(2, 2)}, num_stages=2)
    return str(caught.value)


def test_a_process_without_its_stage_is_told(two_ranks: RankPool) -> None:
    for rank, message in enumerate(two_ranks.run(_wrong_stages)):
        assert f"stages[{rank}]: rank {rank} holds this stage, but it was not given here" in message


def _wrong_world(rank: int) -> list[str]:
    messages = []
    for settings in ({"ranks": 3}, {"split": 1}):
        with pytest.raises(sl.ConfigError) as caught:
            sl.Pipeline(model(), **{"split": 2, **settings})  # type: ignore[arg-type]
        messages.append(str(caught.value))
    return messages


def test_a_pipeline_that_does_not_fit_the_world_is_refused(two_ranks: RankPool) -> None:
    for first, second in two_ranks.run(_wrong_world):
        assert "ranks=3, but torchrun started 2 processes" in first
        assert "2 ranks for 1 stages: every rank needs a stage" in second


def _another_batch(rank: int, rows: int) -> str:
    pipe = pipeline()
    x, y = batch()
    given = 8 if rank == 0 else rows
    with pytest.raises(sl.PeerError) as caught:
        pipe.step(x[:given], target=y[:given])
    pipe.step(x, target=y)
    return str(caught.value)


@pytest.mark.parametrize("rows", [7, 6, 1])
def test_a_rank_with_another_batch_is_told_the_leaf_and_both_values(
    rows: int, two_ranks: RankPool
) -> None:
    """With 1 row there are fewer microbatches, and one rank waits for what never comes."""
    first, second = two_ranks.run(_another_batch, rows)
    assert first == second
    assert first.startswith("rank 1 was given another batch than rank 0: args[0] is float32")
    assert f"float32 ({rows}, 4) on rank 1 and float32 (8, 4) on rank 0" in first


def _another_batch_and_bad_news_late(rank: int) -> str:
    real = Member.hear

    def hear(member: Member, message: Any, files: Any = ()) -> None:
        if message["kind"] == "fail" and rank == 1:
            time.sleep(0.5)
        real(member, message, files)

    Member.hear = hear  # type: ignore[method-assign, assignment]  # in a process of a pool
    pipe = pipeline()
    x, y = batch()
    if rank == 1:
        time.sleep(0.5)  # so that what rank 0 sends is there
        x, y = x[:1], y[:1]
    try:
        with pytest.raises(sl.StagelineError) as caught:
            pipe.step(x, target=y)
    finally:
        Member.hear = real  # type: ignore[method-assign]
    pipe.step(*batch()[:1], target=batch()[1])
    return f"{type(caught.value).__name__}: {caught.value}"


def test_what_is_wrong_is_said_by_all_even_where_its_consequence_comes_first(
    two_ranks: RankPool,
) -> None:
    """On a busy machine a rank with another batch failed at its first action, by its shape.

    It then raised that, and the others what was behind it: that the batches were different.
    """
    first, second = two_ranks.run(_another_batch_and_bad_news_late)
    assert first == second
    assert first.startswith("PeerError: rank 1 was given another batch than rank 0")


def _bad_batch_on_the_first_rank(rank: int) -> str:
    pipe = pipeline()
    x, y = batch()
    with pytest.raises(sl.StagelineError) as caught:
        pipe.step(x[:0] if rank == 0 else x, target=y[:0] if rank == 0 else y)
    message = f"{type(caught.value).__name__}: {caught.value}"
    pipe.step(x, target=y)
    pipe.close()
    return message


def test_a_step_that_cannot_begin_fails_on_every_rank_and_the_next_one_works(
    two_ranks: RankPool,
) -> None:
    first, second = two_ranks.run(_bad_batch_on_the_first_rank)
    assert first.startswith("BatchError: args[0] says the batch has 0 rows")
    assert second.startswith(
        "PeerError: rank 0 failed in a training step: args[0] says the batch has 0 rows"
    )


def _another_batch_after_an_accumulated_one(rank: int) -> tuple[str, str]:
    pipe = pipeline()
    x, y = batch()
    said = []
    for _ in range(2):
        if rank == 1:
            time.sleep(0.5)  # rank 0 is in the middle of its step when it hears of the difference
        with pytest.raises(sl.PeerError) as caught:
            pipe.step(x + rank, target=y)
        said.append(str(caught.value))
        pipe.step(x, target=y)
    return said[0], said[1]


def test_another_batch_says_that_accumulated_gradients_may_hold_a_part(
    two_ranks: RankPool,
) -> None:
    """Only a StepError said so; a loop that caught this error went on with wrong gradients."""
    before, after = two_ranks.run(_another_batch_after_an_accumulated_one)[0]
    advice = "Gradients accumulated before this step may now hold a part of it: call zero_grad()"
    assert advice not in before
    assert advice in after


def _another_mode(rank: int) -> str:
    pipe = pipeline()
    x, y = batch()
    pipe.train(rank == 1)
    with pytest.raises(sl.PeerError) as caught:
        pipe.step(x, target=y)
    pipe.train()
    pipe.step(x, target=y)
    return str(caught.value)


def test_ranks_in_different_modes_are_told(two_ranks: RankPool) -> None:
    messages = two_ranks.run(_another_mode)
    assert messages[0] == messages[1]
    assert messages[0].startswith("rank 1 is at a training step, rank 0 at an evaluation step")


def _two_pipelines_take_turns(rank: int) -> list[float]:
    pipes = [pipeline(), pipeline(schedule="gpipe")]
    x, y = batch()
    losses = [pipe.step(x, target=y).loss.item() for _ in range(3) for pipe in pipes]
    for pipe in pipes:
        pipe.close()
    return losses


def test_two_pipelines_do_not_disturb_each_other(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_two_pipelines_take_turns)
    assert first == second
    assert first[0::2] == first[1::2]


def _threads_inside_a_process(rank: int) -> float:
    pipe = pipeline(transport="memory")
    x, y = batch()
    return pipe.step(x, target=y).loss.item()


def test_threads_can_be_asked_for_under_torchrun(two_ranks: RankPool) -> None:
    losses = two_ranks.run(_threads_inside_a_process)
    assert losses[0] == losses[1]


def test_a_pool_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pool left the file of its store in the temporary folder, for good."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pool = RankPool(1)
    assert pool.run(int) == [0]
    assert len(list(tmp_path.glob("stageline-ranks-*"))) == 1
    pool.close()
    assert list(tmp_path.glob("stageline-ranks-*")) == []
