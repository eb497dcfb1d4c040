"""What a pipeline takes from a proposal, and what of the user's own words contradicts it."""

from __future__ import annotations

from stageline.partitioning.plan import Plan
from stageline.planning.proposal import Proposal
from stageline.scheduling import Schedule


def adopt(
    plan: Plan | Proposal | None, schedule: str | Schedule | None, num_microbatches: int | None
) -> tuple[Plan | None, str | Schedule | None, int | None, list[str]]:
    """Return plan, schedule and number of microbatches of a proposal, and what is wrong.

    Of anything else than a proposal, what was given.
    """
    if not isinstance(plan, Proposal):
        return plan, schedule, num_microbatches, []
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
    by_name = plan.method.build_name
    return plan.plan, by_name or plan.schedule, plan.num_microbatches, faults
