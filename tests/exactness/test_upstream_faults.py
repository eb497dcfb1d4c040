"""Ways in which the strongest peer is silently wrong; each must be right here.

Numbers are those of the list we keep of torch.distributed.pipelining 2.13: results that differ from
the plain model without an error. The tests carry the number of the fault they stand for.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.testing import RankPool, plain_step
from tests.exactness.cases import Case, run_plain

pytestmark = pytest.mark.usefixtures("one_thread")


def _case(model: str = "resnet", precision: str = "fp32", batch: str = "even") -> Case:
    return Case(model, 3, "1f1b", batch, precision)


def _pipe(case: Case, model: nn.Sequential) -> sl.Pipeline:
    return sl.Pipeline(
        model,
        split=case.stages,
        num_microbatches=case.num_microbatches,
        schedule=case.schedule,
        loss_fn=F.cross_entropy,
        timeout=30,
    )


def _gradients(model: nn.Module | sl.Pipeline) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.equal(got[name], gradient), f"gradient of {name}"


def test_fault_4_evaluation_leaves_gradients_alone() -> None:
    """There, eval() divides the gradients that exist by the number of microbatches."""
    case = _case()
    model, x, y = case.build()
    pipe = _pipe(case, model)
    pipe.step(x, target=y)
    before = _gradients(pipe)
    buffers = {name: buffer.clone() for name, buffer in pipe.named_buffers()}
    pipe.eval()
    for _ in range(2):
        pipe.step(x, target=y)
        pipe(x)
    _assert_equal(_gradients(pipe), before)
    for name, buffer in pipe.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def test_fault_5_two_steps_accumulate_to_the_sum_of_both() -> None:
    """There, two steps give 1.25 times one step instead of 2: the sum is scaled again."""
    case = _case(batch="uneven")
    model, x, y = case.build()
    pipe = _pipe(case, model)
    pipe.step(x, target=y)
    pipe.step(x.flip(0), target=y.flip(0))
    plain, _, _ = case.build()
    for inputs, labels in ((x, y), (x.flip(0), y.flip(0))):
        plain_step(plain, inputs, target=labels, num_microbatches=4, loss_fn=F.cross_entropy)
    _assert_equal(_gradients(pipe), _gradients(plain))


def test_fault_6_autocast_values_arrive_in_their_own_dtype() -> None:
    """There, buffers keep the dtype of the example: bfloat16 bytes are read as float32."""
    case = _case(precision="bf16")
    plain, (wanted, *_) = run_plain(case, steps=1)
    model, x, y = case.build()
    pipe = _pipe(case, model)
    pipe.step(x, target=y)  # in float32 first, so that anything remembered would be wrong now
    pipe.zero_grad()
    model.load_state_dict(case.build()[0].state_dict())
    with case.autocast():
        loss = pipe.step(x, target=y).loss
    assert torch.equal(loss, wanted.loss)
    _assert_equal(_gradients(pipe), _gradients(plain))


@pytest.mark.parametrize("rows", [10, 8, 5, 3, 1, 12])
def test_fault_7_batches_that_change_their_size_or_do_not_divide(rows: int) -> None:
    """There, inference returns stale rows of an earlier batch, and training aborts."""
    case = _case("mlp")
    model, x, y = case.build()
    pipe = _pipe(case, model)
    pipe.step(x, target=y)
    pipe.zero_grad()
    x, y = torch.randn(rows, 12), torch.randint(5, (rows,))
    loss = pipe.step(x, target=y).loss
    plain, _, _ = case.build()
    wanted = plain_step(plain, x, target=y, num_microbatches=4, loss_fn=F.cross_entropy)
    assert torch.equal(loss, wanted.loss)
    _assert_equal(_gradients(pipe), _gradients(plain))
    out = pipe.eval()(x)
    assert out.shape == (rows, 5)
    assert torch.equal(out, wanted.outputs)


def test_fault_8_a_stage_runs_once_for_each_microbatch_and_no_more() -> None:
    """There, shapes are found by running the module once more on uninitialised memory.

    BatchNorm then counts 5 batches after 4, its mean may be garbage for ever, and an embedding is
    asked for rows that do not exist.
    """
    case = _case()
    model, x, y = case.build()
    pipe = _pipe(case, model)
    pipe.step(x, target=y)
    counts = [b for name, b in pipe.named_buffers() if name.endswith("num_batches_tracked")]
    assert counts
    assert all(count == case.num_microbatches for count in counts)
    plain, _ = run_plain(case, steps=1)
    buffers = dict(plain.named_buffers())
    for name, buffer in pipe.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def test_fault_8_integer_inputs_of_a_later_stage_are_never_invented() -> None:
    torch.manual_seed(0)
    stages: list[Any] = [lambda x: x % 7, nn.Embedding(7, 3), nn.Linear(3, 2)]
    pipe = sl.Pipeline.from_stages(stages, num_microbatches=4, loss_fn=lambda out, _: out.sum())
    pipe.step(torch.arange(16), target=torch.zeros(16))
    assert all(parameter.grad is not None for parameter in pipe.parameters())


IGNORED = -100


def _token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def _share_of_tokens(part: sl.Batch, whole: sl.Batch) -> Tensor:
    counted: Tensor = (part.target != IGNORED).sum() / (whole.target != IGNORED).sum()
    return counted


def test_fault_10_a_mean_over_tokens_is_that_of_the_whole_batch() -> None:
    """There, the loss is the mean of the microbatches' means, whatever they counted."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(11, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 11)
    ).double()
    tokens, labels = torch.randint(11, (6, 9)), torch.randint(11, (6, 9))
    for row, length in enumerate([9, 1, 2, 7, 3, 5]):
        labels[row, length:] = IGNORED
    whole = _token_loss(model(tokens), labels)
    whole.backward()
    wanted = _gradients(model)
    model.zero_grad()

    pipe = sl.Pipeline(
        model,
        split=2,
        num_microbatches=4,
        loss_fn=_token_loss,
        loss_reduction=_share_of_tokens,
    )
    loss = pipe.step(tokens, target=labels).loss
    torch.testing.assert_close(loss, whole.detach(), rtol=1e-6, atol=0)
    for name, gradient in _gradients(pipe).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-6, atol=1e-9, msg=name)
    mean_of_means = torch.stack(
        [
            _token_loss(model(t), y)
            for t, y in zip(tokens.tensor_split(4), labels.tensor_split(4), strict=True)
        ]
    ).mean()
    assert abs(mean_of_means - whole) > 0.01, "the example must tell the two apart"


def _batches_of_many_sizes(rank: int) -> list[str]:
    torch.set_num_threads(1)
    case = Case("mlp", 2, "1f1b", "even", "fp32")
    model, _, _ = case.build()
    pipe = _pipe(case, model)
    wrong = []
    for rows in (8, 10, 5, 3, 1, 12):
        plain, _, _ = case.build()
        x, y = torch.randn(rows, 12), torch.randint(5, (rows,))
        wanted = plain_step(plain, x, target=y, num_microbatches=4, loss_fn=F.cross_entropy)
        if not torch.equal(pipe.step(x, target=y).loss, wanted.loss):
            wrong.append(f"loss of {rows} rows")
        gradients = _gradients(plain)
        for name, gradient in _gradients(pipe).items():
            if not torch.equal(gradient, gradients[name]):
                wrong.append(f"{rows} rows, gradient of {name}")
        pipe.zero_grad()
        out = pipe.eval()(x)
        pipe.train()
        if not torch.equal(out, wanted.outputs):
            wrong.append(f"outputs of {rows} rows")
    pipe.close()
    return wrong


@pytest.mark.processes
def test_fault_7_between_processes(two_ranks: RankPool) -> None:
    assert two_ranks.run(_batches_of_many_sizes) == [[], []]


def _evaluate_between_steps(rank: int) -> list[str]:
    torch.set_num_threads(1)
    case = Case("resnet", 2, "1f1b", "uneven", "fp32")
    plain, expected = run_plain(case, steps=2)
    model, x, y = case.build()
    pipe = _pipe(case, model)
    losses = [pipe.step(x, target=y).loss]
    pipe.eval()
    pipe.step(x, target=y)
    pipe(x)
    pipe.train()
    losses.append(pipe.step(x, target=y).loss)
    wrong = [f"loss {i}" for i in (0, 1) if not torch.equal(losses[i], expected[i].loss)]
    gradients, buffers = _gradients(plain), dict(plain.named_buffers())
    wrong += [n for n, g in _gradients(pipe).items() if not torch.equal(g, gradients[n])]
    wrong += [n for n, b in pipe.named_buffers() if not torch.equal(b, buffers[n])]
    pipe.close()
    return wrong


@pytest.mark.processes
def test_faults_4_5_and_8_between_processes(two_ranks: RankPool) -> None:
    assert two_ranks.run(_evaluate_between_steps) == [[], []]


class _TiedLanguageModel(nn.Module):
    """An embedding whose weight is also the head's, around a loop over one shared block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).mean(1)
        for _ in range(3):
            x = self.block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def _tied(transport: str | None = None) -> tuple[sl.Pipeline, nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    model = _TiedLanguageModel()
    tokens, labels = torch.randint(13, (8, 5)), torch.randint(13, (8,))
    plain = copy.deepcopy(model)
    pipe = sl.Pipeline(
        model,
        example_args=(tokens[:2],),
        split={"block": "end"},
        num_microbatches=4,
        loss_fn=F.cross_entropy,
        ranks=None if transport is None else 2,
        transport=transport,
        timeout=30,
    )
    return pipe, plain, tokens, labels


def _close(got: Tensor, wanted: Tensor) -> bool:
    """Sums over ranks come in another order than in the plain model: 1e-6 of the largest value."""
    return bool((got - wanted).abs().max() <= 1e-6 * wanted.abs().max())


def test_fault_1_a_tied_weight_gets_the_sum_of_all_its_gradients() -> None:
    """There, each stage has a copy, nothing is summed, and the copies drift apart."""
    pipe, plain, tokens, labels = _tied()
    pipe.eval()
    pipe.training = True  # gradients, without dropout
    plain.eval()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pipe, plain)]
    for _ in range(3):
        pipe.step(tokens, target=labels)
        plain_step(plain, tokens, target=labels, num_microbatches=4, loss_fn=F.cross_entropy)
        wanted = _gradients(plain)
        assert _gradients(pipe).keys() == wanted.keys()
        for name, gradient in _gradients(pipe).items():
            assert _close(gradient, wanted[name]), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in pipe.named_parameters():
        assert _close(parameter.detach(), dict(plain.named_parameters())[name].detach()), name


@pytest.mark.parametrize("frozen", [[0], [0, 1], [1], [0, 2]])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "sequential"])
def test_fault_2_frozen_stages_do_not_starve_the_others(frozen: list[int], schedule: str) -> None:
    """There, a frozen first stage leaves the next without any gradient."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    stages.append(nn.Sequential(nn.Linear(4, 2)))
    for index in frozen:
        stages[index].requires_grad_(False)
    plain = copy.deepcopy(nn.Sequential(*stages))
    x, y = torch.randn(8, 4), torch.randint(2, (8,))
    pipe = sl.Pipeline.from_stages(
        stages, num_microbatches=4, schedule=schedule, loss_fn=F.cross_entropy
    )
    pipe.step(x, target=y)
    plain_step(plain, x, target=y, num_microbatches=4, loss_fn=F.cross_entropy)
    assert len(_gradients(plain)) == 2 * (4 - len(frozen))
    _assert_equal(_gradients(pipe), _gradients(plain))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "sequential"])
def test_fault_3_hooks_on_parameters_see_every_gradient(schedule: str) -> None:
    """There, weight gradients are written by hand, and DDP, which lives on hooks, sees none."""
    case = Case("mlp", 3, schedule, "even", "fp32")
    model, x, y = case.build()
    seen: dict[str, int] = {}

    def count(name: str) -> Any:
        def hook(_: Tensor) -> None:
            seen[name] = seen.get(name, 0) + 1

        return hook

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(count(name))
    _pipe(case, model).step(x, target=y)
    assert seen == {name: case.num_microbatches for name, _ in model.named_parameters()}


def test_fault_9_evaluation_reaches_every_layer_of_a_recorded_model() -> None:
    """There, dropout and BatchNorm are burned in when the model is traced; eval() does nothing."""
    pipe, plain, tokens, labels = _tied()
    pipe.step(tokens, target=labels)
    plain.load_state_dict(pipe.state_dict())
    pipe.eval()
    plain.eval()
    assert torch.equal(pipe(tokens), pipe(tokens))
    with torch.no_grad():
        wanted = torch.cat([plain(part) for part in tokens.tensor_split(4)])
    assert torch.equal(pipe(tokens), wanted)
    before = {name: buffer.clone() for name, buffer in pipe.named_buffers()}
    pipe.step(tokens, target=labels)
    for name, buffer in pipe.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_fault_11_unrolled_and_shared_modules_keep_their_names() -> None:
    """There, an unrolled block appears under mangled and phantom names in the state."""
    pipe, plain, _, _ = _tied()
    assert len(pipe.plan.stages) == 4
    assert list(pipe.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in pipe.named_parameters()] == [n for n, _ in plain.named_parameters()]


def _faults_between_processes(rank: int, transport: str) -> list[str]:
    torch.set_num_threads(1)
    pipe, plain, tokens, labels = _tied(transport)
    whole = dict(plain.state_dict())
    wrong = [name for name in pipe.state_dict() if name not in whole]
    pipe.eval()
    pipe.training = True
    plain.eval()
    pipe.step(tokens, target=labels)
    plain_step(plain, tokens, target=labels, num_microbatches=4, loss_fn=F.cross_entropy)
    wanted = _gradients(plain)
    wrong += [name for name, got in _gradients(pipe).items() if not _close(got, wanted[name])]
    pipe.eval()
    with torch.no_grad():
        outputs = torch.cat([plain(part) for part in tokens.tensor_split(4)])
    if not torch.equal(pipe(tokens), outputs):
        wrong.append("outputs after eval()")
    pipe.close()
    return wrong


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["shared-memory", "process-group"])
def test_faults_1_9_and_11_between_processes(transport: str, two_ranks: RankPool) -> None:
    assert two_ranks.run(_faults_between_processes, transport) == [[], []]
