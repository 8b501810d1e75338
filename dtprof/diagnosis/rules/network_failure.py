"""A transport failed, as NCCL or gloo say in a log: no rank is to blame."""

from dtprof.diagnosis.findings import Finding
from dtprof.diagnosis.log_findings.log_rule import log_rule
from dtprof.diagnosis.rule import Declared
from dtprof.diagnosis.sources.logs.log_facts import Note
from dtprof.diagnosis.sources.logs.logged_job import LoggedJob


def find_transport(job: LoggedJob) -> Finding | None:
    """Return the finding for a network that NCCL saw fail."""
    broken = job.notes("transport")
    remote = job.notes("remote-error")
    duplicate = job.notes("duplicate-gpu")
    if duplicate:
        return _stall("Two ranks use the same GPU.", duplicate, 0.6, "Call torch.cuda.set_device(LOCAL_RANK) first.")
    if broken:
        return _stall(
            "NCCL's network transport failed.",
            [*broken, *remote],
            0.7,
            "Check the link, switch and NIC to the peer named; look whether the peer's process lived.",
        )
    if unreachable := job.notes("unreachable"):
        return _stall(
            "NCCL could not connect its ranks with each other.",
            unreachable,
            0.5,
            "Set NCCL_SOCKET_IFNAME to the interface by which the hosts reach each other, let the firewall pass all "
            "ports between them, and look whether the peer's process had ended before.",
        )
    if remote:
        return _stall(
            "NCCL lost a peer: its process ended, or the network failed.",
            [*job.notes("lost-socket")[:1], *remote],
            0.3,
            "Look in the logs of the other hosts for what ended first.",
        )
    if (states := job.notes("system-error")) and not job.notes("nccl-refused", "cuda-failure"):
        return _stall(
            f"NCCL failed, and does not say at what: {states[0].text.partition(':')[0]}.",
            states,
            0.2,
            "Run once with NCCL_DEBUG=WARN and keep every rank's output: NCCL then names the call that failed.",
        )
    if no_mesh := job.notes("no-mesh"):
        return _stall(
            "gloo could not connect the ranks with each other.",
            no_mesh,
            0.4,
            "Set GLOO_SOCKET_IFNAME to the interface by which the hosts reach each other: by default gloo takes the "
            "one that the host's own name stands for. Look whether another rank had ended before.",
        )
    return None


def _stall(summary: str, notes: list[Note], grade: float, advice: str) -> Finding:
    return Finding(
        kind="backend-stall",
        summary=summary,
        culprit_ranks=(),
        waiting_ranks=tuple(sorted({note.rank for note in notes if note.rank is not None})),
        grade=grade,
        evidence=tuple(note.text[:300] for note in notes[:2]),
        advice=(advice,),
    )


RULES: Declared = (log_rule(find_transport, ("backend-stall",)),)
