"""The best proposals, and why all others lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, overload

from stageline.capturing.graph import Cuttable
from stageline.errors import ConfigError
from stageline.partitioning.amounts import show_bytes
from stageline.planning.candidates import Candidate, Method
from stageline.planning.losses import Loss
from stageline.planning.proposal import Proposal
from stageline.wording import aligned, milliseconds

_Key = TypeVar("_Key", Method, int)


@dataclass(frozen=True)
class Proposals(Sequence[Proposal]):
    """The best ways to run a model, the fastest first; each of another method.

    Attributes:
        found: The proposals.
        losses: What was dropped, the nearest candidate of each method and data-parallel degree.
        num_candidates: How many ways there were.
        num_simulated: How many simulations that took, with those that moved blocks.
        memory_limit: What a rank has, in bytes; None if that was not said.
        enough: Where nothing fits, the bytes with which something would, and what.
    """

    found: tuple[Proposal, ...]
    losses: tuple[Loss, ...]
    num_candidates: int
    num_simulated: int
    memory_limit: int | None
    enough: tuple[int, Candidate] | None = None

    @overload
    def __getitem__(self, index: int) -> Proposal: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Proposal]: ...
    def __getitem__(self, index: int | slice) -> Proposal | Sequence[Proposal]:
        return self.found[index]

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self) -> Iterator[Proposal]:
        return iter(self.found)

    def of_graph(self, graph: Cuttable, opened_for: int) -> Proposals:
        """Return the same for a model of which the blocks have these costs.

        Args:
            graph: The captured model.
            opened_for: The number of stages for which it was opened.
        """
        found = (replace(one, _graph=graph, _opened_for=opened_for) for one in self.found)
        return replace(self, found=tuple(found))

    @property
    def best(self) -> Proposal:
        """The fastest.

        Raises:
            ConfigError: Nothing fits; the message says what came nearest.
        """
        if not self.found:
            findings = [f"{method}: {text}" for method, text in self.reasons().items()]
            few = findings[:3] or ["there is nothing to choose from"]
            way_out = [] if self.enough is None else [self._way_out()]
            all_of_it = "print the proposals for all that was tried"
            raise ConfigError("a plan", [*few, *way_out, all_of_it])
        return self.found[0]

    def table(self) -> str:
        """Return the proposals as a table."""
        if not self.found:
            return "Nothing fits." if self.enough is None else f"Nothing fits: {self._way_out()}"
        each = self.found
        columns = {
            "": [str(place) for place in range(1, len(each) + 1)],
            "schedule": [str(one.method) for one in each],
            "ranks": [_ranks(one) for one in each],
            "blocks": [_sizes(one.sizes) for one in each],
            "m": [str(one.num_microbatches) for one in each],
            "rows": [str(one.rows) for one in each],
            "step ms": [milliseconds(one.predicted.seconds) for one in each],
            "bubble": [f"{100 * one.predicted.bubble:.1f} %" for one in each],
            "memory per rank": [_memory(one.predicted.memory) for one in each],
        }
        return aligned(columns, left=("schedule", "blocks", "memory per rank"))

    def reasons(self) -> dict[str, str]:
        """Return why each method lost that is not among the proposals."""
        kept = {one.method for one in self.found}
        nearest = _nearest(self.losses, lambda candidate: candidate.method)
        return {
            str(method): loss.text(self._best_seconds)
            for method, loss in nearest.items()
            if method not in kept
        }

    def degrees(self) -> dict[int, str]:
        """Return why each data-parallel degree lost that is not among the proposals."""
        kept = {one.data_parallel for one in self.found}
        nearest = _nearest(self.losses, lambda candidate: candidate.data_parallel)
        return {
            degree: f"{loss.text(self._best_seconds)}, {loss.candidate.method}"
            for degree, loss in sorted(nearest.items())
            if degree not in kept
        }

    def _way_out(self) -> str:
        assert self.enough is not None
        needed, candidate = self.enough
        return (
            f"{show_bytes(needed, at_least=True)} per rank would be enough for {candidate}; "
            "or use more ranks, or a smaller model"
        )

    @property
    def _best_seconds(self) -> float:
        return self.found[0].predicted.seconds if self.found else 1.0

    def why(self) -> str:
        """Return why the others lost, a line for each."""
        lost = {**self.reasons()}
        degrees = self.degrees()
        if len({loss.candidate.data_parallel for loss in self.losses}) > 1:
            lost |= {f"data_parallel={degree}": text for degree, text in degrees.items()}
        names: dict[str, list[str]] = {}
        for name, text in lost.items():
            names.setdefault(text, []).append(name)
        columns = {"schedule": [_few(each) for each in names.values()], "why it lost": list(names)}
        return aligned(columns, left=list(columns)) if lost else ""

    def __str__(self) -> str:
        counted = f"{self.num_candidates} candidates, {self.num_simulated} simulations"
        if self.memory_limit is not None:
            counted += f", {show_bytes(self.memory_limit)} per rank"
        if self.found:
            counted += f"; costs: {self.found[0].origin}"
        return "\n\n".join(part for part in (self.table(), self.why(), counted) if part)


def _nearest(losses: Sequence[Loss], key: Callable[[Candidate], _Key]) -> dict[_Key, Loss]:
    """Return the loss that came nearest for each key, those that came nearest first."""
    best: dict[_Key, Loss] = {}
    for loss in sorted(losses, key=lambda loss: loss.rank):
        best.setdefault(key(loss.candidate), loss)
    return best


def _few(names: Sequence[str]) -> str:
    """Return some names, and how many more there are.

    Example:
        >>> _few(["a", "b"]), _few(["a", "b", "c", "d"])
        ('a, b', 'a, b and 2 more')
    """
    more = f" and {len(names) - 2} more" if len(names) > 3 else ""
    return ", ".join(names[:2] if more else names) + more


def _ranks(proposal: Proposal) -> str:
    if proposal.data_parallel == 1:
        return str(proposal.num_ranks)
    return f"{proposal.num_ranks} x {proposal.data_parallel} copies"


def _memory(needed: Sequence[int]) -> str:
    low, high = show_bytes(min(needed)), show_bytes(max(needed))
    return high if low == high else f"{low} .. {high}"


def _sizes(sizes: Sequence[int]) -> str:
    """Return the blocks of each stage, in few characters.

    Example:
        >>> _sizes([3, 4, 4, 4, 3]), _sizes([2, 1]), _sizes([1] * 64)
        ('3 4*3 3', '2 1', '1*64')
    """
    runs: list[tuple[int, int]] = []
    for size in sizes:
        if runs and runs[-1][0] == size:
            runs[-1] = (size, runs[-1][1] + 1)
        else:
            runs.append((size, 1))
    text = [f"{size}*{count}" if count > 1 else str(size) for size, count in runs]
    return " ".join(text if len(text) <= 8 else [*text[:4], "..", *text[-3:]])
