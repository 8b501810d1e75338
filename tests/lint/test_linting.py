"""What lint finds in source, and what it must not find: each text is the body of a program."""

import textwrap
from pathlib import Path

import pytest

from dtprof.lint.lint_findings import LintResult
from dtprof.lint.linting import lint
from dtprof.lint.run_evidence import GroupCalls, confirm

HEAD = "import os\nimport torch\nimport torch.distributed as dist\n\n"


def findings_of(tmp_path: Path, body: str, **others: str) -> LintResult:
    """Lint a program, and further modules by name."""
    (tmp_path / "train.py").write_text(HEAD + textwrap.dedent(body), encoding="utf-8")
    for name, text in others.items():
        (tmp_path / f"{name}.py").write_text(HEAD + textwrap.dedent(text), encoding="utf-8")
    return lint([tmp_path])


FAULTY = {
    "a barrier on rank 0": (
        "rank-dependent-collective",
        """
        if dist.get_rank() == 0:
            print("saving")
            dist.barrier()  # here
        """,
    ),
    "by another import, the rank from the environment": (
        "rank-dependent-collective",
        """
        from torch.distributed import all_reduce as reduce_it
        def step(x):
            if int(os.environ["LOCAL_RANK"]) == 0:
                reduce_it(x)  # here
        """,
    ),
    "through a helper of another module": (
        "rank-dependent-collective",
        """
        from helpers import mean, is_main
        def log(loss):
            if is_main():
                print(mean(loss))  # here
        """,
    ),
    "early return": (
        "rank-dependent-exit",
        """
        def evaluate(args, x):
            if args.local_rank != 0:
                return None
            total = x.sum()
            dist.all_reduce(total)  # here
            return total
        """,
    ),
    "continue in a loop": (
        "rank-dependent-exit",
        """
        def train(rank, batches):
            for step, batch in enumerate(batches):
                if rank == 1 and step % 7 == 3:
                    continue
                dist.all_reduce(batch)  # here
        """,
    ),
    "break": (
        "rank-dependent-exit",
        """
        def train(rank, steps):
            for step in range(steps):
                if rank == 0 and step == 5:
                    break
                dist.barrier()  # here
        """,
    ),
    "swapped order": (
        "rank-dependent-collective",
        """
        def exchange(rank, x):
            if rank == 0:
                dist.broadcast(x, src=0)  # here
                dist.all_reduce(x)
            else:
                dist.all_reduce(x)
                dist.broadcast(x, src=0)
        """,
    ),
    "a trip count of the rank": (
        "rank-dependent-loop",
        """
        def train(x):
            for _ in range(10 + dist.get_rank()):
                dist.all_reduce(x)  # here
        """,
    ),
    "strided shares of uneven length": (
        "rank-dependent-loop",
        """
        def train(files, rank, world_size):
            for file in files[rank::world_size]:
                x = torch.load(file)
                dist.all_reduce(x)  # here
        """,
    ),
    "bad loss skipped before backward": (
        "data-dependent-collective",
        """
        from torch.nn.parallel import DistributedDataParallel as DDP
        def train(net, loader, opt):
            model = DDP(net)
            for batch in loader:
                loss = model(batch).mean()
                if torch.isnan(loss):
                    continue
                loss.backward()  # here
                opt.step()
        """,
    ),
    "until a local tensor has converged": (
        "data-dependent-collective",
        """
        def train(loader, model):
            for batch in loader:
                error = model(batch).norm()
                if error.item() < 1e-3:
                    break
                dist.all_reduce(batch)  # here
        """,
    ),
    "a raise that is caught, and makes one call more": (
        "rank-dependent-collective",
        """
        def step(seen):
            try:
                dist.all_reduce(seen)
                if dist.get_rank() == 1:
                    raise FileNotFoundError("shard 1")
            except FileNotFoundError:
                dist.all_reduce(seen)  # here
        """,
    ),
    "a raise for the data of one rank that is caught": (
        "collective-in-except",
        """
        def train(model, loader):
            for batch in loader:
                try:
                    if torch.isnan(batch).any():
                        raise ValueError("bad batch")
                    dist.all_reduce(model.loss)
                except ValueError:
                    dist.barrier()  # here
        """,
    ),
    "except": (
        "collective-in-except",
        """
        def train(load):
            try:
                batch = load()
            except OSError:
                dist.barrier()  # here
        """,
    ),
    "finally": (
        "collective-in-finally",
        """
        def main(train):
            try:
                train()
            finally:
                dist.barrier()  # here
        """,
    ),
    "a distributed checkpoint on the main process": (
        "rank-dependent-collective",
        """
        import torch.distributed.checkpoint as dcp
        def save(accelerator, state):
            if accelerator.is_main_process:
                dcp.save(state, checkpoint_id="x")  # here
        """,
    ),
    "a sharded model's state on rank 0": (
        "rank-dependent-collective",
        """
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        def save(net, rank):
            model = FSDP(net)
            if rank == 0:
                torch.save(model.state_dict(), "x.pt")  # here
        """,
    ),
    "a group that its members alone make": (
        "rank-dependent-collective",
        """
        def make(rank):
            if rank in (0, 1):
                return dist.new_group([0, 1])  # here
        """,
    ),
    "a member of the group left out": (
        "rank-dependent-collective",
        """
        def run(rank, x):
            some = dist.new_group([0, 1, 2])
            if rank != 1:
                dist.all_reduce(x, group=some)  # here
        """,
    ),
    "two groups in opposite order": (
        "rank-dependent-group-order",
        """
        def run(rank, x):
            a = dist.new_group([0, 1])
            b = dist.new_group([0, 1])
            if rank == 0:
                dist.all_reduce(x, group=a)
                dist.all_reduce(x, group=b)
            else:
                dist.all_reduce(x, group=b)  # here
                dist.all_reduce(x, group=a)
        """,
    ),
    "each rank its own root": (
        "rank-dependent-argument",
        """
        def share(x):
            dist.broadcast(x, src=dist.get_rank())  # here
        """,
    ),
    "each rank its own root, which it knows by name": (
        "rank-dependent-argument",
        """
        def share(model):
            rank = dist.get_rank()
            for parameter in model.parameters():
                dist.broadcast(parameter.data, src=rank)  # here
        """,
    ),
    "behind a decorator": (
        "rank-dependent-collective",
        """
        from lightning.pytorch.utilities import rank_zero_only
        @rank_zero_only
        def save(x):
            dist.all_gather_object([], x)  # here
        """,
    ),
    "a mesh coordinate": (
        "rank-dependent-collective",
        """
        def step(mesh, x):
            if mesh.get_local_rank("dp") == 0:
                dist.all_reduce(x)  # here
        """,
    ),
    "in a conditional expression": (
        "rank-dependent-collective",
        """
        def step(rank):
            return dist.barrier() if rank == 0 else None  # here
        """,
    ),
    "in a nested function, the rank from around it": (
        "rank-dependent-collective",
        """
        def train(rank):
            def log(step):
                if not (step == 3 and rank == 1):
                    dist.barrier()  # here
            for step in range(5):
                log(step)
        """,
    ),
}
HELPERS = """
def mean(x):
    dist.all_reduce(x)
    return x / dist.get_world_size()

def is_main():
    return not dist.is_initialized() or dist.get_rank() == 0
"""

SOUND = {
    "work of rank 0": """
        def save(rank, model):
            if rank == 0:
                torch.save(model.state_dict(), "x.pt")
                print("saved")
            dist.barrier()
        """,
    "same calls on both sides": """
        def share(rank, x):
            if rank == 0:
                x = torch.ones(4)
                dist.broadcast(x, src=0)
            else:
                x = torch.zeros(4)
                dist.broadcast(x, src=0)
        """,
    "the subgroup of the branch": """
        def run(rank, ranks, x):
            group = dist.new_group(ranks)
            if rank in ranks:
                dist.all_reduce(x, group=group)
        """,
    "a subgroup written out": """
        def run(rank, x):
            some = dist.new_group([0, 1])
            for step in range(4):
                if rank < 2 and step % 2:
                    dist.all_reduce(x, group=some)
            dist.barrier()
        """,
    "sends by parity": """
        def ring(rank, x):
            if rank % 2 == 0:
                dist.send(x, rank + 1)
                dist.recv(x, rank - 1)
            else:
                dist.recv(x, rank - 1)
                dist.send(x, rank + 1)
        """,
    "first the main process": """
        from contextlib import contextmanager
        @contextmanager
        def main_first(local_rank):
            if local_rank not in [-1, 0]:
                dist.barrier()
            yield
            if local_rank == 0:
                dist.barrier()
        def load(local_rank):
            with main_first(local_rank):
                return open("data").read()
        """,
    "only where the job is distributed": """
        def reduce_it(x, local_rank=-1):
            if local_rank == -1 or not dist.is_initialized():
                return x
            dist.all_reduce(x)
            return x
        """,
    "the leader of one dimension in the group of another": """
        def sync(x, tp_group, dp_group):
            if dist.get_rank(group=tp_group) == 0:
                dist.all_reduce(x, group=dp_group)
            dist.broadcast(x, 0, group=tp_group)
        """,
    "one after the other": """
        def in_turn(rank, world_size, work):
            for turn in range(world_size):
                if turn == rank:
                    work()
                dist.barrier()
        """,
    "decided together": """
        def train(loader, model):
            for batch in loader:
                loss = model(batch).mean()
                dist.all_reduce(loss)
                if loss.item() < 0.1:
                    break
                dist.all_reduce(batch)
        """,
    "wrong arguments refused": """
        def scatter(x, rank, src, ranks):
            if rank not in ranks:
                raise ValueError("not a member")
            if rank == src and x is None:
                raise ValueError("the source needs data")
            dist.broadcast(x, src=src)
        """,
    "a raise that is caught, and makes the call of the others": """
        def step(seen):
            for i in range(9):
                try:
                    if dist.get_rank() == 1:
                        raise FileNotFoundError("shard 1")
                    dist.all_reduce(seen)
                except FileNotFoundError:
                    dist.all_reduce(seen)
            dist.barrier()
        """,
    "another name of the call in older versions": """
        def gather(out, x):
            try:
                dist.all_gather_into_tensor(out, x)
            except AttributeError:
                dist._all_gather_base(out, x)
        """,
    "equal shares, padded by a sampler": """
        from torch.utils.data import DataLoader, DistributedSampler
        def train(data, rank, world_size, x):
            sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
            for batch in DataLoader(data, sampler=sampler):
                dist.all_reduce(batch)
        """,
    "uneven inputs joined": """
        from torch.nn.parallel import DistributedDataParallel
        def train(net, rank):
            model = DistributedDataParallel(net)
            with model.join():
                for _ in range(3 + rank):
                    model(torch.ones(2)).sum().backward()
        """,
    "uneven inputs joined with an optimizer": """
        from torch.distributed.algorithms.join import Join
        from torch.nn.parallel import DistributedDataParallel
        def train(net, optimizer, rank):
            model = DistributedDataParallel(net)
            with Join([model, optimizer]):
                for _ in range(3 + rank):
                    model(torch.ones(2)).sum().backward()
        """,
    "microbatches that differ in number, the last alone synchronised": """
        import contextlib
        from torch.nn.parallel import DistributedDataParallel
        def train(net, rank):
            model = DistributedDataParallel(net)
            for microbatch in range(rank + 1):
                with contextlib.nullcontext() if microbatch == rank else model.no_sync():
                    model(torch.ones(2)).sum().backward()
        """,
    "the bare model evaluated on rank 0": """
        from torch.nn.parallel import DistributedDataParallel
        def train(net, rank, is_distributed):
            model = DistributedDataParallel(net) if is_distributed else net
            bare = model.module if is_distributed else model
            if rank == 0:
                bare(torch.ones(2))
        """,
    "a root that is each rank in turn": """
        class Shards:
            def share(self, x, rank):
                dist.broadcast(x, src=dist.get_global_rank(self.group, rank), group=None)
            def share_all(self, x):
                for rank in range(dist.get_world_size()):
                    self.share(x, rank)
        """,
    "the device of the rank": """
        def train(net, rank, loader):
            model = net.to(f"cuda:{rank}")
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        """,
    "a root that all compute alike": """
        def share(x, rank, world_size):
            for root in range(world_size):
                dist.broadcast(x, src=root)
        """,
    "no collective of another library": """
        import threading, functools
        def run(rank, lock: threading.Barrier):
            if rank == 0:
                functools.reduce(max, [1, 2])
                lock.wait()
        """,
    "a parameter called rank that is not the caller's": """
        def share(rank, groups):
            for group in groups[rank]:
                dist.broadcast(group, src=rank)
        def share_all(groups):
            for rank in range(dist.get_world_size()):
                share(rank, groups)
        """,
}


@pytest.mark.parametrize("name", FAULTY)
def test_what_ranks_do_not_issue_alike_is_found_at_its_line(name: str, tmp_path: Path) -> None:
    kind, body = FAULTY[name]
    result = findings_of(tmp_path, body, helpers=HELPERS)
    lines = (HEAD + textwrap.dedent(body)).splitlines()
    marked = [number for number, line in enumerate(lines, 1) if "# here" in line]
    assert [finding.kind for finding in result.findings] == [kind]
    (finding,) = result.findings
    assert (finding.called_from or finding.place).line in marked
    assert finding.severity in ("error", "warning")


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_found_in_sound_source(name: str, tmp_path: Path) -> None:
    assert [f.summary for f in findings_of(tmp_path, SOUND[name], helpers=HELPERS).findings] == []


def test_comment_with_a_reason_covers_a_finding_and_one_without_does_not(tmp_path: Path) -> None:
    body = """
    if dist.get_rank() == 0:
        dist.barrier()  {}
    """
    covered = findings_of(tmp_path, body.format("# dtprof: ignore the peers call it in main.cc"))
    assert (len(covered.findings), covered.ignored, covered.problems) == (0, 1, ())
    bare = findings_of(tmp_path, body.format("# dtprof: ignore"))
    assert (len(bare.findings), bare.ignored) == (1, 0)
    assert "without a reason" in bare.problems[0]


def test_files_that_are_no_source_are_reported_and_the_others_read(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def (:\n", encoding="utf-8")
    (tmp_path / "binary.py").write_bytes(b"\x00\xff" * 100)
    (tmp_path / "deep.py").write_text("x = " + "(" * 5000 + ")" * 5000, encoding="utf-8")
    result = findings_of(tmp_path, FAULTY["break"][1])
    assert len(result.findings) == 1
    assert result.files == 1
    assert len(result.problems) == 3
    assert not any("None" in problem for problem in result.problems)
    assert not result.unreadable
    assert lint([tmp_path / "bad.py"]).unreadable
    assert lint([tmp_path / "absent.py"]).unreadable


def test_call_that_may_be_meant_to_be_refused_is_no_error_and_one_among_others_is(tmp_path: Path) -> None:
    body = """
    def f(rank, x):
        if rank == 1:
            try:
                {}
                dist.all_reduce(x)
            except RuntimeError:
                print("refused")
        dist.barrier()
    """
    (refused,) = findings_of(tmp_path, body.format("")).findings
    assert refused.severity == "warning"
    assert "(line 8): where it is refused, no rank waits" in refused.why
    (meant,) = findings_of(tmp_path, body.format("x += 1")).findings
    assert meant.severity == "error"


def test_a_run_confirms_where_members_disagree_and_acquits_where_all_made_the_call(tmp_path: Path) -> None:
    result = findings_of(
        tmp_path, "def f(rank, x):\n    if rank == 0:\n        dist.all_reduce(x)\n    dist.barrier()\n"
    )
    file = str(tmp_path / "train.py")
    reduced, waited = ("all_reduce", file, 7), ("barrier", file, 8)

    def ran(**calls: list[tuple[str, str, int]]) -> tuple[str, str]:
        group = GroupCalls(ranks=(0, 1), calls={int(rank[1:]): own for rank, own in calls.items()})
        (finding,) = confirm(result, [group]).findings
        assert finding.ran is not None
        return finding.ran.verdict, finding.severity

    assert result.findings[0].place.line == 7
    assert ran(r0=[reduced, waited], r1=[waited]) == ("confirmed", "error")
    assert ran(r0=[reduced, waited], r1=[reduced, waited]) == ("acquitted", "acquitted")
    assert ran(r0=[waited], r1=[waited]) == ("not-run", "error")
    # Rank 1 issues the same operation elsewhere each time: the sides of the condition match.
    other = ("all_reduce", "/other/part.py", 3)
    assert ran(r0=[reduced, waited] * 2, r1=[other, waited] * 2) == ("acquitted", "acquitted")
    # Rank 1 left one out: from there on, the line meets what belongs elsewhere.
    assert ran(r0=[reduced, reduced, other], r1=[reduced, other]) == ("confirmed", "error")


@pytest.mark.parametrize(("branch", "words"), [("if", "holds"), ("else", "does not hold")])
def test_the_side_of_a_condition_is_reported(tmp_path: Path, branch: str, words: str) -> None:
    calls = {"if": "dist.barrier()", "else": "print(1)"}
    first, second = (calls["if"], calls["else"]) if branch == "if" else (calls["else"], calls["if"])
    body = f"if dist.get_rank() == 0:\n    {first}\nelse:\n    {second}\n"
    (finding,) = findings_of(tmp_path, body).findings
    assert f"`dist.get_rank() == 0` (line 5) {words}, which" in finding.summary


def test_code_nested_too_deeply_or_with_too_many_ways_through_it_does_not_stop_the_rest(tmp_path: Path) -> None:
    long_sum = "    x = " + " + ".join(["a"] * 1500)
    ways = "        if a:\n            if x:\n                return\n" * 14
    found = findings_of(
        tmp_path,
        f"def deep(a):\n{long_sum}\n    dist.barrier()\n"
        f"def wide(a, x):\n    try:\n        a.go()\n    except OSError:\n{ways}        dist.barrier()\n"
        "if dist.get_rank() == 0:\n    dist.barrier()\n",
    )
    assert [(finding.kind, finding.function) for finding in found.findings] == [
        ("rank-dependent-collective", "<module>")
    ]


def test_a_function_of_a_thousand_statements_is_looked_at(tmp_path: Path) -> None:
    statements = "    x = x + 1\n" * 1000
    found = findings_of(tmp_path, f"def f(x):\n{statements}    if dist.get_rank() == 0:\n        dist.barrier()\n")
    assert [finding.kind for finding in found.findings] == ["rank-dependent-collective"]
