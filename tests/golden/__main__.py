"""Rewrite what the commands are expected to print: `python -m tests.golden --update [NAME...]`.

A NAME is that of a folder of `expected/` or of one file in it, such as `ddp` or `ddp/summary.txt`; without one, all are
rewritten. Without --update the names of those that differ are printed, with status 1.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.golden.transcripts import EXPECTED, TRANSCRIPTS, Transcript


def main() -> int:
    """Compare or rewrite what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--update", action="store_true", help="rewrite the files that differ")
    parser.add_argument("names", nargs="*", metavar="NAME", help="transcripts, or folders of them; default: all")
    arguments = parser.parse_args()
    chosen = [one for one in TRANSCRIPTS if not arguments.names or _is_asked_for(one, arguments.names)]
    if not chosen:
        parser.error(f"{' '.join(arguments.names)} names no transcript; there are {', '.join(_folders())}")
    differing = []
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        for one in chosen:
            text = one.run(Path(folder))
            if one.expected() != text:
                differing.append(one.name)
                if arguments.update:
                    one.path.parent.mkdir(parents=True, exist_ok=True)
                    one.path.write_text(text, encoding="utf-8")
    print("\n".join(differing) or "nothing differs")
    if arguments.update and not arguments.names:
        for path in sorted(EXPECTED.rglob("*.txt")):
            if path not in {one.path for one in TRANSCRIPTS}:
                path.unlink()
                print(f"removed {path.relative_to(EXPECTED)}")
    return 1 if differing and not arguments.update else 0


def _is_asked_for(one: Transcript, names: list[str]) -> bool:
    return any(one.name == name or one.name.startswith(f"{name}/") for name in names)


def _folders() -> list[str]:
    return list(dict.fromkeys(one.name.partition("/")[0] for one in TRANSCRIPTS))


sys.exit(main())
