"""Run a program upon a copy of its framework under another name.

`vendored.py FOLDER PACKAGE NAME PROGRAM ARGUMENTS...`. The copy lies in a folder of the rank, as a repository that
vendors the package has it, and names itself throughout.
"""

import importlib.util
import os
import sys
from pathlib import Path


def main() -> None:
    """Copy the package, replace its name in its files and in the program, and run the program."""
    folder = Path(sys.argv[1], os.environ["RANK"])
    package, name = sys.argv[2:4]
    program = Path(__file__).with_name(sys.argv[4])
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0])
    for path in source.rglob("*.py"):
        copy = folder / name / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text().replace(package, name))
    sys.path.insert(0, str(folder))
    sys.argv[:5] = [str(program)]
    text = program.read_text().replace(package, name)
    exec(compile(text, str(program), "exec"), {"__name__": "__main__", "__file__": str(program)})


if __name__ == "__main__":
    main()
