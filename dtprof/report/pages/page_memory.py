"""Memory as tables: ranks beside their formulas, the assumptions of these, and the headroom of memories."""

from collections.abc import Sequence

from dtprof.analysis.memory.memory_series import RankMemory
from dtprof.analysis.results import MemoryFormula, MemoryGrowth, RankResult, Summary
from dtprof.report.figures.drawing import Nothing
from dtprof.report.figures.figure_numbers import SIZES, format_bytes, format_share
from dtprof.report.figures.figure_source import Source
from dtprof.report.pages.page_dashboard import Dashboard, Panel
from dtprof.report.pages.page_markup import Markup, element, join
from dtprof.report.pages.page_sections import render_nothing
from dtprof.report.pages.page_tables import number_column, render_plain_table, render_table, text_column, unit_column

Pages = Sequence[Dashboard]
SCHEMES = {
    "none": "replicated: all of it on every rank",
    "zero1": "optimizer state sharded (ZeRO 1)",
    "zero2": "gradients and optimizer state sharded (ZeRO 2)",
    "zero3": "all of it sharded (ZeRO 3, FSDP)",
}
HOLDS = {True: "holds", False: "does not hold", None: "not known"}
LEAKS = {True: "keeps growing", False: "no leak", None: "too few samples"}
NOT_SAMPLED = Nothing(
    why="Memory was not sampled.",
    remedy="Samples are taken at each step: let the job end one, with an optimizer or dtprof.step().",
)


def render_memory_table(panel: Panel, source: Source, _: Pages) -> Markup:
    """List the ranks, one a row."""
    ranks = [rank for rank in source.summary.ranks if rank.peak_bytes]
    if not ranks:
        return render_nothing(NOT_SAMPLED)
    memory = source.closeup.memory.ranks if source.closeup else {}
    sampled = [memory.get(rank.rank, RankMemory(total=None)) for rank in ranks]
    formulas = [rank.memory_formula for rank in ranks]
    growths = [rank.memory_growth for rank in ranks]
    columns = [
        number_column("rank", "rank", [rank.rank for rank in ranks], lambda rank: str(round(rank))),
        unit_column("peak", "peak", [rank.peak_bytes for rank in ranks], SIZES),
        unit_column("state", "model state", [formula.state_bytes if formula else None for formula in formulas], SIZES),
        unit_column(
            "formula", "by formula", [formula.state_formula_bytes if formula else None for formula in formulas], SIZES
        ),
        unit_column(
            "activations", "activations", [formula.activation_bytes if formula else None for formula in formulas], SIZES
        ),
        unit_column(
            "formula",
            "by formula",
            [formula.activation_formula_bytes if formula else None for formula in formulas],
            SIZES,
        ),
        unit_column(
            "growth", "growth a step", [growth.bytes_per_step if growth else None for growth in growths], SIZES
        ),
        text_column("leak", "leak", [_leak(growth) for growth in growths]),
        number_column("fragmentation", "fragmentation", [rank.fragmentation for rank in sampled], format_share),
        number_column("oom", "out of memory", [len(rank.out_of_memory) for rank in ranks], lambda n: str(round(n))),
    ]
    return render_table(columns, caption=panel.title, definitions=panel.definitions)


def _leak(growth: MemoryGrowth | None) -> str:
    return LEAKS[growth.leaks if growth is not None else None]


def render_memory_formula(panel: Panel, source: Source, _: Pages) -> Markup:
    """Give the model state of the fullest rank by formula, under each sharding scheme, and the assumptions."""
    worst = _find_worst(source.summary)
    formula = worst.memory_formula if worst is not None else None
    if worst is None or formula is None:
        return render_nothing(
            Nothing(
                why="What memory is held for was not recorded.",
                remedy="It takes a model that runs forward and backward under `dtprof run`, and a step that ends.",
            )
        )
    rows = [(text, format_bytes(nbytes), "as it is" if here else "") for text, nbytes, here in _list_schemes(formula)]
    assumptions = [(assumption.text, HOLDS[assumption.holds]) for assumption in source.summary.memory_assumptions]
    sharding = f", by what is sharded over {formula.shards} ranks" if formula.shards > 1 else " on one rank"
    return join(
        element(
            "p",
            f"Rank {worst.rank} holds {_held(formula.state_bytes)} of model state; by formula it is "
            f"{format_bytes(formula.state_formula_bytes)}. Parameters, gradients and optimizer state{sharding}:",
            class_="label",
        ),
        render_plain_table(("sharding", "model state of a rank", ""), rows, caption=panel.title),
        element("p", "What the formulas assume:", class_="label"),
        render_plain_table(("assumption", "in this run"), assumptions, caption=f"{panel.title}: assumptions"),
    )


def _find_worst(summary: Summary) -> RankResult | None:
    known = [rank for rank in summary.ranks if rank.memory_formula is not None]
    return max(known, key=lambda rank: rank.peak_bytes or 0, default=None)


def _held(state_bytes: int | None) -> str:
    return "an unknown amount" if state_bytes is None else format_bytes(state_bytes)


def _list_schemes(formula: MemoryFormula) -> list[tuple[str, int, bool]]:
    """Return each scheme in words, its bytes, and whether this run uses it; without ranks to shard over that alone."""
    return [
        (SCHEMES.get(name, name), nbytes, name == formula.scheme)
        for name, nbytes in formula.by_scheme_bytes.items()
        if formula.shards > 1 or name == formula.scheme
    ]


def render_headroom(panel: Panel, source: Source, _: Pages) -> Markup:
    """List the headroom of each memory, smallest first."""
    headrooms = source.summary.headroom
    if not headrooms:
        return render_nothing(
            Nothing(
                why="The sizes of the memories are not known.",
                remedy="The launcher samples its node: start the job with `dtprof run` on every node.",
            )
        )
    columns = [
        text_column("host", "host", [headroom.host for headroom in headrooms]),
        text_column("device", "memory of", [headroom.device for headroom in headrooms]),
        unit_column("capacity", "size", [headroom.capacity_bytes for headroom in headrooms], SIZES),
        unit_column("most", "most in use", [headroom.most_used_bytes for headroom in headrooms], SIZES),
        unit_column("headroom", "left", [headroom.headroom_bytes for headroom in headrooms], SIZES),
        number_column(
            "share",
            "left of it",
            [headroom.headroom_bytes / headroom.capacity_bytes for headroom in headrooms],
            format_share,
        ),
    ]
    return render_table(columns, caption=panel.title, definitions=panel.definitions)
