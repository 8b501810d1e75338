"""torch-tb-profiler 0.4.3 with pages that need no network, in place of its own.

Its back end works as it is. Its pages load Google's charts and a trace viewer's polyfill from the internet. Here the
page gets plotly.js, as the installed plotly package carries it, behind the few names of Google's that it uses
(charts.js), and its trace view is a page of our own (trace_view.html). No file of the package is changed; its own tab
is hidden, or every trace would be read twice.
"""

import functools
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

GOOGLE_CHARTS = '<script src="https://www.gstatic.com/charts/loader.js"></script>'
OURS = '<script src="plotly.min.js"></script><script src="charts.js"></script>'
NAME, TAB = "torch_profiler_offline", "Torch Profiler"
FOLDER = Path(__file__).parent


def load(_loader: Any, context: Any) -> Any:
    """Return the plugin; None where torch-tb-profiler is not installed, or no plotly.js to draw with."""
    try:
        upstream = import_module("torch_tb_profiler.plugin").TorchProfilerPlugin
        import_module("plotly.offline")
    except ImportError:
        return None
    return offline_plugin(upstream)(context)


@functools.cache
def offline_plugin(upstream: Any) -> Any:
    """Return the plugin on top of that of the package."""

    def get_plugin_apps(self: Any) -> dict[str, Any]:
        apps: dict[str, Any] = upstream.get_plugin_apps(self)
        return apps | {path: _page(kind, read, self.headers) for path, (kind, read) in _pages().items()}

    def frontend_metadata(_self: Any) -> Any:
        metadata = import_module("tensorboard.plugins.base_plugin").FrontendMetadata
        return metadata(es_module_path="/index.js", disable_reload=True, tab_name=TAB)

    members = {"plugin_name": NAME, "get_plugin_apps": get_plugin_apps, "frontend_metadata": frontend_metadata}
    return type("OfflineTorchProfiler", (upstream,), members)


def _pages() -> dict[str, tuple[str, Callable[[], str]]]:
    """Return the pages served in place of the package's own, and the added files."""
    index = Path(import_module("torch_tb_profiler").__file__ or "").parent / "static" / "index.html"
    return {
        "/index.html": ("text/html", lambda: index.read_text("utf-8").replace(GOOGLE_CHARTS, OURS)),
        "/charts.js": ("application/javascript", (FOLDER / "charts.js").read_text),
        "/plotly.min.js": ("application/javascript", import_module("plotly.offline").get_plotlyjs),
        "/trace_embedding.html": ("text/html", (FOLDER / "trace_view.html").read_text),
    }


def _page(kind: str, read: Callable[[], str], headers: list[tuple[str, str]]) -> Any:
    """Return the application that serves one page."""
    wrappers = import_module("werkzeug.wrappers")

    def respond(_request: Any) -> Any:
        return wrappers.Response(read(), content_type=f"{kind}; charset=utf-8", headers=headers)

    return wrappers.Request.application(respond)


def hide_upstream() -> None:
    """Let the package's own plugin, which TensorBoard loads beside ours, read nothing and show no tab."""
    try:
        upstream = import_module("torch_tb_profiler.plugin").TorchProfilerPlugin
        base = import_module("tensorboard.plugins.base_plugin").TBPlugin
        import_module("plotly.offline")
    except ImportError:
        return

    def of_itself(name: str, instead: Callable[..., Any]) -> None:
        original = getattr(upstream, name)

        @functools.wraps(original)
        def method(self: Any, *arguments: Any) -> Any:
            return (instead if type(self) is upstream else original)(self, *arguments)

        setattr(upstream, name, method)

    def is_active(_self: Any) -> bool:
        return False

    def get_plugin_apps(_self: Any) -> dict[str, Any]:
        return {}

    of_itself("__init__", base.__init__)
    of_itself("is_active", is_active)
    of_itself("get_plugin_apps", get_plugin_apps)


hide_upstream()
Loader = type("Loader", (import_module("tensorboard.plugins.base_plugin").TBLoader,), {"load": load})
"""The name of the entry point: TensorBoard imports this module, and asks it for the plugin."""
