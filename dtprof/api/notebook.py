"""Results in a notebook: shown as the commands print them, without a server."""

import sys
from collections.abc import Callable
from html import escape
from typing import Any


def show_results_as_text() -> None:
    """Register with IPython how results are displayed; nothing where no IPython runs.

    Results stay plain dataclasses below the report, which knows the text of each.
    """
    if "IPython" not in sys.modules:
        return
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    if shell is None or shell.display_formatter is None:
        return
    from dtprof.analysis.comparison.run_comparison import Comparison
    from dtprof.analysis.results import Summary
    from dtprof.analysis.whatif.prediction import Prediction
    from dtprof.diagnosis.findings import Verdict
    from dtprof.report.text.comparison_text import comparison_text
    from dtprof.report.text.summary_text import summary_text
    from dtprof.report.text.verdict_text import verdict_text
    from dtprof.report.text.whatif_text import whatif_text

    texts: dict[type, Callable[[Any], str]] = {
        Summary: summary_text,
        Verdict: verdict_text,
        Comparison: comparison_text,
        Prediction: whatif_text,
    }
    formatter = shell.display_formatter.formatters["text/html"]
    for kind, text in texts.items():
        formatter.for_type(kind, lambda result, _text=text: as_html(_text(result)))


def as_html(text: str) -> str:
    """Return text of a command as a notebook shows it."""
    return f"<pre>{escape(text)}</pre>"
