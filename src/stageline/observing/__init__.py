"""What happened? Events of a run in, a report that a person can read out.

recorder.py   collects the events of steps and adds them up, rank by rank
memory.py     what a stage really holds after F, I and W
"""

from stageline.observing.memory import StageMemory, costs_of, measure_memory
from stageline.observing.recorder import RankTime, Recorder

__all__ = ["RankTime", "Recorder", "StageMemory", "costs_of", "measure_memory"]
