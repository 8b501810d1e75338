"""The verdict of `dtprof doctor` as JSON, schema 1."""

from dtprof.analysis.doctor.doctor_judgement import DoctorResult
from dtprof.formatting import round_figure

SCHEMA = 1


def doctor_json(result: DoctorResult) -> dict[str, object]:
    """Return the document; what is not known is null, with its reason under `cannot_tell`."""
    return {
        "schema": SCHEMA,
        "world_size": result.world_size,
        "hosts": list(result.hosts),
        "clock_error_ns": round_figure(result.clock_error_ns),
        "findings": [
            {
                "kind": finding.kind,
                "severity": finding.severity,
                "hosts": list(finding.hosts),
                "ranks": list(finding.ranks),
                "summary": finding.summary,
                "advice": list(finding.advice),
            }
            for finding in result.findings
        ],
        "bandwidth": [
            {
                "group": row.group,
                "op": row.op,
                "bytes": row.nbytes,
                "busbw_gb_per_s": round_figure(row.busbw_gb_per_s),
                "time_us": round_figure(row.time_ns / 1e3),
                "ranks": list(row.ranks),
                "hosts": row.hosts,
                "backend": row.backend,
            }
            for row in result.bandwidth
        ],
        "pairs": [
            {
                "from": rate.sender,
                "to": rate.receiver,
                "gb_per_s": round_figure(rate.gb_per_s),
                "latency_us": round_figure(rate.latency_us),
                "spread": round_figure(rate.spread),
                "from_host": rate.sender_host,
                "to_host": rate.receiver_host,
                "backend": rate.backend,
            }
            for rate in result.pairs
        ],
        "cannot_tell": list(result.cannot_tell),
    }
