"""A recorded model in stages, at run time: recordings are variants, chosen by their guards.

    stage 0                        stage 1                    stage 2 (last)
    arguments ──▶ values ────────▶ values ──────────────────▶ the model's result
                                   ▲ arguments it uses        ▲ arguments it uses

A stage gets what the stage before returned, and the arguments of the model; it returns what later
stages need. With one value and the first recording that is a bare tensor, by far the most common
case; otherwise a tuple that begins with the name of the recording.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph as FxGraph

from stageline.capturing.cutting import Cutter, StageCode, named_in
from stageline.capturing.dependence import attribute_of
from stageline.capturing.direct.calls import listening
from stageline.capturing.direct.entrances import Entrance
from stageline.capturing.inputs import Arguments, ambient_key
from stageline.capturing.recording import Recording
from stageline.capturing.stage import TABLES, Parts, StageModule, build
from stageline.capturing.streams.frames import Planned, here
from stageline.capturing.streams.tracking import numbers_of_copy
from stageline.capturing.training_flags import TrainingFlags
from stageline.capturing.watching import Watch
from stageline.capturing.wiring import Wiring
from stageline.errors import CaptureError, GuardError

MOST_VARIANTS = 64


class Variant:
    """One recording, cut into stages.

    Attributes:
        name: What stages call it when they hand on its values.
        codes: The code of each stage.
    """

    def __init__(self, recording: Recording, cutter: Cutter, cuts: Sequence[int]) -> None:
        self.recording = recording
        self.name = recording.fingerprint
        self.codes = cutter.cut(cuts)
        depends = cutter.dependence
        self._guards = _guard_code(recording, cutter)
        # Whether guards that hold for a call hold for every call whose arguments look alike.
        self.goes_by_looks = depends.guards_see_only_looks()
        # A guard on a number that only a stage knows might fail for other sizes than those seen.
        self._any_size = not depends.has_guards_on_sizes()
        self._seen: set[Any] = set()
        self._grad = recording.grad if recording.asks_for_grad else None
        self.watch_again()

    def is_like(self, other: Variant) -> bool:
        """Whether two recordings are one: the same code for the same arguments."""
        mine, theirs = self.recording, other.recording
        if mine.fingerprint != theirs.fingerprint or mine.key != theirs.key:
            return False
        values = zip(mine.constants.values(), theirs.constants.values(), strict=True)
        return all(
            one is another or (not isinstance(one, Tensor) and bool(one == another))
            for one, another in values
        )

    def flags_of(self, stage: int) -> dict[str, nn.Module]:
        """Return the opened modules whose training flag the code of a stage reads, by name."""
        names = self.recording.names
        return {path: names.module(path) for path in self.codes[stage].opened}

    def watch_again(self) -> None:
        """Take the attributes of opened modules as they are now."""
        names = self.recording.names
        self._watch = Watch({path: names.module(path) for path in self.recording.opened})

    def is_current(self) -> bool:
        """Whether opened modules still keep the numbers that were recorded."""
        return not self._watch.changed()

    def check_model(self) -> None:
        """Raise if something in an opened module was replaced."""
        replaced = self._watch.replaced()
        if replaced:
            raise CaptureError(
                f"{replaced[0]} of {type(self.recording.names.model).__name__} was replaced since "
                "the model was captured: capture it again"
            )

    def is_for(self, key: tuple[Any, ...], arguments: Arguments) -> bool:
        """Whether it was recorded for such arguments, whatever is in them."""
        if key != self.recording.key:
            return False
        if self._grad is not None and torch.is_grad_enabled() != self._grad:
            return False
        return self._any_size or arguments.sizes() in self._seen

    def holds(self, arguments: Arguments) -> bool:
        """Whether a call would decide as recorded; asked if the recording is for its arguments."""
        if self._guards is None:
            return True
        module, inputs = self._guards
        try:
            with torch.no_grad():
                module(*(arguments.leaves[index] for index in inputs))
        except GuardError:
            return False
        return True

    def saw(self, arguments: Arguments) -> None:
        if not self._any_size:
            self._seen.add(arguments.sizes())


def _guard_code(recording: Recording, cutter: Cutter) -> tuple[StageModule, tuple[int, ...]] | None:
    """Return the code that checks all guards on inputs, and the inputs that it takes."""
    depends = cutter.dependence
    guards = depends.guards_on_inputs()
    if not guards:
        return None
    nodes = depends.closure(guards, recording.num_nodes)
    places = {node: index for index, node in recording.inputs.items()}
    used = dict.fromkeys(
        source for node in nodes for source in node.all_input_nodes if source in places
    )
    graph = FxGraph()
    twins = {node: graph.placeholder(node.name) for node in used}
    for node in nodes:
        twins[node] = graph.node_copy(node, twins.__getitem__)
    graph.output(None)
    code = StageCode(
        graph=graph,
        uses=(),
        inputs=tuple(places[node] for node in used),
        makes=(),
        carries=(),
        attributes=named_in(nodes),
        opened=(),
        has_regions=False,
        changes=(),
    )
    return build(recording, Parts(), code, 0), code.inputs


class VariantStage(Parts):
    """One stage of a recorded model, in all its variants; what a pipeline runs.

    Called with what the stage before returned and with the model's arguments, it returns what goes
    to the next stage, or the model's result.
    """

    def __init__(self, index: int, num_stages: int, flags: TrainingFlags) -> None:
        super().__init__()
        self.index = index
        self.num_stages = num_stages
        self.flags = flags
        self._first: str | None = None
        self.numbers: dict[int, int] = {}
        self.num_changes = 0  # of its recordings, for those who look at all of them
        wirings: dict[str, Wiring] = {}
        # Behind a function: whoever walks the objects of a stage need not walk its graphs.
        self._wirings: Callable[[], dict[str, Wiring]] = lambda: wirings

    def add(self, variant: Variant) -> None:
        """Take in another recording of this stage."""
        code = variant.codes[self.index]
        self._first = self._first or variant.name
        module = build(variant.recording, self, code, self.index)
        module.flags, module.index = self.flags, self.index
        self._number(variant.recording, code)
        is_plain = self._first == variant.name
        is_last = self.index == self.num_stages - 1
        self._wirings()[variant.name] = Wiring(variant, self.index, module, is_plain, is_last)
        self.num_changes += 1

    def remove(self, variant: Variant) -> None:
        """Forget a recording; never the first one."""
        del self._wirings()[variant.name]
        self.num_changes += 1

    def _number(self, recording: Recording, code: StageCode) -> None:
        """Take in what random streams call the modules of some code, which may be copies."""
        for name in code.attributes:
            given = attribute_of(recording, name)
            if isinstance(given, nn.Module):
                made = self.get_submodule(name)
                self.numbers.update(numbers_of_copy(recording.names.numbers, given, made))

    @property
    def draws(self) -> bool:
        """Whether some recording of this stage draws random numbers outside of modules."""
        return any(wiring.code.route.draws for wiring in self._wirings().values())

    def module_of(self, variant: str | None = None) -> StageModule:
        """Return the code of one recording, the first if none is named."""
        assert self._first is not None
        return self._wirings()[variant or self._first].module

    @property
    def takes_inputs(self) -> bool:
        """Whether some recording of this stage uses arguments of the model."""
        return self.index == 0 or any(w.code.inputs for w in self._wirings().values())

    def train(self, mode: bool = True) -> VariantStage:
        """Put the stage into a mode, and the training flags that its code reads."""
        super().train(mode)
        for wiring in self._wirings().values():
            wiring.module.training = mode
        self.flags.train(self.index, mode)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> VariantStage:
        twin = VariantStage(self.index, self.num_stages, self.flags)
        memo[id(self)] = twin
        twin.__dict__.update({name: copy.deepcopy(vars(self)[name], memo) for name in TABLES})
        twin.training = self.training
        twin._first = self._first
        for name, wiring in self._wirings().items():
            twin._wirings()[name] = wiring.on(twin)
            twin._number(wiring.recording, wiring.code)
        return twin

    def forward(self, value: Any, leaves: Sequence[Any], variant: str | None = None) -> Any:
        wiring, values = self._wiring(value, variant)
        return wiring.run(wiring.module, values, leaves)

    def directly(self) -> Callable[..., Any]:
        """Return what does the same as a call, for one batch; random streams do not follow it."""
        calls = {name: wiring.direct.now() for name, wiring in self._wirings().items()}

        def call(value: Any, leaves: Sequence[Any], variant: str | None = None) -> Any:
            wiring, values = self._wiring(value, variant)
            return wiring.run(calls.get(wiring.name, wiring.module), values, leaves)

        return listening(self, call)

    def entrance(self) -> Entrance | None:
        """Return the layer that meets a single tensor from the stage before; after ``directly``."""
        assert self._first is not None
        return self._wirings()[self._first].entrance

    def _wiring(self, value: Any, variant: str | None) -> tuple[Wiring, Sequence[Any]]:
        """Return the recording that a call follows, and what the stage before has returned."""
        values: Sequence[Any] = ()
        sent = variant
        if self.index:
            if isinstance(value, tuple):
                sent, *values = value
            else:
                sent, values = self._first, (value,)
        wiring = self._wirings().get(sent or "")
        if wiring is None or (variant is not None and sent != variant):
            raise CaptureError(
                f"stage {self.index} was sent values of another recording than it follows: the "
                "rank before was given another batch, or its model is in another state. Give every "
                "rank the same data, and set modes, and what the model's code decides by, to the "
                "same on every rank"
            )
        track = here.track
        if track is not None and track.base is not None:
            track.frame = Planned(wiring.code.route)
        return wiring, values


class StagedModel:
    """A recorded model in stages; records again when a call would do something else.

    Attributes:
        variants: The recordings so far.
        held: The stages that live here, each in all its recordings.
        flags: The training flags of opened modules.
    """

    def __init__(
        self,
        first: Variant,
        record: Callable[[Arguments], Variant],
        opened: Mapping[str, nn.Module],
    ) -> None:
        self.variants: list[Variant] = []
        self._current: list[Variant] = []
        count = len(first.codes)
        self.flags = TrainingFlags(opened, count)
        self.held = {index: VariantStage(index, count, self.flags) for index in range(count)}
        self._record = record
        self._lock = threading.Lock()
        self._add(first)
        self._current.append(first)

    def _add(self, variant: Variant) -> None:
        taken = [other.recording.fingerprint for other in self.variants]
        count = taken.count(variant.recording.fingerprint)
        if count:  # the same code on other constants, or for other arguments
            variant.name = f"{variant.recording.fingerprint}.{count}"
        for stage in self.held.values():
            stage.add(variant)
        for index in range(len(variant.codes)):
            self.flags.note_reads(index, variant.flags_of(index))
        self.variants.append(variant)

    def holding(self, stages: Mapping[int, VariantStage]) -> StagedModel:
        """Return the same model with other modules for its stages: those of one process."""
        twin = copy.copy(self)
        twin.held = dict(stages)
        twin.flags.hold(stages)
        twin.variants = list(self.variants)
        twin._current = list(self._current)
        twin._lock = threading.Lock()
        return twin

    @property
    def stages(self) -> list[nn.Module]:
        """The stages as they were recorded first."""
        return [stage.module_of() for _, stage in sorted(self.held.items())]

    def choose(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, list[Any]]:
        """Return which recording a call follows, and the leaves of its arguments."""
        arguments = Arguments.of(args, kwargs)
        return self.choice(arguments)[0], arguments.leaves

    def choice(self, arguments: Arguments) -> tuple[str, bool]:
        """Return which recording a call follows, and whether all calls that look alike do.

        Until the model changes, or something around it: autocast, whether gradients are enabled.
        """
        key = (*arguments.key(), *ambient_key())
        goes_by_looks = True
        for variant in self._current:
            if not variant.is_for(key, arguments):
                continue
            goes_by_looks = goes_by_looks and variant.goes_by_looks
            if variant.holds(arguments):
                return variant.name, goes_by_looks
        with self._lock:
            # Not said of a new recording: only its guards know, and none of them was asked.
            return self._recorded(arguments), False

    def look_at_model(self) -> None:
        """See which recordings still hold: once before a batch is run."""
        self.variants[0].check_model()
        self.flags.check()
        self._current = [variant for variant in self.variants if variant.is_current()]

    def holds_now(self, variants: Iterable[str]) -> bool:
        """Whether all these recordings were made, and still hold."""
        return {variant.name for variant in self._current}.issuperset(variants)

    def watch_again(self) -> None:
        """Take the model as it is now: its tensors have been made real, or moved."""
        for variant in self.variants:
            variant.watch_again()

    def _recorded(self, arguments: Arguments) -> str:
        fresh = self._record(arguments)
        for variant in self._current:
            if variant.is_like(fresh):
                variant.saw(arguments)
                return variant.name
        if len(self.variants) >= MOST_VARIANTS:
            raise CaptureError(
                f"the model has done {MOST_VARIANTS} different things by now: its code decides by "
                "values that change with every batch. Move that code into a module that is not cut"
            )
        fresh.saw(arguments)
        self._add(fresh)
        self._current.append(fresh)
        self.flags.check()
        return fresh.name

    def forget(self, variants: Sequence[Variant]) -> None:
        """Drop recordings that were made last."""
        for variant in variants:
            for stage in self.held.values():
                stage.remove(variant)
            self.variants.remove(variant)
        self._current = [variant for variant in self._current if variant in self.variants]

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run all stages one after the other: what the plain model gives."""
        if any(p.is_meta for stage in self.held.values() for p in stage.parameters()):
            raise CaptureError(
                "the model is on meta, so there is nothing to compute with: make it real first, or "
                "build a Pipeline, which makes each stage real"
            )
        self.look_at_model()
        variant, leaves = self.choose(args, kwargs)
        return self.replay(variant, leaves)

    def replay(self, variant: str, leaves: Sequence[Any]) -> Any:
        """Run all stages as one recording says."""
        value: Any = None
        for _, stage in sorted(self.held.items()):
            value = stage(value, leaves, variant)
        return value
