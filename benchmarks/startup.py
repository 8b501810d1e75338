"""How long a command takes before it does anything: `dtprof --help` and `import dtprof`, beside a bare interpreter."""

import functools
import subprocess
import sys
import time

from benchmarks import pairs

PAIRS = 15


def measure(*arguments: str) -> float:
    """Return the wall time of one process, in ms."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, timeout=60)
    return (time.perf_counter() - begin) * 1000


def main() -> None:
    """Compare both with an interpreter that does nothing."""
    for label, arguments in (("dtprof --help", ["-m", "dtprof", "--help"]), ("import dtprof", ["-c", "import dtprof"])):
        nothing = functools.partial(measure, "-c", "pass")
        compared = pairs.in_turn(nothing, functools.partial(measure, *arguments), pairs=PAIRS, unit="ms")
        pairs.report(label, compared, a="python -c pass", b=label, digits=1)


if __name__ == "__main__":
    main()
