"""Operations that are small and many: their number costs the time, not their bytes. Join them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from dtprof.analysis.results import CallLine, CallSiteResult, CollectiveResult, SmallMessages
from dtprof.records.events import POINT_TO_POINT

MOST_BYTES = 64 << 10
"""Up to here latency rules: at 10 GB/s, 64 KiB take 7 us."""
FEWEST_A_STEP = 20
MIN_SHARE = 0.01
"""Of the step, in which they keep the program."""


def find_small_messages(
    collectives: Sequence[CollectiveResult],
    sites: Sequence[CallSiteResult],
    *,
    num_steps: int,
    step_ns: int | None,
) -> tuple[SmallMessages, ...]:
    """Return the small operations that cost the program most, one row an axis, operation and api."""
    if not num_steps or not step_ns:
        return ()
    alike: dict[tuple[str, str, str | None], list[SmallMessages]] = defaultdict(list)
    for row in collectives:
        a_step = row.count / num_steps
        exposed_ns = int((row.exposed_ns or 0) * a_step)
        if (
            row.op in POINT_TO_POINT
            or row.bytes is None
            or row.bytes > MOST_BYTES
            or a_step < FEWEST_A_STEP
            or exposed_ns < MIN_SHARE * step_ns
        ):
            continue
        axis = row.axis or row.group
        alike[axis, row.op, row.api].append(
            SmallMessages(
                axis=axis,
                op=row.op,
                api=row.api,
                groups=1,
                count_per_step=a_step,
                bytes=row.bytes,
                exposed_ns_per_step=exposed_ns,
                line=_find_line(sites, axis, row),
            )
        )
    worst = [_worst(rows) for rows in alike.values()]
    return tuple(sorted(worst, key=lambda row: (-row.exposed_ns_per_step, row.axis, row.op, row.api or "")))


def _find_line(sites: Sequence[CallSiteResult], axis: str, row: CollectiveResult) -> CallLine | None:
    """Return the line that issues the costliest of these operations, of call sites with the costliest first."""
    alike = (site for site in sites if (site.axis, site.op, site.api) == (axis, row.op, row.api))
    return next((site.line for site in alike if site.bytes is not None and site.bytes <= MOST_BYTES), None)


def _worst(rows: Sequence[SmallMessages]) -> SmallMessages:
    worst = max(rows, key=lambda row: row.exposed_ns_per_step)
    return replace(worst, groups=len(rows))
