"""Run every benchmark, or those named, such as `python -m benchmarks launch_cost hook_cost`; their names are in ALL.

python -m benchmarks --record FOLDER [NAME...]    keep the values, by commit and machine
python -m benchmarks --compare BEFORE AFTER       say what became slower between two kept files
"""

import argparse
import importlib
import sys
from pathlib import Path

from benchmarks import history, pairs

ALL = (
    "startup",
    "launch_cost",
    "mark_cost",
    "label_cost",
    "adapter_cost",
    "sampling_cost",
    "hook_cost",
    "step_cost",
    "analysis_speed",
    "export_speed",
    "trainer_speed",
    "flight_recorder",
    "import_speed",
    "live_pages",
    "collector_load",
)


def main(arguments: list[str]) -> int:
    """Run them one after the other; nothing else should run meanwhile."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure in pairs what dtprof costs and how fast it is."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ALL)} (default: all of them)")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="keep every value in a file of this folder")
    parser.add_argument(
        "--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="compare two kept files; measure nothing"
    )
    parsed = parser.parse_args(arguments)
    if parsed.compare:
        return _compare(*parsed.compare)
    names = parsed.names
    for name in sorted(set(names) - set(ALL)):
        parser.error(f"unknown benchmark {name!r}; expected some of: {', '.join(ALL)}")
    print(pairs.machine())
    for name in names or ALL:
        importlib.import_module(f"benchmarks.{name}").main()
    if parsed.record:
        print(history.save(parsed.record, history.this_state()))
    return 0


def _compare(before: Path, after: Path) -> int:
    try:
        lines = history.compare(history.read(before), history.read(after))
    except history.HistoryError as error:
        print(error, file=sys.stderr)
        return 2
    print(*lines, sep="\n")
    return 1 if any(": slower by " in line for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
