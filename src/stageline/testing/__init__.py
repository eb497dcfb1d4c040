"""Public fakes and helpers for tests of code that uses pipelines.

reference.py   the plain model, microbatch by microbatch: what every pipeline must equal
ordered.py     a transport as strict as NCCL, for one process
ranks.py       functions run on several real processes, with tracebacks and deadlines
"""

from stageline.testing.ordered import OrderedTransport
from stageline.testing.ranks import RankPool, RanksFailed
from stageline.testing.reference import PlainResult, plain_step

__all__ = ["OrderedTransport", "PlainResult", "RankPool", "RanksFailed", "plain_step"]
