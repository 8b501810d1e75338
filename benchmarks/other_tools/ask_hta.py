"""Ask HolisticTraceAnalysis for every analysis that takes no further argument: ask_hta.py TRACES.

Runs in an environment that has it.
"""

import logging
import sys

import pandas as pd  # type: ignore[import-untyped]

ASKED = (
    "get_temporal_breakdown",
    "get_comm_comp_overlap",
    "get_idle_time_breakdown",
    "get_gpu_kernel_breakdown",
    "get_potential_stragglers",
    "get_memory_bw_summary",
)


def main() -> None:
    """Print each answer, or the error in its place."""
    from hta.trace_analysis import TraceAnalysis  # type: ignore[import-not-found]

    logging.disable(logging.INFO)
    pd.set_option("display.width", 150, "display.max_columns", 12)
    analysis = TraceAnalysis(trace_dir=sys.argv[1])
    for name in ASKED:
        print(f">>> {name}()")
        try:
            options = {} if name in ("get_potential_stragglers", "get_memory_bw_summary") else {"visualize": False}
            answer = getattr(analysis, name)(**options)
        except Exception as error:  # noqa: BLE001 - whatever it raises is its answer
            print(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        else:
            for part in answer if isinstance(answer, tuple) else (answer,):
                if part is not None:
                    print(part)


if __name__ == "__main__":
    main()
