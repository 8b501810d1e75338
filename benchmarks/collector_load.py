"""What one `dtprof collect` takes of 64 hosts of 8 ranks with 10,000 events a second each, sent as launchers send them.

The collector is a process of its own, held to one core. Its senders are threads of this process with what a launcher
sends: of each rank an archive once a segment is full, the newest records as often as the collector asks for, a line of
samples a second. Bodies are made once, of a segment with random durations, since 512 ranks would take more cores than a
machine has. Clients begin spread over the time that a segment takes to fill. The share of a core is processor time of
the collector, user and system, over the time that the events took to come about: of the second half, since
the collector needs the first one to find out how many tails it can take.

With `python -m benchmarks.collector_load HOSTS RANKS EVENTS SECONDS` for other numbers.
"""

import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks import pairs
from dtprof.launch.collector import run_sender
from dtprof.launch.collector.http_sink import HttpSink
from dtprof.launch.collector.sinks import LauncherCard, SinkError
from dtprof.records import paths, schema
from dtprof.records.rank_log import archive
from dtprof.records.rank_log.archive import RECORD_DTYPE

HOSTS, RANKS, EVENTS_PER_S, SECONDS = 64, 8, 10_000, 40
TOKEN = "of-the-benchmark"
ROUND_S = run_sender.EVERY_S
PARTS = 8
"""Of a segment: tails are sent in so many sizes."""
SAMPLE_BYTES = 400
"""Of a line of samples."""
LONGEST_WAIT_S = 300.0


def segment(events_per_s: int) -> bytes:
    """Return a full segment of collectives with random gaps, durations and waits."""
    random = np.random.default_rng(1)
    count = schema.SEGMENT_CAPACITY
    rows = np.zeros(count, RECORD_DTYPE)
    rows["kind"], rows["state"] = schema.KIND["collective"], schema.STATE["done"]
    rows["seq"] = np.arange(count)
    rows["numel"] = 1 << random.integers(10, 24, count)
    rows["issued_ns"] = np.cumsum(random.exponential(1e9 / events_per_s, count)).astype(np.uint64)
    for name, scale in (("returned_after", 2e4), ("done_after", 8e4), ("waited_from", 3e4), ("waited_for", 5e4)):
        rows[name] = random.exponential(scale, count)
    rows["waits"] = 1
    header = schema.pack_header(
        segment=0,
        rank=0,
        local_rank=0,
        world_size=1,
        attempt=0,
        pid=1,
        tap=1,
        opened_monotonic_ns=1,
        opened_realtime_ns=1,
        dropped=0,
        host="a",
        boot_id="b",
        torch_version="2.13.0",
        dtprof_version="0",
    ).ljust(schema.HEADER_SIZE, b"\0")
    at = schema.HEADER_OFFSET["head"]
    return header[:at] + count.to_bytes(8, "little") + header[at + 8 :] + rows.tobytes()


@dataclass(frozen=True, kw_only=True)
class Bodies:
    """What clients send."""

    archive: bytes
    tails: tuple[bytes, ...]  # of one part of a segment, of two, ...
    num_records: int

    @staticmethod
    def make(events_per_s: int) -> "Bodies":
        """Pack a segment in every way."""
        data = segment(events_per_s)
        header, records = data[: schema.HEADER_SIZE], data[schema.HEADER_SIZE :]
        part = len(records) // schema.RECORD_SIZE // PARTS * schema.RECORD_SIZE
        tails = []
        for count in range(1, PARTS + 1):
            pieces = [(schema.HEADER_SIZE + k * part, records[k * part : (k + 1) * part]) for k in range(count)]
            packed = b"".join(run_sender.piece(at, piece) for at, piece in [*pieces, (0, header)])
            tails.append(zlib.compress(packed, run_sender.LEVEL))
        return Bodies(archive=archive.pack(data), tails=tuple(tails), num_records=len(records) // schema.RECORD_SIZE)


@dataclass(kw_only=True)
class Client:
    """A launcher of one host."""

    number: int
    sink: HttpSink
    bodies: Bodies
    ranks: int
    fill_s: float  # a rank takes so long for a segment
    sent: int = 0
    archives: int = 0
    tails: int = 0
    late_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    def open(self) -> None:
        """Begin the run of this host's job: a run of its own, as jobs of a cluster are."""
        card = LauncherCard(
            launcher=secrets.token_hex(16), name="job", is_named=False, job="J", joins=False, host=f"host-{self.number}"
        )
        self.sink.open(card)
        self.sink.put_manifest(b'{"format_version": %d, "hosts": ["host-%d"]}' % (schema.FORMAT_VERSION, self.number))

    def run(self, half: threading.Barrier, seconds: float) -> None:
        """Send for a while, by the clock: what is late is sent all the same. All pass the half of the time together."""
        begin_s, is_past_half = time.monotonic(), False
        offset = self.number / 64 * self.fill_s
        segments = [int((offset + rank / self.ranks * self.fill_s) / self.fill_s) for rank in range(self.ranks)]
        tail_at_s, size, moment_s = 0.0, 0, ROUND_S * self.number / 64
        while moment_s < seconds:
            if moment_s >= seconds / 2 and not is_past_half:
                half.wait(LONGEST_WAIT_S)
                begin_s, is_past_half = time.monotonic() - moment_s, True
                self.sent = self.archives = self.tails = 0
                self.late_s = 0.0
            wait_s = begin_s + moment_s - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)
            sends_tails = moment_s >= tail_at_s
            if sends_tails:
                tail_at_s = moment_s + self.sink.tail_every_s
            try:
                for rank in range(self.ranks):
                    elapsed = moment_s + offset + rank / self.ranks * self.fill_s
                    self._send_rank(rank, segments, elapsed / self.fill_s, sends_tails=sends_tails)
                line = b"x" * (int(ROUND_S) * SAMPLE_BYTES)
                size = self.sink.append(f"node-host-{self.number}/samples.jsonl", size, line)
            except SinkError as error:
                self.problems.append(str(error))
            self.late_s = max(self.late_s, time.monotonic() - begin_s - moment_s - ROUND_S)
            moment_s += ROUND_S
        self.sink.close()

    def _send_rank(self, rank: int, segments: list[int], position: float, *, sends_tails: bool) -> None:
        folder = paths.rank_folder_name(self.number * self.ranks + rank, 0)
        while segments[rank] < int(position):
            name = f"{folder}/{paths.segment_name(segments[rank])}.z"
            self.sink.put(name, self.bodies.archive, mtime_ns=1)
            segments[rank] += 1
            self.archives += 1
            self.sent += len(self.bodies.archive)
        if sends_tails:
            new = min(position - int(position), self.sink.tail_every_s / self.fill_s)
            body = self.bodies.tails[max(0, round(new * PARTS) - 1)]
            self.sink.patch(f"{folder}/{paths.segment_name(segments[rank])}", body)
            self.tails += 1
            self.sent += len(body)


def peak_mb(pid: int) -> float:
    """Return the most memory that a process has had resident, in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    return float("nan")


def measure(hosts: int, ranks: int, events_per_s: int, seconds: int) -> None:
    """Run a collector and its clients, and print what it took."""
    bodies = Bodies.make(events_per_s)
    core = min(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        collector = subprocess.Popen(
            [sys.executable, "-m", "dtprof", "collect", "-o", f"{folder}/store", "--listen", "127.0.0.1:0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "DTPROF_COLLECT_TOKEN": TOKEN},
            text=True,
        )
        try:
            assert collector.stdout is not None
            port = int(collector.stdout.readline().rpartition(":")[2])
            os.sched_setaffinity(collector.pid, {core})
            clients = [
                Client(
                    number=number,
                    sink=HttpSink("127.0.0.1", port, token=TOKEN, context=None),
                    bodies=bodies,
                    ranks=ranks,
                    fill_s=bodies.num_records / events_per_s,
                )
                for number in range(hosts)
            ]
            for client in clients:
                client.open()
            half = threading.Barrier(hosts + 1)
            threads = [threading.Thread(target=client.run, args=(half, float(seconds))) for client in clients]
            for thread in threads:
                thread.start()
            half.wait(LONGEST_WAIT_S)
            before_s, begin_s = sum(pairs.cpu_s(collector.pid)), time.monotonic()
            for thread in threads:
                thread.join(seconds + LONGEST_WAIT_S)
            took_s = sum(pairs.cpu_s(collector.pid)) - before_s
            _print(clients, took_s, seconds // 2, time.monotonic() - begin_s, peak_mb(collector.pid))
        finally:
            collector.terminate()
            collector.wait()


def _print(clients: list[Client], took_s: float, seconds: int, wall_s: float, peak: float) -> None:
    bodies, ranks = clients[0].bodies, clients[0].ranks
    archives, tails = sum(client.archives for client in clients), sum(client.tails for client in clients)
    events = archives * bodies.num_records
    print(f"collector [{len(clients)} hosts of {ranks} ranks, {seconds} s in {wall_s:.0f} s]")
    print(f"  events in archives           {events / seconds / 1e6:.2f} million a second")
    print(f"  archive                      {len(bodies.archive) / bodies.num_records:.1f} bytes an event")
    print(f"  sent                         {sum(client.sent for client in clients) / seconds / 1e6:.1f} MB/s")
    print(f"  archives, tails              {archives}, {tails}; tails now every {clients[0].sink.tail_every_s:.0f} s")
    print(f"  processor time               {100 * took_s / seconds:.0f} % of a core")
    print(f"  most memory                  {peak:.0f} MB")
    print(f"  a round is late by at most   {max(client.late_s for client in clients):.1f} s")
    problems = [problem for client in clients for problem in client.problems]
    print(f"  requests that failed         {len(problems)}{f', such as: {problems[0]}' if problems else ''}")


def main() -> None:
    """Measure the load that is asked for."""
    measure(HOSTS, RANKS, EVENTS_PER_S, SECONDS)


if __name__ == "__main__":
    if len(sys.argv) == 5:
        measure(*map(int, sys.argv[1:]))
    else:
        pairs.run_alone(main, __doc__)
