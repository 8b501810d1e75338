"""Files cut anywhere and files with wrong bytes: the run opens, says a sentence, and gives what is whole."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtprof.errors import DtprofError
from dtprof.records import paths, schema
from dtprof.records.reader import open_run
from tests.builders import RankBuilder, write_run
from tests.records.segments import fill_up, record, write_rank

NUM_RECORDS = 4
USED = schema.HEADER_SIZE + NUM_RECORDS * schema.RECORD_SIZE
FUZZ = settings(max_examples=300)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a run of one rank that holds one of everything; tests copy what they damage."""
    folder = tmp_path_factory.mktemp("template")
    rank = RankBuilder(0, world_size=2)
    rank.threads = {1: "MainThread"}
    rank.sizes = {1: ((1, 3), (2, 2))}
    rank.span("backward", 5, 30)
    rank.op("all_reduce", 40, 80, nbytes=64, dtype="float32", api="all_reduce")
    rank.op("send", 90, peer=1)
    rank.sample("rss_bytes", 100, 5)
    rank.exception(130)
    return write_run(folder / "run", [rank])


@pytest.mark.parametrize("begin", range(0, USED + 1, 512))
def test_segment_cut_at_any_byte_gives_the_whole_records_before_the_cut(tmp_path: Path, begin: int) -> None:
    segment = write_rank(tmp_path, [record(issued_ns=i) for i in range(NUM_RECORDS)])
    whole = segment.read_bytes()
    assert len(whole) == USED
    for cut in range(begin, min(begin + 512, USED + 1)):
        segment.write_bytes(whole[:cut])
        tables = open_run(tmp_path).load(0)
        expected = max(0, cut - schema.HEADER_SIZE) // schema.RECORD_SIZE
        assert tables.operations["issued_ns"].tolist() == list(range(expected)), cut
        assert tables.problems[0].startswith(f"rank-00000.0/events.00000 is cut after {cut} "), cut
        if cut >= schema.HEADER_STRUCT.size:
            assert len(tables.problems) == 1
            assert (tables.world_size, tables.host) == (1, "host-a")


def test_strings_cut_at_any_byte_give_the_whole_lines_before_the_cut(tmp_path: Path, template: Path) -> None:
    whole = (template / "rank-00000.0" / paths.STRINGS).read_bytes()
    segment = write_rank(tmp_path, [record()])
    fill_up(segment)
    all_names = [row["name"] for row in map(json.loads, whole.splitlines()) if row["k"] == "op"]
    assert len(all_names) == 4
    for cut in range(len(whole) + 1):
        segment.with_name(paths.STRINGS).write_bytes(whole[:cut])
        tables = open_run(tmp_path).load(0)
        rows = [json.loads(line) for line in whole[: whole.rfind(b"\n", 0, cut) + 1].splitlines()]
        assert list(tables.raw_ops) == [row["name"] for row in rows if row["k"] == "op"]
        assert len(tables.exceptions) == sum(row["k"] == "exception" for row in rows)
        assert tables.problems == ()  # a line cut short by a kill is the last thing a rank did


@pytest.mark.parametrize("name", [paths.MANIFEST, f"node-host-a/{paths.EXITS}"])
def test_file_of_the_launcher_cut_at_any_byte_leaves_the_ranks(tmp_path: Path, template: Path, name: str) -> None:
    whole = (template / paths.MANIFEST).read_bytes() if name == paths.MANIFEST else b'{"pid":1,"status":0,"t_ns":5}\n'
    fill_up(write_rank(tmp_path, [record()]))
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    for cut in range(len(whole) + 1):
        file.write_bytes(whole[:cut])
        run = open_run(tmp_path)
        assert run.load(0).num_events == 1
        assert all(isinstance(sentence, str) for sentence in run.problems)


OVERWRITES = st.lists(st.tuples(st.integers(0, USED - 1), st.binary(min_size=1, max_size=9)), min_size=1, max_size=8)


def overwritten(data: bytes, places: list[tuple[int, bytes]]) -> bytes:
    damaged = bytearray(data)
    for at, new in places:
        at %= len(data)
        damaged[at : at + len(new)] = new
    return bytes(damaged)


def read_everything(run: Path) -> None:
    """Read all that can be read; only errors of dtprof's own may leave this."""
    try:
        opened = open_run(run)
        for tables in opened.load_all():
            assert len(tables.operations) + len(tables.spans) + len(tables.samples) == tables.num_events
            assert all("\n" not in sentence for sentence in (*opened.problems, *tables.problems))
    except DtprofError:
        return


@given(OVERWRITES)
@FUZZ
def test_wrong_bytes_in_a_segment_never_surprise_the_reader(
    tmp_path: Path, template: Path, places: list[tuple[int, bytes]]
) -> None:
    segment = write_rank(tmp_path, [])
    whole = (template / "rank-00000.0" / "events.00000").read_bytes()[:USED]
    segment.write_bytes(overwritten(whole, places))
    read_everything(tmp_path)


@given(OVERWRITES)
@FUZZ
def test_wrong_bytes_in_the_records_never_surprise_the_reader(
    tmp_path: Path, template: Path, places: list[tuple[int, bytes]]
) -> None:
    segment = write_rank(tmp_path, [])
    whole = (template / "rank-00000.0" / "events.00000").read_bytes()
    body = overwritten(whole[schema.HEADER_SIZE : USED], places)
    segment.write_bytes(whole[: schema.HEADER_SIZE] + body)
    read_everything(tmp_path)


JSON_BYTES = st.sampled_from(
    [b'"', b"{", b"}", b"[", b"]", b"-1", b"1e999", b"null", b"\n", b"NaN", b"\xff", b"\\u", b":", b"0"]
)
TEXT_OVERWRITES = st.lists(
    st.tuples(st.integers(0, 5000), JSON_BYTES | st.binary(min_size=1, max_size=4)), min_size=1, max_size=8
)


@given(TEXT_OVERWRITES)
@FUZZ
def test_wrong_bytes_in_the_strings_never_surprise_the_reader(
    tmp_path: Path, template: Path, places: list[tuple[int, bytes]]
) -> None:
    segment = write_rank(tmp_path, [record()])
    fill_up(segment)
    whole = (template / "rank-00000.0" / paths.STRINGS).read_bytes()
    segment.with_name(paths.STRINGS).write_bytes(overwritten(whole, places))
    read_everything(tmp_path)


@given(TEXT_OVERWRITES, st.sampled_from([paths.MANIFEST, paths.EXITS, paths.PROCESSES, paths.STACKS]))
@FUZZ
def test_wrong_bytes_in_files_of_the_launcher_never_surprise_the_reader(
    tmp_path: Path, template: Path, places: list[tuple[int, bytes]], name: str
) -> None:
    fill_up(write_rank(tmp_path, [record()]))
    node = tmp_path / "node-a"
    node.mkdir(exist_ok=True)
    whole = (template / paths.MANIFEST).read_bytes()
    if name == paths.MANIFEST:
        (tmp_path / name).write_bytes(overwritten(whole, places))
    elif name == paths.STACKS:
        (node / name).write_bytes(overwritten(b'{"t_ns": 5, "processes": {"12": {"state": "running"}}}', places))
    else:
        (node / name).write_bytes(overwritten(b'{"pid":12,"status":-9,"t_ns":5}\n' * 3, places))
    read_everything(tmp_path)


IMPOSSIBLE_ENTRIES = [
    {"k": "op", "id": -3, "name": "x"},
    {"k": "op", "id": 10**9, "name": "x"},
    {"k": "op", "id": 1e999, "name": "x"},
    {"k": "op", "id": None, "name": "x"},
    {"k": "op"},
    {"k": "site", "id": 1, "file": "a", "line": "x", "function": "f"},
    {"k": "site", "id": 1e999, "file": "a", "line": 1, "function": "f"},
    {"k": "group", "id": 1, "name": "g", "ranks": 5},
    {"k": "group", "id": 1, "name": "g", "ranks": [1e999]},
    {"k": "sizes", "id": 1, "inputs": [None], "outputs": []},
    {"k": "exception", "frame": {"file": "a"}},
]


@pytest.mark.parametrize("entry", IMPOSSIBLE_ENTRIES, ids=lambda entry: json.dumps(entry)[:50])
def test_impossible_entry_is_counted_and_skipped(tmp_path: Path, entry: dict[str, object]) -> None:
    segment = write_rank(tmp_path, [record()])
    fill_up(segment)
    lines = [json.dumps(entry), '{"k":"op","id":0,"name":"barrier"}']
    segment.with_name(paths.STRINGS).write_text("\n".join(lines) + "\n")
    tables = open_run(tmp_path).load(0)
    assert tables.ops == ("barrier",)
    assert tables.problems == ("rank-00000.0/strings.jsonl holds 1 entries that cannot be understood, left out",)


def test_times_beyond_what_can_be_are_not_known_and_not_a_warning(tmp_path: Path) -> None:
    names = ("returned_after", "waited_from", "waited_for", "done_after")
    values = (3e38, float("nan"), float("inf"), -5.0)
    records = [record(issued_ns=5, waits=1, **dict.fromkeys(names, value)) for value in values]
    fill_up(write_rank(tmp_path, records))
    tables = open_run(tmp_path).load(0)
    for name in ("returned_ns", "wait_begin_ns", "done_ns"):
        assert tables.operations[name].tolist() == [-1] * 4, name
    assert tables.operations["wait_ns"].tolist() == [0] * 4


def test_groups_beyond_the_last_number_are_not_taken_for_one_another(tmp_path: Path) -> None:
    rank = RankBuilder(0, world_size=2)
    rank.op("all_reduce", 1_000, 2_000)
    folder = write_run(tmp_path / "run", [rank]) / "rank-00000.0"
    with (folder / "strings.jsonl").open("a", encoding="utf-8") as file:
        for name in ("one", "another"):
            file.write(json.dumps({"k": "group", "id": 65_535, "name": name, "size": 2, "ranks": [0, 1]}) + "\n")
    tables = open_run(tmp_path / "run").load(0)
    assert 65_535 not in tables.groups
    assert any("more than 65,535 groups" in problem for problem in tables.problems)
