"""What happened? Events of a run in, a report that a person can read out.

recorder.py   collects the events of steps and adds them up, rank by rank
memory.py     what a stage really holds after F, I and W
measuring.py  what each block of a model costs, with all ranks busy
bench.py      .. the blocks and the microbatches for that
shares.py     .. the blocks of one rank, run and timed
playing.py    .. several ranks at once
progress.py   a bar for what takes a while
"""

from stageline.observing.measuring import measure_costs
from stageline.observing.memory import StageMemory, costs_of, measure_memory
from stageline.observing.recorder import RankTime, Recorder

__all__ = ["RankTime", "Recorder", "StageMemory", "costs_of", "measure_costs", "measure_memory"]
