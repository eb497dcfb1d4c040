"""A channel from one process to another: slabs of shared memory, and a ring that tells of them.

sender    lays a packet into a free slab     ── record ──▶
receiver  copies it out                      ◀── "read" ──    the slab is free again

outgoing.py and incoming.py have its two sides, this file what both must know.
"""

from __future__ import annotations

import struct
import sys

from stageline.errors import PeerError
from stageline.running.control.member import Member
from stageline.running.transports.base import Aborted
from stageline.running.transports.rings import CAPACITY

# epoch, edge (stages, letter, microbatch), slab, bytes of the header, of this piece, of the whole.
# A header that the slab holds from the packet before is not written again: it has 0 bytes.
RECORD = struct.Struct("<iiiciIIQQ")
# Per channel: each is an open file until the receiver has mapped it. Every unread record has one.
MOST_SLABS = CAPACITY // 2
BACKSTOP = 0.25  # seconds after which a sleeper looks by itself
_GRACE = 2.0  # seconds in which the control plane says why a peer is gone


def channel_key(generation: int) -> str:
    """Return the name under which the files of a channel are posted."""
    return f"channel {generation}"


def generation_of(key: str) -> int:
    """Return the generation of a posted channel or slab; other posts belong to none that is old."""
    kind, _, rest = key.partition(" ")
    return int(rest.split()[0]) if kind in ("channel", "slab") else sys.maxsize


def slab_key(generation: int, number: int) -> str:
    """Return the name under which the file of a slab is posted."""
    return f"slab {generation} {number}"


def gone(member: Member, peer: int, edge: object) -> BaseException:
    """Return what to raise when a pipe has ended: the control plane usually knows why."""
    if member.await_failure(_GRACE) is not None:
        return Aborted()
    return PeerError(
        f"rank {peer} closed its channel to rank {member.rank} at {edge}: every rank must make the "
        "same calls; look at the output of that rank"
    )
