"""Judge generated programs: `python -m tests.faults.generated --count 2000 --seed 1`."""

import argparse
import sys

from dtprof.diagnosis.measured_rates import RATES
from tests.faults.generated.mutations import MUTATIONS
from tests.faults.generated.scores import Rates, calibration, count_by_evidence, generate, rates_by_fault


def main() -> int:
    """Print rates by class of fault, false alarms, and how sure verdicts are against how often they are right."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.generated", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="faulty programs; each has a sound twin")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=tuple(MUTATIONS), default="", help="a class of fault")
    parser.add_argument("--wrong", type=int, default=0, metavar="N", help="show so many wrong verdicts")
    parser.add_argument(
        "--evidence", action="store_true", help="show how often findings of each kind and class of evidence are right"
    )
    options = parser.parse_args()
    rates = {} if options.evidence else RATES
    cases = list(generate(options.count, options.seed, only=options.only, rates=rates))
    if options.evidence:
        for (kind, evidence), (count, right) in sorted(count_by_evidence(cases).items()):
            # One right and one wrong more than seen: of few findings little is known.
            print(f'    ("{kind}", {evidence}): {(right + 1) / (count + 2):.2f},  # {right} of {count}')
        return 0
    whole = Rates()
    print(f"{'fault':28} {'n':>5} {'kind':>6} {'ranks':>6} {'line':>6}  said instead")
    for fault, rates in rates_by_fault(cases).items():
        _print(fault, rates)
    for case in cases:
        if case.truth is not None:
            whole.add(case)
    _print("all", whole)
    sound = [case for case in cases if case.truth is None]
    alarms = [case for case in sound if case.first is not None]
    print(f"false alarms: {len(alarms)} of {len(sound)} sound programs")
    print("confidence   n     mean  right")
    for low, high, count, mean, right in calibration(cases):
        print(f"{low:.2f} to {min(high, 1):.2f} {count:5d}  {mean:.2f}  {right:.2f}")
    wrong = [
        case
        for case in cases
        if case.truth is not None and not (case.kind_right and case.culprits_right and case.line_right)
    ]
    for case in [*alarms, *wrong][: options.wrong]:
        summary = case.first.summary if case.first is not None else "; ".join(case.verdict.cannot_tell)
        kind = case.first.kind if case.first is not None else case.verdict.outcome
        print(f"\n{case.fault}, {case.template}, {case.seed}: {case.truth}\n  {kind}: {summary}")
    return 0


def _print(name: str, rates: Rates) -> None:
    said = ", ".join(f"{kind} {count}" for kind, count in sorted(rates.confused.items(), key=lambda item: -item[1])[:4])
    kind, culprits, line = (f"{100 * count / rates.cases:.0f} %" for count in (rates.kind, rates.culprits, rates.line))
    print(f"{name:28} {rates.cases:5d} {kind:>6} {culprits:>6} {line:>6}  {said}")


if __name__ == "__main__":
    sys.exit(main())
