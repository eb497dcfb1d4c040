"""The module of a stage: the user's own modules, and the code that calls them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule

from stageline.capturing.cutting import StageCode
from stageline.capturing.dependence import attribute_of, is_flag, module_of_flag
from stageline.capturing.recording import Recording
from stageline.capturing.training_flags import TrainingFlags


class Flag:
    """The training flag of an opened module, which is in no stage itself; never copied."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @property
    def training(self) -> bool:
        return bool(self._module.training)

    def __deepcopy__(self, memo: Any) -> Flag:
        return self


_CHECK = re.compile(r"\s+check\w* = stageline_capturing_guards_check|\s*# To see more debug info")
TABLES = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


class Parts(nn.Module):
    """The modules, parameters, buffers and constants of a stage, under their original names."""

    # How a rank that shares parameters with others sees a module: over copies of its own.
    adapt: Callable[[nn.Module], nn.Module] | None = None

    def place(self, recording: Recording, names: Iterable[str]) -> None:
        """Take in what some code names."""
        # Modules before the parameters inside them, and all in the model's own order, which is
        # the order in which an optimizer numbers them.
        order = recording.names.order
        found = {
            name: attribute_of(recording, name)
            for name in sorted(names, key=lambda name: order.get(name, len(order)))
        }
        for is_module in (True, False):
            for name, value in found.items():
                if isinstance(value, nn.Module) is is_module:
                    self._take(recording, name, value)

    def _take(self, recording: Recording, name: str, value: Any) -> None:
        if self.adapt is None or not isinstance(value, (nn.Module, nn.Parameter)):
            _place(recording, self, name, value)
            return
        holder = nn.Module()
        holder.value = value
        _place(recording, self, name, self.adapt(holder).value)


def _place(recording: Recording, root: nn.Module, name: str, value: Any) -> None:
    *path, last = name.split(".")
    holder: Any = root
    for part in path:
        inner = getattr(holder, part, None)
        if inner is None:
            inner = nn.Module()
            holder.add_module(part, inner)
        holder = inner
    if getattr(holder, last, None) is not None:  # it is there, perhaps as this rank's own copy
        return
    if isinstance(value, nn.Module):
        holder.add_module(last, value)
    elif isinstance(value, nn.Parameter):
        holder.register_parameter(last, value)
    elif isinstance(value, Tensor):
        holder.register_buffer(last, value, persistent=_is_persistent(recording, name))
    else:
        setattr(holder, last, value)


def _is_persistent(recording: Recording, name: str) -> bool:
    if name in recording.constants:
        return False
    owner, _, leaf = name.rpartition(".")
    return leaf not in recording.names.module(owner)._non_persistent_buffers_set


class StageModule(GraphModule):
    """The code of one stage; prints as its modules and what is done with them.

    It shares its tables of modules and parameters with the ``Parts`` of the stage, so that moving
    one to a device moves the other.
    """

    # What else train() sets, and as which stage; nothing in the code that checks guards.
    flags: TrainingFlags | None = None
    index = 0

    def train(self, mode: bool = True) -> StageModule:
        """Put the stage into a mode, and the training flags that its code reads."""
        super().train(mode)
        if self.flags is not None:
            self.flags.train(self.index, mode)
        return self

    def __str__(self) -> str:
        """Return modules and code, without the checks that only the machine needs."""
        code = [line for line in self.code.strip().splitlines() if not _CHECK.match(line)]
        text = "\n".join(code).rstrip().replace("stageline_capturing_calls_", "")
        return f"{nn.Module.__repr__(self)}\n\n{text}"

    def on(self, parts: Parts) -> StageModule:
        """Return the same code on other parts."""
        constants = {name: value for name, value in vars(self).items() if _is_constant(name)}
        twin = _module(parts, self.graph, constants, type(self).__name__)
        twin.flags, twin.index = self.flags, self.index
        return twin

    def __deepcopy__(self, memo: Any) -> StageModule:
        parts = Parts()
        parts.__dict__.update({name: copy.deepcopy(vars(self)[name], memo) for name in TABLES})
        return self.on(parts)


def _is_constant(name: str) -> bool:
    return name.startswith(("constant_", "flag_"))


def build(recording: Recording, parts: Parts, code: StageCode, index: int) -> StageModule:
    """Return the module that runs the code of a stage, on the parts of that stage."""
    renamed = _own_constants(recording, parts, code)
    parts.place(recording, [name for name in code.attributes if name not in renamed])
    for name, own in renamed.items():
        parts.register_buffer(own, recording.constants[name], persistent=False)
    constants: dict[str, Any] = {
        name: recording.constants[name]
        for name in code.attributes
        if name in recording.constants and not isinstance(recording.constants[name], Tensor)
    }
    for node in code.graph.nodes:
        if node.op == "get_attr" and node.target in renamed:
            node.target = renamed[node.target]
    constants |= _read_flags(code.graph, recording)
    return _module(parts, code.graph, constants, f"Stage{index}")


def _own_constants(recording: Recording, parts: Parts, code: StageCode) -> dict[str, str]:
    """Return other names for constants whose own name means another one in an earlier recording."""
    return {
        name: f"{name}_{recording.fingerprint}"
        for name in code.attributes
        if isinstance(recording.constants.get(name), Tensor)
        and not _is_free(parts, name, recording.constants[name])
    }


def _is_free(parts: Parts, name: str, value: Any) -> bool:
    there = getattr(parts, name, None)
    return there is None or there is value


def _module(
    parts: nn.Module,
    graph: FxGraph,
    constants: dict[str, Any],
    name: str,
) -> StageModule:
    module = StageModule(nn.Module(), FxGraph(), name)
    module.__dict__.update({table: vars(parts)[table] for table in TABLES})
    module.__dict__.update(constants)
    module.graph = graph
    return module


def _read_flags(graph: FxGraph, recording: Recording) -> dict[str, Flag]:
    """Let the reads of training flags go to the modules they belong to; return these by name."""
    flags = {}
    for node in list(graph.nodes):
        target = str(node.target)
        if node.op == "get_attr" and is_flag(target):
            path = module_of_flag(target)
            name = f"flag_{path.replace('.', '_')}"
            flags[name] = Flag(recording.names.module(path))
            with graph.inserting_before(node):
                holder = graph.create_node("get_attr", name)
                flag = graph.call_function(getattr, (holder, "training"))
            node.replace_all_uses_with(flag)
            graph.erase_node(node)
    return flags
