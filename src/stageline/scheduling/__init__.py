"""When does it run? Integers in, a ``Schedule`` out: checked, simulated, printed, drawn.

    action.py      one thing one rank does, and its text form
    schedule.py    the rows of all ranks, as integer arrays
    text.py        a schedule as text, and back
    torch_form.py  the same in the words of torch.distributed.pipelining
    schedules/     the families, from gpipe to bitpipe
    passes.py      a schedule in, another one out
    work.py        what waits for what
    walk.py        an order in which everything can run, or the deadlock explained
    costs.py       how long actions take, and what they keep
    units.py       exact numbers as whole ticks
    kernels.py     the simulator's inner loop: plain, and in waves for many ranks
    times.py       when every action starts and ends
    memory.py      how much every rank holds
    critical.py    why it takes so long
    simulator.py   all of that, as figures
    transfers.py   sends and receives, in one order that cannot deadlock
    ledger.py      where each action stands
    checking.py    every fault of a schedule at once; checking_transfers.py: those of its transfers
    drawing.py     a schedule drawn for the terminal; svg.py: as a picture

Nothing here knows about models, tensors or processes.
"""

from stageline.scheduling import schedules
from stageline.scheduling.action import Action, Kind
from stageline.scheduling.costs import Costs
from stageline.scheduling.critical import CriticalStep
from stageline.scheduling.drawing import picture
from stageline.scheduling.schedule import Schedule
from stageline.scheduling.simulator import Simulation, TimedAction, simulate
from stageline.scheduling.text import parse
from stageline.scheduling.transfers import order_transfers

__all__ = [
    "Action",
    "Costs",
    "CriticalStep",
    "Kind",
    "Schedule",
    "Simulation",
    "TimedAction",
    "order_transfers",
    "parse",
    "picture",
    "schedules",
    "simulate",
]
