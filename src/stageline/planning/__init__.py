"""Which is best? Schedules and cuts compared by simulation, before anything runs.

proposing.py  costs in, the best proposals out
asking.py     .. what may be asked
candidates.py .. every way to share a batch among ranks
bounds.py     .. how fast a way can be at best
cutting.py    .. where to cut for a schedule; moving.py: a block at a time
evaluating.py .. what a way costs, by simulation
refining.py   .. the best made better
losses.py     .. why a way lost
proposal.py   one proposal; proposals.py: the best, and why the others lost
saving.py     a proposal as JSON
comparing.py  what was predicted beside what was measured
adopting.py   what a pipeline takes from a proposal
forecast.py   what a schedule makes of stages that are not equally long
estimating.py what blocks cost on a described device, counted instead of run
abstract.py   .. a block run without numbers
counting.py   .. how long that device takes for each operation
searching/    the best schedule for given costs and a memory limit
"""

from stageline.planning.estimating import estimate_costs
from stageline.planning.forecast import Forecast, forecast
from stageline.planning.proposal import Prediction, Proposal
from stageline.planning.proposals import Proposals
from stageline.planning.proposing import propose
from stageline.planning.searching import Candidate, Found, find_schedule

__all__ = [
    "Candidate",
    "Forecast",
    "Found",
    "Prediction",
    "Proposal",
    "Proposals",
    "estimate_costs",
    "find_schedule",
    "forecast",
    "propose",
]
