"""Everything that can be wrong when a pipeline is built: said there, all of it at once."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.running.settings import Settings
from stageline.scheduling import parse


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))


def build(model: Any = None, **settings: Any) -> sl.Pipeline:
    return sl.Pipeline(mlp() if model is None else model, **{"split": 2, **settings})


def stages(given: Any = None, **settings: Any) -> sl.Pipeline:
    given = [nn.Linear(4, 4), nn.Linear(4, 4)] if given is None else given
    return sl.Pipeline.from_stages(given, **settings)


class OwnForward(nn.Sequential):
    """Its forward does more than calling its children."""

    def forward(self, input: Tensor) -> Any:
        return self[0](input) * 2


def hooked() -> nn.Sequential:
    model = mlp()
    model.register_forward_hook(lambda module, args, output: None)
    return model


def patched() -> nn.Sequential:
    model = mlp()
    model.forward = lambda input: input * 0  # type: ignore[method-assign]  # as accelerate does
    return model


def with_own_parameter() -> nn.Sequential:
    model = mlp()
    model.register_parameter("temperature", nn.Parameter(torch.ones(1)))
    return model


def with_own_buffer() -> nn.Sequential:
    model = mlp()
    model.register_buffer("seen", torch.zeros(1))
    return model


def transposed() -> nn.Sequential:
    model = mlp()
    model[2].weight = nn.Parameter(model.get_parameter("0.weight").detach().t())
    return model


def one_norm_twice() -> nn.Sequential:
    norm = nn.BatchNorm1d(4)
    return nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm)


NOT_A_MODEL: dict[str, tuple[Callable[[], object], str]] = {
    "a string": (lambda: build("model"), r"model: wanted a module, got str"),
    "a list": (lambda: build([nn.ReLU()]), r"model: wanted a module, got list"),
    "a module": (
        lambda: build(nn.Linear(4, 4)),
        r"model: Linear is no nn.Sequential: give the arguments of one call",
    ),
    "wrapped whole": (
        lambda: build(nn.DataParallel(mlp())),
        r"model: DataParallel is no nn.Sequential: .*example_args",
    ),
    "a forward of its own": (
        lambda: build(OwnForward(nn.Linear(4, 4), nn.ReLU())),
        r"model: OwnForward has a forward of its own: .*example_args",
    ),
    "a forward on the instance": (lambda: build(patched()), r"model: .*forward of its own"),
    "hooks": (lambda: build(hooked()), r"model: it has hooks of its own, .*: remove them, or put"),
    "no children": (lambda: build(nn.Sequential(), split=1), r"model: it has no children"),
    "a parameter of its own": (lambda: build(with_own_parameter()), r"model: .*temperature"),
    "a buffer of its own": (lambda: build(with_own_buffer()), r"model: .*seen"),
    "a lazy layer": (
        lambda: build(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))),
        r"(?i)0.*(lazy|uninitialized)",
    ),
    "views of one weight in two stages": (
        lambda: build(transposed()),
        r"weight of 4 x 4 is held by stage 0 as 0.weight and by stage 1 as 2.weight, but these are "
        r"different views",
    ),
    "one BatchNorm trained by two stages": (
        lambda: build(one_norm_twice(), split=[2, 2]),
        r"BatchNorm1d is trained by two stages .*stage 0 as 1.running_mean and by stage 1 as 3.run",
    ),
    "one BatchNorm given as two stages": (
        lambda: stages([nn.BatchNorm1d(4)] * 2),
        r"BatchNorm1d is trained by two stages",
    ),
}

SPLITS: dict[str, tuple[Callable[[], object], str]] = {
    "left out": (lambda: sl.Pipeline(mlp()), r"split=None: wanted a number of stages \(4\) or"),
    "0": (lambda: build(split=0), r"split=0: wanted a number of stages, at least 1"),
    "a bool": (lambda: build(split=True), r"split=True: wanted"),
    "a string": (lambda: build(split="marks"), r"split='marks': wanted"),
    "a generator": (lambda: build(split=(n for n in [3, 2])), r"split=<generator .*: wanted"),
    "too many": (lambda: build(split=6), r"split=6: the model has 5 blocks, .* at most 5 stages"),
    "a wrong sum": (lambda: build(split=[2, 2]), r"places 4 blocks, the model has 5: 0 Linear, 1"),
    "an empty stage": (lambda: build(split=[5, 0]), r"stage 1 has 0 blocks, wanted"),
}

DEADLOCK = "0B0 0F0 \n 1F0 1B0"

SCHEDULES: dict[str, tuple[Callable[[], object], str]] = {
    "unknown": (
        lambda: build(schedule="1F1B"),
        r"schedule: unknown schedule '1F1B': choose one of .* Did you mean '1f1b'\?",
    ),
    "the function": (lambda: build(schedule=sl.schedules.gpipe), r"schedule.*wanted a name .*got"),
    "a number": (lambda: build(schedule=3), r"schedule.*wanted a name .*got 3"),
    "for other stages": (
        lambda: build(schedule=sl.schedules.gpipe(3, 4)),
        r"schedule: it is for 3 stages, the pipeline has 2",
    ),
    "for other ranks": (
        lambda: build(schedule=sl.schedules.gpipe(2, 4), ranks=1),
        r"schedule: it is for 2 ranks, the pipeline has 1",
    ),
    "for other microbatches": (
        lambda: build(schedule=sl.schedules.gpipe(2, 4), num_microbatches=8),
        r"schedule: it is for 4 microbatches, the pipeline has 8",
    ),
    "bad text": (
        lambda: build(schedule="0F0 0B0 \n 1F0 1X0"),
        r"schedule: line 2, column 6: .*1X0",
    ),
    "without a backward": (lambda: build(schedule="0F0 0B0 \n 1F0"), r"schedule: .*1B0 is missing"),
    "a deadlock": (lambda: build(schedule=DEADLOCK), r"(?s)schedule: .*deadlock: rank 0"),
    "a hole": (lambda: build(schedule="0F0 0B0 \n 2F0 2B0"), r"schedule: .*stage 1 appears in no"),
    "half a backward": (
        lambda: build(schedule="0F0 0I0 \n 1F0 1B0"),
        r"schedule: .*0W0 is missing",
    ),
    "a reduction": (
        lambda: build(schedule=parse("0F0 0B0 0REDUCE \n 1F0 1B0")),
        r"schedule: it uses REDUCE, which cannot be run",
    ),
}

SETTINGS: dict[str, tuple[Callable[[], object], str]] = {
    **{
        f"{name}={value!r}": (
            functools.partial(build, **{name: value}),
            rf"{name}={value!r}: wanted a whole number of at least 1",
        )
        for name in ("num_microbatches", "ranks")
        for value in (0, -3, 2.5, True, "4")
    },
    "more ranks than stages": (lambda: build(ranks=3), r"3 ranks for 2 stages: .* use 2 ranks"),
    "loss_fn": (lambda: build(loss_fn="mse"), r"loss_fn='mse': wanted a function or None"),
    "loss_fn, a class": (
        lambda: build(loss_fn=nn.CrossEntropyLoss),
        r"loss_fn.*CrossEntropyLoss.*CrossEntropyLoss\(\)",
    ),
    "wrap_stage": (lambda: build(wrap_stage=3), r"wrap_stage=3: wanted a function or None"),
    "wrap_stage, no module": (
        lambda: build(wrap_stage=lambda module, index: None),
        r"wrap_stage.*stage 0.*wanted a module.*NoneType",
    ),
    "observer": (lambda: build(observer=[]), r"observer=\[\]: wanted a function or None"),
    "loss_reduction": (
        lambda: build(loss_reduction="none"),
        r"loss_reduction='none': wanted 'mean', 'sum' or a function",
    ),
    "loss_reduction=None": (lambda: build(loss_reduction=None), r"loss_reduction=None: wanted"),
    "timeout=0": (lambda: build(timeout=0), r"timeout=0: wanted a number of seconds above 0"),
    "timeout='1 h'": (lambda: build(timeout="1 h"), r"timeout='1 h': wanted a number of seconds"),
    "timeout=nan": (lambda: build(timeout=float("nan")), r"timeout=nan: wanted"),
    "timeout=True": (lambda: build(timeout=True), r"timeout=True: wanted"),
    "batch_dims=None": (lambda: build(batch_dims=None), r"batch_dims=None: wanted a dimension"),
    "batch_dims=[1]": (lambda: build(batch_dims=[1]), r"batch_dims=\[1\]: wanted a dimension"),
    "batch_dims by number": (lambda: build(batch_dims={0: 1}), r"batch_dims=.*by leaf"),
    "batch_dims of True": (lambda: build(batch_dims={"args[0]": True}), r"batch_dims=.*by leaf"),
    "transport": (lambda: build(transport="nccl"), r"transport='nccl': choose one of memory, sh"),
    "transport=5": (lambda: build(transport=5), r"transport=5: wanted a name or a transport"),
    "transport, alone": (
        lambda: build(transport="process-group"),
        r"transport='process-group': this process is alone: start the script with torchrun",
    ),
    "shared memory, alone": (
        lambda: build(transport="shared-memory"),
        r"transport='shared-memory': this process is alone: start the script with torchrun",
    ),
    "heartbeat_timeout": (
        lambda: build(heartbeat_timeout=0),
        r"heartbeat_timeout=0: wanted a number of seconds above 0",
    ),
    "devices, a string": (lambda: build(devices="cpu"), r"devices='cpu': wanted a list with one"),
    "devices, a number": (lambda: build(devices=2), r"devices=2: wanted a list with one"),
    "devices, too few": (lambda: build(devices=["cpu"]), r"devices: 1 devices for 2 ranks: give"),
    "devices, unknown": (lambda: build(devices=["cpu", "gpu0"]), r"devices: 'gpu0' is no device"),
    "devices, None": (lambda: build(devices=[None, "cpu"]), r"devices: None is no device"),
    "devices, absent": (
        lambda: build(devices=["cpu", f"cuda:{torch.cuda.device_count()}"]),
        r"devices: .*cuda:\d+",
    ),
    "keep_outputs": (lambda: build(keep_outputs="no"), r"keep_outputs='no': wanted True or False"),
    "share_outputs": (lambda: build(share_outputs=1), r"share_outputs=1: wanted True or False"),
}

STAGES: dict[str, tuple[Callable[[], object], str]] = {
    "none at all": (lambda: stages([]), r"stages: the list is empty"),
    "a number": (lambda: stages(5), r"stages: wanted a list of stages, got int"),
    "a module": (lambda: stages(nn.Linear(4, 4)), r"stages: wanted a list .* put it into a list"),
    "an object": (lambda: stages([nn.ReLU(), 3]), r"stages\[1\]: wanted a module or a function, g"),
    "a class": (lambda: stages([nn.ReLU(), nn.Tanh]), r"stages\[1\]: .*Tanh.*Tanh\(\)"),
    "a module's method": (
        lambda: stages([mlp().forward, nn.ReLU()]),
        r"stages\[0\]: .*method.*Sequential.*parameters",
    ),
    "a bound module": (
        lambda: stages([functools.partial(nn.Linear(4, 4)), nn.ReLU()]),
        r"stages\[0\]: .*Linear.*parameters",
    ),
    "of another process": (lambda: stages([nn.ReLU(), None]), r"stages\[1\]: rank 1 holds this s"),
    "a mapping alone": (
        lambda: stages({0: nn.ReLU()}),
        r"stages: a mapping names only some stages: say how many there are, num_stages=4",
    ),
    "a mapping with a hole": (
        lambda: stages({0: nn.ReLU()}, num_stages=2),
        r"stages\[1\]: rank 1 holds this stage, but it was not given here",
    ),
    "a mapping with strangers": (
        lambda: stages({0: nn.ReLU(), 7: nn.ReLU()}, num_stages=1),
        r"stages: 7 is no stage of 0..0",
    ),
    "a wrong number": (lambda: stages(num_stages=3), r"the list has 2 entries, num_stages=3"),
    "a number in a string": (lambda: stages(num_stages="2"), r"num_stages='2': wanted a whole num"),
    "no stage": (lambda: stages({}, num_stages=0), r"num_stages=0"),
    "unpack_tuples": (lambda: stages(unpack_tuples="no"), r"unpack_tuples='no': wanted True or F"),
}


def table() -> list[Any]:
    return [
        pytest.param(*case, id=f"{title}: {name}")
        for title, cases in (
            ("model", NOT_A_MODEL),
            ("split", SPLITS),
            ("schedule", SCHEDULES),
            ("settings", SETTINGS),
            ("stages", STAGES),
        )
        for name, case in cases.items()
    ]


@pytest.mark.parametrize(("make", "message"), table())
def test_what_is_wrong_is_said_at_construction(make: Callable[[], object], message: str) -> None:
    with pytest.raises(sl.ConfigError, match=message) as caught:
        make()
    assert str(caught.value).startswith("sl.Pipeline")
    assert " is not possible:\n  - " in str(caught.value)
    assert len(caught.value.findings) >= 1


def findings(make: Callable[[], object]) -> list[str]:
    with pytest.raises(sl.ConfigError) as caught:
        make()
    assert all(finding in str(caught.value) for finding in caught.value.findings)
    return list(caught.value.findings)


def assert_all_found(found: list[str], *wanted: str) -> None:
    missing = [start for start in wanted if not any(start in finding for finding in found)]
    assert not missing, f"not among the findings: {missing}"


def test_all_findings_of_the_settings_come_in_one_error() -> None:
    found = findings(
        lambda: sl.Pipeline(
            nn.Linear(2, 2),
            split=0,
            num_microbatches=0,
            loss_fn=3,  # type: ignore[arg-type]  # wrong on purpose, as are the others
            loss_reduction="average",
            ranks=-1,
            wrap_stage=4,  # type: ignore[arg-type]
            batch_dims="0",  # type: ignore[arg-type]
            transport="nccl",
            timeout=-5,
            observer=6,  # type: ignore[arg-type]
        )
    )
    assert_all_found(found, "model:", "split=0", "num_microbatches=0", "loss_fn=3", "ranks=-1")
    assert_all_found(found, "loss_reduction='average'", "wrap_stage=4", "batch_dims='0'")
    assert_all_found(found, "transport='nccl'", "timeout=-5", "observer=6")


def test_schedule_and_devices_are_read_whatever_else_is_wrong() -> None:
    """Neither a name nor a device needs the model, so neither waits for a second attempt."""
    found = findings(lambda: build(split=0, schedule="1f1bb", devices=["cpu", "banana"]))
    assert_all_found(found, "split=0", "unknown schedule '1f1bb'", "'banana' is no device")
    found = findings(lambda: build(loss_fn=3, schedule="0F0 0X0 \n 1F0", split=9))
    assert_all_found(found, "loss_fn=3", "line 1, column 5", "at most 5 stages")


def test_findings_about_ranks_do_not_hide_those_about_the_schedule() -> None:
    found = findings(lambda: build(transposed(), ranks=3, schedule="1f1bb", devices=["banana"]))
    assert_all_found(found, "3 ranks for 2 stages", "unknown schedule", "is no device")
    assert_all_found(found, "weight of 4 x 4 is held by")


def test_what_is_shared_is_found_beside_wrong_settings() -> None:
    found = findings(lambda: stages([nn.BatchNorm1d(4)] * 2, loss_fn=3))
    assert_all_found(found, "loss_fn=3", "BatchNorm1d is trained by two stages")


def test_every_fault_of_a_schedule_is_a_finding_of_its_own() -> None:
    found = findings(lambda: build(schedule=DEADLOCK, loss_fn=3))
    assert_all_found(found, "0B0 stands before 0F0", "deadlock: rank 0 waits at 0B0", "loss_fn=3")
    assert len(found) == 3
    found = findings(lambda: build(schedule="0F0 0B0 0REDUCE \n 1F0 1B0", loss_fn=3))
    assert_all_found(found, "it uses REDUCE", "loss_fn=3")


def test_devices_of_other_processes_need_not_be_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun each process may see one accelerator only, or run on another host."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    absent = f"cuda:{torch.cuda.device_count()}"
    assert Settings(devices=["cpu", absent]).find_faults() == []
    assert_all_found(Settings(devices=[absent, "cpu"]).find_faults(), absent)


def test_every_wrong_stage_is_named() -> None:
    found = findings(lambda: stages([1, nn.ReLU(), "two"], num_microbatches=0))
    assert_all_found(found, "stages[0]", "stages[2]", "num_microbatches=0")


def test_an_error_leaves_the_model_and_the_process_as_they_were() -> None:
    model = transposed()
    before = threading.active_count(), dict(model.named_modules()), model.state_dict()
    findings(lambda: build(model))
    assert threading.active_count() == before[0]
    assert dict(model.named_modules()) == before[1]
    assert all(torch.equal(value, before[2][name]) for name, value in model.state_dict().items())


def test_an_argument_that_does_not_exist_is_blamed_on_the_function_that_was_called() -> None:
    with pytest.raises(TypeError, match=r"Pipeline.*'num_microbatch'"):
        build(num_microbatch=4)
    with pytest.raises(TypeError, match=r"from_stages\(\).*'num_microbatch'"):
        stages(num_microbatch=4)
    with pytest.raises(TypeError, match=r"from_stages\(\).*'split'"):
        stages(split=2)


def test_what_wrap_stage_raises_comes_through() -> None:
    def wrap(module: nn.Module, index: int) -> nn.Module:
        raise LookupError("the user's own")

    with pytest.raises(LookupError, match="the user's own"):
        build(wrap_stage=wrap)


# What looks odd and is right


def test_a_generator_of_stages_is_read_once() -> None:
    pipe = stages(nn.Linear(4, 4) for _ in range(3))
    assert pipe.plan.num_stages == 3


@pytest.mark.parametrize("container", [nn.Sequential, nn.ModuleList, list, tuple])
def test_stages_may_stand_in_any_list(container: Callable[..., Any]) -> None:
    layers = [nn.Linear(4, 4), nn.ReLU()]
    given = container(*layers) if container is nn.Sequential else container(layers)
    assert stages(given).plan.num_stages == 2


def test_a_sparse_buffer_is_no_obstacle() -> None:
    model = mlp()
    model[1].register_buffer("adjacency", torch.eye(4).to_sparse())
    assert build(model).plan.num_stages == 2


def test_a_schedule_without_spaces_is_read_as_text() -> None:
    pipe = stages([nn.ReLU(), nn.ReLU()], schedule="0F0\n1F0")
    assert pipe.schedule == parse("0F0 \n 1F0")
    assert stages([F.relu], schedule="0F0\t0B0").schedule == parse("0F0 0B0")
