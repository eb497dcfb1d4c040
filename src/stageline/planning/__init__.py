"""Which is best? Schedules and cuts compared by simulation, before anything runs.

forecast.py   what a schedule makes of stages that are not equally long
estimating.py what blocks cost on a described device, counted instead of run
abstract.py   .. a block run without numbers
counting.py   .. how long that device takes for each operation
searching/    the best schedule for given costs and a memory limit
"""

from stageline.planning.estimating import estimate_costs
from stageline.planning.forecast import Forecast, forecast
from stageline.planning.searching import Candidate, Found, find_schedule

__all__ = ["Candidate", "Forecast", "Found", "estimate_costs", "find_schedule", "forecast"]
