"""The best schedule for given costs and a memory limit: ``find_schedule``.

problem.py    what is scheduled: lines of actions, their times, hops and room
lines.py      the same laid out for placing, forward or backward in time
placing.py    place actions one by one, each as early as it can be: the inner loop
seeds.py      where a search begins
rounds.py     the published search for zero bubbles, as seeds
improving.py  try seeds, run them back and forth, shake
bounds.py     what no schedule can beat
rows.py       what was placed as a schedule
fusing.py     whole backwards where halves do not pay
placements.py which rank holds which stage
limits.py     how much each rank may hold
exact.py      the same problem for an exact solver
finding.py    families, search and solver together: ``find_schedule``
found.py      what is handed back
"""

from stageline.planning.searching.finding import find_schedule
from stageline.planning.searching.found import Candidate, Found

__all__ = ["Candidate", "Found", "find_schedule"]
