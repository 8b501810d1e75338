"""Panels of text, tables and cards: those without a drawing."""

import shlex
from collections.abc import Callable, Sequence

from dtprof.analysis.communication.axis_collectives import name_rows
from dtprof.analysis.results import (
    CallSiteResult,
    ExchangeBalance,
    PhaseCommunication,
    PipelineAction,
    PipelineStage,
    Summary,
)
from dtprof.formatting import format_count
from dtprof.job.axes import axis_words, name_groups
from dtprof.report.figures.drawing import Nothing
from dtprof.report.figures.figure_numbers import DURATIONS, format_bytes, format_duration, format_share
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.pipeline_figure import explain_no_pipeline
from dtprof.report.pages.page_dashboard import Dashboard, Panel
from dtprof.report.pages.page_headline import write_headline
from dtprof.report.pages.page_markup import Markup, element, join
from dtprof.report.pages.page_tables import (
    PageColumn,
    number_column,
    render_plain_table,
    render_table,
    text_column,
    unit_column,
)
from dtprof.report.wording import clock_words, hot_line_words, input_words, reductions_words

Pages = Sequence[Dashboard]
MAX_BALANCES = 8
"""Groups whose exchanges are listed by member."""


def render_nothing(nothing: Nothing) -> Markup:
    """Say why there is nothing to show, and how to get it."""
    return element("p", element("b", nothing.why), " ", nothing.remedy, class_="nothing")


def render_headline(_panel: Panel, source: Source, pages: Pages) -> Markup:
    """State the verdict, its evidence, and the advice."""
    headline = write_headline(source.summary, source.verdict)
    links = []
    panels = [panel for page in pages for panel in page.panels]
    anchor = next((panel.anchor for panel in panels if panel.name == headline.evidence), None)
    if anchor is not None:
        links.append(element("a", "Show the evidence", href=f"#{anchor}", class_="evidence"))
    if headline.command:
        links.append(element("span", "Next: ", element("code", headline.command, class_="command"), class_="next"))
    return element(
        "div",
        element("p", headline.label, class_="verdict"),
        element("p", headline.sentence, class_="sentence"),
        element("p", headline.advice, class_="advice") if headline.advice else "",
        element("p", *links, class_="links"),
        class_=f"headline {headline.verdict}",
    )


def render_collectives(panel: Panel, source: Source, _: Pages) -> Markup:
    """List every kind of operation."""
    summary = source.summary
    rows = summary.collectives
    if not rows:
        return render_nothing(
            Nothing(
                why="No collective was recorded.",
                remedy="A job of one rank has none; otherwise check under Quality of the measurement that every "
                "rank was reached.",
            )
        )
    described = {group.name: group for group in summary.groups}
    groups, names = [described.get(row.group) for row in rows], name_groups(summary.groups)
    columns = [
        text_column("op", "operation", [row.op for row in rows]),
        text_column("group", "group", name_rows(summary, names)),
        number_column("ranks", "ranks", [len(group.ranks) if group else None for group in groups], _as_count),
        text_column("api", "issued by", [row.api or "\u2013" for row in rows]),
        number_column("count", "count", [row.count for row in rows], _as_count),
        number_column("bytes", "size", [row.bytes for row in rows], format_bytes),
        unit_column("duration", "duration", [row.duration_ns for row in rows], DURATIONS),
        unit_column("wait", "wait", [row.wait_ns for row in rows], DURATIONS),
        unit_column("transfer", "transfer", [row.transfer_ns for row in rows], DURATIONS),
        unit_column("exposed", "blocked", [row.exposed_ns for row in rows], DURATIONS),
        number_column("overlap", "overlap", [row.overlap for row in rows], format_share),
        number_column("algbw", "algbw\u00a0(GB/s)", [row.algbw_gb_per_s for row in rows]),
        number_column("busbw", "busbw\u00a0(GB/s)", [row.busbw_gb_per_s for row in rows]),
    ]
    table = render_table(columns, caption=panel.title, definitions=panel.definitions)
    return join(table, *map(_render_balance, summary.exchanges[:MAX_BALANCES]))


NO_STEP_SUMS = Nothing(
    why="Operations are not known step by step.",
    remedy="It takes operations in measured steps; see Quality of the measurement for what is missing.",
)


def _time_columns(rows: Sequence[CallSiteResult] | Sequence[PhaseCommunication]) -> tuple[PageColumn, ...]:
    """Return the columns of what communication costs in a step."""
    return (
        unit_column("exposed", "blocked a step", [row.exposed_ns_per_step for row in rows], DURATIONS),
        unit_column("wait", "wait", [row.wait_ns_per_step for row in rows], DURATIONS),
        unit_column("transfer", "transfer", [row.transfer_ns_per_step for row in rows], DURATIONS),
    )


def render_call_sites(panel: Panel, source: Source, _: Pages) -> Markup:
    """List the lines of the program that issue operations, costliest first."""
    rows = source.summary.call_sites
    if not rows:
        return render_nothing(NO_STEP_SUMS)
    called_at = [row.line.caller.short if row.line and row.line.caller else "" for row in rows]
    columns = [
        text_column("line", "line", [row.line.place if row.line else "\u2013" for row in rows]),
        *([text_column("caller", "called at", called_at)] if any(called_at) else ()),
        text_column("phase", "phase", [row.phase.replace("_", " ") for row in rows]),
        text_column("op", "operation", [row.operation for row in rows]),
        text_column("axis", "axis", [axis_words(row.axis) for row in rows]),
        number_column("operations", "operations a step", [row.count_per_step for row in rows]),
        number_column("bytes", "size", [row.bytes for row in rows], format_bytes),
        *_time_columns(rows),
    ]
    repeated = [element("p", f"{reductions_words(row)}.", class_="label") for row in source.summary.repeated_reductions]
    return element("div", render_table(columns, caption=panel.title, definitions=panel.definitions), *repeated)


def render_communication_phases(panel: Panel, source: Source, _: Pages) -> Markup:
    """List the communication issued in each phase."""
    rows = source.summary.communication_phases
    if not rows:
        return render_nothing(NO_STEP_SUMS)
    columns = [
        text_column("phase", "phase", [row.phase.replace("_", " ") for row in rows]),
        number_column("operations", "operations a step", [row.count_per_step for row in rows]),
        number_column("bytes", "bytes a step", [row.bytes_per_step for row in rows], format_bytes),
        *_time_columns(rows),
    ]
    return render_table(columns, caption=panel.title, definitions=panel.definitions)


def render_message_sizes(panel: Panel, source: Source, _: Pages) -> Markup:
    """List operations by size, from a power of two to the next."""
    rows = source.summary.message_sizes
    if not rows:
        return render_nothing(NO_STEP_SUMS)
    columns = [
        text_column("op", "operation", [row.op for row in rows]),
        text_column("axis", "axis", [axis_words(row.axis) for row in rows]),
        number_column("from", "from", [row.from_bytes for row in rows], format_bytes),
        number_column("below", "to below", [row.below_bytes for row in rows], format_bytes),
        number_column("operations", "operations a step", [row.count_per_step for row in rows]),
        number_column("bytes", "bytes a step", [row.bytes_per_step for row in rows], format_bytes),
        unit_column("exposed", "blocked a step", [row.exposed_ns_per_step for row in rows], DURATIONS),
        unit_column("transfer", "transfer a step", [row.transfer_ns_per_step for row in rows], DURATIONS),
        number_column("algbw", "algbw\u00a0(GB/s)", [row.algbw_gb_per_s for row in rows]),
        number_column("busbw", "busbw\u00a0(GB/s)", [row.busbw_gb_per_s for row in rows]),
    ]
    return render_table(columns, caption=panel.title, definitions=panel.definitions)


def _render_balance(exchanges: ExchangeBalance) -> Markup:
    """List what each member of a group sends and receives where splits are uneven."""
    over = axis_words(exchanges.axis or exchanges.group)
    title = f"all_to_all over {over}: the busiest rank has {exchanges.imbalance:.2f}\u00d7 the mean"
    members = sorted(exchanges.members, key=lambda member: -member.load)
    return element(
        "details",
        element("summary", title),
        render_plain_table(
            ("rank", "sent per step", "received per step", "load"),
            [
                (
                    str(member.rank),
                    format_bytes(member.sent_bytes_per_step),
                    format_bytes(member.received_bytes_per_step),
                    f"{member.load:.2f}\u00d7",
                )
                for member in members
            ],
            caption=title,
        ),
    )


def render_pipeline_stages(panel: Panel, source: Source, _: Pages) -> Markup:
    """List the stages of the pipeline: time in a step by kind of action, and the bubbles before them."""
    pipeline = source.summary.pipeline
    if pipeline is None or not pipeline.per_stage:
        return render_nothing(explain_no_pipeline(source.summary))
    rows = pipeline.per_stage
    columns = [number_column("stage", "stage", [row.stage for row in rows], _as_count), *_action_columns(rows)]
    return render_table(columns, caption=panel.title, definitions=panel.definitions)


def render_pipeline_actions(panel: Panel, source: Source, _: Pages) -> Markup:
    """List each microbatch on each stage: its actions and the bubble before them."""
    pipeline = source.summary.pipeline
    if pipeline is None or not pipeline.per_action:
        return render_nothing(explain_no_pipeline(source.summary))
    rows = pipeline.per_action
    columns = [
        number_column("stage", "stage", [row.stage for row in rows], _as_count),
        number_column("microbatch", "microbatch", [row.microbatch for row in rows], _as_count),
        *_action_columns(rows),
    ]
    return render_table(columns, caption=panel.title, definitions=panel.definitions)


def _action_columns(rows: Sequence[PipelineStage] | Sequence[PipelineAction]) -> list[PageColumn]:
    return [
        unit_column(f"{name}_ns", header, [getattr(row, f"{name}_ns") for row in rows], DURATIONS)
        for name, header in (
            ("forward", "forward"),
            ("backward", "backward"),
            ("weight", "weight gradients"),
            ("bubble", "bubble"),
        )
    ]


def render_part_bands(panel: Panel, source: Source, _: Pages) -> Markup:
    """List the parts of the step with their bands over ranks and over steps."""
    rows = [band for band in source.summary.part_bands if band.over_ranks.p90 or band.over_steps.p90]
    if not rows:
        return render_nothing(NO_STEP_SUMS)
    columns = [text_column("part", "part", [row.part.replace("_", " ") for row in rows])]
    for name, title, bands in (
        ("ranks", "ranks", [row.over_ranks for row in rows]),
        ("steps", "steps", [row.over_steps for row in rows]),
    ):
        columns += [
            unit_column(f"{name}_{which}", f"{title} {word}", [getattr(band, which) for band in bands], DURATIONS)
            for which, word in (("p10", "10\u00a0%"), ("median", "median"), ("p90", "90\u00a0%"))
        ]
    beside = [element("p", f"Hot line: {hot_line_words(row)}.", class_="label") for row in source.summary.hot_lines]
    return element("div", render_table(columns, caption=panel.title, definitions=panel.definitions), *beside)


def render_stragglers(panel: Panel, source: Source, _: Pages) -> Markup:
    """List the ranks that others wait for."""
    summary = source.summary
    rows = summary.stragglers
    beside = [element("p", f"Unequal input: {input_words(row)}.", class_="label") for row in summary.uneven_input]
    if not rows:
        return element("div", render_nothing(_explain_no_straggler(summary)), *beside)
    columns = [
        number_column("rank", "rank", [row.rank for row in rows], _as_count),
        number_column("arrives_last", "to blame in", [row.last_share for row in rows], format_share),
        unit_column("costs_others", "costs others per step", [row.blame_ns_per_step for row in rows], DURATIONS),
        number_column("slowdown", "slowdown of the job", [row.slowdown for row in rows], lambda x: f"{x:.2f}\u00d7"),
    ]
    if len(rows) > 1:
        together = [row.slowdown_together for row in rows]
        columns.append(number_column("together", "with those above", together, lambda x: f"{x:.2f}\u00d7"))
    return element("div", render_table(columns, caption=panel.title, definitions=panel.definitions), *beside)


def _explain_no_straggler(summary: Summary) -> Nothing:
    if summary.world_size == 1:
        return Nothing(why="The job has one rank: nobody waits for anybody.", remedy="")
    if summary.stragglers is None:
        return Nothing(
            why=f"It is not known who was waited for{': '.join(['', *summary.reasons('stragglers')[:1]])}.",
            remedy="Waits are counted per step, in collectives that every member recorded on one clock.",
        )
    return Nothing(why="No rank holds the others up.", remedy="Waits, if any, are spread over the ranks.")


def render_cannot_tell(_panel: Panel, source: Source, _: Pages) -> Markup:
    """List the caveats."""
    summary = source.summary
    if not summary.cannot_tell:
        return element("p", "No caveats: the run has records for every figure on this page.", class_="nothing")
    items = [
        element("li", element("code", caveat.subject) if caveat.subject else "", f" {caveat.reason}")
        for caveat in summary.cannot_tell
    ]
    return element("ul", *items, class_="sentences")


def render_measurement(panel: Panel, source: Source, _: Pages) -> Markup:
    """State the recorded events and their precision."""
    summary = source.summary
    facts = [
        ("command", shlex.join(summary.command) or "not known"),
        ("hosts", ", ".join(summary.hosts) or "not known"),
        ("backend", summary.backend or "not known"),
        ("torch", summary.torch or "not known"),
        ("hook", summary.hook or "not known"),
        ("complete", "yes" if summary.complete else "no: a rank is missing, truncated or still running"),
        ("missing ranks", ", ".join(map(str, summary.missing_ranks)) or "none"),
        ("events", f"{format_count(summary.events)}, {format_count(summary.dropped_events)} dropped"),
        ("recorded time", _or_not_known(summary.wall_ns, format_duration)),
        ("times", clock_words(summary)),
        ("clock error", _or_not_known(summary.time_error_ns, format_duration)),
        ("recording took, all ranks together", _or_not_known(summary.overhead.capture_ns_total, format_duration)),
        ("a recorded event cost", _or_not_known(summary.overhead.capture_ns_per_event, format_duration)),
        ("share of the step", _or_not_known(summary.overhead.share_of_step, format_share)),
    ]
    described = [
        element("div", element("dt", name), element("dd", element("bdi", value)), title=panel.definitions.get(name))
        for name, value in facts
    ]
    return join(
        element("dl", *described, class_="facts"),
        element(
            "details",
            element("summary", f"Ranks ({len(summary.ranks)})"),
            render_plain_table(
                ("rank", "ended", "events", "step", "peak memory"),
                [
                    (
                        str(rank.rank),
                        rank.ended,
                        format_count(rank.events),
                        _or_not_known(rank.step_ns, format_duration),
                        _or_not_known(rank.peak_bytes, format_bytes),
                    )
                    for rank in summary.ranks
                ],
                caption="Ranks of the run",
            ),
        ),
        element(
            "details",
            element("summary", f"Process groups ({len(summary.groups)})"),
            render_plain_table(
                ("group", "description", "axis", "size", "ranks"),
                [
                    (
                        group.name,
                        group.description,
                        group.axis or "\u2013",
                        str(len(group.ranks)),
                        ", ".join(map(str, group.ranks)),
                    )
                    for group in summary.groups
                ],
                caption="Process groups of the run",
            ),
        ),
    )


def _as_count(value: float) -> str:
    return format_count(round(value))


def _or_not_known(value: float | None, write: Callable[[float], str]) -> str:
    return "not known" if value is None else write(value)


def render_next_commands(_panel: Panel, source: Source, _: Pages) -> Markup:
    """Name the next commands."""
    summary = source.summary
    run = shlex.quote(summary.run)
    commands = [
        (f"dtprof diagnose {run}", "what is wrong, with evidence, ranked"),
        (f"dtprof summary {run}", "the same figures in the terminal"),
        (f"dtprof summary {run} --json", "the same figures for a script"),
        (f"dtprof export {run} --format perfetto -o trace.pftrace", "every operation, to open in Perfetto"),
    ]
    rows = [
        element("div", element("dt", element("code", command, class_="command")), element("dd", does))
        for command, does in commands
    ]
    return element("dl", *rows, class_="commands")


def render_page_links(_panel: Panel, _source: Source, pages: Pages) -> Markup:
    """Lead to the other pages, with the question that each answers."""
    rows = [
        element(
            "li",
            element("a", page.title, href=f"#page-{page.name}"),
            element("span", page.question),
        )
        for page in pages
        if page.name != "overview"
    ]
    if not rows:
        return render_nothing(
            Nothing(why="This report has one page.", remedy="Without --dashboard it has all of them.")
        )
    return element("ul", *rows, class_="page-links")
