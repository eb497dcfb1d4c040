"""torchgpipe: two partitions in one process, GPipe; its threads work like those of fairscale.

It refuses parameters that several layers share, so a block that is called again becomes copies.
"""

from __future__ import annotations

from importlib import import_module

from contestant import Contestant
from fairscale_pipe import trained_whole
from models import Case


def build(case: Case, dropout: float, home: str = "torchgpipe") -> Contestant:
    pipe = import_module(home).GPipe(
        case.layers(dropout, tied=False),
        balance=case.cuts[2],
        devices=["cpu", "cpu"],
        chunks=case.num_microbatches,
        checkpoint="never",
    )
    return trained_whole(case, pipe, tied=False)
