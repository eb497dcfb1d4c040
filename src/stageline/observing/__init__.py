"""What happened? Events of a run in, a report that a person can read out.

recorder.py   collects the events of steps and adds them up, rank by rank
"""

from stageline.observing.recorder import RankTime, Recorder

__all__ = ["RankTime", "Recorder"]
