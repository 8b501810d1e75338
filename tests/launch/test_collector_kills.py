"""Tests that SIGKILL of the collector or of a sender, at any moment, loses no record and doubles none."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from dtprof.launch.collector import run_sender
from dtprof.launch.collector.http_sink import HttpSink
from dtprof.session.run_collection import CollectorSettings, serve_collector
from tests.imitated_host import ImitatedHost, differences

TOKEN = "a-secret"
START_S = 120.0
MOST_RECORDS = 6000
"""Written by each rank between two kills; a segment holds 70,000."""
LONGEST_LIFE_S = 0.08
PRELOADED = ["dtprof.session.run_collection", "dtprof.launch.collector.collect_service", "uvicorn", "numpy", __name__]


@dataclass(kw_only=True)
class Victim:
    """A process that is killed and begun again."""

    process: BaseProcess
    words: Connection
    number: int = field(default=0)

    def kill(self) -> None:
        """End it as the kernel's OOM killer does, and wait until it is gone."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.words.close()
        assert self.process.exitcode == -signal.SIGKILL


def collect(store: Path, port: int, words: Connection) -> None:
    """Serve as `dtprof collect` does, until it is killed."""
    os.environ["DTPROF_COLLECT_TOKEN"] = TOKEN
    serve_collector(
        CollectorSettings(store=store, host="127.0.0.1", port=port),
        say=lambda _: None,
        announce=words.send,
    )


def send(run: Path, port: int, words: Connection) -> None:
    """Send as the launcher does, until it is killed or told that the job has ended."""
    run_sender.EVERY_S, run_sender.LONGEST_BACKOFF_S = 0.005, 0.02
    run_sender.SHARE = 100.0  # the newest records in every round
    card = run_sender.new_card(run, is_named=False, job="J", joins=False, host=run.parent.name)
    sink = HttpSink("127.0.0.1", port, token=TOKEN, context=None)
    sink.__class__ = EagerSink
    sender = run_sender.RunSender(run, sink, card)
    thread = run_sender.CollectThread(sender, run=run, say=words.send, target="here")
    words.recv()
    thread.finish(run, limit_s=START_S)
    words.send(sender.progress.is_complete)


class EagerSink(HttpSink):
    """Sends the newest records as often as it can, whatever the collector asks for."""

    @property
    def tail_every_s(self) -> float:
        """Seconds between two times."""
        return 0.0

    @tail_every_s.setter
    def tail_every_s(self, value: float) -> None:
        pass


@contextmanager
def begun() -> Iterator[list[Victim]]:
    """Yield a list of processes, of which none is left behind."""
    victims: list[Victim] = []
    yield victims
    for victim in victims:
        if victim.process.is_alive():
            victim.process.kill()
        victim.process.join()


def start(context: ForkServerContext, target: object, *arguments: object) -> Victim:
    """Begin a process from one that has imported all it needs."""
    mine, its = context.Pipe()
    process = context.Process(target=target, args=(*arguments, its))  # type: ignore[arg-type]
    process.start()
    its.close()
    return Victim(process=process, words=mine)


def answer(victim: Victim) -> object:
    """Return what a process says next."""
    assert victim.words.poll(START_S), "it says nothing"
    return victim.words.recv()


def wait_for_more(store: Path, before: dict[str, int]) -> dict[str, int]:
    """Wait until something has arrived since the last kill; return when each file was last written to."""
    limit_s = time.monotonic() + START_S
    while time.monotonic() < limit_s:
        now = {}
        # os.walk() passes over a folder that the collector removes meanwhile, where rglob() raises.
        for folder, _, names in os.walk(store):
            for file in (Path(folder) / name for name in ("", *names)):
                with suppress(OSError):
                    now[str(file)] = file.stat().st_mtime_ns
        if now != before:
            return now
        time.sleep(0.002)
    pytest.fail("nothing arrives")


@pytest.mark.parametrize("num_kills", [4, pytest.param(100, marks=[pytest.mark.thorough, pytest.mark.timeout(3600)])])
def test_kills_of_either_end_lose_and_double_nothing(tmp_path: Path, num_kills: int) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = tmp_path / "store"
    hosts = [
        ImitatedHost(tmp_path / name / "job", host=name, ranks=range(2 * k, 2 * k + 2), world_size=4, job="J")
        for k, name in enumerate("ab")
    ]
    moments = random.Random(num_kills)
    before: dict[str, int] = {}
    with begun() as victims:
        victims.append(start(context, collect, store, 0))
        port = int(str(answer(victims[0])).rpartition(":")[2])
        victims += [start(context, send, host.run, port) for host in hosts]
        for number in range(num_kills):
            for host in hosts:
                host.write(moments.randrange(1, MOST_RECORDS))
            # Half of the kills hit the collector. The moment is any: what is being written then is not waited for.
            chosen = moments.choice([0, 0, 1, 2]) if number > 2 else number
            before = wait_for_more(store, before)
            victims[chosen].process.join(moments.uniform(0, LONGEST_LIFE_S))
            victims[chosen].kill()
            if chosen == 0:
                victims[0] = start(context, collect, store, port)
                answer(victims[0])
            else:
                victims[chosen] = start(context, send, hosts[chosen - 1].run, port)
        for host in hosts:
            host.end()
        for victim in victims[1:]:
            victim.words.send("the job has ended")
        for victim in victims[1:]:
            while isinstance(word := answer(victim), str):
                pass
            assert word is True
        victims[0].kill()
    assert [differences(host.run, store / "job") for host in hosts] == [[], []]
    assert sorted(path.name for path in store.iterdir()) == ["job"]
    assert sorted(path.name for path in (store / "job").iterdir() if path.is_dir()) == [
        *("node-a", "node-b", "rank-00000.0", "rank-00001.0", "rank-00002.0", "rank-00003.0")
    ]
    for state in (store / "job").glob(".collect-*.json"):
        assert state.stat().st_mode & 0o077 == 0
