"""Run every benchmark, or those named, such as `python -m benchmarks launch_cost hook_cost`; their names are in ALL."""

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
)


def main(names: list[str]) -> int:
    """Run them one after the other; nothing else should run meanwhile."""
    unknown = sorted(set(names) - set(ALL))
    if unknown:
        print(f"unknown benchmark {unknown[0]!r}; expected some of: {', '.join(ALL)}", file=sys.stderr)
        return 2
    print(pairs.machine())
    for name in names or ALL:
        importlib.import_module(f"benchmarks.{name}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
