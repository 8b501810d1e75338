"""Actors, learners, servers, threads and handlers that guests wrote, faulty and right.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight. A
comment `or:` names what the label accepts as well.
"""

import multiprocessing
import os
import pickle
import queue
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc

from tests.faults.corpus import faulty, healthy


@faulty("p2p-unmatched", 2, ranks=4)
def a_trajectory_sent_to_the_other_learner(rank: int) -> None:
    learners = {2: 0, 3: 1}
    for rollout in range(6):
        if rank in learners:
            learner = learners[rank]
            if rank == 2 and rollout == 3:
                learner = (learner + 1) % 2
            dist.send(torch.full((6,), float(rollout)), dst=learner)  # here
            weights = torch.zeros(3)
            dist.recv(weights, src=learners[rank])
        else:
            trajectory = torch.zeros(6)
            dist.recv(trajectory, src=rank + 2)
            dist.send(trajectory[:3].clone(), dst=rank + 2)


@healthy(ranks=4)
def trajectories_for_learners_in_turn(rank: int) -> None:
    for rollout in range(6):
        for actor in (2, 3):
            learner = (actor + rollout) % 2
            if rank == actor:
                dist.send(torch.full((6,), float(rollout)), dst=learner)
            elif rank == learner:
                dist.recv(torch.zeros(6), src=actor)
        weights = torch.zeros(3)
        dist.broadcast(weights, src=rollout % 2)


@faulty("rank-exited", 3, ranks=4)
def an_actor_that_has_solved_its_task(rank: int) -> None:
    # or: p2p-unmatched 3
    if rank == 0:
        for _ in range(6):
            for actor in (1, 2, 3):
                reward = torch.zeros(1)
                dist.recv(reward, src=actor)
        return
    for episode in range(6):
        reward = torch.tensor([float(episode * (2 if rank == 3 else 1))])
        if reward > 5:
            return  # here
        dist.send(reward, dst=0)


@healthy(ranks=4)
def actors_that_say_when_they_are_done(rank: int) -> None:
    if rank == 0:
        active = {1, 2, 3}
        while active:
            reward = torch.zeros(1)
            source = dist.recv(reward)
            if float(reward) < 0:
                active.discard(source)
        return
    for episode in range(2 + 2 * rank):
        dist.send(torch.tensor([float(episode)]), dst=0)
    dist.send(torch.tensor([-1.0]), dst=0)


@faulty("rank-stuck", 1)
def weights_that_are_never_published(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    for version in range(5):
        if rank == 0:
            if version != 3:
                store.set(f"weights/{version}", pickle.dumps([version]))
            for actor in (1, 2):
                dist.recv(torch.zeros(2), src=actor)
        else:
            if rank == 1:
                store.wait([f"weights/{version}"], timedelta(seconds=60))  # here
            dist.send(torch.ones(2), dst=0)


@healthy()
def weights_published_through_the_store(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    for version in range(5):
        if rank == 0:
            time.sleep(0.2)
            store.set(f"weights/{version}", pickle.dumps([version]))
            for actor in (1, 2):
                dist.recv(torch.zeros(2), src=actor)
        else:
            store.wait([f"weights/{version}"], timedelta(seconds=60))
            dist.send(torch.ones(2), dst=0)


@faulty("rank-stuck", 1)
def a_replay_buffer_that_is_full(rank: int) -> None:
    replay: queue.Queue[torch.Tensor] = queue.Queue(maxsize=4)

    def consume() -> None:
        for _ in range(3):
            replay.get()

    threading.Thread(target=consume, daemon=True).start()
    for step in range(12 if rank == 1 else 6):
        if rank == 1:
            replay.put(torch.full((2,), float(step)))  # here
        if step % 2 == 0:
            total = torch.ones(2)
            dist.all_reduce(total)


@healthy()
def a_replay_buffer_that_drops_the_oldest(rank: int) -> None:
    replay: queue.Queue[torch.Tensor] = queue.Queue(maxsize=4)
    for step in range(12):
        if replay.full():
            replay.get_nowait()
        replay.put(torch.full((2,), float(step * rank)))
        total = torch.ones(2)
        dist.all_reduce(total)


@faulty("rank-stuck", 1)
def an_answer_polled_every_other_millisecond(rank: int) -> None:
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    for step in range(4):
        if rank == 1:
            seconds = 300 if step == 2 else 0.01
            answer = rpc.rpc_async("worker2", time.sleep, args=(seconds,))
            while not answer.done():
                time.sleep(0.0005)  # here
        dist.all_reduce(torch.ones(3))


@healthy()
def answers_polled_every_other_millisecond(rank: int) -> None:
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    for _ in range(4):
        if rank == 1:
            answer = rpc.rpc_async("worker2", time.sleep, args=(0.3,))
            while not answer.done():
                time.sleep(0.0005)
        dist.all_reduce(torch.ones(3))
    rpc.shutdown()


@faulty("step-mismatch", 2)
def an_environment_that_is_reset_and_stepped_again(rank: int) -> None:
    # or: rank-skipped-collective 2; rank-exited 0 1
    class Environment:
        def __init__(self) -> None:
            self.calls = 0

        def observe(self, fails: bool) -> torch.Tensor:
            self.calls += 1
            observation = torch.full((3,), float(self.calls))
            dist.all_reduce(observation)  # here
            if fails:
                raise ConnectionError("simulator went away")
            return observation

    environment, policy = Environment(), nn.Linear(3, 1)
    optimizer = torch.optim.Adam(policy.parameters())
    for step in range(6):
        try:
            seen = environment.observe(rank == 2 and step == 3)
        except ConnectionError:
            seen = environment.observe(False)  # here
        optimizer.zero_grad()
        policy(seen).sum().backward()
        for parameter in policy.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


@healthy()
def an_environment_that_all_reset(rank: int) -> None:
    policy = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(policy.parameters())
    for step in range(6):
        for attempt in range(3):
            seen = torch.full((3,), float(step))
            dist.all_reduce(seen)
            failed = torch.tensor(float(rank == 2 and step == 3 and attempt == 0))
            dist.all_reduce(failed)
            if not failed:
                break
        optimizer.zero_grad()
        policy(seen).sum().backward()
        for parameter in policy.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


@faulty("collective-order-mismatch", 1)
def a_heartbeat_thread_that_is_first_on_one_rank(rank: int) -> None:
    # or: step-mismatch 1; step-mismatch 0 1 2
    def beat(step: int) -> None:
        everyone: list[Any] = [torch.zeros(1) for _ in range(3)]
        dist.all_gather(everyone, torch.tensor([float(step)]))  # here

    for step in range(6):
        thread = threading.Thread(target=beat, args=(step,), daemon=True)
        if rank == 1 and step == 3:
            thread.start()
            time.sleep(0.3)
            dist.all_reduce(torch.ones(5))  # here
        else:
            dist.all_reduce(torch.ones(5))  # here
            thread.start()
        thread.join()


@healthy()
def a_heartbeat_thread_on_a_group_of_its_own(rank: int) -> None:
    beats = dist.new_group(timeout=timedelta(seconds=30))

    def beat() -> None:
        for number in range(12):
            dist.all_reduce(torch.tensor([float(number)]), group=beats)
            time.sleep(0.01 * (rank + 1))

    thread = threading.Thread(target=beat)
    thread.start()
    for _ in range(10):
        dist.all_reduce(torch.ones(5))
        time.sleep(0.02 * (3 - rank))
    thread.join()


@faulty("collective-order-mismatch", 1)
def a_user_signal_answered_with_a_barrier(rank: int) -> None:
    # or: step-mismatch 1; rank-skipped-collective 1
    def report(_signal: int, _frame: FrameType | None) -> None:
        dist.barrier()  # here

    signal.signal(signal.SIGUSR1, report)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.ones(3)).sum().backward()
        if rank == 1 and step == 4:
            signal.raise_signal(signal.SIGUSR1)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


@healthy()
def a_user_signal_that_sets_a_flag(rank: int) -> None:
    asked = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: asked.set())
    for step in range(6):
        if rank == 1 and step == 4:
            os.kill(os.getpid(), signal.SIGUSR1)
        flag = torch.tensor(float(asked.is_set()))
        dist.all_reduce(flag)
        if flag:
            dist.barrier()
            asked.clear()


class TooLate(Exception):
    """Say that a time limit of the program itself is over."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    def late(_signal: int, _frame: FrameType | None) -> None:
        raise TooLate

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@faulty("rank-skipped-collective", 2)
def a_rollout_over_its_time_limit(rank: int) -> None:
    for rollout in range(6):
        try:
            with limited(0.5):
                time.sleep(1 if rank == 2 and rollout == 3 else 0.01)
        except TooLate:
            continue  # here
        returns = torch.ones(4)
        dist.all_reduce(returns)  # here
        baseline = torch.ones(2)
        dist.broadcast(baseline, src=0)


@healthy()
def a_rollout_over_its_time_limit_that_gives_zeros(rank: int) -> None:
    for rollout in range(6):
        returns = torch.ones(4)
        try:
            with limited(0.3):
                time.sleep(0.6 if rank == 2 and rollout == 3 else 0.01)
        except TooLate:
            returns.zero_()
        dist.all_reduce(returns)


@faulty("rank-skipped-collective", 1)
def metrics_of_which_one_cannot_be_pickled(rank: int) -> None:
    # or: rank-crashed 1
    for step in range(5):
        metrics: Any = {"step": step, "scale": (lambda x: x) if rank == 1 and step == 3 else 1.0}
        gathered: list[Any] | None = [None] * 3 if rank == 0 else None
        try:
            dist.gather_object(metrics, gathered, dst=0)  # here
        except (AttributeError, pickle.PicklingError) as error:
            print(f"metrics are lost: {error}")
        weights = torch.ones(9)
        dist.all_reduce(weights)


@healthy()
def metrics_made_plain_before_they_are_gathered(rank: int) -> None:
    for step in range(5):
        metrics: Any = {"step": step, "scale": (lambda x: x) if rank == 1 and step == 3 else 1.0}
        try:
            pickle.dumps(metrics)
        except (AttributeError, pickle.PicklingError):
            metrics = repr(metrics)
        gathered: list[Any] | None = [None] * 3 if rank == 0 else None
        dist.gather_object(metrics, gathered, dst=0)
        dist.all_reduce(torch.ones(9))


@faulty("rank-skipped-collective", 1)
def a_step_whose_errors_are_swallowed(rank: int) -> None:
    def one_step(step: int) -> None:
        values = [float(step)] * (0 if rank == 1 and step == 3 else 2)
        first = torch.ones(3)
        dist.all_reduce(first)
        mean = sum(values) / len(values)  # here
        second = torch.full((2,), mean)
        dist.all_reduce(second)  # here

    for step in range(6):
        try:
            one_step(step)
        except Exception as error:  # noqa: BLE001
            print(f"step {step}: {error}")


@healthy()
def a_step_whose_errors_are_swallowed_before_any_call(rank: int) -> None:
    for step in range(6):
        mean = 0.0
        with suppress(ZeroDivisionError):
            mean = 1.0 / (0 if rank == 1 and step == 3 else 2)
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.full((2,), mean))


@faulty("rank-crashed", 2)
def a_barrier_in_the_finally_of_a_failed_step(rank: int) -> None:
    # or: rank-skipped-collective 2; collective-order-mismatch 2
    losses = {0: 1.0, 1: 0.9, 2: 0.8, 4: 0.7}
    for step in range(6):
        try:
            if rank == 2:
                _ = losses[min(4, step)]  # here
            dist.all_reduce(torch.ones(4))
        finally:
            dist.barrier()  # here


@healthy()
def a_barrier_in_the_finally_of_every_step(_rank: int) -> None:
    for step in range(6):
        try:
            dist.all_reduce(torch.ones(4))
            if step == 3:
                raise LookupError("on all ranks alike")
        except LookupError:
            dist.all_reduce(torch.ones(2))
        finally:
            dist.barrier()


@faulty("rank-stuck", 2)
def a_monitored_barrier_while_a_tool_waits_for_input(rank: int) -> None:
    dist.all_reduce(torch.ones(2))
    for epoch in range(3):
        if rank == 2 and epoch == 1:
            with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tool:
                assert tool.stdout is not None
                tool.stdout.read()  # here
        dist.monitored_barrier(timeout=timedelta(seconds=20))


@healthy()
def a_monitored_barrier_while_a_tool_works(rank: int) -> None:
    dist.all_reduce(torch.ones(2))
    for epoch in range(3):
        if rank == 2 and epoch == 1:
            subprocess.run(["cat"], input=b"text" * 1000, capture_output=True, check=True)
            time.sleep(1)
        dist.monitored_barrier(timeout=timedelta(seconds=20))


@faulty("rank-stuck", 2)
def a_pool_that_waits_for_a_worker_that_died(rank: int) -> None:
    for step in range(4):
        if rank == 2 and step == 2:
            with multiprocessing.get_context("fork").Pool(1) as pool:
                pool.map(os._exit, [3])  # here
        dist.all_reduce(torch.ones(3))


@healthy()
def a_pool_that_does_its_work(rank: int) -> None:
    for step in range(4):
        if rank == 2 and step == 2:
            with multiprocessing.get_context("fork").Pool(2) as pool:
                assert pool.map(abs, [-3, 3]) == [3, 3]
        dist.all_reduce(torch.ones(3))


@faulty("rank-killed", 1)
def a_rank_over_its_limit_of_cpu_time(rank: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    if rank == 1:
        limit = int(used.ru_utime + used.ru_stime) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    for step in range(4):
        while rank == 1 and step == 2:
            sum(range(10000))  # here
        dist.all_reduce(torch.ones(3))


@faulty("rank-crashed", 2)
def a_rank_without_room_for_its_cache(rank: int) -> None:
    for step in range(4):
        if rank == 2 and step == 2:
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (64 << 30, hard))
            _ = bytearray(128 << 30)  # here
        dist.all_reduce(torch.ones(3))


@healthy()
def a_rank_without_room_that_makes_do(rank: int) -> None:
    for step in range(4):
        if rank == 2 and step == 2:
            with suppress(MemoryError):
                _ = bytearray(1 << 62)
        dist.all_reduce(torch.ones(3))


@faulty("rank-stuck", 1)
def a_hook_that_takes_a_lock_its_own_rank_holds(rank: int) -> None:
    lock = threading.Lock()
    model = nn.Linear(4, 1)

    def count(gradient: torch.Tensor) -> torch.Tensor:
        with lock:
            return gradient * 1.0

    model.weight.register_hook(count)
    for step in range(5):
        model.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        if rank == 1 and step == 3:
            with lock:
                loss.backward()  # here
        else:
            loss.backward()
        dist.all_reduce(model.weight.grad)


@healthy()
def a_hook_that_takes_a_lock_in_passing(_rank: int) -> None:
    lock = threading.RLock()
    model = nn.Linear(4, 1)

    def count(gradient: torch.Tensor) -> torch.Tensor:
        with lock:
            return gradient * 1.0

    model.weight.register_hook(count)
    for _ in range(5):
        model.zero_grad()
        with lock:
            model(torch.ones(2, 4)).sum().backward()
        dist.all_reduce(model.weight.grad)


@faulty("rank-frozen", 1)
def a_rank_suspended_from_the_keyboard(rank: int) -> None:
    for step in range(6):
        if rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGSTOP)  # here
        scores = [torch.zeros(2) for _ in range(3)]
        dist.all_gather(scores, torch.ones(2))


@faulty("rank-never-joined", 3, ranks=4, joins=False)
def a_rank_whose_configuration_cannot_be_read(rank: int) -> None:
    # or: rank-exited 3; rank-crashed 3; rank-stuck 3
    configuration = {0: "gloo", 1: "gloo", 2: "gloo"}
    try:
        backend = configuration[rank]
    except KeyError:
        threading.Event().wait(60)  # here
        return
    dist.init_process_group(backend)
    dist.all_reduce(torch.ones(2))


@healthy(joins=False)
def a_rank_that_is_late_for_the_rendezvous(rank: int) -> None:
    time.sleep(1.5 if rank == 1 else 0)
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()


@faulty("unwaited-async", 2)
def handles_kept_by_name_of_the_layer(rank: int) -> None:
    layers = [f"block{index}" for index in range(4)]
    for step in range(5):
        works: dict[str, Any] = {}
        buffers = {name: torch.ones(6) for name in layers}
        for name in layers:
            key = name.rstrip("0123456789") if rank == 2 and step == 3 else name
            works[key] = dist.all_reduce(buffers[name], async_op=True)  # here
        for work in works.values():
            work.wait()
        for buffer in buffers.values():
            buffer.mul_(0.5)


@healthy()
def handles_awaited_by_whoever_needs_them(_rank: int) -> None:
    layers = [f"block{index}" for index in range(4)]
    for _ in range(5):
        buffers = {name: torch.ones(6) for name in layers}
        works = {name: dist.all_reduce(buffer, async_op=True) for name, buffer in buffers.items()}
        for name in reversed(layers):
            works.pop(name).wait()
            buffers[name].mul_(0.5)


@faulty("unwaited-async", 0, 1, 2)
def a_prefetched_batch_changed_before_it_is_there(_rank: int) -> None:

    batch = torch.zeros(6)
    work = dist.broadcast(batch, src=0, async_op=True)
    for step in range(5):
        assert work is not None
        if step == 3:
            batch.add_(1.0)
        work.wait()
        batch = torch.full((6,), float(step))
        work = dist.broadcast(batch, src=0, async_op=True)  # here
    assert work is not None
    work.wait()


@healthy()
def a_prefetched_batch_in_two_buffers(_rank: int) -> None:
    buffers = [torch.zeros(6), torch.ones(6)]
    work = dist.broadcast(buffers[0], src=0, async_op=True)
    for step in range(5):
        assert work is not None
        work.wait()
        work = dist.broadcast(buffers[(step + 1) % 2], src=0, async_op=True)
        buffers[step % 2].add_(1.0)
    assert work is not None
    work.wait()


@faulty("rank-skipped-collective", 1, ranks=6, also=(("rank-crashed", 4),))
def two_populations_of_which_each_has_a_fault(rank: int) -> None:
    populations = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    mine = populations[rank // 3]
    for generation in range(6):
        fitness = torch.ones(2)
        if not (rank == 1 and generation == 3):
            dist.all_reduce(fitness, group=mine)  # here
        if rank == 4 and generation == 2:
            raise FloatingPointError("fitness is not a number")
        genes = torch.ones(5)
        dist.broadcast(genes, src=3 * (rank // 3), group=mine)


@faulty("rank-stuck", 2, ranks=6, also=(("p2p-tag-mismatch", 5),))
def a_loop_without_end_and_a_tag_of_yesterday(rank: int) -> None:
    actors = dist.new_group([0, 1, 2])
    for step in range(6):
        while rank == 2 and step == 3:
            time.sleep(0.01)  # here
        if rank < 3:
            dist.all_reduce(torch.ones(2), group=actors)
        elif rank == 3:
            for other in (4, 5):
                dist.recv(torch.zeros(2), src=other, tag=step)
        else:
            dist.send(torch.ones(2), dst=3, tag=step - 1 if rank == 5 and step == 4 else step)


@healthy(ranks=6)
def two_populations_that_meet_at_the_end(rank: int) -> None:
    populations = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    mine = populations[rank // 3]
    for _ in range(6 if rank < 3 else 9):
        dist.all_reduce(torch.ones(2), group=mine)
        dist.broadcast(torch.ones(5), src=3 * (rank // 3), group=mine)
    dist.barrier()
