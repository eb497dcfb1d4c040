"""Why a candidate is not among the proposals."""

from __future__ import annotations

from dataclasses import dataclass

from stageline.planning.candidates import Candidate


@dataclass(frozen=True)
class Loss:
    """A candidate that was dropped.

    Attributes:
        candidate: Which.
        seconds: What its step takes, or takes at least; None where it cannot run at all.
        is_bound: Whether it was not simulated, because it could not win any more.
        bubble: The share of time in which its ranks wait, if it was simulated.
        needs: Bytes of its fullest rank, where that is too much.
        reason: Why it cannot run.
    """

    candidate: Candidate
    seconds: float | None = None
    is_bound: bool = False
    bubble: float | None = None
    needs: int | None = None
    reason: str = ""

    @property
    def rank(self) -> tuple[int, float]:
        """Where it stands among others that lost: lower is nearer to winning."""
        if self.seconds is not None:
            return int(self.is_bound), self.seconds
        if self.needs is not None:
            return 2, self.needs
        return 3, -self.candidate.num_microbatches

    def text(self, best: float) -> str:
        """Say why it lost against a step of so many seconds.

        Example:
            >>> from stageline.planning.candidates import Method
            >>> candidate = Candidate(Method("1f1b"), 1, 4, 8, rows=1)
            >>> Loss(candidate, 0.112, bubble=0.31).text(best=0.1)
            '12.0 % slower: bubble 31 %, m=8'
            >>> Loss(candidate, 0.112, is_bound=True).text(best=0.1)
            'at least 12.0 % slower, m=8'
        """
        candidate = self.candidate
        copies = f", {candidate.num_ranks} ranks" if candidate.data_parallel > 1 else ""
        where = f"m={candidate.num_microbatches}{copies}"
        if self.seconds is None:
            return self.reason if self.needs is None else f"{self.reason}, {where}"
        slower = f"{100 * (self.seconds / best - 1):.1f} % slower"
        if self.is_bound:
            return f"at least {slower}, {where}"
        assert self.bubble is not None
        return f"{slower}: bubble {100 * self.bubble:.0f} %, {where}"
