"""What the zero-bubble families share: one forward, one input gradient, and weights when it pays.

    warmup 2, delay 1     F F | F I0 | F I1 W0  F I2 W1 ... | I W  I W | W

The weight gradient of a microbatch holds nobody up, so a rank may keep it for later. It begins
with its own after ``delay`` input gradients, by when the ranks above have what they wait for.
"""

from __future__ import annotations

from itertools import pairwise

from stageline.scheduling.schedule import Row
from stageline.scheduling.schedules.rows import alternate, one_after_another


def delayed_weights(forwards: Row, inputs: Row, weights: Row, *, warmup: int, delay: int) -> Row:
    """Return the row of a rank.

    Args:
        forwards: Its forwards, one line each.
        inputs: Its input gradients, as many.
        weights: Its weight gradients, in the same order.
        warmup: How many forwards come first.
        delay: How many input gradients come before the first weight gradient.
    """
    total = len(forwards)
    warmup, delay = min(warmup, total), min(delay, total)
    last_forward = total - warmup  # after so many input gradients no forward is left

    phases = [forwards[:warmup]]
    for begin, end in pairwise(sorted({0, last_forward, delay, total})):
        units = [inputs[begin:end]]
        if begin < last_forward:
            units.insert(0, forwards[warmup + begin : warmup + end])
        if begin >= delay:
            units.append(weights[begin - delay : end - delay])
        phases.append(alternate(*units))
    phases.append(weights[total - delay :])
    return one_after_another(*phases)
