"""The schedules that stageline ships, each a function of integers, one file per family.

    gpipe            all forwards, then all backwards
    1f1b             one forward, one backward: the same speed as GPipe, far less memory
    sequential       one microbatch at a time: no overlap, for debugging
    forward-only     inference and evaluation
    interleaved      several stages per rank: a shorter bubble, more transfers
    looped-bfs       the same, all microbatches stage by stage
    zb-h1            the backward in two halves: a third of the bubble of 1F1B
    zb-h2            the same filled twice as deep: no bubble, twice the memory
    interleaved-zb   zb-h1 with several stages per rank
    zb-v             stages in a V: no bubble with the memory of 1F1B
    v-half  v-min    stages in a V: half, or a third, of the memory of 1F1B
    dualpipe-v       stages in a V: forwards and backwards that overlap
    varuna           activations are recomputed
    dualpipe  chimera  bitpipe     two copies of the model: to simulate and draw

To add a family, state its rule for a rank in a new file (``rows.py`` helps) and enter it in
``catalogue.py``.
"""

from __future__ import annotations

from stageline.scheduling.schedules.bitpipe import bitpipe
from stageline.scheduling.schedules.catalogue import (
    NAMES,
    Family,
    build,
    family,
    fitted,
)
from stageline.scheduling.schedules.chimera import chimera
from stageline.scheduling.schedules.dualpipe import dualpipe
from stageline.scheduling.schedules.dualpipe_v import dualpipe_v
from stageline.scheduling.schedules.forward_only import forward_only
from stageline.scheduling.schedules.gpipe import gpipe
from stageline.scheduling.schedules.interleaved import interleaved
from stageline.scheduling.schedules.interleaved_zb import interleaved_zb
from stageline.scheduling.schedules.looped_bfs import looped_bfs
from stageline.scheduling.schedules.one_f_one_b import one_f_one_b
from stageline.scheduling.schedules.sequential import sequential
from stageline.scheduling.schedules.v_half import v_half
from stageline.scheduling.schedules.v_min import v_min
from stageline.scheduling.schedules.varuna import varuna
from stageline.scheduling.schedules.zb_h1 import zb_h1
from stageline.scheduling.schedules.zb_h2 import zb_h2
from stageline.scheduling.schedules.zb_v import zb_v

__all__ = [
    "NAMES",
    "Family",
    "bitpipe",
    "build",
    "chimera",
    "dualpipe",
    "dualpipe_v",
    "family",
    "fitted",
    "forward_only",
    "gpipe",
    "interleaved",
    "interleaved_zb",
    "looped_bfs",
    "one_f_one_b",
    "sequential",
    "v_half",
    "v_min",
    "varuna",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
