"""When does it run? Integers in, a ``Schedule`` out: checked, simulated, printed, drawn.

    action.py      one thing one rank does, and its text form
    schedule.py    the rows of all ranks, as integer arrays
    text.py        a schedule as text, and back
    torch_form.py  the same in the words of torch.distributed.pipelining
    schedules/     the families, from gpipe to bitpipe
    passes.py      a schedule in, another one out
    work.py        what waits for what
    walk.py        an order in which everything can run, or the deadlock explained
    costs.py       how long actions take
    simulator.py   when everything happens
    transfers.py   sends and receives, in one order that cannot deadlock
    ledger.py      where each action stands
    checking.py    every fault of a schedule at once; checking_transfers.py: those of its transfers
    drawing.py     a schedule drawn for the terminal

Nothing here knows about models, tensors or processes.
"""

from stageline.scheduling import schedules
from stageline.scheduling.action import Action, Kind
from stageline.scheduling.costs import Costs
from stageline.scheduling.drawing import picture
from stageline.scheduling.schedule import Schedule
from stageline.scheduling.simulator import Simulation, simulate
from stageline.scheduling.text import parse
from stageline.scheduling.transfers import order_transfers

__all__ = [
    "Action",
    "Costs",
    "Kind",
    "Schedule",
    "Simulation",
    "order_transfers",
    "parse",
    "picture",
    "schedules",
    "simulate",
]
