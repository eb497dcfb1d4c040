"""What the blocks of a model cost, as measured or as estimated: what balance and planning go by.

    block        0          1          2
    behind it        |0         |1         (nothing)      what crosses if a cut lies there

Times are whole nanoseconds of one microbatch, so that every figure made of them is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any

from stageline.errors import ConfigError
from stageline.partitioning.amounts import show_bytes
from stageline.partitioning.device import Device
from stageline.partitioning.json_form import JsonForm
from stageline.scheduling import Costs, Kind
from stageline.scheduling.costs import Number
from stageline.wording import aligned

_FORM = JsonForm("costs")
_ENTRIES = ("blocks", "rows", "origin", "others", "boundary")


@dataclass(frozen=True)
class BlockCosts:
    """What one block costs for one microbatch; also what several in a row cost together.

    Attributes:
        name: What lies in it, for people: ``layers.3``.
        forward: Nanoseconds of F.
        input_gradient: Of I.
        weight_gradient: Of W.
        backward: Of B, which may be less than I and W together.
        input_bytes: What comes in and is kept for the backward.
        activation_bytes: What is kept after F, beside the input.
        input_gradient_frees: The part of both that I releases; W releases the rest. Negative where
            W needs more gradients than I releases.
        parameters: How many numbers it trains or keeps.
        parameter_bytes: Their bytes.
        output_bytes: What crosses a cut behind it; 0 behind the last block.
        kept_output_bytes: The part of ``activation_bytes`` that is its own output: where the next
            block keeps that as its input, both keep it once.
        wants_input_gradient: Whether somebody waits for the gradient of its input; nobody does
            where that is data, or comes from frozen blocks. A stage that begins so does nothing in
            I, and all of its backward in W.
    """

    name: str
    forward: int
    input_gradient: int
    weight_gradient: int
    backward: int
    input_bytes: int
    activation_bytes: int
    input_gradient_frees: int
    parameters: int
    parameter_bytes: int
    output_bytes: int
    kept_output_bytes: int = 0
    wants_input_gradient: bool = True

    @property
    def time(self) -> int:
        """Nanoseconds of F and B."""
        return self.forward + self.backward


@dataclass(frozen=True)
class BoundaryCosts:
    """What of a block's times goes into being a stage of its own: values enter, leave, are kept.

    Blocks that go together have that once.

    Attributes:
        forward: Nanoseconds of F.
        input_gradient: Of I.
        weight_gradient: Of W.
        backward: Of B.
    """

    forward: int = 0
    input_gradient: int = 0
    weight_gradient: int = 0
    backward: int = 0

    def within(self, blocks: Sequence[BlockCosts]) -> BoundaryCosts:
        """Return the same, but never more than a whole block takes."""
        most = {
            name: min((getattr(block, name) for block in blocks if _runs(block, name)), default=0)
            for name in TIMES
        }
        return BoundaryCosts(**{name: min(getattr(self, name), most[name]) for name in TIMES})


TIMES = ("forward", "input_gradient", "weight_gradient", "backward")
"""The attributes that are times."""


def _runs(block: BlockCosts, name: str) -> bool:
    """Whether a block's I and W are ever joined with others': not where nobody waits for I."""
    return block.wants_input_gradient or name in ("forward", "backward")


_OF_ONE = ("name", "input_bytes", "output_bytes", "kept_output_bytes", "wants_input_gradient")
_ADDED = tuple(each.name for each in fields(BlockCosts) if each.name not in _OF_ONE)
_SCALED = (
    *(name for name in _ADDED if not name.startswith("parameter")),
    "input_bytes",
    "output_bytes",
    "kept_output_bytes",
)


@dataclass(frozen=True)
class ModelCosts:
    """What every block of a model costs, for microbatches of so many rows.

    Example:
        >>> block = BlockCosts("layer", 10, 10, 10, 20, 8, 32, 16, 5, 20, 8)
        >>> costs = ModelCosts((block,) * 3, rows=4, origin="by hand")
        >>> costs.simulated([2, 1]).forward
        (20, 10)

    Attributes:
        blocks: In forward order, as ``graph.cuts`` separate them.
        rows: The size of the microbatch.
        origin: Where the figures come from, for people.
        others: The same model with other numbers of rows.
        boundary: What each block pays for being measured as a stage of its own.
    """

    blocks: tuple[BlockCosts, ...]
    rows: int
    origin: str
    others: tuple[ModelCosts, ...] = ()
    boundary: BoundaryCosts = BoundaryCosts()

    def __post_init__(self) -> None:
        object.__setattr__(self, "boundary", self.boundary.within(self.blocks))

    def stages(self, sizes: Sequence[int]) -> tuple[BlockCosts, ...]:
        """Return what stages of so many blocks cost.

        Blocks that go together have one boundary. A stage keeps the inputs of its blocks. Where a
        block keeps its own output, and the next one the same as its input, that is kept once.

        Where nobody waits for the gradient of its input, I only takes in the gradient of the
        output, and keeps it for W, which is B.

        Example:
            >>> first = BlockCosts("embed", 5, 0, 6, 6, 0, 8, -8, 5, 20, 8, 0, False)
            >>> layer = BlockCosts("layer", 10, 12, 13, 20, 8, 32, 16, 5, 20, 8)
            >>> costs = ModelCosts((first, layer, layer, layer), rows=4, origin="by hand")
            >>> [(s.input_gradient, s.weight_gradient, s.backward) for s in costs.stages([2, 2])]
            [(0, 26, 26), (24, 26, 40)]
        """
        if sum(sizes) != len(self.blocks) or min(sizes, default=0) < 1:
            raise ValueError(f"{len(self.blocks)} blocks cannot make stages of {list(sizes)}")
        ends = pairwise([0, *accumulate(sizes)])
        return tuple(_joined(self.blocks[a:b], self.boundary) for a, b in ends)

    def simulated(self, sizes: Sequence[int], **hops: Any) -> Costs:
        """Return what ``sl.simulate`` is told of stages of so many blocks.

        Args:
            sizes: How many blocks each stage has.
            hops: ``latency`` (nanoseconds) and ``bandwidth`` (bytes per nanosecond) between ranks.
        """
        stages = self.stages(sizes)
        return Costs(
            forward=[stage.forward for stage in stages],
            backward=[stage.backward for stage in stages],
            input_gradient=[stage.input_gradient for stage in stages],
            weight_gradient=[stage.weight_gradient for stage in stages],
            activation_bytes=[stage.input_bytes + stage.activation_bytes for stage in stages],
            input_bytes=[stage.input_bytes for stage in stages],
            input_gradient_frees=[stage.input_gradient_frees for stage in stages],
            edge_bytes=[stage.output_bytes for stage in stages[:-1]] or 0,
            **hops,
        )

    def placed(self, sizes: Sequence[int], placement: Sequence[int], device: Device) -> Costs:
        """Return the same for stages on ranks, with what it takes to send values between them.

        Example:
            >>> from stageline.partitioning.device import Link
            >>> block = BlockCosts("layer", 10, 10, 10, 20, 8, 32, 16, 5, 20, 8)
            >>> costs = ModelCosts((block,) * 3, rows=4, origin="by hand")
            >>> device = Device("", {"float32": 1.0}, 1.0, link=Link(4e-9, 2e9, handling=3e-9))
            >>> placed = costs.placed([1, 1, 1], [0, 1, 1], device)
            >>> placed.forward, placed.backward, placed.latency
            ((13, 13, 10), (23, 23, 20), (8, 0))

        Args:
            sizes: How many blocks each stage has.
            placement: The rank of each stage.
            device: What connects the ranks.
        """
        links = [None if a == b else device.between(a, b) for a, b in pairwise(placement)]
        sent = [stage.output_bytes for stage in self.stages(sizes)[:-1]]
        hops = [link.time(size) if link else 0 for link, size in zip(links, sent, strict=True)]
        busy = [link.handled if link else 0 for link in links]
        told = self.simulated(sizes, latency=hops[0] if len(set(hops)) == 1 else hops or 0)
        # A stage takes and gives one value in F, and one gradient in B or I.
        both = [before + after for before, after in zip([0, *busy], [*busy, 0], strict=True)]

        def longer(kind: Kind) -> list[Number]:
            each = told.per_stage(kind, len(sizes))
            return [time + more for time, more in zip(each, both, strict=True)]

        return replace(
            told,
            forward=longer(Kind.FORWARD),
            backward=longer(Kind.BACKWARD),
            input_gradient=longer(Kind.INPUT_GRADIENT),
        )

    def at(self, rows: int) -> ModelCosts:
        """Return the costs of microbatches of another size.

        On a line through the two nearest sizes that are known; if only one is, in proportion.

        Example:
            >>> block = BlockCosts("layer", 10, 10, 10, 20, 8, 32, 16, 5, 20, 8)
            >>> ModelCosts((block,), rows=4, origin="by hand").at(8).blocks[0].forward
            20
        """
        known = {each.rows: each for each in (*self.others, self)}
        if rows in known:
            return replace(known[rows], others=())
        nearest = sorted(known, key=lambda size: (abs(size - rows), size))[:2]
        nearer, low = known[nearest[0]], min(nearest)
        high = max(nearest) if len(nearest) == 2 else 0
        blocks = tuple(
            _between(a, b, low, high, rows)
            for a, b in zip(
                known[low].blocks,
                known[high].blocks if high else (None,) * len(self.blocks),
                strict=True,
            )
        )
        origin = f"{self.origin}, from {low}{_and(high)} rows"
        return ModelCosts(blocks, rows, origin, boundary=nearer.boundary)

    def table(self) -> str:
        """Return the blocks as a table."""
        each = self.blocks
        columns = {
            "block": [str(index) for index in range(len(each))],
            "F ms": [_milliseconds(block.forward) for block in each],
            "I ms": [_milliseconds(block.input_gradient) for block in each],
            "W ms": [_milliseconds(block.weight_gradient) for block in each],
            "B ms": [_milliseconds(block.backward) for block in each],
            "kept": [show_bytes(block.input_bytes + block.activation_bytes) for block in each],
            "I frees": [_signed_bytes(block.input_gradient_frees) for block in each],
            "parameters": [f"{block.parameters:,}" for block in each],
            "sends": [show_bytes(block.output_bytes) for block in each],
            "name": [block.name for block in each],
        }
        return f"{aligned(columns, left=['name'])}\n{self.rows} rows; {self.origin}"

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> str:
        """Return the costs as text that ``from_json`` reads."""
        return _FORM.text(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ModelCosts:
        """Read what ``to_json`` wrote."""
        entries, faults = _FORM.entries(text)
        if not faults:
            try:
                return _read({name: entries[name] for name in entries if name in _ENTRIES})
            except (ValueError, TypeError, KeyError, AttributeError) as cause:
                faults = [f"an entry is missing or wrong ({cause}): measure the costs anew"]
        raise ConfigError("ModelCosts.from_json", faults)


def _joined(blocks: Sequence[BlockCosts], boundary: BoundaryCosts) -> BlockCosts:
    sums = {name: sum(getattr(block, name) for block in blocks) for name in _ADDED}
    for time in TIMES:
        sums[time] = max(0, sums[time] - (len(blocks) - 1) * getattr(boundary, time))
    inner = sum(block.input_bytes for block in blocks[1:])
    twice = sum(min(a.kept_output_bytes, b.input_bytes) for a, b in pairwise(blocks))
    sums["activation_bytes"] += inner - twice
    # What two blocks keep is gone when both have released it: counted as if one did so in W.
    sums["input_gradient_frees"] -= twice
    first, last = blocks[0], blocks[-1]
    if not first.wants_input_gradient:
        sums["input_gradient"] = 0
        sums["weight_gradient"] = sums["backward"]
        sums["input_gradient_frees"] = -last.output_bytes
    name = first.name if len(blocks) == 1 else f"{first.name} .. {last.name}"
    return BlockCosts(
        name=name,
        input_bytes=first.input_bytes,
        output_bytes=last.output_bytes,
        kept_output_bytes=last.kept_output_bytes,
        wants_input_gradient=first.wants_input_gradient,
        **sums,
    )


def _between(a: BlockCosts, b: BlockCosts | None, low: int, high: int, rows: int) -> BlockCosts:
    """Return a block at another size: on the line through two, or in proportion to one."""

    def scaled(name: str) -> int:
        first: int = getattr(a, name)
        if b is None:
            return round(first * rows / low)
        second: int = getattr(b, name)
        value = first + (second - first) * (rows - low) / (high - low)
        return round(value if name == "input_gradient_frees" else max(value, 0))

    sizes: dict[str, Any] = {name: scaled(name) for name in _SCALED}
    kept = sizes["activation_bytes"]
    # Rounded one by one, a part must not become larger than the whole.
    sizes["kept_output_bytes"] = min(sizes["kept_output_bytes"], kept)
    whole = sizes["input_bytes"] + kept
    sizes["input_gradient_frees"] = min(sizes["input_gradient_frees"], whole)
    return replace(a, **sizes)


def _and(high: int) -> str:
    return f" and {high}" if high else ""


def _read(entries: dict[str, Any]) -> ModelCosts:
    blocks = tuple(BlockCosts(**block) for block in entries.pop("blocks"))
    others = tuple(_read(other) for other in entries.pop("others"))
    boundary = BoundaryCosts(**entries.pop("boundary", {}))
    return ModelCosts(blocks=blocks, others=others, boundary=boundary, **entries)


def _milliseconds(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.3f}"


def _signed_bytes(count: int) -> str:
    return show_bytes(count) if count >= 0 else f"-{show_bytes(-count)}"
