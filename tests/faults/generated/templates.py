"""Sound programs by framework and parallelism: what each rank does in each step, drawn at random within one kind."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from dtprof.records import events
from tests.faults.generated.machine import Do, Plan

_MS = 1_000_000


@dataclass
class Draft:
    """A program being written; `choose` draws what differs from program to program, the same for all ranks."""

    choose: random.Random
    world_size: int
    steps: int
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ranks: list[list[Do]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Make the default group."""
        self.groups["0"] = tuple(range(self.world_size))
        self.ranks = [[] for _ in range(self.world_size)]
        self.line = 10

    def lines(self, count: int) -> list[int]:
        """Return that many new lines of the program, in order."""
        found = []
        for _ in range(count):
            self.line += self.choose.randrange(1, 5)
            found.append(self.line)
        return found

    def split(self, name: str, size: int, *, strided: bool = False) -> None:
        """Make groups of a size that divides the ranks, of neighbours or of every so many."""
        for i in range(self.world_size // size):
            first = range(i, self.world_size, self.world_size // size) if strided else range(i * size, (i + 1) * size)
            self.groups[f"{name}{i}"] = tuple(first)

    def group_of(self, name: str, rank: int) -> str:
        """Return the group of this kind that a rank is in."""
        return next(key for key, ranks in self.groups.items() if key.startswith(name) and rank in ranks and key != "0")


def data_parallel(draft: Draft) -> None:
    """DDP: buckets reduced while backward goes on, a loss averaged now and then, a barrier before checkpoints."""
    buckets, every = draft.choose.randrange(1, 5), draft.choose.randrange(1, 4)
    backward, wait, loss, barrier, setup = draft.lines(5)
    sizes = [draft.choose.choice((4096, 65536, 1 << 20)) for _ in range(buckets)]
    for rank, own in enumerate(draft.ranks):
        own += [Do("call", setup, "broadcast", root=0, nbytes=65536, slot="setup")]
        for step in range(draft.steps):
            own += _begin()
            for i, nbytes in enumerate(sizes):
                own.append(
                    Do(
                        "call",
                        backward,
                        "all_reduce",
                        nbytes=nbytes,
                        handle=f"b{i}",
                        inferred=True,
                        reduce_op="sum",
                        slot=f"bucket {i}",
                    )
                )
            own += [Do("wait", wait, handle=f"b{i}") for i in range(buckets)]
            own.append(Do("span", name=events.OPTIMIZER, ns=_MS))
            if step % every == 0:
                own.append(Do("call", loss, "all_reduce", nbytes=8, reduce_op="sum", slot="loss"))
            if step % 4 == 3:
                own += [Do("span", name=events.CHECKPOINT, ns=20 * _MS)] if rank == 0 else []
                own.append(Do("call", barrier, "barrier", nbytes=4, slot="barrier"))
        own.append(Do("call", draft.line + 9, "barrier", nbytes=4, slot="end"))


def sharded(draft: Draft) -> None:
    """FSDP: parameters gathered layer by layer, gradients scattered."""
    layers = draft.choose.randrange(2, 5)
    forward, backward, loss, norm = draft.lines(4)
    sizes = [draft.choose.choice((8192, 32768, 131072)) * (i + 1) for i in range(layers)]
    for own in draft.ranks:
        for step in range(draft.steps):
            own.append(Do("span", name=events.DATA, ns=_MS))
            for i, nbytes in enumerate(sizes):
                own.append(Do("call", forward, "all_gather", nbytes=nbytes, slot=f"gather {i}"))
                own.append(Do("span", name=events.FORWARD, ns=_MS))
            own.append(Do("call", loss, "all_reduce", nbytes=4, reduce_op="sum", slot="loss"))
            own.append(Do("span", name=events.BACKWARD, ns=3 * _MS, line=backward))
            for i, nbytes in reversed(list(enumerate(sizes))):
                own.append(Do("call", backward, "all_gather", nbytes=nbytes, inferred=True, slot=f"regather {i}"))
                own.append(
                    Do(
                        "call",
                        backward,
                        "reduce_scatter",
                        nbytes=nbytes,
                        inferred=True,
                        reduce_op="sum",
                        slot=f"scatter {i}",
                    )
                )
            own.append(Do("span", name=events.OPTIMIZER, ns=_MS))
            if step % 2:
                own.append(Do("call", norm, "all_reduce", nbytes=4, reduce_op="max", slot="norm"))


def tensor_parallel(draft: Draft) -> None:
    """Tensor parallel in groups of neighbours, data parallel across them."""
    draft.split("tp", 2)
    draft.split("dp", draft.world_size // 2, strided=True)
    layers = draft.choose.randrange(1, 4)
    mlp, attention, reduce, clip = draft.lines(4)
    for rank, own in enumerate(draft.ranks):
        tp, dp = draft.group_of("tp", rank), draft.group_of("dp", rank)
        for _ in range(draft.steps):
            own += _begin()
            for i in range(layers):
                own.append(
                    Do("call", attention, "all_reduce", group=tp, nbytes=16384, reduce_op="sum", slot=f"attention {i}")
                )
                own.append(Do("call", mlp, "all_reduce", group=tp, nbytes=32768, reduce_op="sum", slot=f"mlp {i}"))
            own.append(Do("call", reduce, "all_reduce", group=dp, nbytes=65536, reduce_op="sum", slot="gradients"))
            own.append(Do("call", clip, "all_reduce", nbytes=4, reduce_op="max", slot="clip"))
            own.append(Do("span", name=events.OPTIMIZER, ns=_MS))


def pipeline(draft: Draft) -> None:
    """Stages that send activations on and gradients back, and reduce at the end of a step."""
    microbatches = draft.choose.randrange(2, 5)
    into, out, back_in, back_out, reduce = draft.lines(5)
    nbytes = draft.choose.choice((512, 16384))
    last = draft.world_size - 1
    for rank, own in enumerate(draft.ranks):
        for _ in range(draft.steps):
            own.append(Do("span", name=events.DATA, ns=_MS))
            for i in range(microbatches):
                if rank:
                    own.append(Do("recv", into, peer=rank - 1, nbytes=nbytes, tag=0, slot=f"into {i}"))
                own.append(Do("span", name=events.FORWARD, ns=_MS))
                if rank < last:
                    own.append(Do("send", out, peer=rank + 1, nbytes=nbytes, tag=0, slot=f"out {i}"))
            for i in range(microbatches):
                if rank < last:
                    own.append(Do("recv", back_in, peer=rank + 1, nbytes=nbytes, tag=1, slot=f"back into {i}"))
                own.append(Do("span", name=events.BACKWARD, ns=_MS))
                if rank:
                    own.append(Do("send", back_out, peer=rank - 1, nbytes=nbytes, tag=1, slot=f"back out {i}"))
            own.append(Do("call", reduce, "all_reduce", nbytes=4096, reduce_op="sum", slot="gradients"))
            own.append(Do("span", name=events.OPTIMIZER, ns=_MS))


def experts(draft: Draft) -> None:
    """Experts: exchanges of uneven sizes, and a reduction of the rest."""
    dispatch, combine, reduce = draft.lines(3)
    n = draft.world_size
    table = [[draft.choose.randrange(1, 9) * 4 for _ in range(n)] for _ in range(n)]
    for rank, own in enumerate(draft.ranks):
        sent, taken = tuple(table[rank]), tuple(table[i][rank] for i in range(n))
        for _ in range(draft.steps):
            own += _begin()
            for at, splits, slot in ((dispatch, (sent, taken), "dispatch"), (combine, (taken, sent), "combine")):
                own.append(Do("call", at, "all_to_all", nbytes=4 * sum(splits[0]), splits=splits, slot=slot))
            own.append(Do("call", reduce, "all_reduce", nbytes=65536, reduce_op="sum", slot="gradients"))
            own.append(Do("span", name=events.OPTIMIZER, ns=_MS))


def evaluations(draft: Draft) -> None:
    """A loop with many kinds of call: gathered metrics, broadcast decisions, scattered work, uneven gathers."""
    reduce, gather, decide, hand_out, every = draft.lines(5)
    for own in draft.ranks:
        for step in range(draft.steps):
            own += _begin()
            own.append(Do("call", reduce, "all_reduce", nbytes=65536, reduce_op="sum", slot="gradients"))
            own.append(Do("span", name=events.OPTIMIZER, ns=_MS))
            own.append(Do("call", decide, "broadcast", root=0, nbytes=8, slot="decide"))
            if step % 3 == 2:
                own.append(Do("call", hand_out, "scatter", root=0, nbytes=256, slot="hand out"))
                own.append(Do("span", name=events.EVALUATION, ns=5 * _MS))
                own.append(Do("call", gather, "gather", root=0, nbytes=64, slot="metrics"))
                own.append(Do("call", every, "all_gather", nbytes=128, slot="every"))


def ring(draft: Draft) -> None:
    """Ring attention: every rank sends on and receives, without waiting for either before the other is posted."""
    send, receive, reduce, done = draft.lines(4)
    n, rounds = draft.world_size, draft.choose.randrange(1, 3)
    for rank, own in enumerate(draft.ranks):
        for _ in range(draft.steps):
            own += _begin()
            for i in range(rounds):
                own.append(Do("send", send, peer=(rank + 1) % n, nbytes=16384, handle="out", slot=f"out {i}"))
                own.append(Do("recv", receive, peer=(rank - 1) % n, nbytes=16384, handle="into", slot=f"into {i}"))
                own += [Do("wait", done, handle="out"), Do("wait", done, handle="into")]
            own.append(Do("call", reduce, "all_reduce", nbytes=65536, reduce_op="sum", slot="gradients"))
            own.append(Do("span", name=events.OPTIMIZER, ns=_MS))


def _begin() -> list[Do]:
    return [
        Do("span", name=events.DATA, ns=_MS),
        Do("span", name=events.FORWARD, ns=4 * _MS),
        Do("span", name=events.BACKWARD, ns=8 * _MS),
    ]


TEMPLATES: dict[str, Callable[[Draft], None]] = {
    "data parallel": data_parallel,
    "sharded": sharded,
    "tensor parallel": tensor_parallel,
    "pipeline": pipeline,
    "experts": experts,
    "evaluations": evaluations,
    "ring": ring,
}


def write(template: str, choose: random.Random) -> Plan:
    """Return a sound program of a kind."""
    world_size = choose.choice((4, 8) if template == "tensor parallel" else (2, 3, 4, 6, 8))
    draft = Draft(choose=choose, world_size=world_size, steps=choose.randrange(5, 12))
    TEMPLATES[template](draft)
    return Plan(world_size=world_size, groups=draft.groups, ranks=draft.ranks)
