"""Jobs built by hand and what is said of them."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding, Verdict
from dtprof.diagnosis.job_state import JobState, Stack, assemble_job
from dtprof.diagnosis.rule import Refinement, Rule
from dtprof.diagnosis.rules import BY_FILE, RULES
from dtprof.diagnosis.sources.logs.log_reader import read_logs
from dtprof.diagnosis.sources.recorded_ranks import rank_state
from dtprof.diagnosis.verdict import decide
from dtprof.records import events
from dtprof.records.manifest import Manifest
from dtprof.records.schema import FLAG
from dtprof.records.tables import ProcessExit
from tests.builders import START_NS, RankBuilder
from tests.golden.commands import unpack

STEP = 1000
CONNECTION_LOST = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"


def ranks_in_step(world_size: int, steps: int) -> list[RankBuilder]:
    """Return ranks that made `steps` whole steps: a gradient all_reduce at line 10, a loss all_reduce at line 20."""
    ranks = [RankBuilder(rank, world_size, closed=False) for rank in range(world_size)]
    for rank in ranks:
        for step in range(steps):
            rank.span("backward", step * STEP, step * STEP + 200)
            gradients(rank, step * STEP, done=True)
            rank.span("optimizer", step * STEP + 300, step * STEP + 310)
            loss(rank, step * STEP, done=True)
    return ranks


def gradients(rank: RankBuilder, t: int, *, done: bool) -> None:
    site = rank.site("Tensor.backward", line=10)
    rank.op("all_reduce", t + 100, t + 150 if done else None, returned=t + 101, site=site, nbytes=4096)


def loss(rank: RankBuilder, t: int, *, done: bool) -> None:
    site = rank.site("all_reduce", line=20, function="average_loss")
    rank.op("all_reduce", t + 400, t + 450 if done else None, returned=t + 401, site=site, nbytes=8)


def build_job(
    ranks: Sequence[RankBuilder],
    *,
    statuses: Mapping[int, tuple[int, int]] | None = None,
    exit_status: int | None = 1,
    stalled: bool = True,
    stacks: Mapping[int, Stack] | None = None,
    resident: Mapping[int, int] | None = None,
    **job: Any,
) -> JobState:
    """Return a job of these ranks; `statuses` gives (exit status, time) by rank, `resident` bytes in RAM."""
    evidence = []
    for builder in ranks:
        known = (statuses or {}).get(builder.rank)
        ended = ProcessExit(pid=builder.pid, status=known[0], t_ns=START_NS + known[1]) if known else None
        stack = (stacks or {}).get(builder.rank)
        evidence.append(rank_state(builder.tables(), exit=ended, stack=stack, alive=None))
    facts: dict[str, Any] = {"stopped_on_hang_ns": None, "find_resident": lambda: resident or {}} | job
    return assemble_job(
        evidence,
        world_size=ranks[0].world_size,
        manifest=Manifest(exit_status=exit_status, ended_realtime_ns=0 if exit_status is None else 1),
        stalled=stalled,
        **facts,
    )


def logged(text: str) -> JobState:
    """Return the last attempt of a job of which a log holds this."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.log"
        path.write_text(text, encoding="utf-8")
        return list(read_logs([path]))[-1]


def stored_log(name: str) -> JobState:
    """Return the last attempt of a job of which tests/golden stores the logs under this name."""
    with tempfile.TemporaryDirectory() as folder:
        unpack("files/logs", Path(folder))
        return list(read_logs(sorted((Path(folder) / "logs" / name).iterdir())))[-1]


def written_log(text: str) -> JobState:
    """Return the job of which this is the log."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.log"
        path.write_text(text, encoding="utf-8")
        return list(read_logs([path]))[-1]


def judge(ranks: Sequence[RankBuilder], **job: Any) -> Verdict:
    """Return the verdict on the job that `build_job` makes of this."""
    return decide(build_job(ranks, **job))


def judge_success(ranks: Sequence[RankBuilder]) -> Verdict:
    """Return the verdict on a job that ended in order."""
    return judge(ranks, exit_status=0, stalled=False)


def kinds_after_success(ranks: Sequence[RankBuilder]) -> list[str]:
    """Return the kinds found in a job that ended in order; healthy where there are none."""
    verdict = judge_success(ranks)
    assert verdict.findings or verdict.outcome == "healthy"
    return [finding.kind for finding in verdict.findings]


def found_by(file: str, job: JobState) -> list[Finding]:
    """Return what the rules of a file find by themselves, and what they make of the causes that all rules find."""
    case = Case(job)
    rules = [declared for declared in BY_FILE[file] if isinstance(declared, Rule)]
    found = [finding for rule in rules for finding in rule.find(case)]
    for refinement in (declared for declared in BY_FILE[file] if isinstance(declared, Refinement)):
        asked = [rule for rule in RULES if set(rule.stages) & set(refinement.stages)]
        causes = (cause for rule in asked for cause in rule.find(case) if cause.kind in refinement.causes)
        found += [better for cause in causes for better in refinement.refine(case, cause)]
    return found


def skipping_ranks(world_size: int = 4, culprit: int = 2) -> list[RankBuilder]:
    """Return ranks of which one goes on to the next step without the loss all_reduce of step 5."""
    ranks = ranks_in_step(world_size, 5)
    for rank in ranks:
        rank.span("backward", 5000, 5200)
        gradients(rank, 5000, done=True)
        rank.span("optimizer", 5300, 5310)
        if rank.rank == culprit:
            rank.span("backward", 6000)
            gradients(rank, 6000, done=False)
        else:
            loss(rank, 5000, done=False)
    return ranks


def message(
    rank: RankBuilder,
    name: str,
    peer: int,
    t: int,
    done: int | None = None,
    *,
    line: int,
    tag: int = 0,
    nbytes: int = 8,
) -> None:
    site = rank.site(name, line=line, function="exchange")
    rank.op(name, t, done, returned=t + 1, peer=peer, tag=tag, site=site, nbytes=nbytes)


def pair(world_size: int = 2) -> list[RankBuilder]:
    return [RankBuilder(rank, world_size, closed=False) for rank in range(world_size)]


def in_two_groups(orders: Sequence[str], *, done: bool, lines: Sequence[int] = (30, 40)) -> list[RankBuilder]:
    """Return ranks that enter groups a and b after two whole steps; each waits in the first of its order."""
    ranks = ranks_in_step(len(orders), 2)
    for rank, order in zip(ranks, orders, strict=True):
        ids = {name: rank.group(name, range(len(orders)), name) for name in "ab"}
        for i, name in enumerate(order):
            if done or i == 0:
                site = rank.site("all_reduce", line=lines[order != "ab"])
                t = 2000 + 10 * i
                end = t + 100 if done else None
                waits = (t + 50, t + 100) if done else None
                rank.op("all_reduce", t, end, is_async=True, waits=waits, group=ids[name], site=site, nbytes=8)
    return ranks


def with_threads(orders: Sequence[str], *, flags: int = FLAG["completion"]) -> list[RankBuilder]:
    """Return ranks whose threads a and b call at a line each, in the order told."""
    ranks = [RankBuilder(rank, len(orders)) for rank in range(len(orders))]
    for rank, order in zip(ranks, orders, strict=True):
        for i, name in enumerate(order):
            site = rank.site("all_reduce", line=10 if name == "a" else 20)
            thread = 1 if name == "a" else 2
            rank.op("all_reduce", 10 * i, 10 * i + 5, thread=thread, site=site, nbytes=8, flags=flags)
    return ranks


def waiting_in_a_second_init(*, closed: bool) -> list[RankBuilder]:
    """Return two ranks that took two steps; then rank 1 joins a second job, and rank 0 does something else or ends."""
    ranks = ranks_in_step(2, 2)
    ranks[0].closed, ranks[1].closed = closed, False
    ranks[1].span("init_process_group", 3000, site=ranks[1].site("", line=12))
    return ranks


def with_loaders(batches: Sequence[int], *, exhausted: Sequence[bool]) -> list[RankBuilder]:
    """Return ranks that took so many batches in three steps, some of which found their loader exhausted then."""
    ranks = ranks_in_step(len(batches), 3)
    for rank, count, out in zip(ranks, batches, exhausted, strict=True):
        for i in range(count):
            rank.span(events.DATA, 10 * i, 10 * i + 5)
        if out:
            rank.span(events.DATA, 3000, 3001, flags=FLAG["skipped"])
    return ranks
