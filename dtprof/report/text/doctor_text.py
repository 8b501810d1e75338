"""The verdict of `dtprof doctor` in text of 80 columns: findings, then links, then collectives."""

from collections.abc import Sequence

from dtprof.analysis.doctor.doctor_case import LaunchFinding
from dtprof.analysis.doctor.doctor_judgement import DoctorResult
from dtprof.analysis.doctor.link_checks import CollectiveRate, PairRate
from dtprof.formatting import format_bytes, format_ns, format_rates, format_table, join_lines, plural
from dtprof.report.text.labelled_lines import labelled

LABEL = 10
MOST_RANKS = 8
"""Of more ranks, the matrix is of hosts; of more hosts, only the extremes are shown."""
GAP = "-"


def doctor_text(result: DoctorResult) -> str:
    """Return the text."""
    errors = sum(finding.severity == "error" for finding in result.findings)
    warnings = sum(finding.severity == "warning" for finding in result.findings)
    counts = [plural(number, word) for number, word in ((errors, "error"), (warnings, "warning")) if number]
    lines = labelled("launch", ", ".join(counts) if counts else "nothing found", LABEL)
    if result.world_size:
        clock = f"; clocks known to {format_ns(result.clock_error_ns)}" if len(result.hosts) > 1 else ""
        came = "" if result.ranks_seen == result.world_size else f"{result.ranks_seen} of "
        lines += labelled("ranks", f"{came}{result.world_size} on {plural(len(result.hosts), 'host')}{clock}", LABEL)
    for finding in result.findings:
        lines += ["", *_finding(finding)]
    for backend in dict.fromkeys(rate.backend for rate in result.pairs):
        lines += ["", *_matrix([rate for rate in result.pairs if rate.backend == backend], backend)]
    for backend, group in dict.fromkeys((row.backend, row.group) for row in result.bandwidth):
        rows = [row for row in result.bandwidth if (row.backend, row.group) == (backend, group)]
        lines += ["", *_collectives(rows, backend, group)]
    if result.cannot_tell:
        lines.append("")
    for reason in result.cannot_tell:
        lines += labelled("caveat", reason, LABEL)
    return join_lines(lines)


def _finding(finding: LaunchFinding) -> list[str]:
    lines = labelled(finding.severity, f"{finding.summary} [{finding.kind}]", LABEL)
    for advice in finding.advice:
        lines += labelled("  do", advice, LABEL)
    return lines


def _matrix(rates: Sequence[PairRate], backend: str) -> list[str]:
    """Return bandwidth and latency from each rank, or host, to each."""
    ranks = sorted({rate.sender for rate in rates} | {rate.receiver for rate in rates})
    of_ranks = len(ranks) <= MOST_RANKS
    names: dict[str, list[PairRate]] = {}
    for rate in rates:
        key = f"{rate.sender}>{rate.receiver}" if of_ranks else f"{rate.sender_host}>{rate.receiver_host}"
        names.setdefault(key, []).append(rate)
    places = [str(rank) for rank in ranks] if of_ranks else sorted({rate.sender_host for rate in rates})
    if len(places) > MOST_RANKS:
        return _extremes(rates, backend)
    best = {key: max((rate.gb_per_s for rate in found if rate.gb_per_s), default=None) for key, found in names.items()}
    late = {
        key: min((rate.latency_us for rate in found if rate.latency_us), default=None) for key, found in names.items()
    }
    unit, texts = format_rates(list(best.values()))
    shown = dict(zip(best, texts, strict=True))
    what = "rank" if of_ranks else "host"
    lines = [f"from {what} to {what}, {backend}: {unit}, and latency in us"]
    header = ("", *places)
    rows = [header]
    for sender in places:
        cells = []
        for receiver in places:
            key = f"{sender}>{receiver}"
            latency = late.get(key)
            cells.append(f"{shown[key]} {latency:.0f}" if key in shown and latency is not None else GAP)
        rows.append((sender, *cells))
    return [*lines, *format_table(rows)]


def _extremes(rates: Sequence[PairRate], backend: str) -> list[str]:
    ordered = sorted((rate for rate in rates if rate.gb_per_s is not None), key=lambda rate: rate.gb_per_s or 0.0)
    chosen = [*ordered[:3], ordered[len(ordered) // 2], *ordered[-2:]]
    unit, texts = format_rates([rate.gb_per_s for rate in chosen])
    rows = [
        ("pair", unit, "latency us"),
        *((_pair(rate), text, f"{rate.latency_us:.0f}") for rate, text in zip(chosen, texts, strict=True)),
    ]
    return [
        f"{plural(len(ordered), 'direction')} between ranks, {backend}: slowest, median, fastest",
        *format_table(rows),
    ]


def _pair(rate: PairRate) -> str:
    return f"{rate.sender} ({rate.sender_host}) to {rate.receiver} ({rate.receiver_host})"


def _collectives(rows: Sequence[CollectiveRate], backend: str, group: str) -> list[str]:
    """Return bus bandwidth against size, one operation a column."""
    operations = list(dict.fromkeys(row.op for row in rows))
    sizes = sorted({row.nbytes for row in rows})
    unit, texts = format_rates([row.busbw_gb_per_s for row in rows])
    shown = {(row.op, row.nbytes): text for row, text in zip(rows, texts, strict=True)}
    where = "all ranks" if group == "0" else f"ranks of {group}"
    table = [("size", *operations)]
    table += [(format_bytes(size), *(shown.get((op, size), GAP) for op in operations)) for size in sizes]
    return [f"bus bandwidth in {unit}, {where}, {backend}", *format_table(table)]
