"""`dtprof check` as it is typed: what passes, what fails, what is not known, and what cannot be understood."""

import json
from pathlib import Path
from typing import Any

import pytest

from dtprof.cli.main import main
from tests.analysis.noisy_runs import build_ranks
from tests.builders import RankBuilder, write_run
from tests.synthetic import Job, generate

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "gate-in-ci.md"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of 12.2 ms a step, one like it, one 3 ms slower, one of four ranks, that without two of them, a crashed
    one, and an empty one.

    The first consumes 1,280 tokens and 20 samples a step: 105,000 and 1,640 a second.
    """
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "run", build_ranks(1, num_steps=60, tokens=640))
    write_run(folder / "alike", build_ranks(2, num_steps=60))
    write_run(folder / "slower", build_ranks(2, num_steps=60, delay_us=3_000.0))
    write_run(folder / "wider", build_ranks(2, num_ranks=4))
    write_run(folder / "lacking", build_ranks(2, num_ranks=4)[::2])
    crashed = build_ranks(3)
    crashed[1].exception(600_000_000)
    write_run(folder / "crashed", crashed, exit_status=1)
    write_run(folder / "stepless", [RankBuilder(0, world_size=1)])
    return folder


def check(runs: Path, name: str, *options: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = main(["check", str(runs / name), *options, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "figure", "outcome"),
    [
        (["--max-step-ms", "13"], "step_ns", "passed"),
        (["--max-step-ms", "12"], "step_ns", "failed"),
        (["--max-exposed", "25%"], "exposed_fraction", "passed"),  # 2.2 of 12.2 ms: 18 %
        (["--max-exposed", "0.1"], "exposed_fraction", "failed"),
        (["--max-wait", "5%"], "wait_fraction", "passed"),
        (["--max-wait", "0%"], "wait_fraction", "failed"),
        (["--max-peak-memory", "1280MiB"], "peak_bytes", "passed"),  # just so
        (["--max-peak-memory", "1.2GiB"], "peak_bytes", "failed"),
        (["--max-bubble", "25%"], "bubble_fraction", "unknown"),
        (["--min-tokens-per-s", "100000"], "tokens_per_s", "passed"),
        (["--min-tokens-per-s", "110000"], "tokens_per_s", "failed"),
        (["--min-samples-per-s", "1600.5"], "samples_per_s", "passed"),
        (["--no-risk"], "findings", "passed"),
    ],
)
def test_a_figure_is_held_against_its_limit(
    runs: Path, options: list[str], figure: str, outcome: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, document = check(runs, "run", *options, capsys=capsys)
    (result,) = document["limits"]
    assert (result["figure"], result["outcome"]) == (figure, outcome)
    assert status == (outcome != "passed")
    assert document["passed"] == (status == 0)
    assert (result["measured"] is None) == (outcome == "unknown")


def test_a_check_says_how_sure_it_is(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, document = check(runs, "run", "--max-step-ms", "12.19", capsys=capsys)
    (result,) = document["limits"]
    assert result["low"] < 12_190_000 < result["high"]
    assert 0.4 < result["sure"] < 0.9
    _, document = check(runs, "run", "--max-step-ms", "10", capsys=capsys)
    assert document["limits"][0]["sure"] > 0.999
    for least in ("90000", "120000"):
        _, document = check(runs, "run", "--min-tokens-per-s", least, capsys=capsys)
        assert document["limits"][0]["sure"] > 0.999


def test_a_figure_without_some_ranks_says_which_are_missing(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, document = check(runs, "lacking", "--max-step-ms", "13", capsys=capsys)
    assert document["limits"][0]["reason"] == "without ranks 1, 3, whose records are missing"
    _, document = check(runs, "wider", "--max-step-ms", "13", capsys=capsys)
    assert document["limits"][0]["reason"] is None


def test_an_exposed_share_that_may_be_bubble_fails_no_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Ranks 0 and 2 are one pipeline, 1 and 3 another, of which 3 left no log. Theory: 1 / 5 of a step is bubble.
    generate(tmp_path / "run", Job(dp=2, pp=2, steps=12, microbatches=4, lost=frozenset({3})))
    status, document = check(tmp_path, "run", "--max-exposed", "5%", "--max-wait", "5%", capsys=capsys)
    assert status == 1
    assert [one["outcome"] for one in document["limits"]] == ["unknown"] * 2
    assert "its bubble is not known, and counts as exposed wait" in document["limits"][0]["reason"]
    status, document = check(tmp_path, "run", "--max-exposed", "90%", capsys=capsys)
    assert (status, document["limits"][0]["outcome"]) == (0, "passed")
    assert "it contains the bubble, which is unknown; without rank 3" in document["limits"][0]["reason"]

    assert main(["summary", str(tmp_path / "run")]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    column = next(line for line in table if line[:2] == ["per", "step"]).index("bubble")
    shown = {" ".join(line[:2]): line[column] for line in table if line[0] == "rank"}
    assert shown.pop("rank 1") == "-"
    assert all(float(value) > 1 for value in shown.values())
    assert len(shown) == 2


def test_what_is_not_known_fails_unless_it_is_allowed_to(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(runs / "run"), "--max-bubble", "25%"]) == 1
    assert "unknown --max-bubble 25%: no pipeline" in " ".join(capsys.readouterr().out.split())
    assert main(["check", str(runs / "run"), "--max-bubble", "25%", "--allow-unknown"]) == 0
    assert capsys.readouterr().out.endswith("run: 1 unknown (allowed)\n")
    assert main(["check", str(runs / "alike"), "--min-tokens-per-s", "9"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "--min-tokens-per-s 9: no model was given token ids" in said
    assert "dtprof.step(tokens=N) says how many" in said
    shares = [item for name in ("exposed", "wait", "bubble") for item in (f"--max-{name}", "9%")]
    options = ("--max-step-ms", "9", "--min-tokens-per-s", "9", *shares)
    status, document = check(runs, "stepless", *options, "--max-peak-memory", "1GiB", capsys=capsys)
    assert status == 1
    assert {result["outcome"] for result in document["limits"]} == {"unknown"}
    assert document["limits"][0]["reason"].startswith("no step")
    assert document["limits"][-1]["reason"] == "memory was not sampled"


@pytest.mark.parametrize(
    ("name", "allowed", "outcome"),
    [
        ("slower", [], "failed"),
        ("slower", ["--max-slowdown", "10%"], "failed"),  # 3 of 12.2 ms: 25 %
        ("slower", ["--max-slowdown", "200%"], "passed"),
        ("alike", [], "passed"),
        ("wider", [], "unknown"),
        ("stepless", [], "unknown"),
    ],
)
def test_a_slowdown_fails_where_the_noise_leaves_no_doubt(
    runs: Path, name: str, allowed: list[str], outcome: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-slowdown-against", str(runs / "run"), *allowed]
    status, document = check(runs, name, *options, capsys=capsys)
    assert document["limits"][0]["outcome"] == outcome
    assert status == (outcome != "passed")
    if outcome == "passed":
        assert "would be detected" in document["limits"][0]["reason"]


def test_findings_fail_with_what_was_found(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(runs / "crashed"), "--no-risk"]) == 1
    assert "FAILED   --no-risk: rank-crashed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "no threshold was given"),
        (["--max-slowdown", "5%"], "without a baseline"),
        (["--max-step-ms", "fast"], "--max-step-ms is 'fast'; expected a number of milliseconds above 0"),
        (["--max-step-ms", "0"], "above 0"),
        (["--max-step-ms", "1e400"], "above 0"),
        (["--max-bubble", "25percent"], "expected a share from 0 to 100 %"),
        (["--max-wait", "101%"], "expected a share from 0 to 100 %"),
        (["--min-tokens-per-s", "25k"], "--min-tokens-per-s is '25k'; expected a number above 0"),
        (["--max-peak-memory", "8"], "expected a size above 0 with its unit"),
        (["--max-peak-memory", "8XB"], "expected a size above 0 with its unit"),
        (["--max-peak-memory", "1.2.3GiB"], "expected a size above 0 with its unit"),
        (["--max-slowdown-against", "nowhere"], "nowhere does not exist"),
        (["--max-slowdown-against", ".", "--max-slowdown", "-5%"], "expected a share of 0 % or more"),
    ],
)
def test_what_cannot_be_understood_ends_with_two(
    runs: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"{name}={value}" for name, value in zip(options[::2], options[1::2], strict=True)]
    assert main(["check", str(runs / "run"), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_the_page_on_gates_shows_what_is_printed(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    assert main(["check", "run", "--max-step-ms", "300", "--max-wait", "1%"]) == 1
    assert f"```text\n{capsys.readouterr().out}```" in PAGE.read_text(encoding="utf-8")
