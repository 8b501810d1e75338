"""The table of the files of a run."""

import pytest

from dtprof.records.run_files import FileKind, Place, is_written_by_dtprof, kind_of


@pytest.mark.parametrize(
    ("folder", "file", "kind"),
    [
        ("rank-00001.0", "events.00012", FileKind.SEGMENT),
        ("rank-00001.0", "events.00012.z", FileKind.ARCHIVE),
        ("rank-00001.0", "window-10-12.pt.trace.json.gz", FileKind.WHOLE),
        ("rank-00001.0", "memory-1.pickle", FileKind.WHOLE),
        ("node-a", "launcher-7.json", FileKind.WHOLE),
        ("node-a", "program.json.gz", FileKind.WHOLE),
        ("node-a", "hot-lines.jsonl", FileKind.LINES),
        ("rank-00001.0", "events.1", None),
        ("rank-00001.0", "trace-request.json", None),
        ("rank-00001.0", "exits.jsonl", None),
        ("node-a", ".stacks.json.77", None),
        ("other", "stacks.json", None),
    ],
)
def test_a_launcher_sends_the_files_of_the_table_alone(folder: str, file: str, kind: FileKind | None) -> None:
    assert kind_of(folder, file) is kind


@pytest.mark.parametrize("number", ["", ".77"])
@pytest.mark.parametrize(
    "name", ["run.json", "..verdict.json", ".told-0a1b", ".launcher", ".collect-" + "0" * 32 + ".json"]
)
def test_drafts_and_marks_are_ours_and_what_a_user_puts_there_is_not(name: str, number: str) -> None:
    is_draft = name.endswith(".json")
    assert is_written_by_dtprof(Place.RUN, name + number) is (is_draft or not number)
    assert not is_written_by_dtprof(Place.NODE, name + number) or name.startswith((".told", ".launcher", ".collect"))
    assert not is_written_by_dtprof(Place.RUN, f"my-{name}")
