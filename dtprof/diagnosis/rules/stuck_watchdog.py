"""NCCL's watchdog stalled itself, as a log tells: inside a call of CUDA or NCCL, or waiting for the GIL."""

from dtprof.diagnosis.findings import Finding, capitalised
from dtprof.diagnosis.log_findings.log_rule import Suspicion, log_rule
from dtprof.diagnosis.rule import Declared
from dtprof.diagnosis.sources.logs.logged_job import LoggedJob
from dtprof.formatting import list_ranks


def find_stuck(job: LoggedJob) -> Suspicion:
    """Return the finding for ranks whose watchdog itself stalled: inside a call of CUDA or NCCL, or for the GIL."""
    stuck = job.notes("stuck")
    if not stuck:
        late = job.notes("heartbeat")
        ranks = sorted({note.rank for note in late if note.rank is not None})
        if not late:
            return None
        who = f" of {list_ranks(ranks)}" if ranks else ""
        return f"the heartbeat monitor{who} timed out: what the processes were stuck in is not in the log"
    stalled = (*stuck, *job.notes("heartbeat"))  # a monitor tells of its rank at once, and says more before it ends it
    ranks = sorted({note.rank for note in stalled if note.rank is not None})
    everybody = len(ranks) > 1 and set(ranks) == job.known
    return Finding(
        kind="rank-stuck",
        summary=f"{capitalised(ranks) if ranks else 'A rank'} stalled outside collectives for "
        f"{stuck[0].number} s: in a call of CUDA or NCCL, or waiting for the GIL.",
        culprit_ranks=() if everybody else tuple(ranks),
        grade=0.4,
        evidence=(stuck[0].text[:300],),
        advice=(
            "Take native stacks next time: py-spy dump --native --pid PID, or start with dtprof run.",
            "Set TORCH_NCCL_ENABLE_MONITORING=0 only to inspect the stalled processes.",
        ),
        leaves_open=("what the ranks were doing: other ranks may be stuck in the same way and silent",),
    )


RULES: Declared = (log_rule(find_stuck, ("rank-stuck",)),)
