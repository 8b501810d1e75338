"""Output of commands on stored runs, as pages show it: `python -m tests.docs.embedded_transcripts` fills it in.

A page shows a command on a run of `tests/golden/runs`. What stands below it, up to the next command or the end of the
block, is what `tests/golden/expected` says that the command prints on stdout.
"""

import re
from functools import cache

from tests.docs.pages import Page, all_pages
from tests.golden.transcripts import EXPECTED

_BLOCK = re.compile(r"^```(?:console|text)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


@cache
def stored_outputs() -> dict[str, str]:
    """Return what each command of the stored transcripts prints on stdout, by its command line."""
    outputs: dict[str, list[str]] = {}
    for path in sorted(EXPECTED.rglob("*.txt")):
        output: list[str] | None = None
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("$ "):
                output = outputs.setdefault(line[2:], [])
            elif line.startswith(("stderr:", "exit status ")):
                output = None
            elif output is not None:
                output.append(line)
    return {command: "".join(f"{line}\n" for line in lines) for command, lines in outputs.items()}


def shown_commands(page: Page) -> list[str]:
    """Return the commands on stored runs whose output a page shows."""
    blocks = [block["text"] for block in _BLOCK.finditer(page.text)]
    lines = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    return [line for line in lines if line in stored_outputs()]


def filled(page: Page) -> str:
    """Return the text of a page with the stored output below each command on a stored run."""
    return _BLOCK.sub(lambda block: block[0].replace(block["text"], _with_outputs(block["text"])), page.text)


def _with_outputs(text: str) -> str:
    parts = re.split(r"^(?=\$ )", text, flags=re.MULTILINE)
    return "".join(_with_output(part) for part in parts)


def _with_output(part: str) -> str:
    command = part.partition("\n")[0].removeprefix("$ ")
    output = stored_outputs().get(command) if part.startswith("$ ") else None
    if output is None:
        return part
    gap = "\n" if part.endswith("\n\n") else ""  # a blank line before the next command
    return f"$ {command}\n{output}{gap}"


if __name__ == "__main__":
    for shown in all_pages():
        if shown_commands(shown):
            shown.path.write_text(filled(shown), encoding="utf-8")
