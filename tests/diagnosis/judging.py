"""Jobs built by hand and what is said of them."""

from collections.abc import Mapping, Sequence

from dtprof.diagnosis.findings import Verdict
from dtprof.diagnosis.job_state import Stack, assemble_job
from dtprof.diagnosis.sources.recorded_ranks import rank_state
from dtprof.diagnosis.verdict import decide
from dtprof.records.tables import Manifest, ProcessExit
from tests.builders import START_NS, RankBuilder

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


def judge(
    ranks: Sequence[RankBuilder],
    *,
    statuses: Mapping[int, tuple[int, int]] | None = None,
    exit_status: int | None = 1,
    stalled: bool = True,
    stacks: Mapping[int, Stack] | None = None,
    stopped_on_hang_ns: int | None = None,
    oom_kills: int = 0,
    resident: Mapping[int, int] | None = None,
) -> Verdict:
    """Return the verdict; `statuses` gives (exit status, time) by rank, `resident` bytes in RAM."""
    evidence = []
    for builder in ranks:
        known = (statuses or {}).get(builder.rank)
        ended = ProcessExit(pid=builder.pid, status=known[0], t_ns=START_NS + known[1]) if known else None
        stack = (stacks or {}).get(builder.rank)
        evidence.append(rank_state(builder.tables(), exit=ended, stack=stack, alive=None))
    job = assemble_job(
        evidence,
        world_size=ranks[0].world_size,
        manifest=Manifest(exit_status=exit_status, ended_realtime_ns=0 if exit_status is None else 1),
        stalled=stalled,
        stopped_on_hang_ns=stopped_on_hang_ns,
        oom_kills=oom_kills,
        find_resident=lambda: resident or {},
    )
    return decide(job, ("run",))
