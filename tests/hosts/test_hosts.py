"""Jobs on hosts of their own: faults of a host are named with it, from what another host has collected."""

import socket
import warnings
from pathlib import Path

import pytest

from tests.hosts.collected_jobs import PROGRAMS, collected, is_training
from tests.hosts.launchers import Place, torchrun
from tests.hosts.machines import hosts, why_not
from tests.jobs import DTPROF

if why_not():
    warnings.warn(f"no test on several hosts runs: {why_not()}", stacklevel=1)
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def test_hosts_have_names_clocks_boots_and_files_of_their_own(tmp_path: Path) -> None:
    look = "hostname; cut -d. -f1 /proc/uptime; cat /proc/sys/kernel/random/boot_id; ls /tmp; ls /dev/shm; ls /proc"
    with hosts(tmp_path, ["a", "b"], clock_offsets_s=(5000, 90_000)) as (a, b):
        (b.folder / "of-b").touch()
        for host in (a, b):
            assert host.start(["sh", "-c", look], log="looked").wait(60) == 0
        seen = [host.said("looked").split() for host in (a, b)]
        ask = f"import socket; socket.create_connection(('a', 5000), 20).sendall(b'{b.address}')"
        listen = "import socket; s = socket.create_server(('', 5000)); print('up', flush=True); s.accept()"
        answering = a.start(["python3", "-c", f"{listen}; print('met')"], log="listens")
        while "up" not in a.said("listens"):
            assert answering.poll() is None
        assert b.start(["python3", "-c", ask], log="asks").wait(60) == 0
        assert answering.wait(60) == 0
    assert [own[0] for own in seen] == ["a", "b"]
    assert 84_000 < int(seen[1][1]) - int(seen[0][1]) < 86_000
    assert seen[0][2] != seen[1][2]
    assert "of-b" in seen[1]
    assert "of-b" not in seen[0]
    assert socket.gethostname() not in ("a", "b")


@pytest.mark.jobs
@pytest.mark.thorough
def test_a_host_that_is_cut_off_frozen_or_killed_is_named(tmp_path: Path) -> None:
    with collected(tmp_path) as job:
        job.wait_until(lambda: is_training(job))
        host = job.workers[1]
        for fault, mend in ((host.cut_link, host.mend_link), (host.freeze, host.thaw), (host.kill, None)):
            fault()
            finding, _ = job.wait_for("host-silent", "b")
            assert finding.waiting_ranks != finding.culprit_ranks
            if mend is not None:
                mend()
                job.wait_until_gone("host-silent")


@pytest.mark.jobs
@pytest.mark.thorough
def test_a_host_whose_cores_are_slow_is_named(tmp_path: Path) -> None:
    with collected(tmp_path) as job:
        job.wait_until(lambda: is_training(job))
        with job.workers[1].slowed(0.1):
            assert len(job.wait_for("slow-rank", "b")[0].culprit_ranks) == 1


@pytest.mark.jobs
@pytest.mark.thorough
def test_a_host_whose_link_is_slow_is_named(tmp_path: Path) -> None:
    with collected(tmp_path) as job:
        job.wait_until(lambda: is_training(job))
        with job.workers[1].link_slowed(2000):
            assert job.wait_for("slow-link", "b")[0].culprit_ranks == (1,)


@pytest.mark.jobs
@pytest.mark.thorough
def test_doctor_meets_and_measures_over_two_hosts(tmp_path: Path) -> None:
    doctor, program = (*DTPROF, "doctor", "--"), (str(PROGRAMS / "steady_training.py"),)
    place = Place(number=0, hosts=("a", "b"), num_ranks=1, record=doctor, program=program)
    command = torchrun(place)[0].command
    with hosts(tmp_path, ["a", "b"]) as made:
        started = [host.start(command, env={"GLOO_SOCKET_IFNAME": "eth0"}, log="doctor.log") for host in made]
        for process in started:
            assert process.wait(240) in (0, 1)
        said = [host.said("doctor.log") for host in made]
    assert "2 on 2 hosts" in said[0]
    assert "from rank to rank, gloo: GB/s" in said[0]
