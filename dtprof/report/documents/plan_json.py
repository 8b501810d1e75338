"""Plans as JSON, schema 1: times in ns, sizes in bytes, fractions from 0 to 1."""

from dtprof.analysis.planning.plans import AXES, Plan
from dtprof.analysis.planning.run_calibration import PlanResult

SCHEMA = 1


def plan_json(result: PlanResult) -> dict[str, object]:
    """Return the document; unknown values are null, with their reason under `cannot_tell`."""
    return {
        "schema": SCHEMA,
        "considered": result.plans.considered,
        "plans": [_plan(plan) for plan in result.plans.plans],
        "refused": [{"layout": refused.layout, "reason": refused.reason} for refused in result.plans.refused],
        "check": [
            {"figure": checked.figure, "planned": checked.planned, "measured": checked.measured, "off": checked.off}
            for checked in result.checked
        ],
        "cannot_tell": [*result.plans.cannot_tell, *result.reasons],
    }


def _plan(plan: Plan) -> dict[str, object]:
    return {
        **{axis: getattr(plan, axis) for axis in AXES},
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "memory_bytes": plan.memory_bytes,
        "step_ns": plan.step_ns,
        "bubble_fraction": plan.bubble_fraction,
        "exposed_ns": plan.exposed_ns,
        "fits": plan.fits,
    }
