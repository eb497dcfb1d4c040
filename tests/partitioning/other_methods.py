"""How other libraries cut a chain, in a few lines each: what stageline's cuts are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def part_costs(costs: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return what each part costs."""
    return [sum(costs[a:b]) for a, b in pairwise([0, *accumulate(sizes)])]


def local_moves(costs: Sequence[int], num_parts: int) -> list[int]:
    """torchgpipe's way: begin with equal lengths, and move items from the largest to the smallest.

    Item by item along the parts between them, until these two differ by no more than the largest
    item, or the same cut comes again.
    """
    sizes = [len(costs) // num_parts] * num_parts
    sizes[-1] += len(costs) % num_parts
    best, seen = list(sizes), set[tuple[int, ...]]()
    while tuple(sizes) not in seen:
        seen.add(tuple(sizes))
        parts = part_costs(costs, sizes)
        if max(parts) < max(part_costs(costs, best)):
            best = list(sizes)
        largest, smallest = parts.index(max(parts)), parts.index(min(parts))
        if parts[largest] <= parts[smallest] + max(costs):
            break
        step = 1 if largest > smallest else -1
        receiver = smallest
        while receiver != largest:  # whoever became too small takes from the next
            sizes[receiver] += 1
            sizes[receiver + step] -= 1
            receiver += step
            if sizes[receiver] and part_costs(costs, sizes)[receiver] >= parts[smallest]:
                break
        if min(sizes) < 1:
            break
    return best


def least_spread(costs: Sequence[int], num_parts: int) -> list[int]:
    """DeepSpeed's way: a dynamic programme for the smallest difference of largest and smallest.

    A cut with the least difference need not be made of such cuts, so it is not always found.
    """
    sums = [0, *accumulate(costs)]
    best = {end: (sums[end], sums[end], [end]) for end in range(1, len(costs) + 1)}
    for _ in range(num_parts - 1):
        further = {}
        for end in range(1, len(costs) + 1):
            ways = [
                (max(high, part), min(low, part), [*sizes, end - begin])
                for begin, (high, low, sizes) in best.items()
                if begin < end
                for part in (sums[end] - sums[begin],)
            ]
            if ways:
                further[end] = min(ways, key=lambda way: way[0] - way[1])
        best = further
    return best[len(costs)][2]


def least_largest(costs: Sequence[int]) -> list[int]:
    """Return the smallest possible largest part for 1, 2, .. parts, by the textbook recurrence."""
    sums = [0, *accumulate(costs)]
    best = [float("inf") if end else 0 for end in range(len(costs) + 1)]
    found = []
    for _ in costs:
        best = [float("inf")] + [
            min(max(best[begin], sums[end] - sums[begin]) for begin in range(end))
            for end in range(1, len(costs) + 1)
        ]
        found.append(int(best[-1]))
    return found
