"""All names that a tensor has in the model, and which process answers to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stageline.partitioning.sharing import Shared
from stageline.partitioning.sources import StageSource


@dataclass(frozen=True)
class Names:
    """Names beyond those under which the stages of this process hold their tensors.

    Attributes:
        aliases: Other names of a tensor that is held here, each with the name it is held under.
        first: Names held here, each with the first name of the tensor in the model.
        elsewhere: Other names of tensors that only other processes hold.
        order: Where in the model each parameter stands, if the whole model is known.
    """

    aliases: Mapping[str, str] = field(default_factory=dict)
    first: Mapping[str, str] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()
    order: Mapping[str, int] = field(default_factory=dict)


def all_names(
    sources: Sequence[StageSource],
    shared: Iterable[Shared],
    stages_here: Iterable[int],
    aliases: Mapping[str, str] | None = None,
    first_names: Mapping[str, str] | None = None,
) -> Names:
    """Return all names of the tensors that some stages hold.

    Args:
        sources: All stages.
        shared: What several of them hold.
        stages_here: Those of this process.
        aliases: Names in the model that no stage uses, each with one under which a stage, here or
            elsewhere, holds the tensor.
        first_names: Names in the model that are not the first of their tensor, with the first.
    """
    here = set(stages_here)
    states = [_state_names(source) for source in sources]
    found: dict[str, str] = {}
    first: dict[str, str] = {}
    for one in shared:
        held = next((holder.name for holder in one.holders if holder.stage in here), None)
        if held is not None:
            first[held] = one.name
            # A buffer that is not persistent has names, but they stand in no state_dict.
            names = [h.name for h in one.holders if h.name in states[h.stage]]
            found.update((name, held) for name in names if name != held)
    names_here = {name for stage in here for name in states[stage]}
    elsewhere = []
    for alias, name in (aliases or {}).items():
        held = found.get(name, name)
        if held in names_here:
            found[alias] = held
        else:
            elsewhere.append(alias)
    first.update((held, name) for held, name in (first_names or {}).items() if held in names_here)
    return Names(found, first, frozenset(elsewhere))


def _state_names(source: StageSource) -> frozenset[str]:
    if source.module is None:
        return frozenset()
    return frozenset(source.module.state_dict(prefix=source.prefix))
