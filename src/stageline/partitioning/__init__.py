"""Where does it go? Blocks in, a ``Plan`` out: which blocks form which stage, on which rank.

balance.py   the cuts that make the largest stage as small as possible
splits.py    what the user said about cuts, read and checked
costs.py     what blocks cost, measured or estimated; device.py: what they run on
weighing.py  balance by costs, within a budget of memory; blocks.py: as running sums
holdings.py  what ranks and stages hold at their worst, as counts
plan.py      stages and their ranks, as a table a person can read
saving.py    a Plan as JSON; json_form.py: how anything that is saved says what it is
"""

from stageline.partitioning.balance import balance
from stageline.partitioning.plan import Plan, StagePlan
from stageline.partitioning.splits import Split, cut_sizes

__all__ = ["Plan", "Split", "StagePlan", "balance", "cut_sizes"]
