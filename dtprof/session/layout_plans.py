"""Plan layouts of a model on a cluster, from options and measured runs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dtprof.analysis.planning.layout_costs import Cluster
from dtprof.analysis.planning.model_shapes import ModelShape, infer_shape, read_shape
from dtprof.analysis.planning.plans import make_plans
from dtprof.analysis.planning.run_calibration import (
    Calibration,
    MeasuredRun,
    PlanResult,
    calibrate,
    check_plan,
    measure_run,
    measure_sequence,
)
from dtprof.errors import UsageError
from dtprof.session.cluster_bandwidths import read_link_rates
from dtprof.session.engines import Engine, open_run
from dtprof.session.plan_calibrations import keep_runs, read_runs
from dtprof.session.run_measurement import summarise_opened
from dtprof.typed_quantities import parse_number, parse_whole, size_bytes

RANKS_PER_HOST = 8
SEQUENCES_PER_RANK = 4
SEQUENCE = 4096
MAX_RANKS = 1 << 17
MAX_WHOLE = 1 << 24
MAX_TOP = 10_000


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The options of a plan, as typed."""

    texts: Mapping[str, str | None]  # by option
    config: Path | None = None
    runs: tuple[Path, ...] = ()
    check: Path | None = None
    calibration: Path | None = None  # file of the cluster, in which figures of runs are kept
    recompute: bool = False


def plan(request: PlanRequest, engine: Engine) -> PlanResult:
    """Return plans.

    Raises:
        UsageError: a value cannot be, or the model or the ranks are not known.
        NotARunError: a path holds no run that can be read.
    """
    texts = request.texts
    sequence = _whole("sequence", texts["sequence"], MAX_WHOLE)
    model = _read_model(request, sequence)
    matrices = [path for path in request.runs if path.is_file()]
    summaries = [summarise_opened(open_run(path, engine), engine) for path in request.runs if path not in matrices]
    sequence = sequence or (model.sequence if model else measure_sequence(summaries)) or SEQUENCE
    paths = (path for path in request.runs if path not in matrices)
    runs = [
        replace(measure_run(summary, model, sequence), run=str(path.resolve()))
        for path, summary in zip(paths, summaries, strict=True)
    ]
    measured = calibrate([*runs, *_join_kept(request.calibration, runs)])
    for path in matrices:
        measured = _with_links(measured, path)
    if model is None:
        if measured.parameters is None:
            raise UsageError(
                "the model is not known: expected --params N, --config FILE, or --from RUN that recorded its parameters"
            )
        model = infer_shape(measured.parameters, sequence=sequence)
    ranks = _whole("ranks", texts["ranks"], MAX_RANKS) or (summaries[0].world_size if summaries else None)
    if ranks is None:
        raise UsageError("the number of ranks is not known: expected --ranks N, or --from RUN")
    cluster = _describe_cluster(texts, ranks, measured)
    batch = _whole("batch", texts["batch"], MAX_WHOLE) or measured.batch or SEQUENCES_PER_RANK * ranks
    top = _whole("top", texts["top"], MAX_TOP) or 1
    plans = make_plans(model, cluster, batch=batch, most=top, recompute=request.recompute)
    checked = []
    if request.check is not None:
        summary = summarise_opened(open_run(request.check, engine), engine)
        checked = check_plan(summary, model, cluster, batch=batch, recompute=request.recompute)
    return PlanResult(plans=plans, checked=tuple(checked), reasons=measured.reasons)


def _join_kept(file: Path | None, runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Keep the figures of runs in the file of the cluster, and return those of the other runs in it."""
    if file is None:
        return []
    known = read_runs(file)
    if runs:
        keep_runs(file, known, runs)
    return [run for run in known if run.run not in {measured.run for measured in runs}]


def _with_links(measured: Calibration, file: Path) -> Calibration:
    """Return the calibration with the bandwidths of a cluster's file, which were measured alone, where it has them."""
    rates = read_link_rates(file)
    return replace(
        measured,
        link_bytes_per_s=rates.link_bytes_per_s or measured.link_bytes_per_s,
        network_bytes_per_s=rates.network_bytes_per_s or measured.network_bytes_per_s,
    )


def _read_model(request: PlanRequest, sequence: int | None) -> ModelShape | None:
    given = request.texts["params"]
    if given is not None and request.config is not None:
        raise UsageError("--params and --config both describe the model; expected one of them")
    if request.config is not None:
        return read_shape(request.config, sequence=sequence)
    if given is None:
        return None
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([KMBT]?)", given.strip(), re.IGNORECASE)
    units = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    try:
        number = float(match[1]) * units[match[2].upper()] if match else -1.0
    except ValueError:
        number = -1.0
    if number <= 0:
        raise UsageError(f"--params is {given!r}; expected a number of parameters, for example 7e9 or 7B")
    return infer_shape(number, sequence=sequence or SEQUENCE)


def _describe_cluster(texts: Mapping[str, str | None], ranks: int, measured: Calibration) -> Cluster:
    hosts = _whole("hosts", texts["hosts"], MAX_RANKS)
    if hosts is not None and ranks % hosts:
        raise UsageError(f"--hosts is {hosts}, by which {ranks} ranks cannot be divided; expected a divisor")
    memory = texts["memory"]
    memory_bytes = size_bytes(memory or "")
    if memory is not None and memory_bytes is None:
        raise UsageError(f"--memory is {memory!r}; expected a size with its unit, for example 80GiB")
    flops, link, network = (_rate(name, texts[name]) for name in ("flops", "link", "network"))
    return Cluster(
        ranks=ranks,
        ranks_per_host=ranks // hosts if hosts else min(RANKS_PER_HOST, ranks),
        memory_bytes=memory_bytes,
        flops_per_s=flops * 1e12 if flops else measured.flops_per_s,
        link_bytes_per_s=link * 1e9 if link else measured.link_bytes_per_s,
        network_bytes_per_s=network * 1e9 if network else measured.network_bytes_per_s,
        other_bytes=measured.other_bytes,
    )


def _whole(name: str, text: str | None, most: int) -> int | None:
    return None if text is None else parse_whole(f"--{name}", text, 1, most)


def _rate(name: str, text: str | None) -> float | None:
    return None if text is None else parse_number(f"--{name}", text, example="200")
