"""Whether a job that was stopped from outside had stalled before: ranks that wait for each other do so in every step.

A job that goes well is stopped at any moment, with operations open. It counts as stalled when nothing had started
or ended for much longer than ever before in that job (`stalls.had_stalled`).
"""

import signal
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dtprof.diagnosis.job_state import RankState, Stop
from dtprof.records import codes
from dtprof.records.tables import UNKNOWN_NS, Array

SOON_NS = 1_000_000_000
"""Within this time peers of a rank that was stopped lose their connections, and launchers note its end."""
SEEN_NS = 3_000_000_000
"""Hosts are sampled at least so often while their jobs run."""
PEER_GONE = ("closed by peer", "reset by peer", "connection refused", "broken pipe", "remote process exited")
"""Parts of messages of backends about an exited peer, in lower case; not those about a timeout."""
NEWEST = 64
"""Moments kept for each rank; a program may run on a little after it was asked to end."""


def newest_moments(rows: Array, spans: Array) -> tuple[int, ...]:
    """Return when a rank began something, or an operation of it ended well: the newest times, ascending."""
    tail = rows[-NEWEST:]
    well = (tail["done_ns"] != UNKNOWN_NS) & (tail["state"] != codes.FAILED)
    times = np.concatenate([tail["issued_ns"], tail["done_ns"][well], spans["begin_ns"][-NEWEST:]])
    return tuple(np.sort(times)[-NEWEST:].tolist())


def longest_gap_ns(rows: Array, *, until_ns: int) -> int:
    """Return the longest time between operations that follow each other, after the first step where there are more.

    Parameters:
        until_ns: operations issued later do not count; UNKNOWN_NS for no limit.
    """
    rows = rows[: int(np.count_nonzero(rows["issued_ns"] < until_ns))] if until_ns != UNKNOWN_NS else rows
    issued: npt.NDArray[np.int64] = rows["issued_ns"]
    first_step = int(np.searchsorted(rows["step"], 0, side="right"))
    later = issued[first_step:] if len(issued) - first_step > 1 else issued
    return int(np.diff(later).max(initial=0))


def find_stop(ranks: Iterable[RankState], last_seen_ns: Mapping[str, int]) -> Stop | None:
    """Return how the job was going when it was stopped from outside; None where it was not, or ended by itself.

    Parameters:
        last_seen_ns: by host, when it was last sampled: for ranks without an exit record.
    """
    ranks = tuple(ranks)
    ends = _earliest((rank.host, stop_ns(rank)) for rank in ranks)
    by_kill = not ends and _killed_together(ranks)
    if by_kill:
        ends = _earliest((rank.host, _killed_ns(rank)) for rank in ranks)
    if not ends:
        newest = {host: _newest_ns(ranks, host) for host in last_seen_ns}
        ends = {host: max(t, newest[host]) for host, t in last_seen_ns.items() if t >= newest[host] - SEEN_NS}
    if not ends or any(_failed_before(rank, ends.get(rank.host)) for rank in ranks):
        return None
    quiet = [
        end - max((t_ns for t_ns in rank.moments if t_ns < end), default=end)
        for rank in ranks
        if (end := ends.get(rank.host)) is not None
    ]
    usual_ns = max(rank.longest_gap_ns for rank in ranks)
    return Stop(quiet_ns=max(0, min(quiet)), usual_ns=usual_ns, by_kill=by_kill)


def _newest_ns(ranks: Iterable[RankState], host: str) -> int:
    return max((rank.moments[-1] for rank in ranks if rank.host == host and rank.moments), default=0)


def _earliest(times: Iterable[tuple[str, int | None]]) -> dict[str, int]:
    """Return the earliest of these times on each host; None is no time."""
    found: dict[str, int] = {}
    for host, t_ns in times:
        if t_ns is not None:
            found[host] = min(t_ns, found.get(host, t_ns))
    return found


def _killed_together(ranks: Sequence[RankState]) -> bool:
    """Say whether all ranks, of which there are several, were killed by SIGKILL within a second: nobody died first."""
    times = [t_ns for rank in ranks if not rank.exceptions and (t_ns := _killed_ns(rank)) is not None]
    return 1 < len(times) == len(ranks) and max(times) - min(times) <= SOON_NS


def _killed_ns(rank: RankState) -> int | None:
    """Return when SIGKILL ended a rank; None where it did not."""
    return rank.exit.t_ns if rank.exit is not None and rank.exit.status == -signal.SIGKILL else None


def stop_ns(rank: RankState) -> int | None:
    """Return when a rank was asked to end."""
    if rank.interruption is not None:
        return rank.interruption.t_ns
    return rank.exit.t_ns if rank.exit is not None and rank.stopped_politely else None


def _failed_before(rank: RankState, stop_ns: int | None) -> bool:
    """Say whether a rank failed of its own; one that loses a peer as that is stopped has not."""
    lost = rank.transport_exception
    if lost is not None:
        text = f"{lost.traceback}{lost.message}".lower()
        return stop_ns is None or lost.t_ns < stop_ns - SOON_NS or not any(words in text for words in PEER_GONE)
    if rank.interruption is not None or rank.stopped_politely:
        return False
    if rank.exceptions:
        return True
    ended = rank.exit
    after_others = ended is not None and stop_ns is not None and ended.t_ns >= stop_ns - SOON_NS
    return ended is not None and ended.status != 0 and not (after_others and ended.status == -signal.SIGKILL)
