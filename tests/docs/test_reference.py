"""The reference pages say what the code does: help texts, errors, kinds of findings, keys, the run on disk."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtprof import api, errors, settings
from dtprof.analysis import metric_registry
from dtprof.analysis.comparison import thresholds
from dtprof.analysis.comparison.comparison_series import TABLES, measure_run
from dtprof.analysis.comparison.run_comparison import VERDICTS, compare_runs
from dtprof.analysis.comparison.thresholds import Threshold, check_threshold
from dtprof.analysis.doctor import doctor_judgement
from dtprof.analysis.results import PARTS
from dtprof.cli import check
from dtprof.cli.main import COMMANDS
from dtprof.diagnosis.findings import Finding, Verdict
from dtprof.diagnosis.rules import KINDS, ORDER
from dtprof.launch import run_directory
from dtprof.records import paths, run_facts, schema_page
from dtprof.records.manifest import read_document
from dtprof.records.sites import Site
from dtprof.records.tables import Group
from dtprof.report.documents.check_json import check_json
from dtprof.report.documents.comparison_json import comparison_json
from dtprof.report.documents.summary_json import summary_json
from dtprof.report.documents.verdict_json import verdict_json
from tests.analysis.noisy_runs import noisy_run
from tests.docs import embedded_figures, embedded_help, embedded_programs, embedded_tables
from tests.docs.pages import REPOSITORY, load, slug_of
from tests.report.example_summaries import summary_of


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="later argparse prints help differently")
def test_help_texts_are_those_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", embedded_help.COLUMNS)
    page = load("docs/reference/cli.md").text
    assert set(embedded_help.shown_texts(page)) == {"dtprof", *COMMANDS}
    assert page == embedded_help.refresh(page), "run: python -m tests.docs.embedded_help"


def test_every_command_has_a_heading() -> None:
    assert [
        f"dtprof {name}" for name in COMMANDS if f"dtprof {name}" not in load("docs/reference/cli.md").headings()
    ] == []


def test_every_setting_is_listed_with_its_variable_and_default() -> None:
    rows = re.findall(r"^\|.*\|$", load("docs/reference/cli.md").text, re.MULTILINE)
    for setting in (*settings.RUN_SETTINGS, *settings.ANALYSIS_SETTINGS):
        (row,) = [row for row in rows if f"`{setting.option}`" in row]
        assert f"`{setting.env}`" in row
        assert setting.default in row


def test_every_error_has_a_heading() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    slugs = {value.slug for value in classes if issubclass(value, errors.DtprofError)}
    assert slugs - set(load("docs/reference/messages.md").headings()) == set()


# The functions that tell the user something in or beside a job, and at how many places with a text at least.
TELLING = {"fenced": 80, "say": 10, "warn_once": 6, "_say": 4}


def warnings_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the function and the longest plain part of every text that a file tells the user in or beside a job."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and node.args:
            name = ast.unparse(node.func).rpartition(".")[2]
            plain = [n.value for n in ast.walk(node.args[0]) if isinstance(n, ast.Constant)]
            texts = [value.strip(" \n:()") for value in plain if isinstance(value, str)]
            longest = max(texts, key=len, default="")
            if name in TELLING and len(longest) > 3:
                yield name, longest


def test_every_line_printed_in_or_beside_a_job_is_explained() -> None:
    page = load("docs/reference/messages.md").text
    files = [path for folder in ("capture", "launch", "cli") for path in (REPOSITORY / "dtprof" / folder).rglob("*.py")]
    warnings = [warning for path in files for warning in warnings_of(path)]
    places = Counter(name for name, _ in warnings)
    assert {name: places[name] for name, least in TELLING.items() if places[name] < least} == {}
    assert sorted({part for _, part in warnings if part not in page}) == []


def test_the_kinds_of_findings_are_those_of_the_rules() -> None:
    page = load("docs/reference/diagnose.md").prose
    kinds = page.partition("\n## Kinds\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^### (.+)$", kinds, re.MULTILINE)) == set(KINDS)


def test_the_kinds_that_doctor_finds_are_those_of_its_checks() -> None:
    page = load("docs/reference/doctor.md").prose
    kinds = page.partition("\n## Kinds\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^### (.+)$", kinds, re.MULTILINE)) == set(doctor_judgement.KINDS)
    checks = [p for p in (REPOSITORY / "dtprof/analysis/doctor").glob("*.py") if p.name != "doctor_judgement.py"]
    named = set(re.findall(r'"([a-z]+(?:-[a-z]+)*)"', "\n".join(path.read_text(encoding="utf-8") for path in checks)))
    assert set(doctor_judgement.KINDS) <= named
    given = {kind for path in checks for kind in re.findall(r'finding\(\s*"[a-z]+",\s*"([a-z-]+)"', path.read_text())}
    assert given <= set(doctor_judgement.KINDS)


def test_a_module_of_rules_or_sources_gives_no_kind_that_the_registry_lacks() -> None:
    diagnosis = REPOSITORY / "dtprof" / "diagnosis"
    texts = [path.read_text(encoding="utf-8") for path in diagnosis.rglob("*.py")]
    assert {kind for text in texts for kind in re.findall(r'kind="([a-z0-9]+(?:-[a-z0-9]+)+)"', text)} <= set(KINDS)


def test_every_module_of_rules_is_listed() -> None:
    folder = REPOSITORY / "dtprof" / "diagnosis" / "rules"
    assert sorted(ORDER) == sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")


def test_every_key_and_outcome_of_the_verdict_is_listed() -> None:
    site = Site(file="train.py", line=1, function="main")
    finding = Finding(
        kind="rank-crashed",
        summary="",
        culprit_ranks=(0,),
        grade=1.0,
        group=Group(name="0", description="default_pg", size=1, ranks=(0,)),
        call_sites={1: site},
        culprit_call_sites={0: site},
    )
    verdict = Verdict(outcome="crash", source=("run",), ranks_seen=(0, 1), ranks_missing=(), findings=(finding,))
    page = load("docs/reference/diagnose.md").text
    assert [key for key in keys_of(verdict_json(verdict)) if f"`{key}`" not in page] == []
    assert [outcome for outcome in run_facts.VERDICTS if f"`{outcome}`" not in page] == []


def test_every_figure_is_listed_as_declared_and_defined_under_its_heading() -> None:
    page = load("docs/reference/metrics.md")
    assert embedded_figures.shown(page.text) == list(metric_registry.KINDS)
    assert page.text == embedded_figures.refresh(page.text), "run: python -m tests.docs.embedded_figures"
    assert {metric.section for metric in metric_registry.METRICS} - set(page.headings()) == set()


def test_the_contents_of_the_metrics_page_list_every_section() -> None:
    page = load("docs/reference/metrics.md").text
    contents, _, body = page.partition("\n## ")
    sections = re.findall(r"^## (.*)$", f"## {body}", re.MULTILINE)
    assert len(sections) > 25
    assert [section for section in sections if f"[{section}](#{slug_of(section)})" not in contents] == []


def test_the_gallery_shows_programs_of_the_corpus_as_they_are() -> None:
    page = load("docs/reference/gallery.md").text
    assert len(embedded_programs.shown(page)) > 15
    assert page == embedded_programs.refresh(page), "run: python -m tests.docs.embedded_programs"


def test_every_key_of_the_summary_is_listed() -> None:
    page = load("docs/reference/summary-json.md").text
    assert [key for key in keys_of(summary_json(summary_of())) if f"`{key}`" not in page] == []


def test_every_key_verdict_and_figure_of_a_comparison_is_listed() -> None:
    run = measure_run(noisy_run(1, num_steps=10, tokens=640))
    document = comparison_json(compare_runs(run, run))
    page = load("docs/reference/cli.md").text.partition("\n## dtprof compare\n")[2].partition("\n## ")[0]
    names = {change.figure.name for change in compare_runs(run, run).changes} - {f"{part}_ns" for part in PARTS}
    assert len(names) > 5
    assert [word for word in (*keys_of(document), *VERDICTS, *names, *TABLES) if not is_listed(word, page)] == []


def test_every_key_figure_and_outcome_of_a_check_is_listed() -> None:
    judged = check_threshold(
        Threshold(option="--max-step-ms 1", figure="step_ns", bound=1.0), measure_run(noisy_run(1))
    )
    document = check_json("run", [judged], passed=False, allow_unknown=False)
    page = load("docs/reference/cli.md").text.partition("\n## dtprof check\n")[2].partition("\n## ")[0]
    words = {
        *keys_of(document),
        *thresholds.OUTCOMES,
        *(option.figure for option in check.OPTIONS),
        thresholds.SLOWDOWN,
        thresholds.FINDINGS,
    }
    assert sorted(word for word in words - {"schema"} if f"`{word}`" not in page) == []


def test_the_schemas_of_tables_are_those_of_the_api() -> None:
    page = load("docs/reference/python-api.md").text
    assert embedded_tables.shown(page) == [*api.RECORDS, *api.TRACES, *api.RESULTS]
    assert page == embedded_tables.refresh(page), "run: python -m tests.docs.embedded_tables"
    assert [name for name in api.FIGURES if f"`{name}`" not in page] == []


def is_listed(word: str, page: str) -> bool:
    return f"`{word}`" in page or f"`changes[].{word}`" in page


def keys_of(document: object) -> set[str]:
    """Return the keys of all objects in a JSON document but those that are ranks."""
    if isinstance(document, list):
        return {key for item in document for key in keys_of(item)}
    if not isinstance(document, dict):
        return set()
    own = {key for key in document if not key.isdecimal()}
    return own | {key for value in document.values() for key in keys_of(value)}


def test_page_of_the_run_on_disk_is_up_to_date() -> None:
    page = load("docs/reference/run_format.md").text
    assert page == schema_page.render(), "run: python -m dtprof.records.schema_page > docs/reference/run_format.md"


def test_every_key_of_the_manifest_is_listed(tmp_path: Path) -> None:
    page = load("docs/reference/run_format.md").text.partition("## run.json")[2].partition("\n## ")[0]
    run_directory.RunManifest(tmp_path, ["train"], {})
    keys = {*read_document(tmp_path / paths.MANIFEST), *run_directory.JobEndFields.__annotations__}
    assert len(keys) > 15
    assert [key for key in keys if f"`{key}`" not in page] == []
