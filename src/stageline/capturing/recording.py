"""One run of a model, recorded: the graph, where modules were called, and what it relies on."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from stageline.capturing.binding import OpenInstead, is_cache
from stageline.capturing.graph import Call, Mark
from stageline.capturing.guards import is_guard
from stageline.capturing.inputs import Arguments, ambient_key, leaf_names
from stageline.capturing.interception import intercepted
from stageline.capturing.marks import CutPoint, is_own_hook, listening
from stageline.capturing.meter import Meter
from stageline.capturing.names import ModelNames
from stageline.capturing.patches import patched
from stageline.capturing.places import line_of
from stageline.capturing.recorder import Recorder
from stageline.capturing.snapshot import preserved
from stageline.capturing.streams.tracking import calls_followed, tracked
from stageline.capturing.symbols import symbol
from stageline.capturing.values import flatten
from stageline.capturing.watching import SharedObjects, Watch
from stageline.errors import CaptureError, StagelineError
from stageline.torch_private import MODULE_HOOKS, DisableTorchFunction, TreeSpec

_one_at_a_time = threading.RLock()  # the patches of a recording belong to the whole process
# What image models of the transformers library find out on their first call.
_FIRST_CALL = ("config.problem_type",)
_OUTPUT_HOOKS = "transformers.utils.output_capturing"


@dataclass(frozen=True, eq=False)
class Recording:
    """What one run of a model did.

    Attributes:
        inputs: The node of each tensor or number of the arguments, by its place among the leaves.
        nodes: Everything that happened, in order.
        output: The leaves of the result: nodes and constants.
        output_spec: How they make the result again.
        calls: The calls of modules.
        marks: The marks reached.
        constants: Values that existed before, by the name of their node.
        names: The names of the model.
        opened: The modules that were recorded inside.
        key: What arguments must be for it, whatever their sizes.
        random_modules: Unopened modules that draw from Python's or numpy's global generator.
        flags: Where the training flags of which opened modules were read: position and module.
        grad: Whether gradients were enabled around the model.
        checkpoints: Where opened code asked for activation checkpointing.
        asks_for_grad: Whether the code asked if some value requires a gradient.
        findings: What is wrong with the marks.
        device: The real device of the run where parameters are on meta.
        measured: Whether the nodes know what they cost.
    """

    inputs: dict[int, Node]
    nodes: list[Node]
    output: list[Any]
    output_spec: TreeSpec
    calls: list[Call]
    marks: list[Mark]
    constants: dict[str, Any]
    names: ModelNames
    opened: frozenset[str]
    key: tuple[Any, ...]
    checkpoints: list[str]
    asks_for_grad: bool
    findings: list[str]
    input_names: list[str]
    random_modules: list[str]
    flags: list[tuple[int, str]]
    grad: bool
    fingerprint: str = field(default="")

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)


def record(
    names: ModelNames, arguments: Arguments, opened: frozenset[str], *, grad: bool = True
) -> Recording:
    """Run a model and record what its opened modules do.

    Marks inside modules that were not to be opened open them, by another run.
    """
    while True:
        try:
            with _one_at_a_time:
                recorder, recording = _record_once(names, arguments, opened, grad)
            if not recorder.hidden_marks:
                return recording
            needed = _way_to(names, recorder.hidden_marks)
        except OpenInstead as error:
            needed = _way_to(names, [error.path])
            if needed <= opened:
                raise
        opened = opened | needed


def _way_to(names: ModelNames, paths: list[str]) -> frozenset[str]:
    ways: set[str] = set()
    for path in paths:
        parts = path.split(".") if path else []
        ways |= {".".join(parts[:count]) for count in range(len(parts) + 1)}
    return frozenset(way for way in ways if way in names.modules or way in names.extra)


def _record_once(
    names: ModelNames, arguments: Arguments, opened: frozenset[str], grad: bool
) -> tuple[Recorder, Recording]:
    names.refresh()
    model = names.model
    _check_openable(names, opened)
    metered = True
    while True:
        recorder = Recorder(names, opened)
        try:
            output, inputs = _run(recorder, model, arguments, grad=grad, metered=metered)
            return recorder, _finished(recorder, arguments, inputs, output, grad)
        except StagelineError:
            raise
        except Exception as error:
            if not metered or "HigherOrderOperator" not in str(error):
                raise _unrecordable(error) from error
            metered = False  # not every operation can be measured
        finally:
            recorder.bindings.forget()


def _unrecordable(error: Exception) -> CaptureError:
    return CaptureError(
        f"{line_of(error)}: {type(error).__name__} while the model was recorded: {error}. If the "
        "model runs plainly on these arguments, this code does something with sizes or tensors "
        "that cannot be recorded: move it into a module that is not cut"
    )


def _run(
    recorder: Recorder, model: nn.Module, arguments: Arguments, *, grad: bool, metered: bool
) -> tuple[Any, dict[int, Node]]:
    with ExitStack() as stack:
        stack.enter_context(preserved(model))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(grad))
        watch = Watch({path: recorder.names.module(path) for path in recorder.opened})
        shared = SharedObjects(model)
        inputs, placed = _place_inputs(recorder, arguments.copied())
        args, kwargs = placed.unpacked()
        kwargs = {**kwargs, **without_cache(model, kwargs)}
        recorder.regions.begin()
        stack.enter_context(patched(recorder))
        stack.enter_context(listening(_Ear(recorder)))
        stack.enter_context(intercepted(model, recorder.call_module))
        stack.enter_context(calls_followed())
        stack.enter_context(tracked(recorder.names.numbers, recorder.route.caller()))
        if metered:
            recorder.meter = stack.enter_context(Meter())
        stack.enter_context(recorder)
        recorder.check_random(is_new=True)
        output = model(*args, **kwargs)
        recorder.check_random()
        output = _returned(recorder, output, wants_cache=bool(kwargs.get("use_cache")))
        with DisableTorchFunction():
            _refuse_altered([*watch.altered(), *shared.altered()])
    return output, inputs


def _refuse_altered(names: list[str]) -> None:
    altered = [name for name in names if not name.endswith(_FIRST_CALL)]
    if altered:
        raise CaptureError(
            f"the code changes {altered[0]} in forward, which a stage would not do: keep such a "
            "state in a buffer that is changed in place, in a module that is not cut, or outside"
        )


def without_cache(model: nn.Module, kwargs: Any) -> dict[str, Any]:
    """Return the argument that keeps a model from making a cache that nobody asked for.

    Language models of the transformers library return one by default. A cache is filled behind
    the graph's back, and training has no use for it.
    """
    if "use_cache" in kwargs or not hasattr(model, "config"):
        return {}
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    has_switch = hasattr(model.config, "use_cache") and takes_any
    return {"use_cache": False} if "use_cache" in parameters or has_switch else {}


def _place_inputs(recorder: Recorder, arguments: Arguments) -> tuple[dict[int, Node], Arguments]:
    """Make a node of every tensor and number among the arguments; numbers become symbols."""
    args, kwargs = arguments.unpacked()
    names = leaf_names(recorder.names.model, args, kwargs)
    inputs, leaves = {}, list(arguments.leaves)
    for index, (leaf, name) in enumerate(zip(arguments.leaves, names, strict=True)):
        if isinstance(leaf, Tensor):
            inputs[index] = recorder.graph.placeholder(name)
            recorder.bindings.bind_input(leaf, inputs[index])
        elif type(leaf) in (int, float):
            inputs[index] = recorder.graph.placeholder(name)
            inputs[index].meta["number"] = True
            leaves[index] = symbol(recorder, inputs[index], leaf)
    model = recorder.names.model
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        real = [leaf.device for leaf in arguments.leaves if isinstance(leaf, Tensor)]
        recorder.bindings.device = real[0] if real else torch.device("cpu")
    return inputs, arguments.with_leaves(leaves)


def _returned(recorder: Recorder, output: Any, *, wants_cache: bool) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of a result as the graph states them."""
    with DisableTorchFunction():
        leaves, spec = flatten(output)
        if wants_cache and any(map(is_cache, leaves)):
            raise CaptureError(
                "use_cache=True: a cache is filled layer by layer, and stages cannot hand it on: "
                "leave use_cache out, or pass use_cache=False"
            )
        return [_result_leaf(recorder, leaf) for leaf in leaves], spec


def _result_leaf(recorder: Recorder, leaf: Any) -> Any:
    if is_cache(leaf):  # it would be that of the last stage alone
        return None
    if isinstance(leaf, torch.Size):
        return recorder.pure(torch.Size, recorder.to_nodes(leaf))
    return recorder.to_nodes(leaf)


def _finished(
    recorder: Recorder, arguments: Arguments, inputs: dict[int, Node], output: Any, grad: bool
) -> Recording:
    leaves, spec = output
    if recorder.failures:
        raise CaptureError(
            f"{recorder.failures[0]}: the code tries something, catches its error and goes on, "
            "which no recording can check: ask first, or move this into a module that is not cut"
        )
    recorder.marks.finish(recorder.position())
    args, kwargs = arguments.unpacked()
    return Recording(
        inputs=inputs,
        nodes=recorder.bindings.nodes,
        output=leaves,
        output_spec=spec,
        calls=recorder.calls,
        marks=recorder.marks.marks,
        constants=recorder.bindings.constants,
        names=recorder.names,
        opened=recorder.opened,
        key=(*arguments.key(), *ambient_key()),
        checkpoints=recorder.checkpoints,
        asks_for_grad=recorder.asks_for_grad,
        findings=recorder.marks.findings,
        input_names=leaf_names(recorder.names.model, args, kwargs),
        random_modules=recorder.random_modules,
        flags=list(recorder.flags),
        grad=grad,
        fingerprint=_fingerprint(recorder, leaves),
    )


def _fingerprint(recorder: Recorder, output: list[Any]) -> str:
    """Return a digest of everything that a replay does.

    Not of the lines that guards name: those of an ``nn.Sequential`` are where it was called.
    """
    numbers = {node: index for index, node in enumerate(recorder.graph.nodes)}

    def told(value: Any) -> str:
        if isinstance(value, Node):
            return f"%{numbers[value]}"
        if isinstance(value, (list, tuple)):
            return f"({', '.join(told(part) for part in value)})"
        if isinstance(value, dict):
            return str({key: told(part) for key, part in value.items()})
        if isinstance(value, slice):
            return f"{told(value.start)}:{told(value.stop)}:{told(value.step)}"
        return repr(value)

    digest = sha256()
    for node in recorder.graph.nodes:
        target = getattr(node.target, "__qualname__", node.target)
        region = node.meta.get("regions")
        args = node.args[:-1] if is_guard(node.target) else node.args
        line = f"{node.op} {target} {told(args)} {told(node.kwargs)} {region}\n"
        digest.update(line.encode())
    digest.update(told(output).encode())
    return digest.hexdigest()[:16]


class _Ear:
    """Hears of marks, and notes those inside modules that are not open."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def _is_hidden(self, own: str | None = None) -> bool:
        inside = self._recorder.inside
        if not inside or inside == [own]:
            return False
        self._recorder.hidden_marks.append(inside[0])
        return True

    def reached(self, point: CutPoint, where: str) -> None:
        if not self._is_hidden():
            self._recorder.marks.reached(point, where)

    def entered(self, name: str, where: str) -> None:
        if not self._is_hidden():
            self._recorder.marks.entered(name, where)

    def left(self, name: str) -> None:
        if not self._recorder.inside:
            self._recorder.marks.left(name)

    def begun(self, name: str, module: nn.Module, where: str) -> None:
        if not self._is_hidden(self._recorder.names.path_of(module)):
            self._recorder.marks.begun(name, module, where)


def _is_harmless(hook: Any) -> bool:
    """Whether a hook does nothing that a recording misses: marks, and lists of hidden states."""
    return is_own_hook(hook) or getattr(hook, "__module__", "") == _OUTPUT_HOOKS


def _check_openable(names: ModelNames, opened: frozenset[str]) -> None:
    findings = [fault for path in sorted(opened) for fault in _faults(names, path)]
    if findings:
        raise CaptureError("; ".join(findings))


def _faults(names: ModelNames, path: str) -> Iterator[str]:
    module = names.module(path)
    name = f"{path or 'the model'} ({type(module).__name__})"
    for hooks in MODULE_HOOKS:
        if any(not _is_harmless(hook) for hook in getattr(module, hooks).values()):
            yield (
                f"{name} has hooks, which no stage would call: remove them, or put them on a "
                "module inside that is not cut"
            )
            break
    if type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
        yield f"{name} is wrapped whole: pass the plain model, and wrap each stage: wrap_stage=..."
