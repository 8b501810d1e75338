"""The kernel's log tells which processes the OOM killer ended."""

from pathlib import Path

from dtprof.launch.kernel_log import count_host_oom_kills, list_oom_victims

LOG = """\
6,1,1000000,-;usb 1-1: new device
3,2,2000000,-;Out of memory: Killed process 71 (python) total-vm:9kB, anon-rss:3kB, file-rss:0kB, shmem-rss:1kB, UID:0
3,3,5000000,-;Memory cgroup out of memory: Killed process 72 (pt_main_thread) total-vm:9kB, anon-rss:8kB, file-rss:0kB
3,4,5000001,-;Out of memory: Kill process 73 (python3) score 900 or sacrifice child
garbage; Killed process
"""


def test_victims_since_a_time_are_listed_with_what_they_held(tmp_path: Path) -> None:
    (tmp_path / "kmsg").write_text(LOG)
    found = list_oom_victims(since_ns=0, log=tmp_path / "kmsg")
    assert [(one.pid, one.name, one.resident_bytes) for one in found] == [
        (71, "python", 4096),
        (72, "pt_main_thread", 8192),
        (73, "python3", 0),
    ]
    assert [victim.pid for victim in list_oom_victims(since_ns=3_000_000_000, log=tmp_path / "kmsg")] == [72, 73]
    assert list_oom_victims(since_ns=0, log=tmp_path / "none") == []


def test_kills_of_the_host_are_counted_where_the_kernel_counts_them(tmp_path: Path) -> None:
    counters = tmp_path / "vmstat"
    assert count_host_oom_kills(counters) == 0
    counters.write_text("pgfault 17\noom_kill 3\n")
    assert count_host_oom_kills(counters) == 3
    counters.write_text("oom_kill many\n")
    assert count_host_oom_kills(counters) == 0
