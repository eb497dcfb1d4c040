"""Small stages in the caller's own thread, one microbatch after the other.

Between threads a packet costs some tens of microseconds: the interpreter lock changes hands, and
the other thread has to wake up. Below about a third of a millisecond per action that is more than
a second core gives back, and later where a backward is in two halves; so what takes less than a
millisecond is timed both ways. In turn nothing is cut: a microbatch runs through all stages as one
graph, in the order in which every stage would have seen it, so that the results are the same bits.

    threads    rank 0  F0 F1 B0 F2 B1 B2        in turn    F0 F0 B0 F1 F1 B1 F2 F2 B2
               rank 1     F0 B0 F1 B1 ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from torch import Tensor

from stageline.errors import StepError
from stageline.running.autocast import autocast_devices
from stageline.running.backwards import differentiate
from stageline.running.caller import refuse_foreign_modes, step_modes
from stageline.running.current import CURRENT, number_restored
from stageline.running.forwards import call_first, call_stage, finish, weighed_loss
from stageline.running.program import StageProgram
from stageline.running.state import StepState

WARM_UP = 1
TRIALS = 5
"""How often threads, and then turns, are timed before one of them is chosen.

Their medians are compared: the fastest call of several threads is luck, since in most calls they
meet at the interpreter lock, and the mean is that of whatever else ran on the machine."""

EARNED = 1.15
"""How much faster threads must be than turns to be chosen: they take every core, and in noise two
medians of five differ by a tenth."""

AGAIN = 1024
"""After so many calls, and after 16, 64 and 256, the slower one is timed anew: the machine may have
been busy."""

CLEARLY = 1.3
"""How much slower its first time must be that it is not timed further."""

LONGEST = 1e-3
"""Seconds per action, above which nobody has to try: threads pay from 0.3 ms on, and later where
the backward is in two halves."""

HOPELESS = 2.0
"""How much slower the first two turns must be that there are no others; one may have met a
hiccup of the machine."""

_ANY_STAGE = "(All stages were differentiated in one go; it may be any of them.)"


class Tempo:
    """Finds out whether calls of one kind are faster in threads or in turn.

    Example:
        >>> tempo = Tempo(num_actions=32, num_ranks=2)
        >>> for seconds in (9e-3, *[5e-3] * 5, *[3e-3] * 5):
        ...     tempo.note(seconds, in_turn=tempo.prefers_turns)
        >>> tempo.prefers_turns
        True

    Args:
        num_actions: Of all ranks together, transfers left out.
        num_ranks: How many there are.
    """

    def __init__(self, num_actions: int, num_ranks: int) -> None:
        self._longest = LONGEST * num_actions / num_ranks
        self._calls = 0
        self._has_tried_both = False
        self._tried = False
        self._left = 0  # calls until what is tried again has been timed
        self._recent: dict[bool, deque[float]] = {
            each: deque(maxlen=TRIALS) for each in (True, False)
        }

    @property
    def prefers_turns(self) -> bool:
        """Whether the next call should run in turn."""
        if self._left:
            return self._tried
        turns, threads = self._recent[True], self._recent[False]
        if self._has_tried_both:
            return median(turns) < EARNED * median(threads)
        if len(threads) < TRIALS or min(threads) > self._longest:
            return False
        return len(turns) < 2 or min(turns) <= HOPELESS * min(threads)

    def note(self, seconds: float, *, in_turn: bool) -> None:
        """Take down how long a call took."""
        self._calls += 1
        if self._left == WARM_UP + TRIALS:  # the first of those that are tried again
            self._recent[in_turn].clear()
        elif self._calls > WARM_UP:
            self._recent[in_turn].append(seconds)
            self._has_tried_both |= all(len(each) >= TRIALS for each in self._recent.values())
        if self._left:
            tried, other = self._recent[in_turn], self._recent[not in_turn]
            is_clear = bool(tried) and min(tried) > CLEARLY * median(other)
            self._left = 0 if is_clear else self._left - 1
        elif self._calls in (16, 64, 256) or self._calls % AGAIN == 0:
            self._try_again()

    def _try_again(self) -> None:
        """Time what is not used, as often as at first; one call alone would not be warm."""
        if self._has_tried_both:  # else turns were out of the question
            self._tried = not self.prefers_turns
            self._left = WARM_UP + TRIALS


def can_run_in_turn(state: StepState) -> bool:
    """Whether a call needs no cut: it ends in a loss, or builds no graph."""
    if state.streams is not None or state.statistics is not None:
        return False
    if state.builds_graph and state.loss_rule is None:
        return False
    # Whose parameters a stage uses is seen in its own graph only.
    return not state.builds_graph or all(map(state.foreign.is_known, state.programs))


def are_apart(programs: Iterable[StageProgram]) -> bool:
    """Whether every parameter is in one stage: in one graph, others would be summed earlier."""
    owned = [{id(each) for each in program.module.parameters()} for program in programs]
    return sum(map(len, owned)) == len(set().union(*owned))


@number_restored()
def run_in_turn(placement: Sequence[int], states: Mapping[int, StepState]) -> None:
    """Run all stages on all microbatches.

    Args:
        placement: The rank of each stage, for what is said about failures.
        states: Of all ranks: the first stage's gets the gradients of the inputs, the last stage's
            losses and outputs.
    """
    refuse_foreign_modes()
    first, last = states[placement[0]], states[placement[-1]]
    first.autocast = last.autocast = autocast_devices()
    programs = [first.programs[stage] for stage in range(len(placement))]
    stage, microbatch, hint = 0, 0, ""
    try:
        with step_modes(first.builds_graph):
            for microbatch in range(first.microbatches.count):
                CURRENT.microbatch = microbatch
                stage, hint = 0, ""
                output = call_first(first, programs[0], microbatch)
                for stage in range(1, len(programs)):
                    output = call_stage(first, programs[stage], microbatch, output)
                if last.loss_rule is None:
                    finish(last, programs[-1], microbatch, output, None)
                    continue
                loss, weight = weighed_loss(last, programs[-1], microbatch, output)
                if first.builds_graph:
                    del output
                    hint = _ANY_STAGE
                    _differentiate(first, last, microbatch, loss, weight)
    except KeyboardInterrupt:
        raise
    except BaseException as cause:
        action = f"{stage}{'B' if hint else 'F'}{microbatch}"
        rank = placement[stage]
        raise StepError(
            rank=rank, stage=stage, microbatch=microbatch, action=action, hint=hint
        ) from cause


def _differentiate(
    first: StepState, last: StepState, microbatch: int, loss: Tensor, weight: float
) -> None:
    """Run one backward through all stages."""
    slot = first.slots.pop((0, microbatch), None)
    if slot is not None:
        slot.is_open = True
    if weight:
        differentiate(last, (0, microbatch), [loss], [last.share(weight, loss)])
    if slot is not None:
        first.input_gradients[microbatch] = slot.gradients
