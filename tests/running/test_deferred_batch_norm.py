"""With ``deferred_batch_norm=True`` a BatchNorm counts the whole batch once, when a call ends."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import stageline as sl
from stageline.running.batch_norm import Moments, mean_and_variance
from stageline.testing import RankPool
from tests.wrappers import Doubled

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEDULES = ["1f1b", "gpipe", "sequential", "zb-h1", "zb-h2", "varuna"]
Make = Callable[[], nn.Module]


def net(**settings: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm1d(5, **settings),
        nn.Linear(5, 6),
        nn.ReLU(),
        nn.BatchNorm1d(6, **settings),
        nn.Linear(6, 3),
    )


def batch(rows: int = 12, mean: float = 2.0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, 5) * torch.arange(1.0, 6.0) + mean, torch.randint(3, (rows,))


def build(model: nn.Module, **settings: Any) -> sl.Pipeline:
    settings = {"split": 2, "num_microbatches": 4, "deferred_batch_norm": True, **settings}
    return sl.Pipeline(model, loss_fn=F.cross_entropy, **settings)


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def counted(model: nn.Module, name: str) -> int:
    """Return how often a BatchNorm has updated its statistics."""
    return int(buffers(model)[f"{name}.num_batches_tracked"])


def assert_same_state(model: nn.Module, before: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name


def assert_counted_once(model: nn.Module, plain: nn.Module) -> None:
    """Compare with the plain model, to which normalisation of the whole batch did the same."""
    wanted = dict(plain.named_buffers())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, wanted[name], rtol=1e-6, atol=1e-6, msg=name)


def reference(model: nn.Module, pipe_input: Tensor, sizes: list[int]) -> nn.Module:
    """Return a copy whose BatchNorms have counted the whole batch, normalised by microbatch.

    What comes to the second BatchNorm depends on the first one's normalisation, which is that of
    microbatches; so each BatchNorm is given the inputs of all microbatches at once.
    """
    plain, twin = copy.deepcopy(model), copy.deepcopy(model)
    inputs: dict[str, list[list[Tensor]]] = {}
    for name, module in twin.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            of_module = inputs.setdefault(name, [])
            module.register_forward_pre_hook(
                lambda _, args, of_module=of_module: of_module[-1].append(args[0])
            )
    with torch.no_grad():
        for part in pipe_input.split(sizes):
            for of_module in inputs.values():
                of_module.append([])
            twin(part)
        for name, of_module in inputs.items():
            for calls in zip_longest(*of_module):
                plain.get_submodule(name)(torch.cat([call for call in calls if call is not None]))
    return plain


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "momentum": lambda: (nn.BatchNorm1d(5, momentum=0.3), batch()[0]),
    "cumulative": lambda: (nn.BatchNorm1d(5, momentum=None), batch()[0]),
    "not affine": lambda: (nn.BatchNorm1d(5, affine=False), batch()[0]),
    "no statistics": lambda: (nn.BatchNorm1d(5, track_running_stats=False), batch()[0]),
    "large mean": lambda: (nn.BatchNorm1d(5), batch(mean=1000.0)[0]),
    "3 dimensions": lambda: (nn.BatchNorm1d(5), torch.randn(12, 5, 7)),
    "2d": lambda: (nn.BatchNorm2d(3), torch.randn(12, 3, 4, 5)),
    "3d": lambda: (nn.BatchNorm3d(3), torch.randn(12, 3, 2, 3, 2)),
    "channels last": lambda: (
        nn.BatchNorm2d(3),
        torch.randn(12, 3, 4, 5).to(memory_format=torch.channels_last),
    ),
    "float64": lambda: (nn.BatchNorm1d(5).double(), batch(mean=1e6)[0].double()),
}


@pytest.mark.parametrize("case", CASES)
def test_statistics_are_those_of_the_plain_model_on_the_whole_batch(case: str) -> None:
    torch.manual_seed(1)
    norm, x = CASES[case]()
    plain = copy.deepcopy(norm)
    pipe = sl.Pipeline.from_stages(
        [norm, nn.Flatten()], num_microbatches=5, deferred_batch_norm=True
    )
    for _ in range(3):
        plain(x)
        pipe(x)
        assert_counted_once(norm, plain)
        x = x * 1.5 + 1


def test_the_same_in_bfloat16() -> None:
    norm = nn.BatchNorm1d(5)
    plain, x = copy.deepcopy(norm), batch()[0].bfloat16()
    pipe = sl.Pipeline.from_stages(
        [norm, nn.Identity()], num_microbatches=4, deferred_batch_norm=True
    )
    assert torch.equal(pipe(x), pipe(x))
    plain(x)
    plain(x)
    assert_counted_once(norm, plain)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_step_counts_once_and_has_the_gradients_of_any_step(
    schedule: str, momentum: float | None
) -> None:
    model = net(momentum=momentum)
    other = copy.deepcopy(model)
    pipe = build(model, schedule=schedule)
    usual = build(other, schedule=schedule, deferred_batch_norm=False)
    for rows in (12, 10):
        x, y = batch(rows)
        plain = reference(model, x, [len(part) for part in x.tensor_split(4)])
        got, wanted = pipe.step(x, target=y), usual.step(x, target=y)
        assert torch.equal(got.loss, wanted.loss)
        for (name, parameter), twin in zip(
            pipe.named_parameters(), usual.parameters(), strict=True
        ):
            assert parameter.grad is not None
            assert twin.grad is not None
            assert torch.equal(parameter.grad, twin.grad), name
        assert_counted_once(model, plain)
    assert counted(model, "0") == 2
    assert counted(other, "0") == 8  # one per microbatch


@pytest.mark.parametrize("recompute", ["always", "except_last", "waiting"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_recompute_counts_nothing_twice(schedule: str, recompute: str) -> None:
    model, (x, y) = net(momentum=None), batch()
    plain = reference(model, x, [3] * 4)
    pipe = build(model, schedule=schedule, recompute=recompute)
    pipe.step(x, target=y)
    assert_counted_once(model, plain)
    F.cross_entropy(pipe(x), y).backward()
    assert counted(model, "0") == 2


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "looped-bfs"])
def test_several_stages_per_rank(schedule: str) -> None:
    model, (x, y) = net(), batch()
    plain = reference(model, x, [3] * 4)
    build(model, split=4, ranks=2, schedule=schedule).step(x, target=y)
    assert_counted_once(model, plain)


def test_results_do_not_depend_on_the_schedule() -> None:
    seen = []
    for schedule in ("gpipe", "sequential", "zb-h2", "varuna"):
        model, (x, y) = net(), batch()
        build(model, schedule=schedule).step(x, target=y)
        seen.append(buffers(model))
    for other in seen[1:]:
        assert all(torch.equal(other[name], buffer) for name, buffer in seen[0].items())


@pytest.mark.parametrize(("rows", "count"), [(8, 1), (7, 3), (6, 3)])
def test_uneven_microbatches_and_a_single_one(rows: int, count: int) -> None:
    model, (x, y) = net(), batch(rows)
    plain = reference(model, x, [len(part) for part in x.tensor_split(count)])
    build(model, num_microbatches=count).step(x, target=y)
    assert_counted_once(model, plain)


def test_fewer_rows_than_microbatches() -> None:
    torch.manual_seed(0)
    norm, x = nn.BatchNorm2d(3), torch.randn(2, 3, 4, 4)
    plain = copy.deepcopy(norm)
    plain(x)
    sl.Pipeline.from_stages([norm, nn.Flatten()], num_microbatches=8, deferred_batch_norm=True)(x)
    assert_counted_once(norm, plain)


class Residual(nn.Module):
    """Calls one BatchNorm twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5, momentum=0.2)
        self.second = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm(self.first(x))
        made: Tensor = self.second(torch.relu(self.norm(x)))
        return made


class NormThenScale(nn.BatchNorm1d):
    """A BatchNorm with a forward of its own: channels come last."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.transpose(1, 2)).transpose(1, 2) * 2


@pytest.mark.parametrize("opens", [True, False])
def test_two_calls_of_one_batch_norm_count_one_after_the_other(opens: bool) -> None:
    torch.manual_seed(0)
    model, (x, y) = Residual(), batch()
    plain = reference(model, x, [3] * 4)
    if opens:
        pipe = build(model, split=["second"], example_args=(x,))
    else:
        pipe = build(nn.Sequential(model, nn.Identity()))
    pipe.step(x, target=y)
    assert_counted_once(model, plain)
    assert counted(model, "norm") == 2


class TwiceAtTimes(Residual):
    """Calls its BatchNorm a second time where the microbatch says so."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        if x[0, 0] > 0:
            x = self.norm(x * 3)
        made: Tensor = self.second(x)
        return made


def test_a_batch_norm_may_be_left_out_for_some_microbatches() -> None:
    torch.manual_seed(1)
    model, (x, y) = TwiceAtTimes(), batch()
    normalised = [F.batch_norm(model.first(part), None, None, training=True) for part in x.split(3)]
    assert len({bool(part[0, 0] > 0) for part in normalised}) == 2
    plain = reference(model, x, [3] * 4)
    build(nn.Sequential(model, nn.Identity())).step(x, target=y)
    assert_counted_once(model, plain)
    assert counted(model, "norm") == 2


def test_a_subclass_with_a_forward_of_its_own() -> None:
    """What it gives to ``F.batch_norm`` counts, and not what it was given."""
    torch.manual_seed(0)
    norm, x = NormThenScale(5), torch.randn(8, 7, 5)
    plain = copy.deepcopy(norm)
    plain(x)
    sl.Pipeline.from_stages([norm, nn.Flatten()], deferred_batch_norm=True)(x)
    assert_counted_once(norm, plain)


class Own(nn.Module):
    """Normalises by hand, and says of itself that it keeps statistics."""

    track_running_stats = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(5))
        self.register_buffer("running_var", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.running_mean, Tensor)
        with torch.no_grad():
            self.running_mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - x.mean(0)


def test_statistics_that_change_unseen_are_an_error() -> None:
    model = nn.Sequential(Own(), nn.Linear(5, 3))
    pipe, before, (x, y) = build(model), buffers(model), batch()
    with pytest.raises(sl.PipeError, match="an Own of stage 0 has changed its running_mean"):
        pipe.step(x, target=y)
    assert_same_state(model, before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_evaluation_and_frozen_batch_norms_change_nothing() -> None:
    model, (x, y) = net(), batch()
    pipe, before = build(model), buffers(model)
    pipe.eval().step(x, target=y)
    pipe(x)
    assert_same_state(model, before)
    pipe.train()
    model[0].eval()
    pipe.step(x, target=y)
    after = buffers(model)
    assert torch.equal(after["0.running_mean"], before["0.running_mean"])
    assert not torch.equal(after["3.running_mean"], before["3.running_mean"])
    assert counted(model, "3") == 1


@pytest.mark.parametrize("grad", [True, False])
def test_a_call_in_train_mode_counts_when_its_forward_has_ended(grad: bool) -> None:
    model, (x, y) = net(), batch()
    plain = reference(model, x, [3] * 4)
    pipe = build(model, schedule="varuna")
    with torch.set_grad_enabled(grad):
        out = pipe(x)
    assert_counted_once(model, plain)
    if grad:
        after = buffers(model)
        F.cross_entropy(out, y).backward()
        assert_same_state(model, after)  # though R has run


class Trap(nn.Module):
    """Fails in forward or backward, once it is armed, after so many microbatches."""

    armed: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.armed == "forward" and self.calls % 4 == 3:
            raise ValueError("a bad batch")
        if x.requires_grad:
            x.register_hook(self._check)
        return x * 1.0

    def _check(self, gradient: Tensor) -> None:
        if self.armed == "backward":
            raise ValueError("a bad gradient")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failed_step_changes_nothing(where: str) -> None:
    trap = Trap()
    model = nn.Sequential(*net(), trap)
    pipe, (x, y) = build(model, split=[1, 3, 2]), batch()
    pipe.step(x, target=y)
    before, trap.armed = buffers(model), where
    with pytest.raises(sl.StepError):
        pipe.step(x, target=y)
    assert_same_state(model, before)
    trap.armed, trap.calls = None, 0
    plain = reference(model, x, [3] * 4)
    pipe.step(x, target=y)
    assert_counted_once(model, plain)


@pytest.mark.parametrize("grad", [True, False])
def test_a_failed_call_changes_nothing(grad: bool) -> None:
    trap = Trap()
    model = nn.Sequential(*net(), trap)
    pipe, before = build(model), buffers(model)
    trap.armed = "forward"
    with torch.set_grad_enabled(grad), pytest.raises(sl.StepError):
        pipe(batch()[0])
    assert_same_state(model, before)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 5))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.layers, x, use_reentrant=self.reentrant)
        return made


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["step", "call"])
def test_a_checkpoint_of_the_users_own_counts_once(
    kind: str, reentrant: bool, recompute: str
) -> None:
    """The backward of a call ran it again, and each microbatch counted, when statistics were
    long committed."""
    torch.manual_seed(0)
    inner, (x, y) = Checkpointed(reentrant=reentrant), batch()
    x.requires_grad_()  # or a reentrant one gives no gradient
    plain = copy.deepcopy(inner.layers[0])
    plain(x)
    pipe = sl.Pipeline.from_stages(
        [inner, nn.Linear(5, 3)],
        num_microbatches=4,
        loss_fn=F.cross_entropy,
        deferred_batch_norm=True,
        recompute=recompute,
    )
    if kind == "step":
        pipe.step(x, target=y)
    else:
        F.cross_entropy(pipe(x), y).backward()
    assert_counted_once(inner.layers[0], plain)


def test_wrapped_stages_autocast_and_dropout() -> None:
    """Draws are redirected by another function mode, and weights wait for W under a third one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    other, (x, y) = copy.deepcopy(model), batch()
    settings: dict[str, Any] = {
        "wrap_stage": lambda module, _: Doubled(module),
        "schedule": "zb-h1",
    }
    pipe = build(model, **settings)
    usual = build(other, deferred_batch_norm=False, **settings)
    seen: list[Tensor] = []
    other[2].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.manual_seed(3)
        loss = pipe.step(x, target=y).loss
        torch.manual_seed(3)
        assert torch.equal(usual.step(x, target=y).loss, loss)
    plain = nn.BatchNorm1d(5)
    plain(torch.cat(seen))
    assert_counted_once(model[2], plain)


def test_a_compiled_stage_runs_uncompiled(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    norm, x = nn.BatchNorm1d(5), batch()[0]
    norm.compile(backend="eager")
    norm(x)
    plain = nn.BatchNorm1d(5)
    plain.load_state_dict(norm.state_dict())
    pipe = sl.Pipeline.from_stages(
        [norm, nn.Identity()], num_microbatches=4, deferred_batch_norm=True
    )
    for _ in range(2):
        plain(x)
        pipe(x)
        assert_counted_once(norm, plain)
    assert "a compiled BatchNorm1d runs uncompiled, because deferred_batch_norm" in caplog.text


def test_modules_stay_as_they_were() -> None:
    model, (x, y) = net(), batch()
    before = [(name, type(module)) for name, module in model.named_modules()]
    places = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    keys = list(model.state_dict())
    build(model).step(x, target=y)
    assert [(name, type(module)) for name, module in model.named_modules()] == before
    assert {name: buffer.data_ptr() for name, buffer in model.named_buffers()} == places
    assert list(model.state_dict()) == keys
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_instance_norm_stays_as_it_is() -> None:
    norm, x = nn.InstanceNorm1d(5, track_running_stats=True), torch.randn(8, 5, 4)
    plain = copy.deepcopy(norm)
    sl.Pipeline.from_stages([norm, nn.Flatten()], num_microbatches=4, deferred_batch_norm=True)(x)
    for part in x.split(2):
        plain(part)
    assert_same_state(norm, buffers(plain))


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_only_true_and_false_are_taken(value: Any) -> None:
    with pytest.raises(sl.ConfigError, match=r"deferred_batch_norm=.*: wanted True or False"):
        build(net(), deferred_batch_norm=value)


def test_moments_of_parts_are_those_of_the_whole() -> None:
    torch.manual_seed(0)
    x = torch.randn(100, 3) * 0.01 + 100
    mean, variance = mean_and_variance([Moments.of(part, 0.1) for part in x.split([1, 60, 39])])
    exact = x.double()
    torch.testing.assert_close(mean, exact.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(variance, exact.var(0), rtol=1e-6, atol=0)


# Several processes


def _in_processes(rank: int, transport: str) -> dict[str, list[Any]]:
    torch.set_num_threads(1)
    model, (x, y) = net(momentum=None), batch(10)
    pipe = build(model, timeout=20, transport=transport)
    pipe.step(x, target=y)
    pipe(x)
    held = dict(pipe.named_buffers())
    before = {name: buffer.clone() for name, buffer in held.items()}
    bad = y.clone()
    bad[-1] = 7  # rank 1 alone fails, in the loss of its last microbatch
    try:
        pipe.step(x, target=bad)
    except sl.StepError:
        assert all(torch.equal(held[name], before[name]) for name in before)
    else:
        raise AssertionError("the step has not failed")
    pipe.close()
    return {name: buffer.tolist() for name, buffer in before.items()}


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["shared-memory", "process-group"])
def test_processes_count_as_threads_do(transport: str, two_ranks: RankPool) -> None:
    model, (x, y) = net(momentum=None), batch(10)
    pipe = build(model)
    pipe.step(x, target=y)
    pipe(x)
    first, second = two_ranks.run(_in_processes, transport)
    assert {**first, **second} == {name: b.tolist() for name, b in model.named_buffers()}
    assert first.keys() & second.keys() == set()


def _told_differently(rank: int) -> str:
    try:
        build(net(), timeout=20, deferred_batch_norm=rank == 0)
    except sl.StagelineError as error:
        return str(error)
    raise AssertionError("both have the same settings, they say")


@pytest.mark.processes
def test_all_ranks_must_say_the_same(two_ranks: RankPool) -> None:
    for message in two_ranks.run(_told_differently):
        assert "deferred_batch_norm" in message
