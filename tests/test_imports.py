"""Who may import whom, as `import_table.py` says, and what a command never loads."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import dtprof
from dtprof.cli.main import COMMANDS
from tests.import_table import FLOORS, PAGE, refresh, shown

REPOSITORY = Path(__file__).parents[1]
ENTRY = {"dtprof", "dtprof.__main__", "dtprof.auto"}
LOADED_IN_THE_JOB_BEFORE_ITS_TORCH = (
    "dtprof/capture/bootstrap/sitecustomize.py",
    "dtprof/capture/bootstrap/dtprof_start.py",
)
RUNS_UNDER_THE_JOBS_INTERPRETER = "dtprof/capture/native/build.py"


@dataclass(frozen=True, kw_only=True)
class Import:
    """One import statement's target."""

    file: str
    line: int
    module: str
    when_loaded: bool  # not inside a function
    for_types: bool  # under `if TYPE_CHECKING`


def source_files() -> list[Path]:
    """Return the Python files of the packages."""
    found = [path for package in ("dtprof", "reference_trainer") for path in (REPOSITORY / package).rglob("*.py")]
    assert len(found) > 60
    return sorted(found)


def module_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in source_files()}


def imports_of(path: Path) -> Iterator[Import]:
    """Yield every import of a file, wherever it stands."""
    file = str(path.relative_to(REPOSITORY))

    def visit(node: ast.AST, when_loaded: bool, for_types: bool) -> Iterator[Import]:
        def found(module: str) -> Import:
            return Import(file=file, line=node.lineno, module=module, when_loaded=when_loaded, for_types=for_types)  # type: ignore[attr-defined]

        if isinstance(node, ast.Import):
            yield from (found(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} imports relatively"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield found(inner if inner in MODULES else str(node.module))
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            guards_types = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            yield from visit(child, when_loaded and not is_function, for_types or guards_types)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), True, False)


def folder_of(module: str) -> str:
    """Return the floor that a module belongs to; of foreign modules the top-level package."""
    parts = module.split(".")
    if module in ENTRY:
        return "entry"
    if parts[0] != "dtprof":
        return parts[0]
    return parts[1] if (REPOSITORY / "dtprof" / parts[1]).is_dir() else "base"


def is_allowed(imported: Import) -> bool:
    source = folder_of(module_name(REPOSITORY / imported.file))
    target = folder_of(imported.module)
    if imported.module == "dtprof" and not imported.for_types:
        return True  # the version: nothing is loaded with it
    if target == source or target in sys.stdlib_module_names:
        return True
    floor = FLOORS[source]
    return target in floor.folders() if target in FLOORS else floor.packages is None or target in floor.packages


def test_every_folder_imports_only_what_stands_below_it() -> None:
    seen = [imported for path in source_files() for imported in imports_of(path)]
    forbidden = [
        f"{imported.file}:{imported.line} imports {imported.module}" for imported in seen if not is_allowed(imported)
    ]
    assert forbidden == []
    assert {folder_of(module) for module in MODULES} == set(FLOORS), "a new folder needs its floor"


def test_contributing_shows_what_each_folder_may_import() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert {*shown(page), "base", "entry"} >= set(FLOORS)
    assert page == refresh(page), "run: python -m tests.import_table"


def test_no_two_modules_share_a_name() -> None:
    names = [path.stem for path in source_files() if path.parts[-1] != "__init__.py" and "dtprof" in path.parts]
    names = [name for name in names if name != "__main__"]
    assert sorted(name for name, count in Counter(names).items() if count > 1) == []


def test_reference_trainer_uses_only_public_names() -> None:
    allowed = {f"dtprof.{name}" for name in getattr(dtprof, "__all__", ())} | {"dtprof"}
    for path in (REPOSITORY / "reference_trainer").rglob("*.py"):
        used = {one.module for one in imports_of(path) if one.module.split(".")[0] == "dtprof"}
        assert used <= allowed, path


@pytest.mark.parametrize("file", [*LOADED_IN_THE_JOB_BEFORE_ITS_TORCH, RUNS_UNDER_THE_JOBS_INTERPRETER])
def test_what_foreign_interpreters_load_imports_the_standard_library_only(file: str) -> None:
    loaded = [one.module for one in imports_of(REPOSITORY / file) if one.when_loaded]
    assert [name for name in loaded if name.split(".")[0] not in sys.stdlib_module_names] == []
    assert len(loaded) >= 4


def test_no_module_imports_itself_through_others() -> None:
    graph: dict[str, set[str]] = {}
    for path in source_files():
        targets = {one.module for one in imports_of(path) if not one.for_types}
        graph[module_name(path)] = (targets & MODULES) - {module_name(path)}
    # `dtprof demo` calls other commands as a user would, through the function that finds them.
    graph["dtprof.cli.demo"].discard("dtprof.cli.main")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def loaded_by(*arguments: str) -> set[str]:
    """Return the top-level modules that an interpreter has loaded after running these arguments."""
    program = (
        "import runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "try:\n"
        "    runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end:\n"
        "    assert end.code in (0, 1, None), end.code\n"
        "print('LOADED', *{name.split('.')[0] for name in sys.modules})\n"
    )
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=REPOSITORY)
    line = result.stdout.splitlines()[-1]
    assert line.startswith("LOADED "), result.stdout
    return set(line.split()[1:])


def test_importing_dtprof_loads_nothing_heavy() -> None:
    program = "import sys, dtprof; print(*{name.split('.')[0] for name in sys.modules})"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(result.stdout.split())
    assert "dtprof" in loaded
    assert loaded & {"torch", "plotly", "numpy", "psutil", "pynvml"} == set()


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_loads_nothing_heavy(command: str) -> None:
    loaded = loaded_by("dtprof", *filter(None, [command]), "--help")
    assert loaded & {"torch", "plotly", "numpy", "psutil", "pynvml"} == set()


@pytest.mark.parametrize("command", ["summary", "diagnose", "report"])
def test_analysing_commands_load_neither_torch_nor_plotly(command: str, tmp_path: Path) -> None:
    from tests import builders

    rank = builders.RankBuilder(0, world_size=1)
    rank.op("all_reduce", 10, 20, nbytes=8)
    run = builders.write_run(tmp_path / "run", [rank])
    loaded = loaded_by("dtprof", command, str(run))
    assert loaded & {"torch", "plotly"} == set()
    assert "numpy" in loaded


def test_public_names_can_be_imported() -> None:
    for name in getattr(dtprof, "__all__", ()):
        assert hasattr(dtprof, name), name
    assert len(getattr(dtprof, "__all__", ())) <= 15
