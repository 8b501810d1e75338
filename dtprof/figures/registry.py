"""Every figure that a page or `run.figure` can name."""

from collections.abc import Callable, Mapping

from dtprof.figures.bandwidth import draw_bandwidth
from dtprof.figures.blame import draw_blame
from dtprof.figures.bubble_parts import draw_bubble_parts
from dtprof.figures.devices import draw_devices
from dtprof.figures.drawing import Drawing, Nothing
from dtprof.figures.exposed_by_axis import draw_exposed_by_axis
from dtprof.figures.lateness import draw_lateness
from dtprof.figures.memory_categories import draw_memory_categories
from dtprof.figures.memory_course import draw_memory_course
from dtprof.figures.pipeline import draw_pipeline
from dtprof.figures.pipeline_changes import draw_pipeline_changes
from dtprof.figures.source import Source
from dtprof.figures.stage_times import draw_stage_times
from dtprof.figures.step_parts import draw_step_parts
from dtprof.figures.step_phases import draw_step_phases
from dtprof.figures.step_times import draw_step_times
from dtprof.figures.timeline import draw_timeline
from dtprof.figures.traffic_matrix import draw_traffic_matrix
from dtprof.figures.wait_matrix import draw_wait_matrix

FIGURES: Mapping[str, Callable[[Source], Drawing | Nothing]] = {
    "step_parts": lambda source: draw_step_parts(source.summary),
    "step_phases": lambda source: draw_step_phases(source.summary),
    "step_times": lambda source: draw_step_times(source.summary),
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
    "memory_course": draw_memory_course,
    "devices": draw_devices,
    "blame": draw_blame,
}
