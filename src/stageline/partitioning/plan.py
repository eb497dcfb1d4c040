"""The plan: which blocks form which stage, and which rank holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan.

    Attributes:
        index: The stage, in forward order.
        rank: The pipeline rank that holds it.
        device: Where it runs, for the table.
        blocks: The names of its blocks.
        module: What runs; None where another process holds it.
        num_parameters: How many numbers it trains or keeps; None where another process knows.
    """

    index: int
    rank: int
    device: str
    blocks: tuple[str, ...]
    module: nn.Module | None
    num_parameters: int | None


@dataclass(frozen=True)
class Plan:
    """All stages of a pipeline, in forward order."""

    stages: tuple[StagePlan, ...]

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def placement(self) -> tuple[int, ...]:
        """Which rank holds each stage."""
        return tuple(stage.rank for stage in self.stages)

    def table(self) -> str:
        """Return the plan as a table.

        Example:
            >>> plan = Plan((
            ...     StagePlan(0, 0, "cpu", ("0 Linear", "1 ReLU"), None, 110),
            ...     StagePlan(1, 1, "cpu", ("2 Linear",), None, 55),
            ... ))
            >>> print(plan.table())
            stage  rank  device  parameters  share  blocks
                0     0  cpu            110   67 %  0 Linear .. 1 ReLU (2)
                1     1  cpu             55   33 %  2 Linear (1)
        """
        known = [stage.num_parameters for stage in self.stages if stage.num_parameters is not None]
        total = sum(known) if len(known) == len(self.stages) else None
        rows: list[tuple[str, ...]] = [("stage", "rank", "device", "parameters", "share", "blocks")]
        rows += [_cells(stage, total) for stage in self.stages]
        return _aligned(rows, left=("device", "blocks"))

    def __str__(self) -> str:
        return self.table()


def _cells(stage: StagePlan, total: int | None) -> tuple[str, ...]:
    count = stage.num_parameters
    share = f"{100 * count / total:.0f} %" if total and count is not None else ""
    names = stage.blocks
    if not names:
        blocks = "in another process"
    elif len(names) == 1:
        blocks = f"{names[0]} (1)"
    else:
        blocks = f"{names[0]} .. {names[-1]} ({len(names)})"
    number = "" if count is None else f"{count:,}"
    return (str(stage.index), str(stage.rank), stage.device, number, share, blocks)


def _aligned(rows: Sequence[tuple[str, ...]], *, left: Sequence[str]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    to_left = [title in left for title in rows[0]]
    lines = (
        "  ".join(
            cell.ljust(width) if leftish else cell.rjust(width)
            for cell, width, leftish in zip(row, widths, to_left, strict=True)
        ).rstrip()
        for row in rows
    )
    return "\n".join(lines)
