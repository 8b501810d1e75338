"""Carriers, files, attempts, sizes and junk: what stands around the lines that matter."""

import gzip
import resource
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtprof.diagnosis.sources.logs import log_grammar
from dtprof.diagnosis.sources.logs.line_prefixes import parse_line, rank_of_file
from dtprof.diagnosis.sources.logs.log_files import looks_like_a_log
from dtprof.diagnosis.sources.logs.log_reader import read_logs
from dtprof.errors import NotARunError
from dtprof.records.run_facts import VERDICTS
from dtprof.report.documents.verdict_json import verdict_json
from dtprof.report.text.verdict_text import verdict_text
from dtprof.session.job_diagnosis import diagnose_logs
from tests.diagnosis import log_texts as texts
from tests.diagnosis.log_texts import Diagnose

CRASH = texts.traceback("ValueError: bad shard", line=61, source="check(shard)")


def test_carriers_are_taken_off_from_the_outside_in() -> None:
    cases = {
        "[rank3]: Traceback": ("Traceback", 3, None),
        "[rank12]:[E1121 10:00:00.1 x.cpp:1] y": ("[E1121 10:00:00.1 x.cpp:1] y", 12, None),
        "[default2]:[rank10]: x": ("x", 10, 2),
        "3: [default1]:x": ("x", None, None),
        " 7: x": ("x", None, 7),
        "(RayTrainWorker[rank=9] pid=4, ip=10.0.0.1) x": ("x", 9, None),
        "(RayTrainWorker pid=4) [rank2]: x": ("x", 2, None),
        "[1,5]<stderr>:x": ("x", 5, None),
        "[5]<stdout>:x": ("x", 5, None),
        "2026-11-21T10:00:00.123456789Z stderr F [rank1]: x": ("x", 1, None),
        "[pod/job-worker-1/pytorch] [rank4]: x": ("x", 4, None),
        "worker-1: [rank4]: x": ("x", 4, None),
        "trainer_1  | [rank4]: x": ("x", 4, None),
        '{"log":"[rank2]: x\\n","stream":"stderr","time":"2026-11-21T10:00:00Z"}': ("x", 2, None),
        "\x1b[31m[rank0]:\x1b[0m x": ("x", 0, None),
        "step 3: loss 0.1": ("step 3: loss 0.1", None, None),
    }
    for raw, (text, rank, task) in cases.items():
        line = parse_line(raw, file_key="f", file_rank=None)
        assert (line.text.strip(), line.rank, line.task) == (text, rank, task), raw


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("logs/rank_3.log", 3),
        ("logs/rank3/stderr.log", 3),
        ("log_dir/none_x/attempt_0/5/stderr.log", 5),
        ("job-global_rank=11.txt", 11),
        ("frank2.log", None),
        ("train.log", None),
    ],
)
def test_name_of_a_file_may_tell_the_rank(name: str, rank: int | None) -> None:
    assert rank_of_file(name) == rank


@pytest.mark.parametrize(
    "prefix",
    ["{r}: ", "[default{r}]:", "(RayTrainWorker[rank={r}] pid=9{r}, ip=10.0.0.1) ", "[1,{r}]<stderr>:", "[rank{r}]: "],
)
def test_interleaved_tracebacks_are_distinguished_by_their_carrier(diagnose_texts: Diagnose, prefix: str) -> None:
    own = CRASH.split("\n")
    lost = texts.traceback(texts.GLOO_LOST, line=90, source="dist.barrier()", call="barrier").split("\n")
    own += [""] * (len(lost) - len(own))
    mixed = "\n".join(prefix.format(r=2) + a + "\n" + prefix.format(r=0) + b for a, b in zip(own, lost, strict=True))
    (finding,) = diagnose_texts(mixed).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-crashed", (2,))
    assert finding.culprit_call_sites[2].line == 61


def test_one_file_for_each_rank(tmp_path: Path) -> None:
    late = texts.traceback(texts.GLOO_LATE, line=90, source="dist.all_reduce(t)", call="all_reduce")
    for rank, content in enumerate([late, "step 1\nstep 2\n", late]):
        folder = tmp_path / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(content)
    (finding,) = diagnose_logs([tmp_path]).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-skipped-collective", (1,))


def test_healthy_log_has_no_finding(diagnose_texts: Diagnose) -> None:
    healthy = """\
Setting OMP_NUM_THREADS environment variable for each process to be 1 in default
[W socket.cpp:601] [c10d] The client socket cannot be initialized to connect to [localhost]:29500 (errno: 97).
INFO: Waiting in store based barrier to initialize process group for rank: 0, key: store_key:1 (world_size=4)
node1:12:34 [0] NCCL INFO comm 0x1 rank 0 nranks 4 - Init COMPLETE
[rank0]:[W1121 10:00:00.1 ProcessGroupNCCL.cpp:4000] Warning: no device given to barrier(). This may hang.
memory.events oom_kill 0
UserWarning: ErrorHandler is deprecated. SIGTERM handler installed. timeout=600
Epoch 1: 100%|##########| 100/100 [00:10<00:00, 9.9it/s] loss=0.1 error=0.02
[rank0]:[W1121 10:00:09.1 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been destroyed before exit.
"""
    verdict = diagnose_texts(healthy)
    assert (verdict.outcome, verdict.findings) == ("unknown", ())


@pytest.mark.parametrize(
    ("lines", "size"),
    [
        (["[rank0]: init world_size=4", "[rank1]: init world_size=4", "[rank2]: init world_size=4000"], 4),
        (["[rank0]: dp_world_size=2, world_size=4", "[rank1]: dp_world_size=2", "[rank1]: local_world_size: 2"], 4),
        (["[rank0]: init world_size=4", "[rank6]: step 1 loss 2.3"], 7),
        (["python train.py --local_rank=3 exits with return code = 1"], 4),
    ],
)
def test_one_odd_line_neither_adds_nor_hides_ranks(tmp_path: Path, lines: list[str], size: int) -> None:
    (tmp_path / "job.log").write_text("\n".join(lines) + "\n")
    (job,) = read_logs([tmp_path / "job.log"])
    assert job.world_size == size


def test_empty_log_is_unknown(diagnose_texts: Diagnose) -> None:
    assert diagnose_texts("").outcome == "unknown"


def test_binary_junk_around_is_skipped_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "mixed.log"
    path.write_bytes(bytes(range(256)) * 50 + b"\n" + texts.watchdog(0).encode() + b"\n\xff\xfe\0" * 9)
    verdict = diagnose_logs([path])
    assert verdict.outcome == "hang"
    assert any("no text" in reason for reason in verdict.cannot_tell)
    assert not looks_like_a_log(path)


def test_compressed_log_is_read_and_a_torn_one_reported(tmp_path: Path) -> None:
    whole = gzip.compress(("\n".join(texts.watchdog(r) for r in (0, 1, 3)) + "\n").encode() * 50)
    (tmp_path / "a.gz").write_bytes(whole)
    assert diagnose_logs([tmp_path / "a.gz"]).findings[0].culprit_ranks == (2,)
    (tmp_path / "a.gz").write_bytes(whole[:-20])
    assert any("cut off" in reason for reason in diagnose_logs([tmp_path / "a.gz"]).cannot_tell)


def test_damaged_archive_and_missing_file_are_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(b"no archive")
    for path in (tmp_path / "a.gz", tmp_path / "none.log"):
        with pytest.raises(NotARunError, match="cannot read"):
            diagnose_logs([path])
    with pytest.raises(NotARunError, match="no log"):
        diagnose_logs([])


def test_folded_lines_of_ray_are_reported(diagnose_texts: Diagnose) -> None:
    text = f"(W[rank=0] pid=1) {texts.watchdog(0)} [repeated 15x across cluster]"
    assert any("RAY_DEDUP_LOGS" in reason for reason in diagnose_texts(text).cannot_tell)


def test_long_log_takes_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "long.log"
    quiet = b"[rank1]: step 12345 loss 0.12345 tokens/s 123456\n" * 20_000
    with path.open("wb") as file:
        for _ in range(60):
            file.write(quiet)
        file.write(b"x" * 5_000_000 + b"\n")
        file.write("\n".join(texts.watchdog(r) for r in (0, 1, 3)).encode())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert diagnose_logs([path]).findings[0].culprit_ranks == (2,)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 40_000
    assert path.stat().st_size > 60_000_000


def test_ranks_and_sizes_that_no_job_has_take_no_memory(diagnose_texts: Diagnose) -> None:
    gather = texts.watchdog(1, op="_ALLGATHER_BASE").replace("NumelOut=1024", f"NumelOut={1024 * 5_000_000}")
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for damaged in (texts.watchdog(9_999_999), gather):
        verdict = diagnose_texts(damaged)
        assert all(len(finding.culprit_ranks) < 1000 for finding in verdict.findings)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 50_000


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("0,2-4", [0, 2, 3, 4]),
        ("1, 2", [1, 2]),
        ("0-99999999", []),  # no such job: neither 0 nor the last digit is a rank
        ("0-9999999,7", [7]),
        ("0-1-2,5", [5]),
        ("123456789", []),
    ],
)
def test_only_whole_numbers_and_ranges_within_a_job_name_ranks(text: str, named: list[int]) -> None:
    assert list(log_grammar.numbers(text)) == named


def test_many_ranges_together_name_no_more_ranks_than_one_may() -> None:
    ranges = ",".join(f"{n}00000-{n}99999" for n in range(1, 9))
    assert log_grammar.numbers(ranges) == tuple(range(100_000, 200_000))


PIECES = [
    *(CRASH, texts.GLOO_LATE, texts.GLOO_LOST, texts.table({0: 1, 1: -9}, first=0), texts.watchdog(1)),
    *(texts.older_watchdog(2), texts.status(texts.STATUS_26, 1), texts.status(texts.DUMP, 3, enqueued=-1, done=-1)),
    texts.mismatch(texts.fingerprint(0), texts.fingerprint(1, seq=2**63)),
    texts.traceback(texts.GLOO_LATE, line=1, source="dist.send(x, ((((1", call="send", prefix="[rank1]: "),
    *("Worker group FAILED. 2/3 attempts left; will restart worker group", "srun: error: n: tasks 0-99999999: Killed"),
    *("[rank9999999]: x", "  rank      : 3 (local_rank: 1)", "-- Process 1 terminated with the following error:"),
    *("Ranks 1, 2 failed to pass monitoredBarrier", '{"log": 3}', '{"log":"x","rank":true}', "\r", "\x1b[", "\0"),
    *(
        "op.preamble.length <= op.nbytes. 8 vs 4",
        "The above exception was the direct cause of the following",
        "WorkNCCL(",
    ),
]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(PIECES), st.integers(0, 400), st.integers(0, 400), st.text(max_size=12)), max_size=12
    )
)
def test_no_order_or_damage_of_sentences_breaks_the_reader(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[str, int, int, str]]
) -> None:
    damaged = "\n".join(piece[:cut] + junk + piece[min(cut, skip) :] for piece, cut, skip, junk in parts)
    path = tmp_path_factory.getbasetemp() / "fuzzed.log"
    path.write_bytes(damaged.encode("utf-8", "surrogatepass"))
    check(path)


def test_separators_of_records_in_a_message_break_no_line_of_the_verdict(tmp_path: Path) -> None:
    path = tmp_path / "separators.log"
    path.write_text("RuntimeError: [." + 80 * "\x1e" + "].\n{}\n")
    check(path)


@settings(max_examples=40)
@given(st.binary(max_size=600))
def test_no_bytes_break_the_reader(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.log"
    path.write_bytes(content + b"\nTraceback (most recent call last):\n" + content)
    check(path)


def check(path: Path) -> None:
    """Diagnose, and hold the verdict against its contract."""
    verdict = diagnose_logs([path])
    assert verdict.outcome in VERDICTS
    assert verdict.outcome != "unknown" or verdict.cannot_tell
    assert len(verdict_text(verdict).splitlines()) < 25
    assert verdict_json(verdict)["source"] == ["log"]
    for finding in verdict.findings:
        assert not set(finding.culprit_ranks) & set(finding.waiting_ranks)
        assert 0 < finding.confidence < 1
        assert finding.culprit_ranks or finding.confidence < 0.95
