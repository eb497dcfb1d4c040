"""Ranks that build a pipeline together: one plan, made once; all agree before the first step.

rank 0         decides where to cut, and tells the others
every rank     builds its part, then says what it has built: the hub compares, and names the
               first difference with both values
a failure      of one rank is the failure of all
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from stageline import log
from stageline.capturing.graph import Cuttable
from stageline.errors import ConfigError
from stageline.partitioning.splits import Cuts
from stageline.running.control import Failure, Member, leaving
from stageline.running.control.agreement import DIGESTS, DRAWS, SEED, Facts, digest
from stageline.running.signature import told_seed
from stageline.running.transports.base import Aborted, ProcessTransport
from stageline.running.transports.process_group import ProcessGroupTransport
from stageline.running.transports.shared_memory import SharedMemoryTransport, can_share_memory


class Builders:
    """The ranks that build one pipeline; alone in a process of its own, there is nothing to agree.

    Attributes:
        seed: What torch has made up on rank 0, known once all have agreed.

    Args:
        member: This rank's side of the control plane; None if all ranks live in this process.
        asked: What the user has asked for. Rank 0 decides, and nobody shall be overruled silently.
    """

    def __init__(self, member: Member | None, asked: Facts | None = None) -> None:
        self.member = member
        self.seed = torch.initial_seed()
        self._asked = asked or {}
        self._has_told = False

    @contextmanager
    def together(self) -> Iterator[None]:
        """Build; a rank that cannot tells all others, and whatever another rank tells is raised."""
        if self.member is None:
            yield
            return
        self.member.next_call()
        try:
            yield
        except Aborted:
            failure = self.member.failure
            assert failure is not None
            leaving.farewell(self.member)
            raise failure.error() from None
        except BaseException as error:
            doing = "while it built its pipeline"
            rank, epoch = self.member.rank, self.member.epoch
            self.member.fail(Failure.of(error, rank=rank, epoch=epoch, doing=doing))
            leaving.farewell(self.member)
            raise

    def decide(self, graph: Cuttable, make: Callable[[], Cuts]) -> Cuts:
        """Return where a model is cut: rank 0 decides, the others follow."""
        if self.member is None:
            return make()
        if self.member.rank == 0:
            cuts, faults = make()
            if not faults:
                self._tell({"cuts": list(cuts), "fingerprint": graph.fingerprint})
            return cuts, faults
        told, _ = self.member.lookup("cuts", 0)
        # Another model is not cut by these numbers; what is different in it will be named.
        if told is None or told["fingerprint"] != graph.fingerprint:
            return make()
        return told["cuts"], []

    def _tell(self, cuts: Any) -> None:
        assert self.member is not None
        if not self._has_told:
            self._has_told = True
            self.member.post("cuts", cuts)

    def agree(
        self,
        facts: Mapping[str, Facts],
        *,
        draws: bool,
        transport: str | None,
        placement: Sequence[int],
    ) -> ProcessTransport:
        """Compare with the other ranks what was built, and choose what carries packets.

        Args:
            facts: All that ranks must agree on, by what it stands for.
            draws: Whether something that is known here may draw.
            transport: The name of the transport that the user wants; None for the best.
            placement: The rank of each stage.
        """
        member = self.member
        assert member is not None
        if member.rank == 0:
            self._tell(None)  # somebody may wait for cuts that nobody makes
        facts = {"the arguments": self._asked, **facts}
        member.details = facts
        digests = {what: digest(fact) for what, fact in facts.items()}
        member.begin({SEED: told_seed(), DRAWS: draws, DIGESTS: digests})
        if not self._may_share(transport):
            self._finish("")
            return self._process_group()
        shared = SharedMemoryTransport(member)
        problems = self._finish(_prepare(shared, placement, member.rank))
        if not problems:
            return shared
        shared.close()
        if member.rank == 0:
            log.warning(0, f"shared memory is too small ({problems[0]}): using gloo instead")
        return self._process_group()

    def _finish(self, problem: str) -> list[str]:
        """Wait for all ranks; take rank 0's seed, and return the problems that any of them has."""
        assert self.member is not None
        told = self.member.finish({"problem": problem, "seed": torch.initial_seed()})
        self.seed = told[0]["seed"]
        return [each["problem"] for each in told.values() if each["problem"]]

    def _may_share(self, transport: str | None) -> bool:
        assert self.member is not None
        if transport == "process-group":
            return False
        if self.member.one_host and can_share_memory():
            return True
        if transport == "shared-memory":
            why = "ranks run on several hosts" if can_share_memory() else "this system has no such"
            raise ConfigError("sl.Pipeline", [f"transport='shared-memory': {why}"])
        return False

    def _process_group(self) -> ProcessTransport:
        assert self.member is not None
        return ProcessGroupTransport(self.member)


def _prepare(transport: SharedMemoryTransport, placement: Sequence[int], rank: int) -> str:
    """Make the channels to the neighbours; return what is wrong, if there is no memory for them.

    The rank of the last stage also sends outputs to all others.
    """
    outputs = [(placement[-1], other) for other in set(placement)]
    pairs = {pair for pair in pairwise(placement) if rank in pair and pair[0] != pair[1]}
    pairs |= {pair for pair in outputs if pair[0] == rank}
    neighbours = {other for pair in pairs for other in pair} - {rank}
    try:
        for neighbour in sorted(neighbours):
            transport.prepare(neighbour)
    except OSError as error:
        return f"rank {rank}: {error.strerror}"
    return ""
