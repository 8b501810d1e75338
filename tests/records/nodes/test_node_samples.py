"""The samples of a node on disk: bounded, thinned where they are old, read whatever happened to them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtprof.records import paths
from dtprof.records.nodes import node_reader, node_samples
from dtprof.records.nodes.node_reader import memory_shares, newest_resident, rate, read_node_samples
from dtprof.records.nodes.node_samples import HOST, Sample, SampleFile, thin

SECOND = 1_000_000_000


def sample(t_s: int, *, busy_s: float = 0.0, pid: int = 7) -> Sample:
    """Return a sample with two cores, one GPU and one process, whose other values are 1."""
    host = [1.0 if field.name != "cpu_busy_s" else busy_s for field in HOST]
    gpu: list[float | None] = [0.5] + [None] * (len(node_samples.GPU) - 1)
    return Sample(
        t_ns=t_s * SECOND,
        host=host,
        cores=[busy_s / 2, busy_s / 2],
        gpus={0: gpu},
        processes={pid: [1.0] * len(node_samples.PROCESS)},
    )


@pytest.fixture
def node(tmp_path: Path) -> Path:
    folder = tmp_path / "node-host-a"
    folder.mkdir()
    return folder


def test_what_is_written_is_read(node: Path) -> None:
    file = SampleFile(node, {"boot_id": "b", "no_gpus_reason": None})
    file.append(sample(1, busy_s=10.0))
    file.append(sample(3, busy_s=13.0))
    (samples,) = read_node_samples(node.parent).values()
    assert (samples.node, samples.boot_id, samples.problems) == ("host-a", "b", ())
    assert samples.host["t_ns"].tolist() == [SECOND, 3 * SECOND]
    assert rate(samples.host, "cpu_busy_s").tolist() == [1.5]  # 3 s in 2 s
    assert [core["busy_s"].tolist() for core in samples.cores] == [[5.0, 6.5], [5.0, 6.5]]
    assert samples.gpus[0]["utilisation"].tolist() == [0.5, 0.5]
    assert np.isnan(samples.gpus[0]["power_w"]).all()
    assert samples.processes[7]["rss_bytes"].tolist() == [1.0, 1.0]


def test_memory_of_processes_is_that_of_their_last_sample_alive(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SampleFile(node, {"boot_id": "b"})
    rest = [None] * (len(node_samples.PROCESS) - 1)
    for t_s in range(100):
        held = {7: 1000 + t_s, 8: 2000 + t_s if t_s < 60 else 0}  # 8 ended then, and nobody has waited for it yet
        held |= {9: 3000} if t_s < 20 else {}
        processes = {pid: [float(nbytes), *rest] for pid, nbytes in held.items()}
        file.append(replace(sample(t_s), processes=processes))
    assert newest_resident(node.parent) == {("b", 7): 1099, ("b", 8): 2059, ("b", 9): 3000}
    (written,) = node.iterdir()
    newest = len(written.read_bytes()) // 2  # of lines of one length: the newest half of them
    monkeypatch.setattr(node_reader, "NEWEST_BYTES", newest)
    assert newest_resident(node.parent) == {("b", 7): 1099, ("b", 8): 2059}
    written.write_bytes(written.read_bytes()[:-40] + b"?")
    assert newest_resident(node.parent)["b", 7] == 1098, "the line that was cut is left out"


def test_of_a_node_without_samples_nothing_is_reported(tmp_path: Path) -> None:
    (tmp_path / "node-host-a").mkdir()
    assert newest_resident(tmp_path) == {}
    (tmp_path / "node-host-a" / paths.SAMPLES).write_bytes(b"")
    assert newest_resident(tmp_path) == {}


def test_file_stays_within_its_bound_and_keeps_totals_and_the_newest(node: Path) -> None:
    file = SampleFile(node, {"boot_id": "b"}, max_bytes=20_000)
    for t_s in range(2000):
        file.append(sample(t_s, busy_s=float(t_s)))
        assert (node / paths.SAMPLES).stat().st_size < 21_000
    (samples,) = read_node_samples(node.parent).values()
    seconds = (samples.host["t_ns"] // SECOND).tolist()
    assert (seconds[0], seconds[-20:]) == (0, list(range(1980, 2000)))
    gaps = np.diff(seconds)
    eighth = len(gaps) // 8
    assert gaps[:eighth].mean() > 2 * gaps[eighth : 2 * eighth].mean(), "the older, the sparser"
    assert (gaps[len(gaps) // 2 :] == 1).all()
    assert rate(samples.host, "cpu_busy_s") == pytest.approx(1.0), "a total is right across what was left out"
    assert samples.boot_id == "b", "descriptions are never left out"


@given(st.lists(st.booleans(), max_size=40))
def test_thinning_keeps_descriptions_the_first_sample_and_the_newer_half(kinds: list[bool]) -> None:
    lines = [(b'{"t":%d}\n' if is_sample else b'{"format":%d}\n') % n for n, is_sample in enumerate(kinds)]
    kept = thin(lines)
    half = len(lines) // 2
    assert kept[len(kept) - (len(lines) - half) :] == lines[half:]
    assert [line for line in lines if b"format" in line] == [line for line in kept if b"format" in line]
    older = [line for line in lines[:half] if line.startswith(b'{"t":')]
    assert [line for line in kept if line in older] == older[::2]


def test_damaged_lines_are_counted_and_a_cut_one_is_nothing_to_speak_of(node: Path) -> None:
    file = SampleFile(node, {"boot_id": "b"})
    file.append(sample(1))
    path = node / paths.SAMPLES
    good = path.read_bytes()
    bad = [b"rubbish", b"[]", b"7", b'{"t":"x"}', b'{"t":1,"host":["a"],"cores":[],"gpus":{},"processes":{}}']
    bad.append(b'{"t":1,"host":[1],"cores":[],"gpus":{"x":[]},"processes":{}}')
    path.write_bytes(good + b"\n".join(bad) + b"\n" + good.splitlines()[1][:40])
    (samples,) = read_node_samples(node.parent).values()
    assert len(samples.host) == 1
    assert samples.problems == ("node-host-a/samples.jsonl holds 6 damaged lines, left out",)


def test_values_of_another_version_of_dtprof_are_taken_as_far_as_they_are_known(node: Path) -> None:
    entry = {"t": 5, "host": [3.0], "cores": [], "gpus": {}, "processes": {"9": [1.0] * 50}}
    (node / paths.SAMPLES).write_text(json.dumps({"format": 1}) + "\n" + json.dumps(entry) + "\n")
    (samples,) = read_node_samples(node.parent).values()
    assert samples.host["cpu_busy_s"].tolist() == [3.0]
    assert np.isnan(samples.host["load"]).all()
    assert len(samples.processes[9]) == 1


def test_run_without_samples_has_none(tmp_path: Path) -> None:
    assert read_node_samples(tmp_path) == {}


def test_every_value_has_a_name_of_its_own_and_a_unit_that_its_name_carries() -> None:
    for fields in node_samples.TABLES.values():
        names = [field.name for field in fields]
        assert len(set(names)) == len(names)
        for field in fields:
            if field.unit in ("s", "bytes"):
                assert field.name.endswith(f"_{field.unit}")


def test_of_many_samples_some_at_even_distances_are_read_with_the_first_and_the_newest(node: Path) -> None:
    file = SampleFile(node, {"boot_id": "b", "no_gpus_reason": "none"})
    for t_s in range(3000):
        file.append(sample(t_s, busy_s=float(t_s)))
    (samples,) = read_node_samples(node.parent, max_samples=50).values()
    seconds = (samples.host["t_ns"] // SECOND).tolist()
    assert (samples.boot_id, samples.no_gpus_reason, samples.problems) == ("b", "none", ())
    assert 45 <= len(seconds) <= 50
    assert (seconds[0] < 5, seconds[-1] > 2900) == (True, True)
    assert np.diff(seconds).max() <= 2 * np.diff(seconds).min()
    assert rate(samples.host, "cpu_busy_s") == pytest.approx(1.0)  # totals survive


def test_the_share_of_memory_is_that_of_the_host_or_of_the_limit_which_is_fuller(node: Path) -> None:
    file = SampleFile(node, {"boot_id": "b", "memory_bytes": 1000, "cgroup_limit_bytes": 100})
    used = {
        "memory_used_bytes": (500.0, 900.0),
        "cgroup_memory_bytes": (80.0, 90.0),
        "cgroup_reclaimable_bytes": (10.0, 80.0),
    }
    names = [field.name for field in node_samples.HOST]
    for t_s in (1, 2):
        host = list(sample(t_s).host)
        for name, values in used.items():
            host[names.index(name)] = values[t_s - 1]
        file.append(replace(sample(t_s), host=host))
    times, shares = memory_shares(node.parent)["b"]
    assert times.tolist() == [SECOND, 2 * SECOND]
    assert shares.tolist() == [0.7, 0.9]
