"""Findings of `dtprof diagnose`, the critical path, and the clocks of the hosts."""

from collections.abc import Sequence

from dtprof.analysis.communication.axis_collectives import name_operations
from dtprof.analysis.results import CallLine
from dtprof.diagnosis.findings import Finding, group_words
from dtprof.diagnosis.reported_mismatches import ReportedMismatch
from dtprof.formatting import list_ranks, plural
from dtprof.job.axes import name_groups
from dtprof.records.sites import Site
from dtprof.report.figures.drawing import Nothing
from dtprof.report.figures.figure_numbers import format_duration, format_share
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.palette import hue_of
from dtprof.report.pages.page_dashboard import Dashboard, Panel
from dtprof.report.pages.page_markup import Markup, element, join
from dtprof.report.pages.page_sections import render_nothing
from dtprof.report.pages.page_tables import render_plain_table

Pages = Sequence[Dashboard]


def render_findings(_panel: Panel, source: Source, _: Pages) -> Markup:
    """List the findings, the most probable first, each with culprits, lines, evidence and advice."""
    findings = source.verdict.findings if source.verdict is not None else ()
    if not findings and not source.reported:
        return render_nothing(
            Nothing(
                why="There is no finding.",
                remedy="`dtprof diagnose RUN` looks for hangs, crashes, slow ranks and risks.",
            )
        )
    return join(
        *(_render_finding(finding, first=not position) for position, finding in enumerate(findings)),
        *map(_render_reported, source.reported),
    )


def _render_reported(mismatch: ReportedMismatch) -> Markup:
    """Return the reports of `dtprof run` during the job that the records no longer hold."""
    when = "while the job ran" if mismatch.after_s is None else f"{mismatch.after_s:.0f} s after the start of the job"
    return element(
        "article",
        element(
            "p",
            element("span", "reported live", class_="severity warning"),
            element("code", mismatch.kind),
            class_="kind",
        ),
        element("p", mismatch.summary, class_="finding-summary"),
        element(
            "dl",
            element("div", element("dt", "group"), element("dd", element("bdi", mismatch.group))),
            element("div", element("dt", "position"), element("dd", f"#{mismatch.seq}")),
            class_="facts",
        ),
        _list(
            "Evidence",
            [f"`dtprof run` reported it {when}, with both lines. The job went on."],
        ),
        class_="finding",
    )


def _render_finding(finding: Finding, *, first: bool) -> Markup:
    facts = [
        ("culprit", list_ranks(finding.culprit_ranks) if finding.culprit_ranks else ""),
        ("waiting", list_ranks(finding.waiting_ranks) if finding.waiting_ranks else ""),
        ("group", group_words(finding.group) if finding.group else ""),
        ("operation", " ".join(filter(None, (finding.op, f"#{finding.seq}" if finding.seq is not None else "")))),
        ("step", "" if finding.step is None else str(finding.step)),
        ("confidence", format_share(finding.confidence)),
    ]
    described = [
        element("div", element("dt", name), element("dd", element("bdi", value))) for name, value in facts if value
    ]
    return element(
        "article",
        element(
            "p",
            element("span", finding.severity, class_=f"severity {finding.severity}"),
            element("code", finding.kind),
            class_="kind",
        ),
        element("p", finding.summary, class_="finding-summary"),
        element("dl", *described, class_="facts"),
        _list("Evidence", finding.evidence),
        _list("What to do", finding.advice),
        _render_sites("Where the culprits are", finding.culprit_call_sites),
        _render_sites("Where the waiting ranks are", finding.call_sites),
        class_="finding first" if first else "finding",
    )


def _list(title: str, sentences: Sequence[str]) -> Markup:
    if not sentences:
        return Markup("")
    return join(
        element("p", title, class_="label"),
        element("ul", *(element("li", sentence) for sentence in sentences), class_="sentences"),
    )


def _render_sites(title: str, sites: dict[int, Site]) -> Markup:
    if not sites:
        return Markup("")
    by_place: dict[tuple[str, str, str], list[int]] = {}
    for rank, site in sites.items():
        caller = CallLine.of(site.caller)
        called_at = caller.short if caller is not None else ""
        by_place.setdefault((f"{site.file}:{site.line}", site.function, called_at), []).append(rank)
    num_columns = 4 if any(called_at for _, _, called_at in by_place) else 3
    rows = [(list_ranks(ranks), *place)[:num_columns] for place, ranks in by_place.items()]
    names = ("ranks", "line", "function", "called at")[:num_columns]
    return join(element("p", title, class_="label"), render_plain_table(names, rows, caption=title))


def render_critical_path(panel: Panel, source: Source, _: Pages) -> Markup:
    """Name the work that must get faster for the step to get faster."""
    path = source.summary.critical_path
    if path is None or not path.step_ns:
        return render_nothing(
            Nothing(
                why="The critical path is not known.",
                remedy=(
                    "It takes steps on one clock whose operations were all seen to complete, of a job without replicas."
                ),
            )
        )
    groups = {group.name: f"group {group.name}" for group in source.summary.groups} | name_groups(source.summary.groups)
    named = name_operations(source.summary, groups)
    kinds = [
        [(f"work: {hue_of(phase).label or phase}", "", time) for phase, time in path.phases_ns.items()],
        [
            (
                f"transfer: {operation.op}",
                named.get((operation.group, operation.op), groups.get(operation.group, f"group {operation.group}")),
                operation.transfer_ns,
            )
            for operation in path.operations
        ],
        [(f"work of rank {rank.rank}", "", rank.work_ns) for rank in path.ranks],
    ]
    table = [
        (what, where, format_duration(time), format_share(time / path.step_ns))
        for rows in kinds
        for what, where, time in sorted(rows, key=lambda row: -row[2])
        if time
    ]
    return join(
        element(
            "p",
            f"Mean of {plural(path.steps, 'step')} of {format_duration(path.step_ns)}. "
            "Work by phase and all transfers sum to the step; work by rank is the same work, divided otherwise.",
            class_="label",
        ),
        render_plain_table(("on the critical path", "of", "time per step", "share"), table, caption=panel.title),
    )


def render_clocks(panel: Panel, source: Source, _: Pages) -> Markup:
    """List the clocks of the hosts."""
    clocks = source.summary.clocks
    if not clocks:
        remedy = "Its error is 0: they are on one host."
        if (error_ns := source.summary.device.error_ns) is not None:
            remedy += f" Times of devices are off on it by up to {format_duration(error_ns)}."
        return render_nothing(Nothing(why="All ranks share one clock.", remedy=remedy))
    rows = [
        (
            clock.host,
            "not aligned" if clock.offset_ns is None else format_duration(clock.offset_ns),
            "not known" if clock.error_ns is None else f"\u00b1 {format_duration(clock.error_ns)}",
            clock.by or "the reference",
        )
        for clock in clocks
    ]
    return render_plain_table(("host", "added to its times", "error", "measured by"), rows, caption=panel.title)
