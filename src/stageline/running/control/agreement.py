"""What ranks must agree on, and the sentence for two that do not.

Large facts (all parameters, the rows of a schedule) are compared by digest; only where digests
differ do the two ranks say the whole, and the first difference is named with both values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b, sha256
from typing import Any

Facts = Mapping[str, Any]
"""By name; a name that only one rank has is not compared: a rank may be given less than all."""

PURPOSE, ROWS, LEAVES, CONTENTS = "purpose", "rows", "leaves", "contents"
SEED, STEP, DIGESTS = "seed", "step", "digests"
DRAWS = "draws"  # whether something draws on a rank: only then must seeds agree
HELD = "held"  # the data that a rank was given; it then waits for what the others were given
OUTPUTS = "outputs"  # whether a step keeps outputs that reach every rank
WHOLE = "whole"  # whether a rank was given all arguments


def digest(fact: Any) -> str:
    """Return a short fingerprint of a fact that JSON can say."""
    return sha256(json.dumps(fact, sort_keys=True).encode()).hexdigest()[:16]


def digest_of_call(facts: Facts) -> int:
    """Return a number for the facts of a call; 0 if only the hub can compare them.

    What draws is another thing on each rank, and says nothing where seeds agree.

    Example:
        >>> digest_of_call({"rows": 8}) == digest_of_call({"rows": 8})
        True
        >>> digest_of_call({"rows": None})
        0
    """
    if facts.get(ROWS) is None or HELD in facts:
        return 0
    # Facts are what JSON can say; repr() says the same of it in half the time.
    told = repr({name: fact for name, fact in facts.items() if name != DRAWS}).encode()
    return int.from_bytes(blake2b(told, digest_size=8).digest(), "little") or 1


def disagreement(rank: int, mine: Facts, other: int, theirs: Facts) -> str | None:
    """Return the sentence for the first fact about a call in which two ranks differ.

    Example:
        >>> print(disagreement(2, {"leaves": {"x": "(6,)"}}, 0, {"leaves": {"x": "(8,)"}})[:72])
        rank 2 was given another batch than rank 0: x is (6,) on rank 2 and (8,)
    """
    if mine.get(PURPOSE) != theirs.get(PURPOSE):
        return (
            f"rank {rank} is at {mine[PURPOSE]}, rank {other} at {theirs[PURPOSE]}: every rank "
            "must make the same calls in the same order and mode"
        )
    seeds = seeds_differ(rank, mine, other, theirs)
    if seeds is not None:
        return seeds
    attributes = _attributes_differ(rank, mine, other, theirs)
    if attributes is not None:
        return attributes
    for name in (LEAVES, CONTENTS, ROWS):
        one, another = mine.get(name), theirs.get(name)
        if one is None or another is None or one == another:
            continue
        if name == ROWS:
            one, another = {"the batch": f"{one} rows long"}, {"the batch": f"{another} rows long"}
        where = first_difference(rank, one, other, another, only_common=True)
        if where is not None:
            return (
                f"rank {rank} was given another batch than rank {other}: {where}. Every rank must "
                "call with the same batch: call torch.manual_seed before you make random batches, "
                "and read data in the same order on every rank"
            )
    return _missing_arguments(rank, mine, other, theirs)


def _attributes_differ(rank: int, mine: Facts, other: int, theirs: Facts) -> str | None:
    """Return the sentence for an attribute of the pipeline that was set otherwise on two ranks."""
    if mine.get(STEP) != theirs.get(STEP):
        return (
            f"rank {rank} is at step {mine[STEP]}, rank {other} at step {theirs[STEP]}: set "
            "pipe.step_number to the same number on every rank"
        )
    if mine.get(OUTPUTS) != theirs.get(OUTPUTS):
        return (
            f"pipe.keep_outputs is {mine[OUTPUTS]} on rank {rank} and {theirs[OUTPUTS]} on rank "
            f"{other}: outputs reach every rank, so set it to the same on every rank, or build "
            "the pipeline with share_outputs=False"
        )
    return None


def seeds_differ(rank: int, mine: Facts, other: int, theirs: Facts) -> str | None:
    """Return the sentence for two seeds that differ; where nothing draws, they may.

    Example:
        >>> seeds_differ(1, {"seed": 7}, 0, {"seed": 8}) is None
        True
        >>> print(seeds_differ(1, {"seed": 7, "draws": True}, 0, {"seed": 8})[:40])
        rank 1 has another seed than rank 0: tor
    """
    draws = mine.get(DRAWS) or theirs.get(DRAWS)
    if not draws or mine.get(SEED) == theirs.get(SEED):
        return None
    return (
        f"rank {rank} has another seed than rank {other}: torch.manual_seed was called with "
        f"{mine.get(SEED)} on rank {rank} and with {theirs.get(SEED)} on rank {other} (None: not "
        "at all). Call it with the same number on every rank"
    )


def _missing_arguments(rank: int, mine: Facts, other: int, theirs: Facts) -> str | None:
    """Return the sentence for an argument that a rank lacks although it was given all arguments."""
    pairs = ((rank, mine, other, theirs), (other, theirs, rank, mine))
    for lacks, fewer, has, more in pairs:
        names = [name for name in more.get(LEAVES, ()) if not name.startswith("target")]
        missing = [name for name in names if name not in fewer.get(LEAVES, ())]
        if fewer.get(WHOLE) and missing:
            return (
                f"rank {lacks} was not given {missing[0]}, which rank {has} was given: in the "
                f"first call rank {lacks} was given all arguments, so pass this one there too"
            )
    return None


def differing_digest(mine: Facts, theirs: Facts) -> str | None:
    """Return the name of the first large fact in which two ranks differ."""
    one, another = mine.get(DIGESTS, {}), theirs.get(DIGESTS, {})
    return next((name for name in one if name in another and one[name] != another[name]), None)


def built_differently(what: str, rank: int, mine: Facts, other: int, theirs: Facts) -> str:
    """Return the sentence for two ranks that have not built the same pipeline."""
    where = first_difference(rank, mine, other, theirs)
    return (
        f"ranks {rank} and {other} have built different pipelines: they differ in {what}: {where}. "
        "Every rank must run the same script with the same arguments"
    )


def first_difference(
    rank: int, mine: Facts, other: int, theirs: Facts, *, only_common: bool = False
) -> str | None:
    """Name the first entry in which two ranks differ, with both values."""
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        if only_common and (name not in mine or name not in theirs):
            continue
        one, another = mine.get(name, "absent"), theirs.get(name, "absent")
        if one != another:
            return f"{name} is {one} on rank {rank} and {another} on rank {other}"
    return None
