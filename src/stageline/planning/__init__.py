"""Which is best? Schedules and cuts compared by simulation, before anything runs.

forecast.py   what a schedule makes of stages that are not equally long
searching/    the best schedule for given costs and a memory limit
"""

from stageline.planning.forecast import Forecast, forecast
from stageline.planning.searching import Candidate, Found, find_schedule

__all__ = ["Candidate", "Forecast", "Found", "find_schedule", "forecast"]
