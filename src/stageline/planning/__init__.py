"""Which is best? Schedules and cuts compared by simulation, before anything runs.

forecast.py   what a schedule makes of stages that are not equally long
"""

from stageline.planning.forecast import Forecast, forecast

__all__ = ["Forecast", "forecast"]
