"""The caveats of a run, gravest first, and those of them that text output shows."""

from collections.abc import Mapping, Sequence

from dtprof.analysis.map_reduce.rank_facts import RankFacts
from dtprof.analysis.map_reduce.rank_sums import RankReduction, Reductions
from dtprof.analysis.map_reduce.survey import SurveyedRun, Surveys
from dtprof.analysis.memory.memory_formulas import TOLERANCE, activation_bytes
from dtprof.analysis.recoveries import describe_attempts
from dtprof.analysis.results import IDLE, Caveat, CollectiveResult, Summary
from dtprof.analysis.steps.step_boundaries import MeasuredSteps
from dtprof.formatting import format_ns, list_ranks, plural
from dtprof.job.clock_alignment import Clocks, worst_error_ns
from dtprof.records import events

MAX_PROBLEMS = 20
NEGLIGIBLE = 0.02
"""Of the duration of an operation: an error of a device's times below it changes no figure of it."""
NO_BUSBW = ("gather", "scatter")


def list_caveats(
    run: SurveyedRun,
    surveys: Surveys,
    reduced: Reductions,
    summary: Summary,
    *,
    measured: MeasuredSteps,
    devices: Sequence[Caveat],
    unlisted: int,
    of_figures: Sequence[Caveat],
) -> tuple[Caveat, ...]:
    """Return every reason why a figure is missing or may be wrong, gravest first.

    What the format of an imported run lacks stands for whatever else is said of the same subject.

    Parameters:
        summary: of which the operations and the attempts are stated.
        devices, of_figures: caveats of the clocks of devices, and of pipelines, throughput and stragglers.
        unlisted: rows of the table of collectives.
    """
    facts, reductions = surveys.facts, reduced.ranks
    lacks = tuple(map(Caveat.parse, run.manifest.cannot_tell))
    clock_error_ns = worst_error_ns(surveys.clocks, surveys.boots.values())
    restarts = describe_attempts(run, summary.recoveries)
    subjects = {caveat.subject for caveat in lacks} - {"run", "collectives", "steps"}
    found = (
        *_of_records(facts, summary.missing_ranks, run.problems, summary.left_out_ranks, restarts),
        *measured.caveats,
        *_of_clocks(surveys.one_clock, surveys.clocks, surveys.boots),
        *_of_uncertain_waits(facts, reductions, summary.collectives, clock_error_ns),
        *_of_devices(facts),
        *devices,
        *_of_operations(facts, reductions, summary.collectives, any_operations=bool(reduced.rows)),
        *(
            [Caveat("collectives", f"{plural(unlisted, 'more row')} of less cost not listed, nor all groups")]
            if unlisted
            else ()
        ),
        *_of_forward(facts),
        *_of_memory(facts),
        *of_figures,
        *_never_recorded(measured, facts, reductions),
    )
    return (*lacks, *(caveat for caveat in found if caveat.subject not in subjects))


def condense_caveats(caveats: Sequence[Caveat]) -> list[Caveat]:
    """Return the caveats to print: none that most runs have, one sentence for figures that share a reason."""
    alike: dict[str, list[Caveat]] = {}
    for caveat in dict.fromkeys(caveats):
        if not caveat.is_usual:
            alike.setdefault(caveat.reason if caveat.subject.endswith("_per_s") else caveat, []).append(caveat)
    return [Caveat(", ".join(caveat.subject for caveat in some), some[0].reason) for some in alike.values()]


def _of_records(
    facts: Sequence[RankFacts],
    missing: Sequence[int],
    run_problems: Sequence[str],
    stale: Sequence[int],
    restarts: Sequence[Caveat],
) -> list[Caveat]:
    caveats = []
    if not facts:
        caveats.append(Caveat("run", "no rank left a log"))
    unknown = [rank for rank in missing if rank not in stale]
    if unknown and facts:
        caveats.append(Caveat("run", f"{list_ranks(unknown)} left no log; their operations are not known"))
    caveats += restarts
    if stale:
        caveats.append(Caveat("run", f"{list_ranks(stale)} took no part in the last attempt: left out"))
    problems = [*run_problems, *(problem for fact in facts for problem in fact.problems)]
    caveats += [Caveat("run", problem) for problem in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        caveats.append(Caveat("run", f"{plural(len(problems) - MAX_PROBLEMS, 'more problem')} with its files"))
    for sentence, ranks in (
        ("stopped recording early (disk full?)", [fact.rank for fact in facts if fact.truncated]),
        ("dropped events to keep within --max-log-mb", [fact.rank for fact in facts if fact.dropped_events]),
        ("could not record some events", [fact.rank for fact in facts if fact.errors]),
        ("had records with impossible times, left out", [fact.rank for fact in facts if fact.unsound]),
        ("did not close the log: their last records may be missing", [fact.rank for fact in facts if not fact.closed]),
    ):
        if ranks:
            caveats.append(Caveat("run", f"{list_ranks(ranks)} {sentence}"))
    builds: dict[str, list[int]] = {}
    for fact in facts:
        if fact.torch_version:
            builds.setdefault(fact.torch_version, []).append(fact.rank)
    if len(builds) > 1:
        described = "; ".join(f"{version} on {list_ranks(ranks)}" for version, ranks in builds.items())
        caveats.append(
            Caveat("run", f"ranks ran different builds of torch ({described}); they are compared as if all ran one")
        )
    noted = dict.fromkeys(note for fact in facts for note in fact.notes)
    for note in list(noted)[:MAX_PROBLEMS]:
        caveats.append(
            Caveat("run", f"{list_ranks([fact.rank for fact in facts if note in fact.notes])} noted: {note}")
        )
    return caveats


def _of_clocks(one_clock: bool, clocks: Clocks, boots: Mapping[int, str]) -> list[Caveat]:
    caveats = []
    if not one_clock:
        unknown = [rank for rank, boot in boots.items() if boot not in clocks.errors_ns]
        caveats.append(
            Caveat(
                "clock_error_ns",
                f"the clocks of the hosts of {list_ranks(unknown or boots)} are not aligned with the "
                "others; across them waits are estimated from durations, stragglers count only where clocks are, and "
                "the timeline is left out",
            )
        )
    for boot, beyond_ns in clocks.contradicted.items():
        ranks = [rank for rank, own in boots.items() if own == boot]
        caveats.append(
            Caveat(
                "clock_error_ns",
                f"the records of {list_ranks(ranks)} contradict what is known of the clock of their host "
                f"by {format_ns(int(beyond_ns))}; it may have jumped. It was aligned by the records as far as possible",
            )
        )
    return caveats


def _of_uncertain_waits(
    facts: Sequence[RankFacts],
    reductions: Sequence[RankReduction],
    collectives: Sequence[CollectiveResult],
    error_ns: int | None,
) -> list[Caveat]:
    uncertain = sum(reduction.uncertain for reduction in reductions)
    if not uncertain:
        return []
    of_devices = max((fact.device_error_ns or 0 for fact in facts), default=0)
    shortest_ns = min((row.duration_ns for row in collectives if row.duration_ns is not None), default=0)
    if not error_ns and 2 * of_devices <= NEGLIGIBLE * shortest_ns:
        return []  # ranks that come at one time are the rule, and so much changes no figure
    across = "hosts or devices" if of_devices else "hosts"
    error = format_ns((error_ns or 0) + 2 * of_devices)
    return [
        Caveat(
            "wait_ns",
            f"{plural(uncertain, 'wait')} across {across} came below the error of the clocks, up to {error}: "
            "who came last there is not known; the shortest duration seen stands for the transfer",
        )
    ]


def _of_devices(facts: Sequence[RankFacts]) -> list[Caveat]:
    """Say whose times those of figures are: figures of a device and of a host are not the same thing."""
    errors = [fact.device_error_ns for fact in facts if fact.device_error_ns is not None]
    if not errors:
        return []
    caveats = [
        Caveat(
            "device",
            f"steps, phases and operations of {list_ranks(f.rank for f in facts if f.device_error_ns is not None)} "
            f"are timed on the device, off by up to {format_ns(max(errors))}; "
            "what it waits for the host counts as host",
            is_usual=True,  # text prints the clock beside the steps
        )
    ]
    if len(errors) < len(facts):
        others = list_ranks(fact.rank for fact in facts if fact.device_error_ns is None)
        caveats.append(Caveat("device", f"{others} left no times of a device; the host's stand for them"))
    if polled := sum(fact.polled for fact in facts):
        caveats.append(
            Caveat(
                "transfer_ns",
                f"the end of {plural(polled, 'operation')} on devices was found by polling: "
                "milliseconds late where no stream waited for it; their transfers are upper bounds",
            )
        )
    if skipped := sum(fact.skipped_marks for fact in facts):
        caveats.append(
            Caveat(
                "device",
                f"{plural(skipped, 'mark')} found no place, as the device was too far behind; operations without "
                "marks have no times, and where one falls into the measured steps the rank has no partition",
            )
        )
    if captured := sum(fact.captured_marks for fact in facts):
        caveats.append(
            Caveat(
                "device",
                f"{plural(captured, 'mark')} fell into the capture of graphs and were left out; operations that "
                "graphs replay are not recorded: their time counts as the phase around them",
            )
        )
    if replays := sum(fact.graph_replays for fact in facts):
        caveats.append(
            Caveat(
                "exposed_ns",
                f"CUDA graphs were replayed {plural(replays, 'time')}; operations in them are not recorded, "
                "and what they expose counts as compute",
            )
        )
    return caveats


def _of_operations(
    facts: Sequence[RankFacts],
    reductions: Sequence[RankReduction],
    collectives: Sequence[CollectiveResult],
    *,
    any_operations: bool,
) -> list[Caveat]:
    caveats = []
    if any(fact.hook == "python" for fact in facts):
        caveats.append(
            Caveat(
                "transfer_ns",
                "the Python hook sees a completion at its wait or at the rank's next event; durations and "
                "transfers are upper bounds, bandwidths lower ones (the native hook sees each at once)",
            )
        )
    if facts and not any_operations:
        caveats.append(Caveat("collectives", "none was recorded in the measured steps"))
    unobserved = sum(reduction.unobserved for reduction in reductions)
    if unobserved:
        caveats.append(
            Caveat(
                "collectives",
                f"completion of {plural(unobserved, 'operation')} is not observed (device tensors, or a back "
                "end other than gloo); how long that took and the partition of the steps around it are not known",
            )
        )
    mixed = sum(reduction.mixed for reduction in reductions)
    if mixed:
        caveats.append(
            Caveat(
                "collectives",
                f"{plural(mixed, 'operation')} met a different operation at the same position of the group; "
                "waits there are not known. Run dtprof diagnose",
            )
        )
    if impossible := [reduction for reduction in reductions if reduction.impossible]:
        most = max(reduction.most_impossible_ns for reduction in impossible)
        ranks = list_ranks([reduction.rank for reduction in impossible])
        caveats.append(
            Caveat(
                "clock_error_ns",
                f"{plural(sum(one.impossible for one in impossible), 'operation')} of {ranks} ended before "
                f"another rank began, by up to {format_ns(most)}: a clock jumped, or clocks taken for one are not. "
                "The shortest duration seen stands for the transfer there",
            )
        )
    estimated = sum(reduction.estimated - reduction.uncertain - reduction.impossible for reduction in reductions)
    if estimated:
        caveats.append(
            Caveat(
                "wait_ns",
                f"for {plural(estimated, 'operation')} not every member's arrival is known on one clock; the "
                "shortest duration seen stands for the transfer",
            )
        )
    not_known = sum(reduction.not_known for reduction in reductions)
    if not_known:
        caveats.append(
            Caveat(
                "wait_ns",
                f"of {plural(not_known, 'operation')} the other members' records are missing; all exposed time of "
                "such counts as exposed_wait",
            )
        )
    dropped = sum(row.dropped_records for row in collectives)
    if dropped:
        caveats.append(
            Caveat(
                "collectives",
                f"of {plural(dropped, 'record')} only sums are left (--max-log-mb); they are in count and "
                "bytes, also those outside the measured steps, and in no time",
            )
        )
    unmatched = sum(reduction.unmatched for reduction in reductions)
    if unmatched:
        caveats.append(
            Caveat(
                "collectives",
                f"{plural(unmatched, 'operation')} could not be matched (receives from any source, messages "
                "after dropped events, groups without a record): left out",
            )
        )
    if any(row.op in NO_BUSBW for row in collectives):
        caveats.append(Caveat("busbw_gb_per_s", "not defined for gather and scatter"))
    return caveats


def _of_forward(facts: Sequence[RankFacts]) -> list[Caveat]:
    ranks = [fact.rank for fact in facts if fact.infers_forward]
    if not ranks:
        return []
    return [
        Caveat(
            "compute",
            f"no forward pass of {list_ranks(ranks)} was recorded (that of a single layer of torch.nn is none): "
            "all from the begin of a step to its backward pass counts as forward, also what is no computation",
        )
    ]


def _why_no_buffers(facts: Sequence[RankFacts]) -> Caveat:
    if any(events.MEMORY_CATEGORIES["communication"] in fact.memory_bytes for fact in facts):
        return Caveat(
            "memory",
            "buffers of communication are larger than all that was ever resident: a framework reserves more "
            "than it uses",
        )
    return Caveat("memory", "buffers of communication are known under DDP, FSDP and DeepSpeed's ZeRO 1 and 2 only")


def _of_memory(facts: Sequence[RankFacts]) -> list[Caveat]:
    if not any(fact.memory_categories for fact in facts):
        return [Caveat("memory", "its categories are not known; that takes two steps of an optimizer")] if facts else []
    unknown = {name for fact in facts for name, held in fact.memory_categories.items() if held is None}
    caveats = []
    if "activations" in unknown:
        caveats.append(
            Caveat(
                "memory",
                "activations are not known where no forward pass is recorded, or an allocator other than "
                "glibc's or CUDA's is used",
            )
        )
    if "communication" in unknown:
        caveats.append(_why_no_buffers(facts))
    several = [fact.rank for fact in facts if fact.model_share.is_of_several]
    if several:
        caveats.append(
            Caveat(
                "memory formula",
                f"{list_ranks(several)} hold parameters that are sharded differently, such as experts "
                "or embedding tables beside the rest, or several models, and which memory is whose is not recorded",
            )
        )
    unsharded = [fact for fact in facts if _holds_less_than_all(fact)]
    if unsharded:
        caveats.append(
            Caveat(
                "memory formula",
                f"nothing says whether {list_ranks(fact.rank for fact in unsharded)} shard the model's "
                "state; the formula is that of all of Adam's, and they hold less",
            )
        )
    known = [activation_bytes(fact.model_share) is not None for fact in facts]
    if "activations" not in unknown and not all(known) and (any(known) or any(map(_is_tensor_parallel, facts))):
        caveats.append(
            Caveat(
                "activation formula",
                "only the layers that torch.distributed.tensor.parallel spreads tell the sizes that it takes",
            )
        )
    return caveats


def _holds_less_than_all(fact: RankFacts) -> bool:
    """Check that a rank keeps optimizer state, less than two moments of its parameters, and nobody said who shards."""
    state, parameters = (fact.memory_categories.get(name) or 0 for name in ("optimizer_state", "parameters"))
    return not fact.model_share.is_known and 0 < state < (1 - TOLERANCE) * 2 * parameters


def _is_tensor_parallel(fact: RankFacts) -> bool:
    return any(group.axis == "tp" and group.size > 1 for group in fact.groups.values())


def _never_recorded(
    measured: MeasuredSteps, facts: Sequence[RankFacts], reductions: Sequence[RankReduction]
) -> list[Caveat]:
    if not measured.known:
        return [Caveat("stragglers", "blame is counted per step, and there are no steps")]
    if any((reduction.partition_ns or {}).get("idle") for reduction in reductions):
        return []
    if facts and all(fact.device_error_ns is not None for fact in facts):
        return [Caveat(IDLE, "what a device does between two marks is not recorded; idle is 0", is_usual=True)]
    return [Caveat(IDLE, "a waiting CPU looks like a working one; idle is 0 and its time is in host", is_usual=True)]
