"""What each node of a recording depends on: which can be computed anew in any stage, from inputs.

    fixed by inputs     masks, positions, sizes of inputs: every stage computes them for itself
    renewable           the same, given some whole numbers of another stage: the numbers travel
    everything else     is made once, and sent to the stages that use it

A change in place belongs to the memory it changes: whoever computes such a value anew repeats the
changes too, in order.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from stageline.capturing.calls import length, rank, size
from stageline.capturing.guards import is_guard
from stageline.capturing.recording import Recording


class Dependence:
    """Answers questions about the nodes of one recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.position = {node: index for index, node in enumerate(recording.nodes)}
        self._mutators: dict[int, list[Node]] = {}
        for node in recording.nodes:
            for storage in node.meta.get("mutates", ()):
                self._mutators.setdefault(storage, []).append(node)
        self.renewable: set[Node] = set()
        self.fixed: set[Node] = set()
        for node in recording.inputs.values():
            if not self._is_changed(node) and not node.meta.get("requires_grad"):
                self.renewable.add(node)
                self.fixed.add(node)
        for node in recording.nodes:
            self._classify(node)
        # A value whose memory is changed by something that cannot be repeated cannot be either.
        self._withdraw_changed()

    def changes(self, node: Node) -> list[Node]:
        """Return the nodes that change in place the memory of a node's value."""
        return self._mutators.get(node.meta.get("storage", 0), [])

    def _is_changed(self, node: Node) -> bool:
        return bool(self.changes(node))

    def inputs_of(self, node: Node) -> Iterable[Node]:
        return (*node.all_input_nodes, *node.meta.get("after", ()))

    def _classify(self, node: Node) -> None:
        if node.op == "call_module" or node.meta.get("requires_grad") or node.meta.get("opaque"):
            return
        if node.op == "get_attr" and not self._is_free(node):
            return
        if self._may_be_random(node):
            return
        used = list(self.inputs_of(node))
        if all(source in self.fixed for source in used):
            self.fixed.add(node)
            self.renewable.add(node)
        elif all(source in self.renewable or is_number(source) for source in used):
            self.renewable.add(node)

    def _may_be_random(self, node: Node) -> bool:
        if node.op == "get_attr" or node.meta.get("pure") or is_guard(node.target):
            return False
        reading = node.meta.get("reading")
        return reading is None or reading.is_random  # what nobody measured may be anything

    def _is_free(self, node: Node) -> bool:
        """Whether any stage may hold this attribute: a constant or buffer that does not change."""
        target = str(node.target)
        if is_flag(target):
            return True
        if target in self._recording.constants:
            value = self._recording.constants[target]
            return not isinstance(value, torch.Tensor) or not self._is_changed(node)
        tensor = attribute_of(self._recording, target)
        is_buffer = isinstance(tensor, torch.Tensor) and not isinstance(tensor, torch.nn.Parameter)
        return is_buffer and not self._is_changed(node)

    def _withdraw_changed(self) -> None:
        withdrawn = True
        while withdrawn:
            withdrawn = False
            for node in [*self._recording.inputs.values(), *self._recording.nodes]:
                if node not in self.renewable:
                    continue
                sources = [*self.inputs_of(node), *self.changes(node)]
                if not all(source in self.renewable or is_number(source) for source in sources):
                    self.renewable.discard(node)
                    self.fixed.discard(node)
                    withdrawn = True

    def closure(self, wanted: Iterable[Node], before: int) -> list[Node]:
        """Return all that must be computed anew for some renewable values, in order.

        Args:
            wanted: The values.
            before: Only changes in place before this position have happened by then.
        """
        found: set[Node] = set()
        waiting = list(wanted)
        while waiting:
            node = waiting.pop()
            # Parameters are held by every stage that uses them; they never travel.
            is_free = node in self.renewable or node.op == "get_attr"
            if node in found or node.op == "placeholder" or not is_free:
                continue
            found.add(node)
            waiting += self.inputs_of(node)
            waiting += [change for change in self.changes(node) if self.position[change] < before]
        return sorted(found, key=self.position.__getitem__)

    def guards_on_inputs(self) -> list[Node]:
        """Return the guards that can be checked before anything runs."""
        return [
            node for node in self._recording.nodes if is_guard(node.target) and node in self.fixed
        ]

    def guards_see_only_looks(self) -> bool:
        """Whether those see no more of a tensor than its sizes and strides; numbers they may."""
        nodes = self.closure(self.guards_on_inputs(), self._recording.num_nodes)
        return all(_sees_only_looks(node) for node in nodes)

    def has_guards_on_sizes(self) -> bool:
        """Whether some guard looks at a number that is known only once a stage has run."""
        guarded = [
            node.all_input_nodes[0]
            for node in self._recording.nodes
            if is_guard(node.target) and node not in self.fixed and node.all_input_nodes
        ]
        # The number of dimensions follows sizes only where dimensions of size one are dropped.
        drops = any(_name(node).strip("_") == "squeeze" for node in self._recording.nodes)
        return any(_is_size(node) or (drops and node.target is rank) for node in guarded)


def is_number(node: Node) -> bool:
    """Whether a node makes a plain number or flag, cheap to send."""
    return bool(node.meta.get("number"))


# What tells of a tensor how it lies in memory, and nothing of where or what is in it.
_LOOKS = (size, length, rank, "numel", "stride", "is_contiguous")


def _sees_only_looks(node: Node) -> bool:
    """Whether a node makes the same of all inputs that look alike, given the same of all others."""
    if node.op == "get_attr" or node.target in _LOOKS:
        return True
    is_known = bool(node.meta.get("pure")) or is_guard(node.target)
    return is_known and all(
        source.op != "placeholder" or is_number(source) for source in node.all_input_nodes
    )


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _is_size(node: Node) -> bool:
    """Whether a number is made of sizes alone."""
    if node.target in (size, length, "numel", "is_contiguous", "stride", "storage_offset"):
        return True
    return (
        is_number(node) and bool(node.all_input_nodes) and all(map(_is_size, node.all_input_nodes))
    )


def is_flag(target: str) -> bool:
    """Whether a name is that of a module's training flag."""
    return target == "training" or target.endswith(".training")


def module_of_flag(target: str) -> str:
    """Return the module whose training flag has a name."""
    return target.removesuffix("training").rstrip(".")


def attribute_of(recording: Recording, target: str) -> object:
    """Return the parameter, buffer, module or constant that a node names."""
    if target in recording.constants:
        return recording.constants[target]
    names = recording.names
    if target in names.modules or target in names.extra:
        return names.module(target)
    path, _, name = target.rpartition(".")
    return getattr(names.module(path), name)
