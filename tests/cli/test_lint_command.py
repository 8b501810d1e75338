"""`dtprof lint` as it is typed."""

import json
from pathlib import Path

import pytest

from dtprof.cli.main import main
from tests import builders

SOURCE = """import torch.distributed as dist


def step(rank, x):
    if rank == 0:
        dist.all_reduce(x)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a file with one finding."""
    path = tmp_path / "train.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def write_run(folder: Path, file: Path, *, ranks_that_call: int) -> Path:
    ranks = [builders.RankBuilder(rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.op("barrier", 10, 20, nbytes=0)
    for rank in ranks[:ranks_that_call]:
        rank.op("all_reduce", 30, 40, nbytes=8, site=rank.site(file=str(file), line=6))
    return builders.write_run(folder, ranks)


def test_findings_are_printed_with_their_place_and_the_status_says_so(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lint", str(source)]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{source}:6:9: error: rank-dependent-collective\n")
    assert out.endswith("1 finding in 1 file\n")
    source.write_text("import torch\n", encoding="utf-8")
    assert main(["lint", str(source.parent)]) == 0
    assert capsys.readouterr().out == "nothing found in 1 file\n"
    assert main(["lint", str(source.with_name("none.py"))]) == 2
    assert capsys.readouterr().out.endswith("\nno file was read\n")


def test_a_run_raises_or_drops_findings(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agreed = write_run(tmp_path / "agreed", source, ranks_that_call=2)
    assert main(["lint", str(source), "--run", str(agreed), "--json"]) == 0
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["severity"], finding["run"]["verdict"]) == ("acquitted", "acquitted")
    assert finding["run"]["calls"] == {"0": 1, "1": 1}
    parted = write_run(tmp_path / "parted", source, ranks_that_call=1)
    assert main(["lint", str(source), "--run", str(parted), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    (finding,) = document["findings"]
    assert (finding["line"], finding["column"], finding["op"]) == (6, 9, "all_reduce")
    assert finding["condition"]["text"] == "rank == 0"
    assert finding["run"]["verdict"] == "confirmed"


def test_a_call_that_was_refused_confirms_nothing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [builders.RankBuilder(rank, world_size=2) for rank in range(2)]
    ranks[0].op(
        "all_reduce",
        10,
        11,
        nbytes=8,
        state="failed",
        waits=None,
        is_async=True,
        site=ranks[0].site(file=str(source), line=6),
    )
    for rank in ranks:
        rank.op("broadcast", 30, 40, nbytes=8, peer=0)
    run = builders.write_run(tmp_path / "refused", ranks)
    assert main(["lint", str(source), "--run", str(run), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["run"]["verdict"] == "not-run"


def test_what_cannot_be_read_is_status_2(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(source), str(tmp_path / "absent.py")]) == 2
    assert "absent.py cannot be read" in capsys.readouterr().out
    assert main(["lint", str(source), "--run", str(tmp_path / "absent")]) == 2
    assert "does not exist" in capsys.readouterr().err
