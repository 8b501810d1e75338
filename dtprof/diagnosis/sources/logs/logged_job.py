"""One attempt seen rank by rank: whose exceptions are causes, whose are consequences, who is known to exist."""

import re
from collections.abc import Hashable
from dataclasses import dataclass, field

from dtprof import launchers
from dtprof.diagnosis.sources.logs.log_facts import BACKWARD, MAX_RANK, Communicator, Exit, Facts, Note, Trace
from dtprof.records.nodes.exit_records import is_stop
from dtprof.records.sites import Site
from dtprof.records.tables import Group

RELAYED = "CheckpointException"
"""What torch.distributed.checkpoint raises on every rank because some failed; it prints what these raised below."""
FROM_OUTSIDE = ("KeyboardInterrupt", "SystemExit")
NOBODY_CAME = ("RendezvousTimeoutError", "RendezvousConnectionError", "RendezvousClosedError")
"""What torch's launcher raises where other nodes, or the store, do not come, or have left: where it runs no rank."""
RAISED_BY_TORCH = re.compile(r"RuntimeError|Dist\w*Error|TimeoutError|Rendezvous\w*|Connection\w*Error|BrokenPipeError")
SAID_BY_C10D = re.compile(
    r"/gloo/|Timed out waiting \d+ms for|communicator was aborted|Watchdog caught|ncclRemoteError|remote process exited"
    r"|NCCL error|ProcessGroupNCCL|monitoredBarrier|pair closure|connectFullMesh|store->get|wait timeout after \d+ms"
    r"|store based barrier on rank|clients joined|client socket has timed out|inconsistent 0 params"
    r"|Connection closed by peer \[|Hccl[A-Z]\w+, error code"
)
OWN_CHECK = re.compile(r"enforce fail at \S{0,300}/gloo/\w+\.(?:cc|h):\d")
"""gloo found the arguments of the rank's own call unfit: what fails with a peer stands in a directory below."""
LOST_OR_LATE = re.compile(
    r"Connection (?:closed|reset|refused|aborted)|Broken pipe|[Tt]imed out|[Tt]imeout|Socket closed"
)
MISMATCH = "Detected mismatch between collectives"
OTHER_STEP = "has different values for step: "
ORDINARY_LINES_AFTER = 25
ABORTED = -6

_OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "barrier",
    "reduce",
    "gather",
    "scatter",
)
_BY_LETTERS = {name.replace("_", ""): name for name in _OPERATIONS}


def operation(name: str) -> str | None:
    """Return the operation for a name in a log: of c10d (`_ALLGATHER_BASE`) or of the Python API."""
    if name == BACKWARD:
        return "all_reduce"
    letters = re.sub(r"[^a-z]", "", name.lower().replace("monitored", ""))
    if letters.startswith(("isend", "send")):
        return "send"
    if letters.startswith(("irecv", "recv")):
        return "recv"
    for prefix in sorted(_BY_LETTERS, key=len, reverse=True):
        if letters.startswith(prefix):
            return _BY_LETTERS[prefix]
    return None


@dataclass(kw_only=True)
class LoggedJob:
    """The view of one attempt that rules read."""

    facts: Facts
    own: dict[int, Trace] = field(default_factory=dict)
    """Exceptions that ended a rank and tell of no peer."""
    own_unknown: list[Trace] = field(default_factory=list)
    victims: dict[int, Trace] = field(default_factory=dict)
    """Exceptions that tell of a lost or late peer."""
    victims_unknown: list[Trace] = field(default_factory=list)
    exits: dict[int, Exit] = field(default_factory=dict)
    hints: list[Trace] = field(default_factory=list)
    """Lines of exceptions alone: not enough to blame anybody."""

    @property
    def known(self) -> set[int]:
        """Ranks that the log names, or that exist because a higher one does."""
        named = self.facts.ranks_named | set(self.exits) | set(self.victims) | set(self.own)
        return set(range(max((rank for rank in named if rank < MAX_RANK), default=-1) + 1))

    @property
    def own_traces(self) -> list[Trace]:
        """Exceptions that ended a process and tell of no peer."""
        return [*self.own.values(), *self.own_unknown]

    @property
    def has_table(self) -> bool:
        """Say whether torchelastic listed ranks that did not end with status 0."""
        return any(exit_.from_table for exit_ in self.exits.values())

    def left_in_order(self, ranks: set[int]) -> set[int]:
        """Return those of the ranks that torchelastic's table of their host would list, had they failed."""
        spans: dict[str, tuple[int, int]] = {}
        for exit_ in self.exits.values():
            if exit_.from_table and exit_.local_rank is not None:
                first, last = spans.get(exit_.host, (exit_.rank, exit_.rank))
                spans[exit_.host] = min(first, exit_.rank - exit_.local_rank), max(last, exit_.rank)
        inside = {rank for rank in ranks if any(first <= rank <= last for first, last in spans.values())}
        return inside - set(self.exits)

    def waited_for(self) -> set[int]:
        """Return ranks that are known to have waited in an operation."""
        timed = {timeout.rank for timeout in self.facts.timeouts if timeout.rank is not None}
        return timed | set(self.victims)

    def sites(self, ranks: set[int] | list[int]) -> dict[int, Site]:
        """Return the user's lines where these ranks failed, or waited."""
        found = {rank: self.own.get(rank) or self.victims.get(rank) for rank in ranks}
        sites = {rank: trace.site if trace is not None else None for rank, trace in found.items()}
        return {rank: site for rank, known in sites.items() if (site := known or self.facts.stacks.get(rank))}

    def notes(self, *kinds: str) -> list[Note]:
        """Return the notes of these kinds."""
        return self.facts.of_kind(*kinds)


def view(facts: Facts) -> LoggedJob:
    """Return the ranks' view of the facts."""
    job = LoggedJob(facts=facts, exits=dict(facts.exits or facts.local_exits))
    for chain in _chains(facts.traces):
        _judge(chain, job)
    _name_the_only_one(job)
    late = {timeout.rank: timeout.order for timeout in reversed(facts.timeouts) if not timeout.rank_in_group}
    for rank, trace in list(job.own.items()):
        lost = [order for order in (late.get(rank), job.victims[rank].order if rank in job.victims else None) if order]
        if any(order.file == trace.order.file and order < trace.order for order in lost):
            del job.own[rank]  # what a rank raises after its peers were lost is a consequence
    return job


def _chains(traces: list[Trace]) -> list[list[Trace]]:
    """Return the exceptions of one stream that were raised while the one before was handled, together."""
    newest: dict[str, list[Trace]] = {}
    chains: list[list[Trace]] = []
    for trace in traces:
        if trace.chained and trace.stream in newest:
            newest[trace.stream].append(trace)
        else:
            newest[trace.stream] = [trace]
            chains.append(newest[trace.stream])
    return chains


def _judge(chain: list[Trace], job: LoggedJob) -> None:
    verdicts = [blame(trace) for trace in chain]
    last = chain[-1]
    rank = _rank(last, job)
    if "launcher" in verdicts or verdicts[-1] == "outside":
        return
    if verdicts[-1] == "relayed":
        job.hints.append(last)
        return
    if verdicts[0] == "victim" or (verdicts[0] == "mismatch" and not last.bare):
        first = chain[0]
        if rank is None:
            job.victims_unknown.append(first)
        elif rank not in job.victims or job.victims[rank].bare:
            job.victims[rank] = first
        return
    own = [trace for trace, verdict in zip(chain, verdicts, strict=True) if verdict == "own"]
    if not own:
        return
    chosen = own[-1]
    if last.bare and not last.fatal:
        job.hints.append(chosen)
    elif _ended_its_process(last, rank, job):
        if rank is None:
            job.own_unknown.append(chosen)
        else:
            job.own.setdefault(rank, chosen)


def blame(trace: Trace) -> str:
    """Classify an exception: own, victim, mismatch, launcher, relayed, outside."""
    name = simple_type(trace)
    if name in launchers.EXCEPTIONS or name in NOBODY_CAME:
        return "launcher"
    if name == RELAYED:
        return "relayed"
    if name in FROM_OUTSIDE:
        return "outside"
    if MISMATCH in trace.message or OTHER_STEP in trace.message:
        return "mismatch"
    if RAISED_BY_TORCH.fullmatch(name):
        if OWN_CHECK.search(trace.message):
            return "own"
        in_torch = trace.torch_only or trace.bare
        if SAID_BY_C10D.search(trace.message) or (
            in_torch and LOST_OR_LATE.search(trace.message) and "DataLoader" not in trace.message
        ):
            return "victim"
    return "own"


def simple_type(trace: Trace) -> str:
    """Return the type of an exception without its module; of Ray's wrapper the wrapped type."""
    wrapped = re.fullmatch(r"(?:[\w.]*\.)?RayTaskError\((\w+)\)", trace.type)
    return wrapped[1] if wrapped else trace.type.rpartition(".")[2]


def _rank(trace: Trace, job: LoggedJob) -> int | None:
    if trace.rank is not None:
        return trace.rank
    pods = job.facts.pods
    if trace.pod is not None and len(pods) > 1 and all(number == rank for number, rank in pods):
        return trace.pod  # every pod that names its rank has the number of that rank
    if trace.task is None:
        return None
    by_local = [exit_.rank for exit_ in job.exits.values() if exit_.local_rank == trace.task]
    if len(by_local) == 1 and not {exit_.host for exit_ in job.exits.values()} - {job.exits[by_local[0]].host}:
        return by_local[0]
    return trace.task if not job.facts.ranks_named else None


def _ended_its_process(trace: Trace, rank: int | None, job: LoggedJob) -> bool:
    if trace.handled:
        return False
    if trace.fatal:
        return True
    end = job.exits.get(rank) if rank is not None else None
    if end is not None:
        return end.status != 0 and not is_stop(end.status)
    # A logged and handled exception is followed by the program's ordinary output: any, where logging printed it and no
    # launcher said that a process failed.
    has_exits = job.facts.exits or job.facts.local_exits
    most = 0 if trace.logged and not has_exits else ORDINARY_LINES_AFTER
    return job.facts.last_activity.get(trace.stream, 0) <= most


def _name_the_only_one(job: LoggedJob) -> None:
    """Give an exception without a rank to the only rank that ended badly by itself."""
    failed = [r for r, end in job.exits.items() if end.status > 0 and r not in job.own and r not in job.victims]
    alike = {(trace.type, trace.site) for trace in job.own_unknown}
    if job.own_unknown and len(alike) == 1 and len(failed) == len(job.own_unknown):
        for rank, trace in zip(sorted(failed), job.own_unknown, strict=True):
            job.own[rank] = trace
        job.own_unknown.clear()


def odd_ones(values: dict[int, Hashable]) -> tuple[int, ...]:
    """Return the ranks whose value is not the majority's; all where there is no majority."""
    by_value: dict[Hashable, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(value, []).append(rank)
    ordered = sorted(by_value.values(), key=len)
    if len(ordered) > 1 and len(ordered[-1]) > len(ordered[-2]) and len(ordered[-1]) * 2 > len(values):
        return tuple(sorted(rank for ranks in ordered[:-1] for rank in ranks))
    return tuple(sorted(values))


def ranks_by_process(found: list[Communicator]) -> dict[str, int]:
    """Return the rank of each process: its file's, else that in its largest communicator, else its device."""
    largest: dict[str, Communicator] = {}
    for member in found:
        if member.process not in largest or member.size > largest[member.process].size:
            largest[member.process] = member
    hosts = {process.partition(":")[0] for process in largest}
    world = max((member.size for member in largest.values()), default=0)
    ranks: dict[str, int] = {}
    for process, member in largest.items():
        if member.file_rank is not None:
            ranks[process] = member.file_rank
        elif member.rank is not None and member.size == world:
            ranks[process] = member.rank
        elif len(hosts) == 1 and len(largest) == world:
            ranks[process] = member.device
    return ranks if len(set(ranks.values())) == len(ranks) else {}


def group_of(name: str | None, description: str, ranks: set[int]) -> Group | None:
    """Return the group a log names."""
    if name is None:
        return None
    members = tuple(sorted(ranks))
    return Group(name=name, description=description, size=len(members), ranks=members)
