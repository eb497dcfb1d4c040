"""Random problems for the tests of the search: small, of any placement, memory and costs."""

from __future__ import annotations

import random

from stageline.planning.searching.problem import Metric, Problem, Room
from stageline.scheduling import Costs


def room_for(limit: int | None, num_ranks: int, num_stages: int) -> Room:
    """Return room for so many activations of one stage, on every rank."""
    return Room((limit,) * num_ranks, (1,) * num_stages, (0,) * num_stages)


def vee(num_ranks: int) -> tuple[int, ...]:
    """Return the placement of two stages per rank in a V."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def random_problem(seed: int, *, placement: str = "any") -> tuple[Problem, Costs, Metric]:
    """Return a problem, the costs it was made of, and what is to be small."""
    drawn = random.Random(seed)
    kind = drawn.choice(("straight", "v")) if placement == "any" else placement
    num_ranks = drawn.choice((2, 3, 4) if kind == "straight" else (2, 3))
    placed = tuple(range(num_ranks)) if kind == "straight" else vee(num_ranks)
    num_stages = len(placed)

    def times() -> list[int]:
        return [drawn.randint(1, 9) for _ in placed]

    costs = Costs(
        forward=times(),
        input_gradient=times(),
        weight_gradient=times(),
        latency=drawn.choice((0, 1, 3)),
    )
    least = num_stages // num_ranks
    room = room_for(drawn.choice((None, *range(least, 2 * num_stages))), num_ranks, num_stages)
    problem = Problem.of(placed, drawn.choice((1, 3, 4, 5)), costs, room)
    metric: Metric = drawn.choice(("T", "span"))
    return problem, costs, metric
