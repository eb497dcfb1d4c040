"""Do the transfers in the rows carry what the stages need? Every fault, found at once.

    1 shape      F goes to the next stage, B to the one before
    2 place      a transfer stands on the rank of its stage, and crosses to another rank
    3 presence   each value that crosses has one send and one receive
    4 order      the send after the action that makes the value, the receive before its user
    5 agreement  both ends of a channel issue in the same order

Rows without any transfer are complete too: ``order_transfers`` writes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stageline.scheduling.action import Kind
from stageline.scheduling.ledger import Integers, Ledger, actions_text, both, only
from stageline.scheduling.schedule import NO_RANK, is_transfer

_PEER_IS_NEXT = (Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD)


@dataclass(frozen=True)
class _Edge:
    """The values that one stage makes for its neighbour."""

    maker: int
    user: int
    made_by: tuple[Kind, ...]
    send: Kind
    receive: Kind


@dataclass(frozen=True, eq=False)
class _Homes:
    """The rank of each stage that is computed anywhere."""

    stages: Integers
    ranks: Integers

    @classmethod
    def of(cls, ledger: Ledger, stages: Integers) -> _Homes:
        ranks = [ledger.holders[stage][0] for stage in stages.tolist()]
        return cls(stages, np.array(ranks, dtype=np.int64))

    def __call__(self, stages: Integers) -> Integers:
        """Return the rank of each of the stages, NO_RANK where nothing computes it."""
        if not len(self.stages):
            return np.full(len(stages), NO_RANK)
        places = np.searchsorted(self.stages, stages).clip(max=len(self.stages) - 1)
        return np.where(self.stages[places] == stages, self.ranks[places], NO_RANK)


def find_transfer_faults(ledger: Ledger, stages: Integers) -> list[str]:
    """Return the faults of the transfers, one sentence each; nothing where there are none.

    Args:
        ledger: Where every action stands.
        stages: The stages that are computed, ascending.
    """
    if not is_transfer(ledger.rows).any():
        return []
    homes = _Homes.of(ledger, stages)
    faults = list(_shape_and_place(ledger, homes))
    for edge in _edges(stages, homes):
        for stage, kind in ((edge.maker, edge.send), (edge.user, edge.receive)):
            faults += _presence(ledger, edge, stage, kind)
        faults += _order(ledger, edge)
    return [*faults, *_agreement(ledger, homes)]


def _shape_and_place(ledger: Ledger, homes: _Homes) -> Iterator[str]:
    places = np.flatnonzero(is_transfer(ledger.rows))
    rows = ledger.rows[places]
    stage = rows["stage"].astype(np.int64)
    wanted = stage + np.where(np.isin(rows["kind"], _PEER_IS_NEXT), 1, -1)
    at_home, at_peer = homes(stage), homes(wanted)

    misdirected = (rows["peer"] != wanted) | (at_peer == NO_RANK)
    astray = ~misdirected & (ledger.ranks[places] != at_home)
    idle = ~misdirected & ~astray & (at_home == at_peer)
    for index in np.flatnonzero(misdirected).tolist():
        verb = "goes to" if Kind(int(rows["kind"][index])).is_send else "comes from"
        peer = f"stage {wanted[index]}" if at_peer[index] != NO_RANK else "no other stage"
        yield f"{ledger.where(places[index])}: this value {verb} {peer}: correct it"
    for index in np.flatnonzero(astray).tolist():
        yield f"{ledger.where(places[index])}: stage {stage[index]} is not on this rank: move it"
    for index in np.flatnonzero(idle).tolist():
        yield f"{ledger.where(places[index])}: stage {wanted[index]} is on this rank too: remove it"


def _edges(stages: Integers, homes: _Homes) -> Iterator[_Edge]:
    """Yield the edges between stages of different ranks, in both directions."""
    crossing = (homes(stages + 1) != NO_RANK) & (homes(stages + 1) != homes(stages))
    for stage in stages[crossing].tolist():
        yield _Edge(
            maker=stage,
            user=stage + 1,
            made_by=(Kind.FORWARD,),
            send=Kind.SEND_FORWARD,
            receive=Kind.RECEIVE_FORWARD,
        )
        yield _Edge(
            maker=stage + 1,
            user=stage,
            made_by=(Kind.BACKWARD, Kind.INPUT_GRADIENT),
            send=Kind.SEND_BACKWARD,
            receive=Kind.RECEIVE_BACKWARD,
        )


def _presence(ledger: Ledger, edge: _Edge, stage: int, kind: Kind) -> Iterator[str]:
    """Compare the transfers at one end of an edge with the values that are made and used."""
    peer = edge.maker + edge.user - stage
    rank = f"rank {ledger.holders[stage][0]}"
    made = ledger.group(edge.maker, *edge.made_by).microbatches
    used = ledger.group(edge.user, *edge.made_by).microbatches
    found = ledger.group(stage, kind)
    missing = only(both(made, used), found.microbatches)
    if len(missing):
        text = actions_text(stage, kind, missing, peer)
        yield f"{rank}: {text} is missing: stage {peer} is on another rank"
    extra = only(found.microbatches, np.union1d(made, used))
    if len(extra):
        yield f"{rank}: {actions_text(stage, kind, extra, peer)} carries nothing: remove it"
    for place in found.places[found.counts > 1].tolist():
        yield f"{ledger.where(place)} stands more than once: transfer each value once"


def _order(ledger: Ledger, edge: _Edge) -> Iterator[str]:
    made = ledger.group(edge.maker, *edge.made_by)
    sent = ledger.group(edge.maker, edge.send)
    for maker, send in ledger.inverted(made, sent):
        yield f"{ledger.where(send)} stands before {ledger.text(maker)}: send what is made"
    received = ledger.group(edge.user, edge.receive)
    used = ledger.group(edge.user, *edge.made_by)
    for receive, user in ledger.inverted(received, used):
        yield f"{ledger.where(receive)} stands after {ledger.text(user)}: receive before use"


def _agreement(ledger: Ledger, homes: _Homes) -> Iterator[str]:
    """Compare the order at both ends of every channel that holds the same values at both."""
    for send, receive in (
        (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD),
        (Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD),
    ):
        sent, received = _channels(ledger, homes, send), _channels(ledger, homes, receive)
        for source, target in sorted(sent.keys() & received.keys()):
            left, right = sent[source, target], received[source, target]
            lefts, rights = _values(ledger, left, "stage"), _values(ledger, right, "peer")
            if np.array_equal(lefts, rights) or not np.array_equal(np.sort(lefts), np.sort(rights)):
                continue
            at = int(np.flatnonzero(lefts != rights)[0])
            yield (
                f"rank {source} sends {ledger.text(left[at])} where rank {target} receives "
                f"{ledger.text(right[at])}: put both ends in one order"
            )


def _channels(ledger: Ledger, homes: _Homes, kind: Kind) -> dict[tuple[int, int], Integers]:
    """Return the places of the transfers of a kind in row order, by source and target rank."""
    places = np.flatnonzero(ledger.rows["kind"] == kind)
    here = ledger.ranks[places]
    there = homes(ledger.rows["peer"][places].astype(np.int64))
    source, target = (here, there) if kind.is_send else (there, here)
    order = np.lexsort((target, source))  # stable: a channel keeps the order of its row
    source, target, places = source[order], target[order], places[order]
    changes = np.flatnonzero((np.diff(source) != 0) | (np.diff(target) != 0)) + 1
    pieces = np.split(np.arange(len(places)), changes)
    return {
        (int(source[piece[0]]), int(target[piece[0]])): places[piece]
        for piece in pieces
        if len(piece)
    }


def _values(ledger: Ledger, places: Integers, maker: str) -> Integers:
    """Return a number for each value that is transferred: its maker and its microbatch."""
    rows = ledger.rows[places]
    values: Integers = (rows[maker].astype(np.int64) << 32) + rows["microbatch"]
    return values
