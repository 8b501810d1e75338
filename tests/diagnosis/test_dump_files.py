"""Files that are no dumps, hostile ones, and dumps that do not belong together: a sentence, nothing executed."""

import json
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.torch_pickle import as_torch_pickles
from dtprof.cli.main import main
from dtprof.diagnosis.sources.flight_recorder.dump_files import read_dumps
from dtprof.diagnosis.sources.flight_recorder.dump_tables import ArgumentTable
from dtprof.diagnosis.sources.flight_recorder.dumped_ranks import gather_dumps
from dtprof.diagnosis.verdict import decide
from dtprof.errors import DtprofError, NotADumpError
from dtprof.job import parallel_reading
from dtprof.session.job_diagnosis import diagnose
from tests.diagnosis.dump_builder import BEGIN_NS, job, verdict_on, write


class Executes:
    """Pickled as a call."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(NotADumpError) as caught:
        verdict_on([path])
    return str(caught.value)


def test_pickle_that_wants_to_call_something_is_refused(tmp_path: Path) -> None:
    made = tmp_path / "made"
    hostile = pickle.dumps({"entries": [Executes(made)]}, protocol=2)
    text = refused(tmp_path / "dump_0", hostile)
    assert "wants to load" in text
    assert not made.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02}r\xff\xff\xff\x7f.",  # a memo of 2 G places
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",  # a bytearray of 1 TiB
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 20) + b".",
        b"\x80\x02X\xff\xff\xff\x7f.",
        b"\x80\x02" + b"]" * 2_000_000 + b"a" * 1_999_999 + b".",  # deep
        b"\x80\x02](" + b"]2" * 3_000_000 + b"e.",
        b"\x80\x02}q\x00K\x01b.",
        b"\x80\x02K\x00\x82\x01.",
        b"\x80\x02Pname\n.",
        b"\x80\x09.",
        b"\x80",
        b"[" * 100_000,
        b'{"entries": ' + b"[" * 100_000,
        b'{"entries": 9' + b"9" * 10_000 + b"}",
    ],
)
def test_hostile_content_is_refused_with_a_sentence(tmp_path: Path, content: bytes) -> None:
    text = refused(tmp_path / "dump_0", content)
    assert "xpected" in text
    assert str(tmp_path / "dump_0") in text


def test_dump_that_is_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    rank = job(1)[0].op("all_reduce", line=3).op("all_reduce", line=4)
    for content in (as_torch_pickles(rank.document()), json.dumps(rank.document()).encode()):
        for end in range(1, len(content), 7):
            refused(tmp_path / "dump_0", content[:end])


def test_pickle_of_something_else_says_what_it_holds(tmp_path: Path) -> None:
    assert "keys model, step" in refused(tmp_path / "state_0", pickle.dumps({"model": {}, "step": 3}, protocol=2))
    assert "a str" in refused(tmp_path / "state_0", pickle.dumps("text", protocol=2))


def test_unreadable_dump_is_neither_blamed_nor_fatal(tmp_path: Path) -> None:
    ranks = [rank.op("all_reduce").op("all_reduce", line=9, done=rank.rank == 2) for rank in job(4)]
    ranks[2].entries.pop()
    paths = write(tmp_path, ranks)
    paths[1].write_bytes(paths[1].read_bytes()[:200])
    verdict = verdict_on(paths)
    assert verdict.findings[0].culprit_ranks == (2,)
    assert any("nccl_trace_rank_1" in text for text in verdict.cannot_tell)
    assert 1 not in verdict.findings[0].waiting_ranks


def test_two_dumps_of_one_rank_are_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "attempt_0", job(2))
    second = write(tmp_path / "attempt_1", job(2))
    with pytest.raises(NotADumpError, match="both of rank 0"):
        verdict_on([*first, *second])


def test_dumps_of_jobs_of_different_size_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotADumpError, match="of a job of 2 ranks"):
        verdict_on([*write(tmp_path / "a", job(2)[:1]), *write(tmp_path / "b", job(4)[1:])])


def test_dump_of_an_earlier_attempt_is_skipped(tmp_path: Path) -> None:
    ranks = [rank.op("all_reduce").op("all_reduce", done=False) for rank in job(3)]
    ranks[1].entries.pop()
    for entry in ranks[2].entries:
        entry["time_created_ns"] -= 5 * 3600 * 10**9
    verdict = verdict_on(write(tmp_path, ranks))
    assert verdict.findings[0].culprit_ranks == (1,)
    assert any("earlier attempt" in text for text in verdict.cannot_tell)


def test_dump_that_ends_with_what_others_began_only_later_is_of_an_earlier_attempt(tmp_path: Path) -> None:
    ranks = [rank.op("all_reduce").op("all_reduce", done=False) for rank in job(3)]
    ranks[1].entries.pop()
    ranks[2].entries[1] |= {"state": "completed", "time_discovered_completed_ns": BEGIN_NS}
    ranks[2].op("all_reduce", done=False)
    alone = verdict_on(write(tmp_path / "one", ranks))
    assert alone.ranks_seen == (0, 1, 2)
    for entry in ranks[2].entries:  # ended #2 two minutes before rank 0 began it
        entry["time_created_ns"] -= 120 * 10**9
    verdict = verdict_on(write(tmp_path / "two", ranks))
    assert verdict.ranks_seen == (0, 1)
    assert verdict.findings[0].culprit_ranks == (1,)
    assert "the dump of rank 2 ends with collectives that others began only later" in verdict.cannot_tell[0]


def test_thin_evidence_says_who_waits_where_and_which_dumps_to_give(tmp_path: Path) -> None:
    paths = write(tmp_path, [rank.op("all_reduce", line=9, done=False) for rank in job(4)])
    paths[0].write_bytes(paths[0].read_bytes()[:-20])
    verdict = verdict_on(paths[:2])
    assert verdict.outcome == "unknown"
    wait, damage, *_ = verdict.cannot_tell
    assert "rank 1 waits in all_reduce #1 of the default group at /home/user/train.py:9" in wait
    assert "give the dumps of ranks 0, 2, 3 too" in wait
    assert "nccl_trace_rank_0 is no Flight Recorder dump" in damage


def test_rank_is_recognised_by_the_groups_where_the_name_does_not(tmp_path: Path) -> None:
    ranks = job(4, a=[2, 3], b=[1, 3])
    write(tmp_path, ranks)
    renamed = (tmp_path / "nccl_trace_rank_3").rename(tmp_path / "dump")
    dumps, _, _ = read_dumps([renamed], ArgumentTable())
    assert [dump.rank for dump in dumps] == [3]
    with pytest.raises(NotADumpError, match="does not name its rank"):
        read_dumps([(tmp_path / "nccl_trace_rank_0").rename(tmp_path / "other")], ArgumentTable())


@pytest.mark.parametrize("version", ["1.0", "2.0", "2.11", "9.4", None, 7])
def test_versions_are_read_for_what_they_hold(tmp_path: Path, version: object) -> None:
    document = job(2)[0].op("all_reduce", done=False).document() | {"version": version, "new": {"a": [1]}}
    (tmp_path / "dump_0").write_bytes(pickle.dumps(document, protocol=4))
    verdict = verdict_on([tmp_path / "dump_0"])
    assert verdict.ranks_missing == (1,)
    newer = [text for text in verdict.cannot_tell if "newer than any known here (2.x)" in text]
    assert len(newer) == (version in ("9.4", 7))


def test_first_version_was_a_list_with_other_names(tmp_path: Path) -> None:
    entries = [{"profiling_name": "nccl:all_reduce", "seq_id": i, "pg_id": 0, "state": "completed"} for i in (1, 2)]
    for rank in range(2):
        entries[1]["state"] = "scheduled" if rank == 0 else "completed"
        (tmp_path / f"dump_{rank}").write_bytes(pickle.dumps(entries[: 2 - rank], protocol=2))
    (finding,) = verdict_on([tmp_path / "dump_0", tmp_path / "dump_1"]).findings
    assert finding.culprit_ranks == (1,)


def test_entry_without_a_position_or_a_group_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "dump_0").write_bytes(pickle.dumps({"entries": [{"profiling_name": "nccl:all_reduce"}]}, protocol=2))
    assert verdict_on([tmp_path / "dump_0"]).ranks_seen == (0,)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
ENTRY_KEYS = sorted(job(1)[0].op("all_reduce").entries[0])


@settings(max_examples=150)
@given(
    entries=st.lists(PLAIN | st.dictionaries(st.sampled_from(ENTRY_KEYS), PLAIN, max_size=12), max_size=4),
    config=PLAIN,
    status=PLAIN,
)
def test_any_plain_content_gives_a_verdict_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, entries: object, config: object, status: object
) -> None:
    sound = job(2)[0].op("all_reduce", line=1, done=False).op("send 0->1", done=False)
    document = sound.document()
    document["entries"] += entries
    document |= {"pg_config": config or document["pg_config"], "pg_status": status}
    path = tmp_path_factory.mktemp("fuzz") / "dump_0"
    path.write_bytes(pickle.dumps(document, protocol=2))
    labels = ArgumentTable()
    try:
        decide(gather_dumps(*read_dumps([path], labels), labels))
    except NotADumpError as error:
        assert str(path) in str(error)  # noqa: PT017


def test_command_reads_a_directory_and_ends_with_1_or_0_or_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [rank.op("all_reduce", line=4) for rank in job(2)]
    assert write(tmp_path / "sound", ranks)
    assert main(["diagnose", str(tmp_path / "sound")]) == 0
    ranks[0].op("all_reduce", line=5, done=False)
    paths = write(tmp_path / "hung", ranks)
    assert main(["diagnose", *map(str, paths), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out.partition("\n")[2])
    assert shown["source"] == ["flight_recorder"]
    assert shown["findings"][0]["culprit_ranks"] == [1]
    (tmp_path / "bad_0").write_bytes(b"\x80\x02}q")
    assert main(["diagnose", str(tmp_path / "bad_0")]) == 2
    assert "is no Flight Recorder dump" in capsys.readouterr().err
    assert main(["diagnose", str(tmp_path / "nowhere")]) == 2


def test_kind_is_recognised_by_content_and_sources_are_joined(tmp_path: Path) -> None:
    ranks = [rank.op("all_reduce").op("all_reduce", line=9, done=False) for rank in job(2)]
    ranks[1].entries.pop()
    write(tmp_path, ranks)
    (tmp_path / "output.log").write_text("[rank0]: step 1 loss 2.3\n[rank1]: step 1 loss 2.3\n")
    verdict = diagnose([tmp_path])
    assert verdict.source == ("flight_recorder", "log")
    assert verdict.findings[0].culprit_ranks == (1,)


def test_diagnosing_dumps_loads_no_torch(tmp_path: Path) -> None:
    paths = write(tmp_path, [rank.op("all_reduce") for rank in job(2)])
    program = (
        "import sys; from pathlib import Path; from dtprof.session.job_diagnosis import diagnose; "
        "diagnose(map(Path, sys.argv[1:])); print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *map(str, paths)], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "False"


def test_errors_are_of_one_tree() -> None:
    assert issubclass(NotADumpError, DtprofError)
    assert NotADumpError.exit_status == 2


def test_several_processes_read_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [rank.op("all_reduce", line=3 + rank.rank % 2) for rank in job(20)]
    for rank in ranks:
        rank.op("all_reduce", line=9, done=False, dtype="Half" if rank.rank == 17 else "Float")
    paths = write(tmp_path, ranks)
    paths[4].write_bytes(b"\x80\x02}")
    alone = verdict_on(paths)
    monkeypatch.setattr(parallel_reading, "MIN_BYTES", 0)
    monkeypatch.setattr(parallel_reading.os, "sched_getaffinity", lambda _: {0, 1})
    assert verdict_on(paths) == alone
    assert alone.findings[0].culprit_ranks == (17,)
