"""`dtprof collect --send`, and what commands say of a run that is collected while its job runs."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtprof.cli.main import main
from dtprof.launch.collector.run_sender import keep_state
from dtprof.records import paths
from dtprof.records.reader import open_run
from tests.imitated_host import ImitatedHost, differences
from tests.launch.test_collector import TOKEN, Service, sync


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A collector, whose token is known here."""
    monkeypatch.setenv("DTPROF_COLLECT_TOKEN", TOKEN)
    monkeypatch.setenv("DTPROF_CACHE_DIR", str(tmp_path / "cache"))
    served = Service(tmp_path / "store")
    yield served
    served.end()


def ended(folder: Path, name: str) -> ImitatedHost:
    """Return a host with a run that has ended."""
    one = ImitatedHost(folder / name, host=name, ranks=range(2), world_size=2)
    one.write(500)
    one.end()
    return one


def test_runs_that_a_host_has_kept_are_sent_once(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = [ended(tmp_path / "runs", name) for name in ("monday", "tuesday")]
    command = ["collect", "--send", str(tmp_path / "runs"), "--target", f"127.0.0.1:{service.port}"]
    assert main(command) == 0
    said = capsys.readouterr().err
    assert [f"{one.run} sent as {one.run.name}" in said for one in kept] == [True, True]
    assert [differences(one.run, service.store / one.run.name) for one in kept] == [[], []]
    assert main(command) == 0
    assert capsys.readouterr().err == "", "nothing is left to send"
    assert sorted(path.name for path in service.store.iterdir()) == ["monday", "tuesday"]
    for one in kept:
        assert (one.run / paths.SENT).stat().st_mode & 0o077 == 0


def test_what_a_killed_launcher_has_left_goes_to_the_run_that_it_had_begun(service: Service, tmp_path: Path) -> None:
    one = ImitatedHost(tmp_path / "runs" / "job", host="a", ranks=range(1), world_size=1)
    sender = service.sender(one)
    keep_state(one.run, sender, "there")  # as it does before the first byte
    one.write(300)
    sync(sender)
    one.write(300)
    one.end()
    assert main(["collect", "--send", str(one.run), "--target", f"127.0.0.1:{service.port}"]) == 0
    assert [path.name for path in service.store.iterdir()] == ["job"]
    assert differences(one.run, service.store / "job") == []


def test_a_wrong_token_a_missing_target_and_a_folder_without_runs_are_one_sentence_each(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ended(tmp_path / "runs", "job").run
    monkeypatch.setenv("DTPROF_COLLECT_TOKEN", "guessed")
    for arguments, status, words in (
        ([str(run), "--target", f"127.0.0.1:{service.port}"], 1, "the token is not that of the collector"),
        ([str(run)], 2, "--send needs to know where to"),
        ([str(tmp_path / "store"), "--target", "127.0.0.1:1"], 2, "holds no run"),
    ):
        assert main(["collect", "--send", *arguments]) == status
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1
    assert list(service.store.iterdir()) == []


def test_a_folder_that_may_not_be_written_to_is_refused_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)  # as of another user's; root may always
    assert main(["collect", "-o", str(tmp_path), "--listen", "127.0.0.1:0"]) == 2
    assert f"{tmp_path} cannot be written to (Permission denied); give a folder with -o" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_grows_at_the_collector_is_read_as_any_other(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = [
        ImitatedHost(tmp_path / h / "job", host=h, ranks=range(k, k + 1), world_size=2) for k, h in enumerate("ab")
    ]
    senders = [service.sender(host) for host in hosts]
    counts = []
    for _ in range(2):
        for host in hosts:
            host.write(400)
        sync(*senders)
        run = str(service.store / "job")
        assert main(["summary", run, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["schema"] >= 1
        counts.append([len(open_run(Path(run)).load(rank).operations) for rank in (0, 1)])
        assert main(["diagnose", run, "--json"]) in (0, 1)
        assert json.loads(capsys.readouterr().out)["ranks_seen"] == [0, 1]
        assert main(["runs", str(service.store), "--json"]) == 0
        (listed,) = json.loads(capsys.readouterr().out)["runs"]
        assert (listed["outcome"], listed["ranks"], listed["hosts"]) == ("running", 2, ["a", "b"])
        assert main(["export", run, "--format", "prometheus", "-o", str(tmp_path / "metrics"), "--force"]) == 0
        assert "dtprof_finished_info" in (tmp_path / "metrics").read_text()
        capsys.readouterr()
        assert main(["top", run, "--once"]) == 0
        assert "2 ranks" in capsys.readouterr().out
    assert counts == [[400, 400], [800, 800]]
