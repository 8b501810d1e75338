"""Run every benchmark, or those named, such as `python -m benchmarks launch_cost hook_cost`; their names are in ALL."""

import argparse
import importlib
import sys

from benchmarks import pairs

ALL = (
    "startup",
    "launch_cost",
    "label_cost",
    "hook_cost",
    "step_cost",
    "analysis_speed",
    "export_speed",
    "trainer_speed",
    "flight_recorder",
    "import_speed",
    "live_pages",
)


def main(arguments: list[str]) -> int:
    """Run them one after the other; nothing else should run meanwhile."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure in pairs what dtprof costs and how fast it is."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ALL)} (default: all of them)")
    names = parser.parse_args(arguments).names
    for name in sorted(set(names) - set(ALL)):
        parser.error(f"unknown benchmark {name!r}; expected some of: {', '.join(ALL)}")
    print(pairs.machine())
    for name in names or ALL:
        importlib.import_module(f"benchmarks.{name}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
