"""Which is best? Schedules and cuts compared by simulation, before anything runs.

forecast.py   what a schedule makes of stages that are not equally long
estimating.py what blocks cost on a described device, counted instead of run
abstract.py   .. a block run without numbers
counting.py   .. how long that device takes for each operation
"""

from stageline.planning.estimating import estimate_costs
from stageline.planning.forecast import Forecast, forecast

__all__ = ["Forecast", "estimate_costs", "forecast"]
