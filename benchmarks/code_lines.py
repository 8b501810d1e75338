"""Count code lines by folder: those with a token that is no comment and no docstring.

python -m benchmarks.code_lines [FOLDER...]      # default: dtprof reference_trainer
"""

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def count_code_lines(source: str) -> int:
    """Return the number of code lines of a module."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def count_by_folder(roots: list[Path]) -> Counter[str]:
    """Return the code lines of each folder below these, and of the modules of a root itself."""
    counts: Counter[str] = Counter()
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            inside = path.relative_to(root).parts[:-1]
            counts["/".join((root.name, *inside[:1]))] += count_code_lines(path.read_text(encoding="utf-8"))
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.code_lines", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", default=["dtprof", "reference_trainer"])
    counts = count_by_folder([Path(folder) for folder in parser.parse_args().folders])
    for folder, count in sorted(counts.items()):
        print(f"{count:7,}  {folder}")
    print(f"{counts.total():7,}  all")
