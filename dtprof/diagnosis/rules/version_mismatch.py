"""Ranks run different versions of torch or Python: what one sends another may not understand."""

import re
from collections.abc import Iterator

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding
from dtprof.diagnosis.job_state import RankState
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import list_ranks

_RELEASE = {"torch": re.compile(r"\d+(\.\d+)*"), "Python": re.compile(r"\d+\.\d+")}
"""Part of a version in which ranks must agree: builds of one release for CPU and CUDA, and patches of Python, do."""
MOST_HOSTS = 4


def find_version_mismatches(case: Case) -> Iterator[Finding]:
    """Give a finding for torch, and one for Python, where ranks run several; the fewer ranks are its culprits."""
    ranks = case.job.ranks
    for program in _RELEASE:
        ranks_by_version: dict[str, list[int]] = {}
        for number, rank in sorted(ranks.items()):
            if version := rank.versions.get(program):
                ranks_by_version.setdefault(version, []).append(number)
        if len(ranks_by_version) > 1:
            yield _finding(program, ranks_by_version, ranks)


def _finding(program: str, ranks_by_version: dict[str, list[int]], ranks: dict[int, RankState]) -> Finding:
    # Of two equal parts, the one without the first rank: that is where a job is started from.
    usual = max(ranks_by_version, key=lambda version: (len(ranks_by_version[version]), -ranks_by_version[version][0]))
    others = {version: found for version, found in ranks_by_version.items() if version != usual}
    culprits = tuple(sorted(rank for found in others.values() for rank in found))
    parts = (f"{_hosts(found, ranks)}{list_ranks(found)} {version}" for version, found in others.items())
    releases = {match.group() for version in ranks_by_version if (match := _RELEASE[program].match(version))}
    return Finding(
        kind="version-mismatch",
        severity="warning" if len(releases) > 1 else "info",
        summary=f"Ranks run different versions of {program}: {'; '.join(parts)}; "
        f"{list_ranks(ranks_by_version[usual])} {usual}.",
        culprit_ranks=culprits,
        waiting_ranks=(),
        grade=0.9,
        evidence=("each rank recorded the version that it imported",),
        advice=("Install the same versions on all hosts, or start all ranks from one image.",),
    )


def _hosts(found: list[int], ranks: dict[int, RankState]) -> str:
    """Return the hosts of some ranks, to put before them; empty in a job of one host."""
    hosts = sorted({ranks[rank].host for rank in found})
    if len({rank.host for rank in ranks.values()}) < 2:
        return ""
    return f"{', '.join(hosts[:MOST_HOSTS])}{' and others' if len(hosts) > MOST_HOSTS else ''}, "


RULES: Declared = (
    Rule(kinds=("version-mismatch",), stages=(Stage.WHOLE_JOB,), find=find_version_mismatches, finds_all=True),
)
