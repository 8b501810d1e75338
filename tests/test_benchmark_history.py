"""Benchmarks: their kept results, and what became slower beyond noise on one machine; their help."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import benchmarks
from benchmarks import history
from benchmarks.__main__ import ALL, main
from benchmarks.pairs import run_alone


def results(seed: int, slower: float = 1.0, count: int = 12, machine: str = "a processor, 2 cores") -> history.Results:
    noise = random.Random(seed)
    figures = {
        "summary: processor time [s]": [slower * noise.gauss(2.0, 0.05) for _ in range(count)],
        "export: processor time [s]": [noise.gauss(1.0, 0.05) for _ in range(count)],
    }
    return history.Results(
        commit=f"{seed}" * 40, machine=machine, python="3.11.7", date="2026-11-25T00:00:00Z", load=0.2, figures=figures
    )


def test_what_became_slower_beyond_noise_is_named_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = (str(history.save(tmp_path, kept)) for kept in (results(1), results(2, slower=1.2)))
    assert main(["--compare", before, after]) == 1
    summary, export = capsys.readouterr().out.splitlines()
    assert summary.startswith("summary: processor time [s]: slower by ")
    assert export.startswith("export: processor time [s]: no change beyond noise")
    assert main(["--compare", after, before]) == 0
    assert "faster by" in capsys.readouterr().out


def test_few_values_and_figures_of_one_side_are_not_judged() -> None:
    few, many = results(1, count=5), results(2)
    del few.figures["export: processor time [s]"]
    assert history.compare(few, many) == [
        "summary: processor time [s]: not judged, 5 values; 8 are needed",
        "export: processor time [s]: only measured after",
    ]


def test_other_machines_and_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = str(history.save(tmp_path, results(1)))
    after = str(history.save(tmp_path, results(2, machine="another, 8 cores")))
    assert main(["--compare", before, after]) == 2
    assert "expected one machine" in capsys.readouterr().err
    (tmp_path / "run.json").write_text('{"schema": 1}')
    assert main(["--compare", before, str(tmp_path / "run.json")]) == 2
    assert "expected a file that --record wrote" in capsys.readouterr().err
    history.save(tmp_path, newer := replace(results(3), schema=2))
    assert main(["--compare", before, str(tmp_path / f"2026-11-25T000000Z-{newer.commit[:12]}.json")]) == 2
    assert "schema 2; expected 1" in capsys.readouterr().err


def test_kept_values_are_those_that_a_benchmark_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import pairs

    monkeypatch.setattr(history, "_measured", {})
    pairs.show("summary", "processor time [s]", [1.0, 2.0, 3.0])
    pairs.report("step", pairs.Comparison(unit="ms", a=(1.0, 2.0), b=(2.0, 3.0)), a="bare", b="recorded")
    assert "2.00 (1.00 to 3.00)" in capsys.readouterr().out
    kept = history.this_state()
    assert kept.figures == {"summary: processor time [s]": [1.0, 2.0, 3.0], "step: recorded over bare [ms]": [2.0, 1.5]}
    assert len(kept.commit) >= 7


def test_the_help_of_a_benchmark_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []
    for word, status in (("--help", 0), ("--hlep", 2)):
        monkeypatch.setattr(sys, "argv", ["benchmarks/startup.py", word])
        with pytest.raises(SystemExit) as ended:
            run_alone(lambda: measured.append("all"), "How long a command takes.")
        assert ended.value.code == status
    assert not measured
    assert "usage: python -m benchmarks.startup [-h]\n\nHow long a command takes." in capsys.readouterr().out


@pytest.mark.parametrize("name", ALL)
def test_each_benchmark_runs_alone_with_help(name: str) -> None:
    source = (Path(benchmarks.__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    assert source.rstrip().endswith("run_alone(main, __doc__)")
