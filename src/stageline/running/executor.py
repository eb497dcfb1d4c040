"""The executor: one loop over the row of a rank. It does not know which schedule it runs.

Every kind of action has a handler of a few lines. What a step needs while it runs lives in one
``StepState``, made when the step begins and dropped when it ends, so that nothing outlives its
step.

    forwards.py             F
    recompute_handlers.py   F whose graph is dropped, and R
    backwards.py            B, or I and W
    moves.py                sends and receives
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from stageline import log
from stageline.errors import StepError
from stageline.running.autocast import autocast_devices
from stageline.running.backwards import backward, input_gradient, weight_gradient
from stageline.running.current import CURRENT, number_restored
from stageline.running.events import ActionDone, Observer
from stageline.running.forwards import forward, forward_split
from stageline.running.moves import (
    receive_backward,
    receive_forward,
    send_backward,
    send_forward,
)
from stageline.running.recompute_handlers import forward_dropped, recompute, recompute_split
from stageline.running.state import StepState
from stageline.running.transports.base import Aborted, Edge
from stageline.scheduling import Action, Kind, Schedule

__all__ = ["HANDLERS", "BoundRow", "StepState", "bind", "bind_actions", "run_row"]

Handler = Callable[[StepState, int, int, "Edge | None"], None]

HANDLERS: dict[Kind, Handler] = {
    Kind.FORWARD: forward,
    Kind.BACKWARD: backward,
    Kind.INPUT_GRADIENT: input_gradient,
    Kind.WEIGHT_GRADIENT: weight_gradient,
    Kind.RECOMPUTE: recompute,
    Kind.SEND_FORWARD: send_forward,
    Kind.SEND_BACKWARD: send_backward,
    Kind.RECEIVE_FORWARD: receive_forward,
    Kind.RECEIVE_BACKWARD: receive_backward,
}

# What becomes of an action whose stage and microbatch have an I, or an R, in the same row.
_IF_SPLIT: dict[Kind, Handler] = {Kind.FORWARD: forward_split, Kind.RECOMPUTE: recompute_split}
_IF_RECOMPUTED: dict[Kind, Handler] = {Kind.FORWARD: forward_dropped}
_RECEIVES = (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)


@dataclass(frozen=True)
class BoundRow:
    """The row of one rank with every handler and edge looked up once."""

    rank: int
    actions: tuple[Action, ...]
    steps: tuple[tuple[Handler, int, int, Edge | None], ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The text form of every action, for those who observe."""
        return tuple(map(str, self.actions))

    @cached_property
    def num_computing(self) -> int:
        """How many actions are more than a transfer."""
        return sum(action.peer is None for action in self.actions)

    @cached_property
    def recomputes(self) -> bool:
        """Whether some forward runs again before its backward."""
        return any(action.kind is Kind.RECOMPUTE for action in self.actions)

    @cached_property
    def is_ascending(self) -> bool:
        """Whether every stage takes all microbatches from first to last, in all that it does."""
        latest: dict[tuple[Kind, int], int] = {}
        for action in self.actions:
            before = latest.get((action.kind, action.stage), -1)
            if action.microbatch < before:
                return False
            latest[action.kind, action.stage] = action.microbatch
        return True

    @cached_property
    def gradients_ascend(self) -> bool:
        """Whether every stage makes its gradients from the first microbatch to the last.

        W does not count: it may be done with I.
        """
        latest: dict[int, int] = {}
        for action in self.actions:
            if action.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
                if action.microbatch < latest.get(action.stage, -1):
                    return False
                latest[action.stage] = action.microbatch
        return True


def bind(schedule: Schedule, rank: int) -> BoundRow:
    """Look up the handlers of a rank's row; the schedule must carry its transfers."""
    return bind_actions(schedule.row(rank), rank, schedule.placement)


def bind_actions(actions: Sequence[Action], rank: int, placement: Sequence[int]) -> BoundRow:
    """Look up the handlers of some actions of a rank."""

    def having(kind: Kind) -> set[tuple[int, int]]:
        return {(a.stage, a.microbatch) for a in actions if a.kind is kind}

    split, recomputed = having(Kind.INPUT_GRADIENT), having(Kind.RECOMPUTE)

    def handler(action: Action) -> Handler:
        key = (action.stage, action.microbatch)
        if key in recomputed and action.kind in _IF_RECOMPUTED:
            return _IF_RECOMPUTED[action.kind]
        if key in split and action.kind in _IF_SPLIT:
            return _IF_SPLIT[action.kind]
        return HANDLERS[action.kind]

    steps = tuple(
        (handler(action), action.stage, action.microbatch, _edge(_transfer(actions, i), placement))
        for i, action in enumerate(actions)
    )
    return BoundRow(rank, tuple(actions), steps)


def _transfer(actions: Sequence[Action], index: int) -> Action:
    """Return the transfer that an action makes: B makes its own send if that overtakes no other."""
    action = actions[index]
    if action.kind is Kind.BACKWARD:
        following = range(index + 1, len(actions))
        later = next((actions[i] for i in following if actions[i].kind not in _RECEIVES), action)
        is_its_own = (later.stage, later.microbatch) == (action.stage, action.microbatch)
        if later.kind is Kind.SEND_BACKWARD and is_its_own:
            return later
    return action


def _edge(action: Action, placement: Sequence[int]) -> Edge | None:
    if action.peer is None:
        return None
    here, there = action.stage, action.peer
    sends = action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
    source, target = (here, there) if sends else (there, here)
    letter = "F" if action.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD) else "B"
    return Edge(source, target, letter, action.microbatch, placement[source], placement[target])


@number_restored()
def run_row(row: BoundRow, state: StepState, observer: Observer | None = None) -> None:
    """Run all actions of a rank; an exception is wrapped once, with what only this loop knows."""
    state.autocast = autocast_devices()
    state.may_stay_whole = row.gradients_ascend
    try:
        if observer is None:
            for position, (handler, stage, microbatch, edge) in enumerate(row.steps):
                state.position = position
                CURRENT.microbatch = microbatch
                handler(state, stage, microbatch, edge)
        else:
            for position in range(len(row.steps)):
                state.position = position
                observer = _observed(row, position, state, observer)
    except (Aborted, KeyboardInterrupt):
        raise
    except BaseException as cause:
        action = row.actions[state.position]
        raise StepError(
            rank=row.rank, stage=action.stage, microbatch=action.microbatch, action=str(action)
        ) from cause


def _observed(
    row: BoundRow, position: int, state: StepState, observer: Observer | None
) -> Observer | None:
    """Run one action and tell the observer; one that raises is logged and dropped, not obeyed."""
    handler, stage, microbatch, edge = row.steps[position]
    state.waited = 0.0
    CURRENT.microbatch = microbatch
    start = time.perf_counter()
    handler(state, stage, microbatch, edge)
    end = time.perf_counter()
    if observer is None:
        return None
    try:
        observer(ActionDone(row.rank, row.names[position], position, start, end, state.waited))
    except Exception as error:
        log.warning(row.rank, f"the observer raised {error!r} and is not asked again in this step")
        return None
    return observer
