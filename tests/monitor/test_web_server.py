"""The server of the live pages: what it shows, to whom, and that it only reads."""

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn

from dtprof.monitor.web.web_server import Runs, is_loopback, listen, make_app
from dtprof.records import schema
from tests import builders
from tests.monitor.test_live_run import two_ranks
from tests.monitor.test_page_feed import feed_of
from tests.monitor.test_top_screen import running

HOSTILE = "<script>alert(1)<"


@contextmanager
def served(path: Path, token: str | None = None) -> Iterator[http.client.HTTPConnection]:
    """Serve in a thread; give a connection."""
    listening = listen("127.0.0.1", 0)
    runs = Runs(path, lambda run: feed_of(run, time.monotonic, time.thread_time))
    server = uvicorn.Server(uvicorn.Config(make_app(runs, token=token), log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    connection = http.client.HTTPConnection("127.0.0.1", listening.getsockname()[1], timeout=120)
    try:
        yield connection
    finally:
        connection.close()
        server.should_exit = True
        thread.join(60)
        listening.close()
        runs.close()
        assert not thread.is_alive()


def get(
    connection: http.client.HTTPConnection, path: str, method: str = "GET", **headers: str
) -> tuple[int, str, dict[str, str]]:
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), {name.lower(): value for name, value in answer.getheaders()}


def test_runs_of_a_folder_are_listed_and_shown(tmp_path: Path) -> None:
    builders.write_run(tmp_path / HOSTILE, two_ranks(4), exit_status=3)
    running(two_ranks(4), tmp_path / "goes-on")
    (tmp_path / "no-run").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with served(tmp_path) as connection:
        status, page, headers = get(connection, "/")
        assert status == 200
        assert "<td>crash, exit status 3<" in page
        assert "<td>running<" in page
        assert "no-run" not in page
        assert "<script>alert" not in page
        assert headers["x-frame-options"] == "DENY"
        status, page, _ = get(connection, "/run/goes-on/")
        assert status == 200
        assert "connect-src &#x27;self&#x27;" in page
        assert 'id="live"' in page
        status, page, _ = get(connection, "/run/%3Cscript%3Ealert%281%29%3C/")
        assert status == 200
        assert "<script>alert" not in page
        status, text, _ = get(connection, "/run/goes-on/documents?since=0")
        assert (status, "headline" in json.loads(text)["documents"]) == (200, True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_without_run_json_is_not_called_running(tmp_path: Path) -> None:
    lost = builders.write_run(tmp_path / "lost", two_ranks(4))
    (lost / "run.json").unlink()
    with served(tmp_path) as connection:
        _, page, _ = get(connection, "/")
        assert "running" not in page.partition("<main")[2]
        assert "<td>unknown" in page
        assert "run.json is missing: the command, the start and the exit status are not known; expected" in page
        _, text, _ = get(connection, "/run/lost/documents?since=0")
        state = json.loads(text)["status"]
        assert (state["state"], state["text"][:30]) == ("unknown", "cannot tell whether it goes on")


def test_runs_that_cannot_be_read_are_reported_as_what_they_are(tmp_path: Path) -> None:
    damaged = builders.write_run(tmp_path / "damaged", two_ranks(4))
    (damaged / "run.json").write_text("{not json")
    newer = builders.write_run(tmp_path / "newer", two_ranks(4))
    document = json.loads((newer / "run.json").read_text())
    (newer / "run.json").write_text(json.dumps(document | {"format_version": 999}))
    of_newer = (
        f"newer/run.json is of format 999; this dtprof reads formats up to {schema.FORMAT_VERSION}: read it with the "
        "dtprof that wrote it"
    )
    of_damaged = "damaged/run.json cannot be read (Expecting property name"
    with served(tmp_path) as connection:
        _, page, _ = get(connection, "/")
        assert "running" not in page.partition("<main")[2]
        assert page.count("<td>unknown") == 2
        assert of_newer in page
        assert of_damaged in page
        status, page, _ = get(connection, "/run/newer/")
        assert (status, of_newer in page) == (503, True)
        assert '<a href="../../">' in page
        status, text, _ = get(connection, "/run/newer/documents")
        assert (status, of_newer in text, text.startswith("/")) == (503, True, True)
        status, page, _ = get(connection, "/run/damaged/")
        assert (status, '<a href="../../">' in page) == (200, True)
        told = json.loads(get(connection, "/run/damaged/documents?since=0")[1])["status"]
        assert told["state"] == "unknown"
        assert told["text"].startswith("cannot tell whether it goes on, step 4")
        assert of_damaged in told["alarms"][0]
    with served(damaged) as connection:
        assert '<a href="../../">' not in get(connection, "/run/damaged/")[1]  # there is no list


@pytest.mark.parametrize(
    ("path", "method", "status", "words"),
    [
        ("/run/nowhere/", "GET", 404, "no run nowhere"),
        ("/run/..%2f..%2fetc/", "GET", 404, ""),
        ("/run/../", "GET", 404, ""),
        ("/run/no-run/documents", "GET", 404, "no run"),
        ("/run/one/documents?since=-1", "GET", 400, "since='-1': expected the number of a version"),
        ("/run/one/documents?since=" + "9" * 400, "GET", 400, "expected"),
        ("/", "POST", 405, "only GET and HEAD"),
        ("/run/one/", "DELETE", 405, "only GET and HEAD"),
        ("/run/one/events.00000", "GET", 404, ""),
    ],
)
def test_anything_else_is_refused(path: str, method: str, status: int, words: str, tmp_path: Path) -> None:
    builders.write_run(tmp_path / "one", two_ranks(2))
    (tmp_path / "no-run").mkdir()
    with served(tmp_path) as connection:
        found, text, _ = get(connection, path, method)
        assert (found, words in text) == (status, True)


def test_only_local_names_are_answered_on_loopback(tmp_path: Path) -> None:
    builders.write_run(tmp_path / "one", two_ranks(2))
    with served(tmp_path / "one") as connection:
        assert get(connection, "/", Host="rebound.example")[0] == 421
        for name in ("localhost:80", "127.0.0.1", "[::1]:8265", "[::1]"):
            status, _, headers = get(connection, "/", Host=name)
            assert (status, headers["location"]) == (307, "run/one/")


def test_elsewhere_a_token_is_needed(tmp_path: Path) -> None:
    builders.write_run(tmp_path / "one", two_ranks(2))
    with served(tmp_path, token="secret") as connection:
        assert get(connection, "/")[0] == 403
        assert get(connection, "/?token=wrong")[0] == 403
        assert get(connection, "/", Cookie="dtprof-token=wrong")[0] == 403
        status, _, headers = get(connection, "/?token=secret", Host="any.example")
        assert status == 307
        assert "token" not in headers["location"]
        cookie = headers["set-cookie"]
        assert "httponly" in cookie.lower()
        assert "samesite=strict" in cookie.lower()
        assert get(connection, "/", Cookie=cookie.split(";")[0], Host="any.example")[0] == 200


@pytest.mark.parametrize(
    ("host", "found"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)]
)
def test_loopback_is_distinguished_from_the_rest(host: str, found: bool) -> None:
    assert is_loopback(host) == found


def test_command_serves_until_ctrl_c(tmp_path: Path) -> None:
    run = running(two_ranks(3), tmp_path / "run")
    command = [sys.executable, "-m", "dtprof", "dashboard", str(run), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        connection = http.client.HTTPConnection(address.removeprefix("http://").rstrip("/"), timeout=120)
        assert get(connection, "/run/run/documents?since=0")[0] == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.wait()


def test_bad_arguments_are_sentences(tmp_path: Path) -> None:
    run = running(two_ranks(3), tmp_path / "run")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = [
            ([str(run), "--port", port], f"cannot listen on port {port} of 127.0.0.1 (Address already in use)"),
            ([str(run), "--port", "99999"], "expected a port from 0 to 65535"),
            ([str(run), "--port", "0", "--host", "300.1.1.1"], "cannot listen on port 0 of 300.1.1.1"),
            ([str(run), "--port", "0", "--dashboard", "nope"], "nope"),
            ([str(tmp_path / "nowhere")], "does not exist"),
        ]
        for arguments, words in cases:
            command = [sys.executable, "-m", "dtprof", "dashboard", *arguments]
            ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
            assert (ended.returncode, words in ended.stderr, "Traceback" in ended.stderr) == (2, True, False)
