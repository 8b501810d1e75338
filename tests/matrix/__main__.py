"""Try dtprof on pairs of a Python and a torch: an environment for each, a few jobs in it, one row of a table.

    python -m tests.matrix [PYTHON:TORCH ...] [--wheel WHEEL] [--folder FOLDER] [--write PAGE]

Needs the interpreters, on PATH (python3.12) or of pyenv, and PyPI. A torch is up to 7 GB; its environment goes once its
row is there. With --wheel that wheel of dtprof is tried, with the hooks in it, else the sources of this repository.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.matrix.pythons import find_python

REPOSITORY = Path(__file__).parents[2]
PAIRS = (
    *("3.10:2.6.0", "3.10:2.13.0", "3.11:2.7.1", "3.11:2.13.0"),
    *("3.12:2.6.0", "3.12:2.8.0", "3.12:2.9.1", "3.12:2.10.0", "3.12:2.11.0", "3.12:2.12.1", "3.12:2.13.0"),
    *("3.12:2.14.1", "3.12:2.15.0", "3.13:2.11.0", "3.13:2.13.0"),
)
HEADER = (
    "| Python | torch | native hook | calls counted as gloo does with it | with the Python hook "
    "| calls that this torch refuses | frameworks | tracebacks and warnings | hang |\n" + "|---" * 9 + "|"
)
HANG = {"status": 3, "kind": "collective-order-mismatch", "culprits": [1], "lines": {"1": 10}}
BEGIN, END = "<!-- rows of python -m tests.matrix -->", "<!-- end of rows -->"
TIMEOUT_S = 3600
JOB_TIMEOUT_S = "900"
"""Of one job, on a machine that has other work."""


def try_pair(python: str, torch: str, folder: Path, wheel: Path | None = None) -> dict[str, Any]:
    """Return what the smoke set found in an environment of its own; `failed` where it could not be made or ended."""
    if (interpreter := find_python(python)) is None:
        return {"python": python, "torch": torch, "failed": f"there is no Python {python}"}
    place = folder / f"{python}-{torch}"
    source = ["-e", str(REPOSITORY)] if wheel is None else [str(wheel)]
    try:
        for command in (
            [interpreter, "-m", "venv", str(place)],
            [str(place / "bin/pip"), "install", "--quiet", "--no-compile", f"torch=={torch}", "numpy", *source],
            [str(place / "bin/python"), "-m", "tests.matrix.smoke"],
        ):
            (place / "here").mkdir(parents=True, exist_ok=True)
            if not (place / "here/tests").exists():  # without dtprof beside it, which would hide the installed one
                (place / "here/tests").symlink_to(REPOSITORY / "tests")
            environment = os.environ | {"DTPROF_CACHE_DIR": str(place / "cache"), "TEST_JOB_TIMEOUT_S": JOB_TIMEOUT_S}
            done = subprocess.run(
                command, cwd=place / "here", env=environment, capture_output=True, text=True, timeout=TIMEOUT_S,
                check=False,
            )  # fmt: skip
            if done.returncode != 0:
                (folder / f"{place.name}.log").write_text(done.stderr, encoding="utf-8")
                last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
                return {"python": python, "torch": torch, "failed": f"{last} ({place.name}.log in the folder has all)"}
        # A torch with NCCL has the hook of the wheel copied into the cache, beside a library that is compiled there.
        shipped = {
            hook.read_bytes() for hook in place.glob("lib/*/site-packages/dtprof/capture/native/prebuilt/*/*.so")
        }
        hooks = place.glob("cache/native/*/dtprof_native_hook.so")
        compiled = any(hook.read_bytes() not in shipped for hook in hooks)
        return {**json.loads(done.stdout.splitlines()[-1]), "compiled": compiled}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def row(found: dict[str, Any]) -> str:
    """Return the row of a pair."""
    versions = f"| {found['python']} | {found['torch']} |"
    if "failed" in found:
        return f"{versions} failed: {found['failed']} | | | | | | |"
    hooks = [found["calls, native hook"], found["calls, python hook"]]
    trained = found["frameworks"]
    cells = [
        _hook(found),
        *(_counted(hook) for hook in hooks),
        str(len({*hooks[0]["refused by torch"], *hooks[1]["refused by torch"]})),
        "; ".join([f"{trained['steps']} steps", *trained["refused by torch"], *trained["problems"]]),
        _printed(found["errors"]),
        "named" if found["hang"] == HANG else json.dumps(found["hang"]),
    ]
    return f"{versions} {' | '.join(cells)} |"


def _hook(found: dict[str, Any]) -> str:
    if found.get("no hook"):
        return f"none: {found['no hook']}"
    origin = "compiled" if found["compiled"] else "of the wheel"
    is_loaded = found["calls, native hook"]["hook"] == "native"
    return origin if is_loaded else f"{origin}, not loaded: the Python hook took its place"


def _counted(hook: dict[str, Any]) -> str:
    right = hook["calls"] - len(hook["wrong"])
    troubles = [*hook["wrong"], *hook["problems"], *([f"{hook['errors']} errors"] if hook["errors"] else [])]
    return f"{right} of {hook['calls']}" + "".join(f"; {trouble}" for trouble in troubles)


def _printed(errors: dict[str, Any]) -> str:
    changed = errors["changed"]
    return f"{len(changed)} of {errors['lines']} lines changed" if changed else f"{errors['lines']} lines, as bare"


def main() -> int:
    """Try all pairs, print their rows, and put them into a page."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("pairs", nargs="*", default=PAIRS, metavar="PYTHON:TORCH", help=f"default: {' '.join(PAIRS)}")
    parser.add_argument("--wheel", type=Path, help="the wheel to try (default: the sources)")
    parser.add_argument("--folder", type=Path, default=Path(".make/matrix"), help="where the environments are made")
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="put the rows of all pairs tried so far into the table of this page"
    )
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    kept = given.folder / "found.json"
    found = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    for pair in given.pairs:
        python, _, torch = pair.partition(":")
        found[pair] = try_pair(python, torch, given.folder.resolve(), given.wheel and given.wheel.resolve())
        print(row(found[pair]), flush=True)
        kept.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if given.write:
        text = given.write.read_text(encoding="utf-8")
        given.write.write_text(put_rows(text, [row(one) for one in found.values()]), encoding="utf-8")
    return int(any("failed" in found[pair] for pair in given.pairs))


def put_rows(page: str, rows: Sequence[str]) -> str:
    """Return the page with these rows in its table, and with its own rows of other pairs."""
    before, rest = page.split(BEGIN)
    table, after = rest.split(END)
    rows_by_pair = {_pair(line): line for line in (*table.splitlines(), *rows) if re.match(r"\| \d", line)}
    lines = [HEADER, *(rows_by_pair[pair] for pair in sorted(rows_by_pair, key=_versions))]
    return "\n".join((f"{before}{BEGIN}\n", *lines, f"\n{END}{after}"))


def _pair(row_text: str) -> tuple[str, str]:
    """Return the minor version of Python and the release of torch: a row replaces that of another build."""
    _, python, torch, *_ = (cell.strip() for cell in row_text.split("|"))
    return ".".join(python.split(".")[:2]), torch.partition("+")[0]


def _versions(pair: tuple[str, str]) -> list[list[int]]:
    return [[int(number) for number in re.findall(r"\d+", version)] for version in pair]


if __name__ == "__main__":
    sys.exit(main())
