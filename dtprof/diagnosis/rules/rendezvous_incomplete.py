"""Launchers wait in a rendezvous for nodes that do not come: no rank was started."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding
from dtprof.diagnosis.job_state import JobState, RendezvousWait
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import plural

MAX_SHOWN = 8
MAX_NODES = 100_000
DEFAULT_PORT = "29400"
"""That of torchrun."""
WHICH_NODE = "which node does not come: a rendezvous knows only those that have come"
NO_RANK = "no rank was started"
CHECK_HOSTS = (
    "Check that the same command was started on every node, with the same --rdzv-endpoint, --rdzv-id and --nnodes, and "
    "that the endpoint's name means the same machine on all of them."
)
CHECK_STORE = (
    "Check that the launcher on the endpoint's host runs, that it was given the same port, and that no firewall is "
    "between: `dtprof doctor` on all nodes says which node reaches it."
)


def find_incomplete_rendezvous(case: Case) -> Iterator[Finding]:
    """Give the finding for launchers in a rendezvous, in a job that has started no rank."""
    waits = case.job.rendezvous
    if not waits or case.job.ranks:
        return
    differing = _find_differing(waits)
    unreached = [wait for wait in waits if wait.for_store]
    words = " and ".join(differing)
    advice: tuple[str, ...]
    if differing:
        summary = f"{_launchers(waits)} wait in different rendezvous, as they differ in {words}; {NO_RANK}."
        advice, grade = (f"Give {words} the same value on every node.",), 0.9
    elif unreached:
        summary = (
            f"{_launchers(unreached)} {_verb(unreached)} for the store of the rendezvous at {_place(unreached[0])}, "
            f"which does not answer; {NO_RANK}."
        )
        advice, grade = (CHECK_STORE, CHECK_HOSTS), 0.85
    else:
        summary = (
            f"{_launchers(waits)} {_verb(waits)} in the rendezvous at {_place(waits[0])} for {_missing(waits)}; "
            f"{NO_RANK}."
        )
        advice, grade = (CHECK_HOSTS,), 0.85
    missing = () if differing else _missing_ranks(waits)
    absent = None if differing else _find_absent(case.job)
    if absent is not None:
        summary = f"{summary.removesuffix('.')}. {absent.words}"
        grade = absent.grade
        named = ", ".join(absent.hosts[:MAX_SHOWN])
        advice = (f"Look at {named}: whether it is up, and what its launcher does.", *advice)
    yield Finding(
        kind="rank-never-joined",
        summary=summary,
        culprit_ranks=missing,
        culprit_hosts=absent.hosts if absent is not None else (),
        grade=grade,
        evidence=tuple(map(_seen, waits[:MAX_SHOWN])),
        advice=advice,
        leaves_open=() if differing or unreached or missing or absent is not None else (WHICH_NODE,),
    )


@dataclass(frozen=True, kw_only=True)
class _Absent:
    hosts: tuple[str, ...]
    words: str  # a sentence
    grade: float


def _find_absent(job: JobState) -> _Absent | None:
    """Return the hosts that have not come, by what takes part in the run, the scheduler, or an earlier run."""
    waits = job.rendezvous
    if job.unwaiting_hosts:
        named = ", ".join(job.unwaiting_hosts[:MAX_SHOWN])
        words = f"dtprof run is on {named}, and its launcher is not in the rendezvous."
        return _Absent(hosts=job.unwaiting_hosts, words=words, grade=0.85)
    waiting = {_short_name(wait.host) for wait in waits}
    given = next((wait for wait in waits if wait.hosts), None)
    if given is not None:
        hosts = tuple(host for host in given.hosts if _short_name(host) not in waiting)
        # Others may keep runs of their own: only where one run has all of them, or one alone is missing, it is known.
        if hosts and len(given.hosts) == waits[0].nodes:
            words = f"{_not_come(hosts)}, of the hosts in {given.hosts_from}."
            return _Absent(hosts=hosts, words=words, grade=0.85 if len(hosts) == 1 else 0.6)
    earlier, name = job.earlier_hosts
    hosts = tuple(host for host in earlier if _short_name(host) not in waiting)
    if hosts:
        words = f"{_not_come(hosts)}: it was in the run {name} with {'this host' if len(waits) == 1 else 'these'}."
        return _Absent(hosts=hosts, words=words, grade=0.6)
    return None


def _not_come(hosts: Sequence[str]) -> str:
    named = ", ".join(hosts[:MAX_SHOWN]) + (f" and {len(hosts) - MAX_SHOWN} more" if len(hosts) > MAX_SHOWN else "")
    return f"{named} {'has' if len(hosts) == 1 else 'have'} not come"


def _short_name(host: str) -> str:
    return host.partition(".")[0]


def _find_differing(waits: Sequence[RendezvousWait]) -> list[str]:
    """Return the options in which launchers differ that should meet.

    An endpoint may have several names: they tell of two only where enough nodes for one rendezvous have come.
    """
    are_enough = len(waits) >= max(wait.nodes for wait in waits)
    values: dict[str, set[object]] = {
        "--nnodes": {wait.nodes for wait in waits},
        "--rdzv-endpoint": {wait.endpoint if are_enough else _port(wait.endpoint) for wait in waits},
        "--rdzv-id": {wait.rdzv_id for wait in waits},
    }
    return [option for option, given in values.items() if len(given) > 1]


def _port(endpoint: str) -> str:
    port = endpoint.rpartition(":")[2]
    return port if port.isdecimal() else DEFAULT_PORT


def _launchers(waits: Sequence[RendezvousWait]) -> str:
    hosts = sorted({wait.host for wait in waits})
    which = "The launcher" if len(waits) == 1 else f"{len(waits)} launchers"
    named = ", ".join(hosts[:MAX_SHOWN])
    return f"{which} on {named}" + (" and others" if len(hosts) > MAX_SHOWN else "")


def _verb(waits: Sequence[RendezvousWait]) -> str:
    return "waits" if len(waits) == 1 else "wait"


def _place(wait: RendezvousWait) -> str:
    named = f" (id {wait.rdzv_id})" if wait.rdzv_id else ""
    return f"{wait.endpoint or 'an endpoint that its command does not give'}{named}"


def _missing(waits: Sequence[RendezvousWait]) -> str:
    """Return how many nodes have not come: others may have, of which this run knows nothing."""
    nodes = waits[0].nodes
    most = nodes - len(waits)
    if most <= 0:
        return f"the rest of {plural(nodes, 'node')}"
    return f"{'1' if most == 1 else f'1 to {most}'} of {plural(nodes, 'node')}"


def _missing_ranks(waits: Sequence[RendezvousWait]) -> tuple[int, ...]:
    """Return the ranks of the one node that does not come, where nodes are numbered and it is known which."""
    first = waits[0]
    if not all(wait.is_static for wait in waits):
        return ()
    here = {wait.node_rank or 0 for wait in waits}
    # Without the store of node 0, the others know of nobody.
    absent = [0] if 0 not in here else [node for node in range(min(first.nodes, MAX_NODES)) if node not in here]
    num_ranks = first.ranks_per_node or 0
    return tuple(range(absent[0] * num_ranks, (absent[0] + 1) * num_ranks)) if len(absent) == 1 else ()


def _seen(wait: RendezvousWait) -> str:
    does = "tries to reach the store" if wait.for_store else "waits for other nodes"
    return (
        f"{wait.host} (process {wait.pid}): {does} at {_place(wait)} for {wait.waited_s:.0f} s, as one of "
        f"{plural(wait.nodes, 'node')}; it has started no rank"
    )


RULES: Declared = (Rule(kinds=("rank-never-joined",), stages=(Stage.WAIT,), find=find_incomplete_rendezvous),)
