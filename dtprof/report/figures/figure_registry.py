"""Every figure that a page or `run.figure` can name."""

from collections.abc import Callable, Mapping

from dtprof.report.figures.bandwidth_figure import draw_bandwidth
from dtprof.report.figures.before_after_figure import draw_before_after
from dtprof.report.figures.blame_figure import draw_blame
from dtprof.report.figures.bubble_parts_figure import draw_bubble_parts
from dtprof.report.figures.change_gains_figure import draw_change_gains
from dtprof.report.figures.devices_figure import draw_devices
from dtprof.report.figures.drawing import Drawing, Nothing
from dtprof.report.figures.exposed_by_axis_figure import draw_exposed_by_axis
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.lateness_figure import draw_lateness
from dtprof.report.figures.memory_categories_figure import draw_memory_categories
from dtprof.report.figures.memory_series_figure import draw_memory_series
from dtprof.report.figures.pipeline_changes_figure import draw_pipeline_changes
from dtprof.report.figures.pipeline_figure import draw_pipeline
from dtprof.report.figures.slowdowns_figure import draw_slowdowns
from dtprof.report.figures.stacked_step_figure import draw_step_parts, draw_step_phases
from dtprof.report.figures.stage_times_figure import draw_stage_times
from dtprof.report.figures.step_times_figure import draw_step_times
from dtprof.report.figures.timeline_figure import draw_timeline
from dtprof.report.figures.traffic_matrix_figure import draw_traffic_matrix
from dtprof.report.figures.wait_matrix_figure import draw_wait_matrix

FIGURES: Mapping[str, Callable[[Source], Drawing | Nothing]] = {
    "step_times": lambda source: draw_step_times(source.summary),
    "step_parts": lambda source: draw_step_parts(source.summary),
    "step_phases": lambda source: draw_step_phases(source.summary),
    "timeline": lambda source: draw_timeline(source.summary),
    "pipeline": draw_pipeline,
    "bubble_parts": draw_bubble_parts,
    "stage_times": draw_stage_times,
    "pipeline_changes": draw_pipeline_changes,
    "exposed_by_axis": draw_exposed_by_axis,
    "bandwidth": draw_bandwidth,
    "wait_matrix": draw_wait_matrix,
    "traffic_matrix": draw_traffic_matrix,
    "lateness": draw_lateness,
    "memory_categories": draw_memory_categories,
    "memory_course": draw_memory_series,
    "devices": draw_devices,
    "blame": draw_blame,
    "change_gains": draw_change_gains,
    "before_after": draw_before_after,
    "slowdowns": draw_slowdowns,
}
