"""What a pipeline takes from a proposal, and what of the user's own words contradicts it."""

from __future__ import annotations

from typing import NamedTuple

from stageline.partitioning.plan import Plan
from stageline.planning.proposal import Proposal
from stageline.scheduling import Schedule
from stageline.scheduling.recompute import Recompute


class Adopted(NamedTuple):
    """What a pipeline is built with."""

    plan: Plan | None
    schedule: str | Schedule | None
    num_microbatches: int | None
    recompute: Recompute


def adopt(
    plan: Plan | Proposal | None,
    schedule: str | Schedule | None,
    num_microbatches: int | None,
    recompute: Recompute,
) -> tuple[Adopted, list[str]]:
    """Return what a proposal says of schedule, microbatches and recompute, and what is wrong.

    Of anything else than a proposal, what was given.
    """
    if not isinstance(plan, Proposal):
        return Adopted(plan, schedule, num_microbatches, recompute), []
    faults = [
        f"{name}={given}, the proposal has {own}: leave {name} out, or give plan=proposal.plan"
        for name, given, own, differs in (
            (
                "schedule",
                repr(schedule),
                plan.schedule.name,
                schedule is not None and schedule not in (plan.schedule, plan.schedule.name),
            ),
            (
                "num_microbatches",
                num_microbatches,
                plan.num_microbatches,
                num_microbatches not in (None, plan.num_microbatches),
            ),
        )
        if differs
    ]
    if plan.data_parallel > 1:
        faults.append(
            f"plan: it is for {plan.data_parallel} copies of the pipeline side by side, and "
            "sl.Pipeline runs one: ask find_plans for data_parallel=1, or run one copy with "
            "plan=proposal.plan, schedule=proposal.schedule"
        )
    # By its name a family can be built anew for smaller batches.
    by_name, again = plan.method.build_name, plan.method.adds_recompute
    if again and recompute == "never":
        by_name, recompute = plan.method.schedule, "waiting"
    return Adopted(plan.plan, by_name or plan.schedule, plan.num_microbatches, recompute), faults
