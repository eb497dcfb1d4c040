"""The control plane: what ranks in several processes tell each other beside the data.

messages.py    JSON over a socket; no pickle
addresses.py   where a rank runs, and how it is reached
joining.py     how processes find each other, and keep strangers out
agreement.py   what they must agree on
failures.py    what went wrong, as text and as an error
hub.py         rank 0 hears all, decides, tells all
board.py       where ranks of one host agree without asking the hub
member.py      one rank's side
listening.py   the thread that listens, and sends heartbeats
leaving.py     last words: why a process ends
terminating.py SIGTERM, also while the main thread waits
job.py         puts these together: ``join``
"""

from stageline.running.control.failures import Failure
from stageline.running.control.job import join
from stageline.running.control.member import Member, Slowness

__all__ = ["Failure", "Member", "Slowness", "join"]
