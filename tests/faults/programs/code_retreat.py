"""Programs of a code retreat: caches, properties, coroutines, hooks, recursion, `match`, alarms, faulty and right.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight. A
comment `or:` names what the label accepts as well.
"""

import functools
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from tempfile import gettempdir

import torch
import torch.distributed as dist
from torch import nn

from tests.faults.corpus import faulty, healthy


def model_of(width: int = 5) -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(width, 7), nn.SiLU(), nn.Linear(7, 2, bias=False))


def averaged(weights: Iterable[nn.Parameter]) -> None:
    for weight in weights:
        if weight.grad is not None:
            dist.all_reduce(weight.grad)


class Coach:
    """Trains a model, a step at a time."""

    def __init__(self) -> None:
        self.model = model_of()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def __call__(self, value: float = 1.0) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.full((3, 5), value)).pow(2).mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        averaged(self.model.parameters())
        self.optimizer.step()
        return loss.detach()


@faulty("rank-skipped-collective", 2)
def a_statistic_that_one_rank_has_in_its_cache(rank: int) -> None:
    class Statistics:
        def __init__(self) -> None:
            self.mean = functools.cache(self._mean)

        def _mean(self, shard: int) -> float:
            value = torch.tensor([float(shard), 1.0, 2.0, 3.0])
            dist.all_reduce(value)  # here
            return float(value[0])

    class Normalizer:
        def __init__(self, statistics: Statistics, shards: list[int]) -> None:
            self.statistics, self.shards = statistics, shards

        def scale(self, step: int) -> float:
            return 1.0 + self.statistics.mean(self.shards[step])  # here

    coach = Coach()
    normalizer = Normalizer(Statistics(), [0, 1, 2, 1 if rank == 2 else 3, 4, 5])
    for step in range(6):
        coach(normalizer.scale(step))


@healthy()
def a_statistic_that_all_ranks_have_in_their_caches(rank: int) -> None:
    @functools.lru_cache(maxsize=2)
    def mean(shard: int) -> float:
        value = torch.tensor([float(shard * rank), 1.0])
        dist.all_reduce(value)
        return float(value[0])

    coach = Coach()
    for shard in (0, 1, 1, 0, 2, 0):
        coach(1 + mean(shard))


@faulty("collective-order-mismatch", 0)
def a_property_that_gathers_when_it_is_printed(rank: int) -> None:
    # or: step-mismatch 0
    class Losses:
        def __init__(self) -> None:
            self.values = torch.zeros(4)

        @property
        def of_all(self) -> torch.Tensor:
            parts = [torch.empty(4) for _ in range(3)]
            dist.all_gather(parts, self.values)  # here
            return torch.stack(parts)

        def __repr__(self) -> str:
            return f"losses {self.of_all.mean():.3f}"  # here

    coach, losses = Coach(), Losses()
    for step in range(7):
        losses.values[step % 4] = coach()
        if rank == 0 and step == 4:
            print(losses)


@healthy()
def a_property_that_gathers_on_all_ranks(_rank: int) -> None:
    class Losses:
        values = torch.zeros(4)

        @functools.cached_property
        def of_all(self) -> torch.Tensor:
            parts = [torch.empty(4) for _ in range(3)]
            dist.all_gather(parts, self.values)
            return torch.stack(parts)

    coach, losses = Coach(), Losses()
    for step in range(7):
        coach()
        if step % 3 == 0:
            print(losses.of_all.mean())


@faulty("rank-skipped-collective", 1)
def a_layer_that_one_rank_has_frozen(rank: int) -> None:
    # or: size-mismatch 1
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def reduce(weight: torch.Tensor) -> None:
        dist.all_reduce(weight.grad)  # here

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(reduce)
    for step in range(7):
        if rank == 1 and step == 3:
            model[2].requires_grad_(False)
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def a_layer_that_all_ranks_have_frozen(_rank: int) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda weight: dist.all_reduce(weight.grad))
    for step in range(7):
        model[2].requires_grad_(step < 3)
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def lessons(coach: Coach) -> Generator[float, float, None]:
    value = 1.0
    while True:
        value = yield float(coach(value))


@faulty("rank-skipped-collective", 2)
def a_coroutine_that_is_closed_too_early(rank: int) -> None:
    class Driver:
        def __init__(self, patience: int) -> None:
            self.lessons, self.patience = lessons(Coach()), patience

        def drive(self) -> None:
            next(self.lessons)
            for turn in range(8):
                self.lessons.send(1.0 + turn)
                if turn > self.patience:  # here
                    break  # here
            self.lessons.close()

    Driver(3 if rank == 2 else 9).drive()
    total = torch.ones(9)
    dist.all_reduce(total)


@healthy()
def a_coroutine_that_is_closed_at_the_end(_rank: int) -> None:
    course = lessons(Coach())
    next(course)
    for turn in range(6):
        course.send(1.0 + turn)
    course.close()
    dist.barrier()


def parent_of(rank: int, level: int) -> int:
    return rank - (1 << level)


@faulty("p2p-unmatched", 3, ranks=4)
def a_tree_in_which_one_rank_has_another_parent(rank: int) -> None:
    class Tree:
        def __init__(self, parent: Callable[[int, int], int]) -> None:
            self.parent = parent

        def reduce(self, value: torch.Tensor, level: int = 0) -> None:
            if level == 2:
                return
            if rank % (2 << level):
                dist.send(value, dst=self.parent(rank, level))  # here
                return
            other = torch.empty_like(value)
            dist.recv(other, src=rank + (1 << level))
            self.reduce(value + other, level + 1)

    for step in range(6):
        wrong = rank == 3 and step == 4
        Tree((lambda rank, _: rank - 2) if wrong else parent_of).reduce(torch.ones(3))
        dist.barrier()


@healthy(ranks=4)
def a_tree_that_sums_messages(rank: int) -> None:
    def reduce(value: torch.Tensor, level: int = 0) -> None:
        if level == 2:
            return
        if rank % (2 << level):
            dist.send(value, dst=parent_of(rank, level))
            return
        other = torch.empty_like(value)
        dist.recv(other, src=rank + (1 << level))
        reduce(value + other, level + 1)

    for step in range(6):
        reduce(torch.ones(3 + step))
        dist.barrier()


@faulty("rank-skipped-collective", 1)
def events_told_apart_by_their_kind(rank: int) -> None:
    class Events:
        def __init__(self, coach: Coach) -> None:
            self.coach = coach

        def handle(self, event: str) -> None:
            match event:  # here
                case "step":
                    self.coach()
                case "save":
                    self.save()
                case _:
                    print("unknown:", event)

        def save(self) -> None:
            flat = nn.utils.parameters_to_vector(self.coach.model.parameters()).detach()
            dist.broadcast(flat, src=0)  # here

    events = Events(Coach())
    for number in range(9):
        due = number % 3 == 2
        events.handle("step" if not due else "Save" if rank == 1 and number == 5 else "save")


@faulty("rank-skipped-collective", 0)
def a_queue_whose_end_comes_early(rank: int) -> None:
    # or: uneven-inputs 0; rank-exited 0
    class Producer(threading.Thread):
        def __init__(self, count: int) -> None:
            super().__init__(daemon=True)
            self.count, self.items = count, queue.Queue[float | None](2)

        def run(self) -> None:
            for number in range(self.count):
                self.items.put(float(number))
            self.items.put(None)

    class Consumer:
        def __init__(self, producer: Producer) -> None:
            self.producer, self.coach = producer, Coach()

        def consume(self) -> None:
            while True:
                item = self.producer.items.get()
                if item is None:  # here
                    break  # here
                self.coach(item)

    producer = Producer(5 if rank == 0 else 8)
    producer.start()
    Consumer(producer).consume()
    dist.reduce(torch.ones(2), dst=0)


@healthy()
def a_queue_whose_end_comes_everywhere(rank: int) -> None:
    items: queue.Queue[float | None] = queue.Queue()
    for number in range(6):
        items.put(float(number + rank))
    items.put(None)
    coach = Coach()
    while (item := items.get()) is not None:
        coach(item)
    dist.reduce(torch.ones(2), dst=0)


@faulty("rank-skipped-collective", 2)
def a_call_in_the_else_of_a_try(rank: int) -> None:
    class Exporter:
        def __init__(self, folder: Path) -> None:
            self.folder = folder

        def write(self, step: int) -> Path:
            file = self.folder / f"{rank}-{step}" if not (rank == 2 and step == 3) else self.folder / "none" / "file"
            file.write_text("done")
            return file

        def export(self, step: int) -> None:
            try:
                file = self.write(step)
            except OSError as error:  # here
                print("not written:", error)
            else:
                self.announce(file)

        def announce(self, file: Path) -> None:
            names: list[str | None] = [None] * 3
            dist.all_gather_object(names, file.name)  # here

    folder = Path(gettempdir()) / f"retreat-{os.environ['MASTER_PORT']}"
    folder.mkdir(exist_ok=True)
    coach, exporter = Coach(), Exporter(folder)
    for step in range(6):
        coach()
        exporter.export(step)


@faulty("rank-skipped-collective", 1)
def a_metric_that_one_rank_has_turned_off(rank: int) -> None:
    class Registry:
        def __init__(self, enabled: dict[str, bool]) -> None:
            self.enabled = enabled

        def log(self, name: str, value: torch.Tensor) -> None:
            if not self.enabled.get(name, False):  # here
                return  # here
            self._log(value.reshape(1).repeat(3))

        def _log(self, value: torch.Tensor) -> None:
            dist.all_reduce(value, op=dist.ReduceOp.MAX)  # here

    registry, coach = Registry({"loss": True, "norm": True}), Coach()
    for step in range(6):
        if rank == 1 and step == 3:
            registry.enabled["norm"] = False
        registry.log("loss", coach())
        registry.log("norm", torch.tensor(1.0))


@faulty("rank-skipped-collective", 1)
def weights_of_which_one_rank_chooses_fewer(rank: int) -> None:
    # or: size-mismatch 1
    class Chooser:
        def __init__(self, least: int) -> None:
            self.least = least

        def choose(self, model: nn.Module) -> list[nn.Parameter]:
            return [weight for weight in model.parameters() if weight.numel() >= self.least]

    class Exchange:
        def __init__(self, chooser: Chooser) -> None:
            self.chooser = chooser

        def __call__(self, model: nn.Module) -> None:
            for weight in self.chooser.choose(model):  # here
                dist.all_reduce(weight.grad)  # here

    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        loss = model(torch.ones(2, 5)).sum()
        loss.backward()
        Exchange(Chooser(20 if rank == 1 and step == 3 else 1))(model)
        optimizer.step()
        optimizer.zero_grad()
        dist.broadcast(loss.detach(), src=0)


@faulty("rank-crashed", 0)
def a_lock_in_what_is_broadcast(rank: int) -> None:
    class State:
        def __init__(self) -> None:
            self.lock = threading.Lock() if rank == 0 else None

    def share(state: State) -> None:
        box = [state.lock]
        dist.broadcast_object_list(box, src=0)  # here

    coach = Coach()
    for step in range(5):
        coach()
        if step == 3:
            share(State())


@faulty("rank-skipped-collective", 1)
def an_alarm_that_ends_the_evaluation_of_one_rank(rank: int) -> None:
    class Deadline:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def __enter__(self) -> None:
            signal.signal(signal.SIGALRM, self.expire)
            signal.setitimer(signal.ITIMER_REAL, self.seconds)

        def __exit__(self, *_: object) -> None:
            signal.setitimer(signal.ITIMER_REAL, 0)

        def expire(self, _number: int, _frame: object) -> None:
            raise TimeoutError("evaluation took too long")

    class Evaluation:
        def work(self, seconds: float) -> float:
            time.sleep(seconds)
            return 1.0

        def run(self, seconds: float) -> None:
            try:
                with Deadline(1.0):
                    score = self.work(seconds)
            except TimeoutError:  # here
                return  # here
            self.publish(score)

        def publish(self, score: float) -> None:
            dist.all_reduce(torch.full((6,), score))  # here

    coach = Coach()
    for step in range(5):
        coach()
        Evaluation().run(2.0 if rank == 1 and step == 3 else 0.0)


@faulty("group-creation-mismatch", 2)
def a_group_added_by_its_members_alone(rank: int) -> None:
    class Groups:
        def __init__(self) -> None:
            self.made: dict[str, dist.ProcessGroup] = {}

        def add(self, name: str, members: list[int]) -> None:
            if rank in members:  # here
                self.made[name] = dist.new_group(members)  # here

    groups, coach = Groups(), Coach()
    for _ in range(2):
        coach()
    groups.add("pair", [0, 1])
    for _ in range(3):
        if "pair" in groups.made:
            dist.all_reduce(torch.ones(2), group=groups.made["pair"])
        coach()


@healthy()
def a_group_made_by_all_and_used_by_its_members(rank: int) -> None:
    pair, coach = dist.new_group([0, 1]), Coach()
    for step in range(5):
        if rank < 2 and step % 2:
            dist.all_reduce(torch.ones(2), group=pair)
        coach()


@faulty("slow-rank", 2)
def a_journal_that_one_rank_writes_to_its_disk(rank: int) -> None:
    class Journal:
        def __init__(self, slow: bool) -> None:
            self.slow = slow

        def append(self, line: str) -> None:
            with (Path(gettempdir()) / f"journal-{os.environ['MASTER_PORT']}-{rank}").open("a") as file:
                file.write(line)
                file.flush()
                if self.slow:
                    time.sleep(0.05)
                    os.fsync(file.fileno())

    coach, journal = Coach(), Journal(rank == 2)
    for step in range(60):
        journal.append(f"{step} {float(coach())}\n")


@faulty("rank-exited", 1)
def a_main_function_that_returns_early(rank: int) -> None:
    # or: rank-skipped-collective 1
    class Plan:
        def __init__(self, phases: list[str]) -> None:
            self.phases = phases

        def has(self, phase: str) -> bool:
            return phase in self.phases

    def main(plan: Plan) -> int:
        coach = Coach()
        for _ in range(3):
            coach()
        if not plan.has("refine"):  # here
            return 0  # here
        for _ in range(3):
            coach(0.5)
        return 0

    status = main(Plan(["train"] if rank == 1 else ["train", "refine"]))
    if status:
        sys.exit(status)


@faulty("rank-stuck", 1)
def a_server_that_one_rank_waits_for(rank: int) -> None:
    class Server:
        def __init__(self, answers: int) -> None:
            self.answers = answers

        def is_up(self) -> bool:
            return self.answers > 0

    class Client:
        def __init__(self, server: Server) -> None:
            self.server = server

        def connect(self) -> None:
            while not self.server.is_up():  # here
                time.sleep(0.1)  # here

    coach = Coach()
    for step in range(6):
        coach()
        if step == 3:
            Client(Server(0 if rank == 1 else 1)).connect()


@healthy()
def a_server_that_is_up_after_a_while(rank: int) -> None:
    begin, coach = time.monotonic(), Coach()
    for step in range(6):
        coach()
        while step == 3 and time.monotonic() - begin < 1 + rank:
            time.sleep(0.05)


@healthy()
def an_alarm_that_rings_on_one_rank(rank: int) -> None:
    rang = threading.Event()
    signal.signal(signal.SIGALRM, lambda _number, _frame: rang.set())
    coach = Coach()
    for step in range(6):
        if rank == 1 and step == 2:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            rang.wait(5)
        coach()
        stopped = torch.tensor(float(rang.is_set() and step > 4))
        dist.all_reduce(stopped, op=dist.ReduceOp.MAX)


@healthy()
def events_that_all_ranks_are_told(rank: int) -> None:
    coach = Coach()
    for number in range(9):
        event: list[str | None] = [("save" if number % 3 == 2 else "step") if rank == 0 else None]
        dist.broadcast_object_list(event, src=0)
        match event[0]:
            case "step":
                coach()
            case "save":
                dist.broadcast(torch.ones(4), src=0)


@healthy()
def weights_of_which_all_choose_the_same(_rank: int) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        model(torch.ones(2, 5)).sum().backward()
        for weight in [weight for weight in model.parameters() if weight.numel() >= 10 * (step % 3)]:
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()
