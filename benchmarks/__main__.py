"""Run every benchmark, or those named: `python -m benchmarks [startup] [launch_cost] [label_cost] [step_cost]`."""

import importlib
import sys

from benchmarks import pairs

ALL = ("startup", "launch_cost", "label_cost", "step_cost")


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
