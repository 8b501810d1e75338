"""How often verdicts on generated programs are right, by class of fault, and if they are as sure as they are right."""

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from dtprof.diagnosis.findings import Finding, Verdict
from dtprof.diagnosis.measured_rates import RATES
from dtprof.diagnosis.measured_rates import Rates as MeasuredRates
from dtprof.diagnosis.verdict import decide
from tests.faults.generated.machine import Machine, Plan
from tests.faults.generated.mutations import MUTATIONS, NotHereError, Truth
from tests.faults.generated.templates import TEMPLATES, write

BANDS = (0.0, 0.55, 0.65, 0.75, 0.85, 0.93, 1.01)


@dataclass(frozen=True)
class Case:
    """One program, what is true of it and what was said; `truth` is None of a sound one."""

    template: str
    fault: str
    seed: int
    truth: Truth | None
    verdict: Verdict

    @property
    def first(self) -> Finding | None:
        """The first finding that is no more than an information."""
        return next((finding for finding in self.verdict.findings if finding.severity != "info"), None)

    @property
    def kind_right(self) -> bool:
        """Say whether the first finding is of a right kind."""
        return self.first is not None and self.truth is not None and self.first.kind in self.truth.kinds

    @property
    def culprits_right(self) -> bool:
        """Say whether exactly the right ranks are named."""
        if self.first is None or self.truth is None:
            return False
        named = frozenset(self.first.culprit_ranks)
        sides = self.truth.culprits, self.truth.either, self.truth.culprits | self.truth.either
        return named == sides[0] or (bool(self.truth.either) and named in sides)

    @property
    def line_right(self) -> bool:
        """Say whether a right line is named; True where the fault has none."""
        if self.first is None or self.truth is None:
            return False
        sites = (*self.first.call_sites.values(), *self.first.culprit_call_sites.values())
        return not self.truth.lines or not self.truth.lines.isdisjoint(site.line for site in sites)


@dataclass
class Rates:
    """Counts of one class."""

    cases: int = 0
    kind: int = 0
    culprits: int = 0
    line: int = 0
    confused: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, case: Case) -> None:
        """Count a case."""
        self.cases += 1
        self.kind += case.kind_right
        self.culprits += case.culprits_right
        self.line += case.line_right
        if not (case.kind_right and case.culprits_right):
            self.confused[case.first.kind if case.first is not None else "nothing found"] += 1


def generate(count: int, seed: int, *, only: str = "", rates: MeasuredRates = RATES) -> Iterator[Case]:
    """Give so many faulty programs, class by class in turn, each with its sound twin.

    Parameters:
        only: a class of fault; empty for all.
        rates: how often findings are right by class of evidence; without them they have the grades of rules.
    """
    names = [only] if only else list(MUTATIONS)
    templates = list(TEMPLATES)
    made = attempt = 0
    while made < count:
        number = seed * 1_000_003 + attempt
        attempt += 1
        choose = random.Random(number)
        fault, template = names[made % len(names)], choose.choice(templates)
        drawn = choose.getrandbits(32)
        plan = write(template, random.Random(drawn))
        try:
            truth = MUTATIONS[fault](plan, choose)
        except NotHereError:
            continue
        made += 1
        yield Case(template, fault, number, None, _judge(write(template, random.Random(drawn)), number, rates))
        yield Case(template, fault, number, truth, _judge(plan, number, rates))


def _judge(plan: Plan, number: int, rates: MeasuredRates) -> Verdict:
    machine = Machine(plan, number)
    machine.run()
    return decide(machine.job(), rates)


def count_by_evidence(cases: list[Case]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return, by kind and evidence of the first finding (its grade where it has none): how many; how many are right."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for case in cases:
        if case.first is not None:
            evidence = case.first.evidence_class
            key = case.first.kind, f"Evidence.{evidence.name}" if evidence is not None else f"{case.first.grade:g}"
            count, right = found.get(key, (0, 0))
            found[key] = count + 1, right + (case.kind_right and case.culprits_right)
    return found


def rates_by_fault(cases: list[Case]) -> dict[str, Rates]:
    """Return the rates of each class of fault."""
    found: dict[str, Rates] = defaultdict(Rates)
    for case in cases:
        if case.truth is not None:
            found[case.fault].add(case)
    return dict(found)


def calibration(cases: list[Case]) -> list[tuple[float, float, int, float, float]]:
    """Return, by band: its ends, how many findings have such a confidence, their mean, and the share that is right."""
    judged = [
        (case.first.confidence, case.kind_right and case.culprits_right) for case in cases if case.first is not None
    ]
    rows = []
    for low, high in itertools.pairwise(BANDS):
        inside = [(sure, right) for sure, right in judged if low <= sure < high]
        if inside:
            mean = sum(sure for sure, _ in inside) / len(inside)
            rows.append((low, high, len(inside), mean, sum(right for _, right in inside) / len(inside)))
    return rows
