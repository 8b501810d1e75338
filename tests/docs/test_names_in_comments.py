"""Comments and docstrings name files and modules that are there, and parameters under one heading."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("dtprof", "reference_trainer")
BESIDE = ("tests", "benchmarks", ".ci")
SCRIPTS = re.compile(r"(?<![\w*{}<>-])[.\w/]*\w+\.py\b")
MODULES = re.compile(r"`([a-z_]+(?:\.[a-z_]+)+)`")
OTHERS = {"setup.py", "train.py"}
"""Scripts of users, and of other packages."""


def comments_of(path: Path) -> Iterator[str]:
    """Give the comments, docstrings and strings below constants of a file; every line of a script of a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield text
        return
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    yield from (token.string for token in tokens if token.type == tokenize.COMMENT)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def test_files_and_modules_that_comments_name_exist() -> None:
    sources = [path for folder in PACKAGES for path in (REPOSITORY / folder).rglob("*.py")]
    scripts = [path for folder in (*PACKAGES, *BESIDE) for path in (REPOSITORY / folder).rglob("*.py")]
    known = {"/".join(path.parts[i:]) for path in scripts for i in range(len(REPOSITORY.parts), len(path.parts))}
    rooms = {path.name for path in (REPOSITORY / "dtprof").iterdir() if path.is_dir()}
    missing = []
    for path in (*sources, *(REPOSITORY / "dashboards").rglob("*.js")):
        for comment in comments_of(path):
            missing += [(path.name, name) for name in SCRIPTS.findall(comment) if name not in known | OTHERS]
            for module in MODULES.findall(comment):
                place = REPOSITORY / "dtprof" / Path(*module.split("."))
                if module.split(".")[0] in rooms and not (place.is_dir() or place.with_suffix(".py").is_file()):
                    missing.append((path.name, module))
    assert missing == []


def test_docstrings_list_parameters_under_one_heading() -> None:
    files = [path for folder in (*PACKAGES, *BESIDE) for path in (REPOSITORY / folder).rglob("*.py")]
    assert [path.name for path in files if re.search(r"^\s+Args:$", path.read_text("utf-8"), re.MULTILINE)] == []
