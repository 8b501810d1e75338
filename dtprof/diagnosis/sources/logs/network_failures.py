"""Ranks that never joined, stores that did not answer, transports that failed, watchdogs that got stuck."""

import re

from dtprof.diagnosis.findings import Finding, capitalised, rank_list
from dtprof.diagnosis.sources.logs.log_facts import Note
from dtprof.diagnosis.sources.logs.logged_job import Job

BARRIER_NUMBER = re.compile(r"store_based_barrier_key:(\d{1,6})")
ASKING_RANK = re.compile(r"\[(\d{1,7})\] is setting up NCCL communicator")
LAST_NUMBER = re.compile(r"keys: .*?/(\d{1,7})\s*(?:[\])(,.]|$)")
PORT = (
    "Another job, or the same one before it, still listens there: end it, or choose another MASTER_PORT "
    "(torchrun --rdzv-endpoint HOST:0 takes a free one)."
)
DRIVER = "Compare the driver (nvidia-smi) with the CUDA that torch was built for; look for Xid in the kernel log."
STARTED = "Check that every rank was started, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE."


def find_never_joined(job: Job) -> tuple[Finding | None, tuple[str, ...]]:
    """Return the finding for ranks that a store or rendezvous waited for."""
    notes = job.notes("store-key", "store-barrier", "store-clients", "store-unreachable", "rendezvous")
    if not notes:
        return _find_no_communicator(job)
    reporters = {note.rank for note in notes if note.rank is not None}
    keys = {int(found[1]) for note in notes if note.kind == "store-key" and (found := LAST_NUMBER.search(note.text))}
    told = keys
    sizes = {note.number for note in notes if note.number} or ({job.facts.world_size} - {0})
    missing = told - reporters
    counts = {note.ranks[0] for note in notes if note.kind in ("store-barrier", "store-clients") and note.ranks}
    if not missing and len(sizes) == 1 and reporters:
        silent = set(range(min(sizes | {100_000}))) - reporters
        expected = next(iter(sizes)) - max(counts, default=len(reporters))
        missing = silent if len(silent) == expected else set()
    culprits = tuple(sorted(missing))
    too_many = [note for note in notes if note.kind == "store-barrier" and note.ranks and note.ranks[0] > note.number]
    what = notes[0].text
    return (
        Finding(
            kind="group-creation-mismatch" if _of_later_group(notes) else "rank-never-joined",
            summary=f"{capitalised(culprits) if culprits else 'Some ranks'} never joined: "
            + (
                "a store still counts ranks of an earlier attempt."
                if too_many
                else "the store or rendezvous timed out."
            ),
            culprit_ranks=culprits,
            waiting_ranks=tuple(sorted(reporters)),
            confidence=0.65 if culprits and not too_many else 0.35,
            evidence=(what[:300],),
            advice=(STARTED,),
        ),
        () if culprits else ("which rank did not join is not in the log",),
    )


def _of_later_group(notes: list[Note]) -> bool:
    """Say whether the barrier is that of a group made after the default one: the first has the number 1."""
    numbers = {int(found[1]) for note in notes if (found := BARRIER_NUMBER.search(note.text))}
    return bool(numbers) and min(numbers) > 1


def _find_no_communicator(job: Job) -> tuple[Finding | None, tuple[str, ...]]:
    """Return the finding for a rank that the others asked in vain for the name of a new communicator."""
    notes = job.notes("nccl-id")
    if not notes:
        return None, ()
    asking = {note.rank: int(found[1]) for note in notes if (found := ASKING_RANK.search(note.text))}
    same = bool(asking) and all(rank == in_group for rank, in_group in asking.items())
    culprits = tuple(sorted({rank for note in notes for rank in note.ranks} - set(asking))) if same else ()
    waiting = tuple(sorted(rank for rank in asking if rank is not None))
    finding = Finding(
        kind="rank-skipped-collective",
        summary=f"{capitalised(culprits) if culprits else 'The first member of a group'} never came to the group's "
        "first operation: the others waited for the name of the communicator.",
        culprit_ranks=culprits,
        waiting_ranks=waiting,
        confidence=0.55 if culprits else 0.3,
        call_sites=job.sites(list(waiting)),
        evidence=(notes[0].text[:300],),
        advice=("Look at what the first rank of the group does before the operation that the others wait in.",),
    )
    return finding, () if culprits else ("ranks are those of a group, which global ranks they are is not in the log",)


def find_transport(job: Job) -> Finding | None:
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
    if no_mesh := job.notes("no-mesh"):
        return _stall(
            "gloo could not connect the ranks with each other.",
            no_mesh,
            0.4,
            "Set GLOO_SOCKET_IFNAME to the interface by which the hosts reach each other: by default gloo takes the "
            "one that the host's own name stands for. Look whether another rank had ended before.",
        )
    return None


def find_setup(job: Job) -> Finding | None:
    """Return the finding for a port that is taken, or a device that NCCL could not use."""
    if taken := job.notes("port-taken"):
        return _failed_setup("could not listen: the port is taken", taken, PORT)
    if failures := job.notes("cuda-failure"):
        words = failures[0].text.partition("Cuda failure ")[2].strip("'\" ")[:120]
        return _failed_setup(f"could not use its device in NCCL: {words}", failures, DRIVER)
    return None


def _failed_setup(what: str, notes: list[Note], advice: str) -> Finding:
    ranks = tuple(sorted({note.rank for note in notes if note.rank is not None}))
    return Finding(
        kind="rank-crashed",
        summary=f"{capitalised(ranks) if ranks else 'A rank'} {what}.",
        culprit_ranks=ranks,
        confidence=0.6,
        evidence=(notes[0].text[:300],),
        advice=(advice,),
    )


def _stall(summary: str, notes: list[Note], confidence: float, advice: str) -> Finding:
    return Finding(
        kind="backend-stall",
        summary=summary,
        culprit_ranks=(),
        waiting_ranks=tuple(sorted({note.rank for note in notes if note.rank is not None})),
        confidence=confidence,
        evidence=tuple(note.text[:300] for note in notes[:2]),
        advice=(advice,),
    )


def find_stuck(job: Job) -> tuple[Finding | None, tuple[str, ...]]:
    """Return the finding for ranks whose watchdog itself stalled: inside a call of CUDA or NCCL, or for the GIL."""
    stuck = job.notes("stuck")
    if not stuck:
        late = job.notes("heartbeat")
        ranks = sorted({note.rank for note in late if note.rank is not None})
        if not late:
            return None, ()
        who = f" of {rank_list(ranks)}" if ranks else ""
        return None, (f"the heartbeat monitor{who} timed out: what the processes were stuck in is not in the log",)
    ranks = sorted({note.rank for note in stuck if note.rank is not None})
    return (
        Finding(
            kind="rank-stuck",
            summary=f"{capitalised(ranks) if ranks else 'A rank'} stalled outside collectives for "
            f"{stuck[0].number} s: in a call of CUDA or NCCL, or waiting for the GIL.",
            culprit_ranks=tuple(ranks),
            confidence=0.4,
            evidence=(stuck[0].text[:300],),
            advice=(
                "Take native stacks next time: py-spy dump --native --pid PID, or start with dtprof run.",
                "Set TORCH_NCCL_ENABLE_MONITORING=0 only to look at the processes while they stand still.",
            ),
        ),
        ("what the ranks were doing: other ranks may be stuck in the same way and silent",),
    )
