"""Hooks into frameworks: laid at import, each for itself, and never in the way of the job."""

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dtprof import fence
from dtprof.capture.frameworks import imports
from dtprof.capture.frameworks.imports import after_import
from dtprof.records.reader import open_run
from tests import jobs


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the name of a package with a module `late` that can be imported, and one that cannot."""
    name = "package_of_this_test"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "late.py").write_text("VALUE = 1\nLOADER = __spec__.loader\n")
    (folder / "broken.py").write_text("raise RuntimeError('as written')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    for loaded in [key for key in sys.modules if key.startswith(name)]:
        del sys.modules[loaded]
    for waiting in [key for key in imports._finder.hooks if key.startswith(name)]:
        del imports._finder.hooks[waiting]


def test_a_hook_runs_once_after_the_module_was_executed(package: str) -> None:
    seen: list[Any] = []
    after_import(f"{package}.late", lambda module: seen.append(module.VALUE))
    assert seen == []
    importlib.import_module(f"{package}.late")
    importlib.reload(sys.modules[f"{package}.late"])
    assert seen == [1]


def test_a_hook_runs_at_once_where_the_module_is_there(package: str) -> None:
    late = importlib.import_module(f"{package}.late")
    seen: list[ModuleType] = []
    after_import(f"{package}.late", seen.append)
    assert seen == [late]


def test_a_module_looked_for_without_an_import_still_waits(package: str) -> None:
    seen: list[ModuleType] = []
    after_import(f"{package}.late", seen.append)
    assert importlib.util.find_spec(f"{package}.late") is not None
    assert seen == []
    importlib.import_module(f"{package}.late")
    assert len(seen) == 1


def test_the_module_keeps_its_own_loader(package: str) -> None:
    after_import(f"{package}.late", lambda _: None)
    late = importlib.import_module(f"{package}.late")
    assert type(late.LOADER).__name__ == "SourceFileLoader"
    assert late.__spec__ is not None
    assert late.__spec__.loader is late.__loader__ is late.LOADER


def test_an_error_of_the_module_is_the_jobs_own(package: str) -> None:
    after_import(f"{package}.broken", lambda _: None)
    with pytest.raises(RuntimeError, match="as written"):
        importlib.import_module(f"{package}.broken")


def test_a_module_that_does_not_exist_is_as_missing_as_before(package: str) -> None:
    after_import(f"{package}.missing", lambda _: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{package}.missing")


class Lines:
    """A recorder that keeps entries and labels."""

    def __init__(self) -> None:
        """Start with none."""
        self.entries: list[str] = []
        self.label = 0

    def write_entry(self, line: str) -> None:
        """Keep a line."""
        self.entries.append(line)

    def set_label(self, label: int) -> int:
        """Keep a label."""
        before, self.label = self.label, label
        return before


@pytest.fixture
def hooked() -> Any:
    """Return the Attribution of a process that records."""
    pytest.importorskip("torch")
    from dtprof.capture.frameworks.attribution import Attribution

    lines = Lines()
    attribution = Attribution(lambda _: lines)  # type: ignore[arg-type,return-value]
    return SimpleNamespace(attribution=attribution, lines=lines)


def framework() -> Any:
    """Return a class as a framework has it."""

    class Framework:
        def gather(self, value: int) -> int:
            """Return twice the value."""
            if value < 0:
                raise ValueError(value)
            return 2 * value

    return Framework


def describe(value: int) -> Any:
    from dtprof.records.sites import Label

    return Label("some", f"some gather of {value}")


def test_a_label_holds_during_the_call_and_no_longer(hooked: Any) -> None:
    owner, during = framework(), []
    hooked.attribution.replace(
        owner, "gather", lambda gather: lambda *given: (during.append(hooked.lines.label), gather(*given))[1]
    )
    hooked.attribution.around(owner, "gather", lambda _, value: hooked.attribution.begin(describe, value))
    hooked.lines.label = 7
    assert owner().gather(3) == 6
    assert hooked.lines.label == 7
    with pytest.raises(ValueError, match="-1"):
        owner().gather(-1)
    assert hooked.lines.label == 7
    assert during == [1, 2]
    declared = [json.loads(line) for line in hooked.lines.entries]
    assert [(entry["id"], entry["text"]) for entry in declared] == [(1, "some gather of 3"), (2, "some gather of -1")]


def test_what_goes_wrong_in_a_hook_does_not_reach_the_job(
    hooked: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fence, "_warned", {})
    monkeypatch.setattr(fence, "_shared", [])
    owner = framework()

    def begin(*_: Any) -> None:
        raise KeyError("dtprof's own")

    hooked.attribution.around(owner, "gather", begin)
    hooked.attribution.after(owner, "gather", begin)
    assert [owner().gather(value) for value in (1, 2)] == [2, 4]
    (line,) = capsys.readouterr().err.splitlines()
    assert line == 'dtprof: attribution to gather is not recorded in this process: KeyError: "dtprof\'s own"'


def test_a_function_that_torch_lacks_is_noted_and_the_others_are_hooked(hooked: Any) -> None:
    owner = framework()
    hooked.attribution.around(owner, "scatter", lambda *_: None)
    hooked.attribution.around(owner, "gather", lambda _, value: hooked.attribution.begin(describe, value))
    assert owner().gather(1) == 2
    (note,) = [line for line in hooked.lines.entries if '"note"' in line]
    assert "torch has no Framework.scatter: its operations carry no label" in note


def test_a_class_that_torch_lacks_is_noted(hooked: Any) -> None:
    hooked.attribution.after_import(
        "json", lambda module: hooked.attribution.around(module.Missing, "gather", lambda *_: None)
    )
    hooked.attribution.labels()
    (note,) = hooked.lines.entries
    assert "torch has no json.Missing" in note


@pytest.mark.jobs
def test_compiled_models_are_left_whole(tmp_path: Path) -> None:
    jobs.recorded(tmp_path / "run", [sys.executable, str(jobs.PROGRAMS / "compiled_tensor_parallel.py")])
    tables = open_run(tmp_path / "run").load(0)
    assert tables.notes == ()
    labels = {tables.sites[int(row["site"])].label for row in tables.operations}
    assert {label.text for label in labels if label is not None} >= {"tp distribution of parameters"}
