"""A rank could not listen at its port, not use its device, or its host refused NCCL something, as a log tells."""

from dtprof.diagnosis.findings import Finding, capitalised
from dtprof.diagnosis.known_errors import NCCL_RESOURCES
from dtprof.diagnosis.log_findings.log_rule import log_rule
from dtprof.diagnosis.rule import Declared
from dtprof.diagnosis.sources.logs.log_facts import Note
from dtprof.diagnosis.sources.logs.logged_job import LoggedJob

PORT = (
    "Another job, or the same one before it, still listens there: end it, or choose another MASTER_PORT "
    "(torchrun --rdzv-endpoint HOST:0 takes a free one)."
)
NUMBERS = (
    "Give every process a RANK of its own: --node-rank differs from host to host, and no process of an earlier job may "
    "be left."
)
DRIVER = "Compare the driver (nvidia-smi) with the CUDA that torch was built for; look for Xid in the kernel log."


def find_setup(job: LoggedJob) -> Finding | None:
    """Return the finding for a taken port, or for a device or another resource of its host that NCCL could not use."""
    if taken := job.notes("port-taken"):
        return _failed_setup("could not listen: the port is taken", taken, PORT)
    if twice := job.notes("rank-taken"):
        return _failed_setup("joined twice: two processes were started with its number", twice, NUMBERS)
    if failures := job.notes("cuda-failure"):
        words = failures[0].text.partition("Cuda failure ")[2].strip("'\" ")[:120]
        return _failed_setup(f"could not use its device in NCCL: {words}", failures, DRIVER)
    if refused := job.notes("nccl-refused"):
        words = refused[0].text.strip()
        advice = next(helps for said, helps in NCCL_RESOURCES if said in words)
        return _failed_setup(f"failed in NCCL, to which its host refused something: {words[:120]}", refused, advice)
    return None


def _failed_setup(what: str, notes: list[Note], advice: str) -> Finding:
    ranks = tuple(sorted({note.rank for note in notes if note.rank is not None}))
    return Finding(
        kind="rank-crashed",
        summary=f"{capitalised(ranks) if ranks else 'A rank'} {what}.",
        culprit_ranks=ranks,
        grade=0.6,
        evidence=(notes[0].text[:300],),
        advice=(advice,),
    )


RULES: Declared = (log_rule(find_setup, ("rank-crashed",)),)
