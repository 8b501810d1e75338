"""Tests of what `dtprof run --collect` sends and `dtprof collect` keeps."""

import http.client
import http.server
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn

from dtprof.errors import UsageError
from dtprof.launch.collector import collect_target, run_sender
from dtprof.launch.collector.collect_service import make_app
from dtprof.launch.collector.http_sink import HttpSink
from dtprof.launch.collector.run_sender import CollectThread, RunSender, new_card
from dtprof.launch.collector.run_store import RunStore
from dtprof.launch.collector.sinks import SinkError, SinkFullError, SinkRefusedError
from dtprof.monitor.web.web_server import listen
from dtprof.records import paths, schema
from dtprof.records.reader import open_run
from dtprof.records.run_follower import RunFollower
from dtprof.session.run_diagnosis import diagnose_run
from tests.golden.commands import unpack
from tests.imitated_host import ImitatedHost, differences, records_of

TOKEN = "a-secret"
PART = 9000
"""Records at a time: a segment is full after the eighth."""


class Service:
    """A collector in a thread, that can be ended and begun again at the same port."""

    def __init__(self, store: Path, *, max_bytes: int = 0, tls: tuple[Path, Path] | None = None) -> None:
        """Begin."""
        self.store, self._max_bytes, self._tls = store, max_bytes, tls
        self.port = 0
        self.notes: list[str] = []
        self._sinks: list[HttpSink] = []
        self.begin()

    def begin(self) -> None:
        """Serve what the store holds."""
        listening = listen("127.0.0.1", self.port)
        self.port = listening.getsockname()[1]
        app = make_app(RunStore(self.store, max_bytes=self._max_bytes), token=TOKEN, note=self.notes.append)
        files = {} if self._tls is None else {"ssl_certfile": self._tls[0], "ssl_keyfile": self._tls[1]}
        config = uvicorn.Config(
            app,
            log_level="critical",
            lifespan="off",
            access_log=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=120,  # as `dtprof collect` has it: a machine that tests may be slow
            **files,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]})
        self._thread.start()

    def end(self) -> None:
        """Stop answering, and forget everything that is not on the disk."""
        for sink in self._sinks:
            sink.close()
        self._server.should_exit = True
        self._thread.join()

    def sink(self, *, token: str = TOKEN, context: ssl.SSLContext | None = None) -> HttpSink:
        """Return a sink that sends here."""
        self._sinks.append(HttpSink("127.0.0.1", self.port, token=token, context=context))
        return self._sinks[-1]

    def sender(
        self, host: ImitatedHost, *, is_named: bool = False, job: str | None = "J", joins: bool = False
    ) -> RunSender:
        """Return what a launcher sends with."""
        card = new_card(host.run, is_named=is_named, job=job, joins=joins, host=host.host)
        return RunSender(host.run, self.sink(), card)

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, Any]]:
        """Send one request as written; return status and answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        given = {"Authorization": f"Bearer {TOKEN}", "X-Crc32": f"{zlib.crc32(body):08x}"} | headers
        try:
            connection.request(method, path, body, given)
            response = connection.getresponse()
            data = response.read()
            return response.status, json.loads(data) if data.startswith(b"{") else {}
        finally:
            connection.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A collector."""
    served = Service(tmp_path / "store")
    yield served
    served.end()


def host(folder: Path, name: str = "a", ranks: range = range(1), world_size: int = 1) -> ImitatedHost:
    """Return a host that writes into a folder of its own."""
    return ImitatedHost(folder / name / "job", host=name, ranks=ranks, world_size=world_size, job="J")


def sync(*senders: RunSender, is_last: bool = False) -> None:
    """Send what is new, the newest records as well."""
    for sender in senders:
        sender._tail_at_s = 0.0
        sender.sync(is_last=is_last)


def test_parts_of_two_hosts_become_one_run(service: Service, tmp_path: Path) -> None:
    hosts = [host(tmp_path, "a", range(2, 4), 4), host(tmp_path, "b", range(2), 4)]
    senders = [service.sender(one) for one in hosts]
    for _ in range(3):
        for one in hosts:
            one.write(PART)
        sync(*senders)
    for one in hosts:
        one.end()
    sync(*senders, is_last=True)
    kept = service.store / "job"
    assert [differences(one.run, kept) for one in hosts] == [[], []]
    run = open_run(kept)
    assert run.ranks == [0, 1, 2, 3]
    assert len(run.load(3).operations) == 3 * PART
    # The manifest is that of the launcher of rank 0, and the other one has joined it.
    assert run.manifest.hosts == ("b", "a")
    assert run.manifest.exit_status == 0
    assert (kept / "node-a" / "launcher-77.json").exists()
    assert not (kept / "node-b" / "launcher-77.json").exists()


def test_a_run_that_grows_is_followed_record_by_record(service: Service, tmp_path: Path) -> None:
    one = host(tmp_path)
    sender = service.sender(one)
    one.write(10)
    sync(sender)
    follower = RunFollower(service.store / "job")
    seen: list[int] = []
    for count in [50, PART, PART, 7 * PART, 5, 8 * PART, 8 * PART]:
        one.write(count)
        sync(sender)
        seen += follower.poll()[0].tables.operations["seq"].tolist()
    one.end()
    sync(sender, is_last=True)
    growth = follower.poll()[0]
    seen += growth.tables.operations["seq"].tolist()
    follower.close()
    # All but those that were open when the last segment was archived, each once.
    assert seen == list(range(len(seen)))
    assert one.ranks[0].count - len(seen) <= 100


def test_records_completed_in_place_are_sent_again(service: Service, tmp_path: Path) -> None:
    one = host(tmp_path)
    sender = service.sender(one)
    one.write(PART)
    sync(sender)
    file = service.store / "job" / "rank-00000.0" / "events.00000"
    assert (records_of(file.parent)["state"] == schema.STATE["issued"]).sum() == 100
    one.ranks[0]._complete(0)
    before = sender.progress.sent_bytes
    sync(sender)
    assert (records_of(file.parent)["state"] == schema.STATE["done"]).all()
    assert sender.progress.sent_bytes - before < 4000  # a hundred records, and not the segment
    before = sender.progress.sent_bytes
    sync(sender)
    assert sender.progress.sent_bytes == before  # nothing is new


def test_nothing_is_lost_or_doubled_when_either_end_is_gone(service: Service, tmp_path: Path) -> None:
    hosts = [host(tmp_path, "a", range(1), 2), host(tmp_path, "b", range(1, 2), 2)]
    senders = [service.sender(one) for one in hosts]
    for number in range(9):
        for one in hosts:
            one.write(PART)
        if number % 3 == 0:
            service.end()
            with pytest.raises(SinkError, match="cannot be reached"):
                sync(senders[0])
            service.begin()
        if number % 4 == 0:  # the launcher of the second host was killed: another process sends the rest
            run_sender.keep_state(hosts[1].run, senders[1], "here")
            senders[1] = service.sender(hosts[1])
        sync(*senders)
    for one in hosts:
        one.end()
    sync(*senders, is_last=True)
    assert [differences(one.run, service.store / "job") for one in hosts] == [[], []]
    assert sorted(path.name for path in service.store.iterdir()) == ["job"]


def test_a_host_that_comes_right_after_a_restart_of_the_collector_joins_its_job(
    service: Service, tmp_path: Path
) -> None:
    hosts = [host(tmp_path, "a", range(1), 2), host(tmp_path, "b", range(1, 2), 2)]
    hosts[0].write(10)
    sync(service.sender(hosts[0]))
    service.end()
    service.begin()
    hosts[1].write(10)
    sync(service.sender(hosts[1]))
    assert [path.name for path in service.store.iterdir()] == ["job"]
    # One that nobody has sent to for long is another job's, whatever the key says.
    service.end()
    for file in (service.store / "job").rglob("*"):
        os.utime(file, (1e9, 1e9))
    service.begin()
    third = host(tmp_path, "c", range(1), 1)
    sync(service.sender(third))
    assert sorted(path.name for path in service.store.iterdir()) == ["job", "job-2"]


def test_an_answer_that_was_lost_doubles_nothing(service: Service, tmp_path: Path) -> None:
    one = host(tmp_path)
    sender = service.sender(one)
    one.write(PART)
    sync(sender)
    one.write(PART)
    known = {name: run_sender._Known(**vars(entry)) for name, entry in sender._known.items()}
    sync(sender)
    sender._known = known  # as if the second round had not been answered
    sender._tails = {}
    sync(sender)
    one.end()
    sync(sender, is_last=True)
    assert differences(one.run, service.store / "job") == []


def test_what_the_host_has_dropped_goes(service: Service, tmp_path: Path) -> None:
    one = host(tmp_path)
    sender = service.sender(one)
    for _ in range(5):
        one.write(8 * PART)
        sync(sender)
    (one.run / "rank-00000.0" / "events.00001.z").unlink()
    sync(sender)
    names = sorted(path.name for path in (service.store / "job" / "rank-00000.0").glob("events*"))
    assert names == ["events.00000.z", "events.00002.z", "events.00003.z", "events.00004", "events.00005"]


def test_samples_that_were_thinned_out_are_sent_anew(service: Service, tmp_path: Path) -> None:
    one = host(tmp_path)
    sender = service.sender(one)
    for _ in range(20):
        one.write(1)
    sync(sender)
    file = one.node / "samples.jsonl"
    draft = file.with_name(".draft")
    draft.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[::2]))
    draft.replace(file)
    sync(sender)
    one.write(1)
    sync(sender)
    assert (service.store / "job" / "node-a" / "samples.jsonl").read_bytes() == file.read_bytes()


def test_a_rank_or_node_that_two_hosts_claim_gets_a_place_of_its_own(service: Service, tmp_path: Path) -> None:
    first = ImitatedHost(tmp_path / "1" / "job", host="same", ranks=range(1), world_size=1)
    second = ImitatedHost(tmp_path / "2" / "job", host="same", ranks=range(1), world_size=1)
    senders = [service.sender(first), service.sender(second, joins=True, job=None)]
    for number, one in enumerate((first, second)):
        one.write(10 + number)
        one.end()
    sync(*senders)
    sync(*senders, is_last=True)
    kept = service.store / "job"
    assert len(records_of(kept / "rank-00000.0")) == 10
    assert len(records_of(kept / "rank-00000.1")) == 11
    assert (kept / "node-same-2" / "samples.jsonl").exists()


def test_two_jobs_of_one_name(service: Service, tmp_path: Path) -> None:
    first, other, unnamed = (
        ImitatedHost(tmp_path / name / "job", host=name, ranks=range(1), world_size=1) for name in "abc"
    )
    sync(service.sender(first, job=None))
    with pytest.raises(SinkRefusedError, match=r"run job of another job; give another -o DIR, or --join"):
        sync(service.sender(other, job=None, is_named=True))
    sender = service.sender(unnamed, job=None)  # the name was ours to choose: another one is
    sync(sender)
    assert sender.progress.name == "job-2"
    # The next job of a host has the same key, as MASTER_ADDR and MASTER_PORT are from a script.
    again = ImitatedHost(tmp_path / "d" / "job", host="a", ranks=range(1), world_size=1)
    sync(service.sender(ImitatedHost(tmp_path / "e" / "job", host="a", ranks=range(1), world_size=1)))
    sender = service.sender(again)
    sync(sender)
    assert sender.progress.name == "job-4"


def test_a_wrong_token_is_refused(service: Service, tmp_path: Path) -> None:
    one = host(tmp_path)
    sender = RunSender(
        one.run, service.sink(token="guess"), new_card(one.run, is_named=False, job=None, joins=False, host="a")
    )
    with pytest.raises(SinkRefusedError, match="token is not that of the collector"):
        sender.sync()
    assert list(service.store.iterdir()) == []
    assert service.notes == ["a sender at 127.0.0.1 has another token: refused"]


def test_a_full_collector_takes_the_rest_once_there_is_room(tmp_path: Path) -> None:
    service = Service(tmp_path / "store", max_bytes=300_000)
    try:
        one = host(tmp_path)
        sender = service.sender(one)
        one.write(1)
        sync(sender)
        one.write(2 * PART)
        with pytest.raises(SinkFullError, match=r"full: .* MiB are used \(dtprof collect --max-gb\)"):
            sync(sender)
        service.end()
        service._max_bytes = 0
        service.begin()
        one.end()
        sync(sender, is_last=True)
        assert differences(one.run, service.store / "job") == []
    finally:
        service.end()


HOSTILE_FILES = (
    "../../outside",
    "..%2F..%2Foutside/events.00000",
    "rank-00000.0/..%2F..%2F..%2Foutside",
    "rank-00000.0/%2e%2e",
    "rank-00000.0/events.00000%00.z",
    "rank-00000.0/.bashrc",
    "rank-00000.0/strings.jsonl%0a",
    "node-..%2Foutside/samples.jsonl",
    "%2Ftmp/samples.jsonl",
    "node-a/report.html",
    "rank-99999999999.0/strings.jsonl",
)
HOSTILE_RUNS = ("", ".", "..", "../x", "a/b", ".hidden", "x" * 300, "a\0b", "-o")


def test_hostile_names_write_nothing(service: Service, tmp_path: Path) -> None:
    card = {
        "launcher": "0" * 32,
        "name": "job",
        "is_named": True,
        "job": None,
        "joins": False,
        "host": "a",
        "format": 2,
    }
    assert service.ask("POST", "/v1/launchers", json.dumps(card).encode())[0] == 200
    before = sorted(path for path in tmp_path.rglob("*"))
    for name in HOSTILE_FILES:
        status, _ = service.ask("PATCH", f"/v1/launchers/{'0' * 32}/{name}?at=0", b"mine")
        assert status in (400, 404, 405), name
        assert sorted(path for path in tmp_path.rglob("*")) == before, name


def test_what_the_other_end_says_cannot_steer_a_terminal(service: Service, tmp_path: Path) -> None:
    card = {"launcher": "0" * 32, "name": "job", "is_named": True, "job": None, "joins": False, "format": 2}
    assert service.ask("POST", "/v1/launchers", json.dumps(card | {"host": "a\x1b[2J\nb"}).encode())[0] == 200
    assert service.notes == [r"a\x1b[2J\nb sends job"]

    class Hostile(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.dumps({"error": "\x1b[2J\nb"}).encode()
            self.send_response(400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Hostile) as hostile:
        thread = threading.Thread(target=hostile.serve_forever)
        thread.start()
        sink = HttpSink("127.0.0.1", hostile.server_port, token=TOKEN, context=None)
        with pytest.raises(SinkRefusedError) as refused:
            sink.open(new_card(host(tmp_path).run, is_named=False, job=None, joins=False, host="a"))
        sink.close()
        hostile.shutdown()
        thread.join()
    assert str(refused.value) == r"\x1b[2J\nb"


def test_hostile_names_of_runs_are_refused(service: Service) -> None:
    card = {"launcher": "0" * 32, "is_named": True, "job": None, "joins": False, "host": "a", "format": 2}
    for name in HOSTILE_RUNS:
        status, answer = service.ask("POST", "/v1/launchers", json.dumps(card | {"name": name}).encode())
        assert status == 400
        assert "no name for a run" in answer["error"]
    assert list(service.store.iterdir()) == []


def test_links_in_the_store_are_not_followed(service: Service, tmp_path: Path) -> None:
    one = host(tmp_path)
    sender = service.sender(one)
    one.write(10)
    sync(sender)
    outside = tmp_path / "outside"
    outside.write_text("keep me")
    strings = service.store / "job" / "rank-00000.0" / "strings.jsonl"
    strings.unlink()
    strings.symlink_to(outside)
    base = f"/v1/launchers/{sender._card.launcher}/rank-00000.0"
    assert service.ask("PATCH", f"{base}/strings.jsonl?at=0", b"{}\n")[0] == 507
    assert outside.read_text() == "keep me"


def _bad_bodies() -> dict[str, tuple[str, str, Callable[[], bytes], str]]:
    def piece(at: int, data: bytes) -> bytes:
        return zlib.compress(at.to_bytes(4, "little") + len(data).to_bytes(4, "little") + data)

    segment, archive_ = "events.00000", "events.00000.z?mtime=1"
    return {
        "cut archive": ("PUT", archive_, lambda: schema.MAGIC.ljust(4106, b"\0"), "cut before"),
        "no archive": ("PUT", archive_, lambda: b"x" * 9000, "another kind of file"),
        "outside": ("PATCH", segment, lambda: piece(schema.SEGMENT_SIZE - 4, b"12345678"), "outside a segment"),
        "cut piece": ("PATCH", segment, lambda: piece(4096, b"12345678")[:-6], "cut short"),
        "bomb": ("PATCH", segment, lambda: zlib.compress(bytes(64 << 20), 9), "more than 8 MiB"),
        "no header": ("PATCH", segment, lambda: piece(0, b"x" * 100), "does not begin as a segment"),
        "no zlib": ("PATCH", segment, lambda: b"plain", "damaged"),
        "long lines": ("PATCH", "strings.jsonl?at=0", lambda: b"x" * (3 << 20), "a body of more than"),
        "no place": ("PATCH", "strings.jsonl?at=-5", lambda: b"x", "expected a number"),
    }


def test_damaged_and_hostile_bodies_are_refused(service: Service, tmp_path: Path) -> None:
    one = host(tmp_path)
    sender = service.sender(one)
    one.write(5)
    sync(sender)
    folder = service.store / "job" / "rank-00000.0"
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    for kind, (method, name, body, words) in _bad_bodies().items():
        status, answer = service.ask(method, f"/v1/launchers/{sender._card.launcher}/rank-00000.0/{name}", body())
        assert status in (400, 413), kind
        assert words in answer["error"], kind
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before, kind


def test_a_body_that_was_cut_or_changed_on_the_way_is_not_taken(service: Service, tmp_path: Path) -> None:
    one = host(tmp_path)
    sender = service.sender(one)
    one.write(5)
    sync(sender)
    path = f"/v1/launchers/{sender._card.launcher}/rank-00000.0"
    kept = service.store / "job" / "rank-00000.0"
    before = (kept / "strings.jsonl").read_bytes()
    status, answer = service.ask("PATCH", f"{path}/strings.jsonl?at={len(before)}", b"{}\n", **{"X-Crc32": "0" * 8})
    assert status == 400
    assert "3 bytes were changed on the way (checksum" in answer["error"]
    base = f"/v1/launchers/{sender._card.launcher}"
    for method, url in (
        ("PUT", f"{base}/manifest"),
        ("POST", "/v1/launchers"),
    ):  # whole documents: one letter is another
        status, answer = service.ask(method, url, b'{"name": "another"}', **{"X-Crc32": "0" * 8})
        assert status == 400
        assert "changed on the way" in answer["error"]
    with socket.create_connection(("127.0.0.1", service.port)) as raw:  # gone in the middle of an archive
        head = f"PUT {path}/events.00009.z?mtime=1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        raw.sendall(f"{head}X-Crc32: 00000000\r\nContent-Length: 100000\r\n\r\n".encode() + b"x" * 5000)
    sync(sender)
    assert (kept / "strings.jsonl").read_bytes() == before
    assert not (kept / "events.00009.z").exists()


def test_the_job_goes_on_with_one_line_whatever_the_collector_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_sender, "EVERY_S", 0.01)
    monkeypatch.setattr(run_sender, "LONGEST_BACKOFF_S", 0.02)
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        one = host(tmp_path)
        one.write(10)
        said: list[str] = []
        tried = threading.Event()
        sender = RunSender(
            one.run,
            HttpSink("127.0.0.1", taken.getsockname()[1], token=TOKEN, context=None),
            new_card(one.run, is_named=False, job=None, joins=False, host="a"),
        )
        attempts: list[int] = []
        sync_once = sender.sync

        def counted(*, is_last: bool = False) -> None:
            attempts.append(1)
            if len(attempts) > 5:
                tried.set()
            sync_once(is_last=is_last)

        monkeypatch.setattr(sender, "sync", counted)
        thread = CollectThread(sender, run=one.run, say=said.append, target="there:1")
        assert tried.wait(60)
        thread.finish(one.run)
    assert len(said) == 2
    assert "cannot be reached" in said[0]
    assert "the job goes on" in said[0]
    assert f"dtprof collect --send {one.run}" in said[1]
    assert (one.run / paths.SENT).stat().st_mode & 0o777 == 0o600


def test_tails_come_seldomer_to_a_busy_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    from dtprof.launch.collector import collect_service

    clock = {"wall": 0.0, "work": 0.0}
    monkeypatch.setattr(collect_service.time, "monotonic", lambda: clock["wall"])
    monkeypatch.setattr(collect_service, "_wanted_s", lambda: clock["work"])
    load = collect_service.Load()
    assert load.poll() == 1.0
    for expected in (2.0, 4.0, 8.0):
        clock["wall"] += 2
        clock["work"] += 1.8
        assert load.poll() == expected
    clock["wall"] += 2
    assert load.poll() == pytest.approx(8 / 1.5)


def test_tls_is_checked_against_the_given_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate with")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", "/CN=collector", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    service = Service(tmp_path / "store", tls=(certificate, key))
    try:
        one = host(tmp_path)
        one.write(10)
        one.end()
        card = new_card(one.run, is_named=False, job=None, joins=False, host="a")
        monkeypatch.setenv("DTPROF_COLLECT_TOKEN", TOKEN)
        with pytest.raises(SinkError, match="certificate"):
            RunSender(one.run, collect_target.make_sink(f"https://127.0.0.1:{service.port}"), card).sync()
        monkeypatch.setenv("DTPROF_COLLECT_CA", str(certificate))
        sink = collect_target.make_sink(f"https://127.0.0.1:{service.port}")
        RunSender(one.run, sink, card).sync(is_last=True)
        sink.close()
        assert differences(one.run, service.store / "job") == []
    finally:
        service.end()


@pytest.mark.parametrize(
    ("target", "words"),
    [("host:port", "expected HOST:PORT"), ("", "expected HOST:PORT"), ("user:pw@host:1", "expected HOST:PORT")],
)
def test_a_target_that_is_none_is_one_sentence(target: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTPROF_COLLECT_TOKEN", TOKEN)
    with pytest.raises(UsageError, match=words) as error:
        collect_target.make_sink(target)
    assert "pw@" not in str(error.value)


def test_the_token_is_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    file.chmod(0o644)
    monkeypatch.setenv("DTPROF_COLLECT_TOKEN_FILE", str(file))
    with pytest.raises(UsageError, match="can be read by others; expected mode 600"):
        collect_target.read_token()
    file.chmod(0o600)
    assert collect_target.read_token() == "secret"
    monkeypatch.delenv("DTPROF_COLLECT_TOKEN_FILE")
    with pytest.raises(UsageError, match="needs the token"):
        collect_target.make_sink("collector:1")


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_run_is_sent_to_object_storage(scheme: str, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    url = f"{scheme}://{tmp_path}/bucket"
    hosts = [host(tmp_path, "a", range(1), 2), host(tmp_path, "b", range(1, 2), 2)]
    senders = [
        RunSender(
            one.run,
            collect_target.make_sink(url),
            new_card(one.run, is_named=False, job="J", joins=False, host=one.host),
        )
        for one in hosts
    ]
    for part in (10, 8 * PART, 8 * PART, 8 * PART):
        for one in hosts:
            one.write(part)
        sync(*senders)
    for one in hosts:
        one.end()
    sync(*senders, is_last=True)
    files, root = fsspec.core.url_to_fs(url)
    files.get(f"{root}/job", str(tmp_path / "fetched"), recursive=True)
    assert [differences(one.run, tmp_path / "fetched") for one in hosts] == [[], []]
    assert (tmp_path / "fetched" / "node-b" / "launcher-77.json").exists()
    other = ImitatedHost(tmp_path / "c" / "job", host="c", ranks=range(1), world_size=1)
    card = new_card(other.run, is_named=True, job="another", joins=False, host="c")
    with pytest.raises(SinkRefusedError, match="of another job"):
        RunSender(other.run, collect_target.make_sink(url), card).sync()
    files.rm(root, recursive=True)


@pytest.mark.parametrize("is_bucket", [False, True])
def test_a_hung_run_that_was_collected_has_the_verdict_that_it_has_on_its_host(
    service: Service, tmp_path: Path, is_bucket: bool
) -> None:
    unpack("runs/skipped", tmp_path)
    run, kept = tmp_path / "skipped", service.store / "skipped"
    node = paths.node_folders(run)[0]
    (node / paths.HOT_LINES).write_text("{}\n")
    card = new_card(run, is_named=False, job="J", joins=False, host="node-a")
    sink = collect_target.make_sink(f"file://{service.store}") if is_bucket else service.sink()
    sync(RunSender(run, sink, card), is_last=True)
    assert {file.name for file in node.iterdir()} == {file.name for file in (kept / node.name).iterdir()}
    assert diagnose_run(kept).findings == diagnose_run(run).findings != ()
    (kept / node.name / paths.PROGRAM).unlink()
    assert diagnose_run(kept).findings != diagnose_run(run).findings, "this verdict needs the program"


def test_an_imitated_record_has_a_value_of_its_own(tmp_path: Path) -> None:
    one = host(tmp_path)
    one.write(20 * PART)
    numel = records_of(one.run / paths.rank_folder_name(0, 0))["numel"]
    assert np.array_equal(numel, np.arange(20 * PART))
