"""An operation that an installed package issues goes by the package, and a message by its own call."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dtprof.capture import call_sites
from dtprof.job.api_names import find_apis
from dtprof.records.sites import Site
from dtprof.records.tables import OPERATION, RankTables


@pytest.mark.parametrize(
    ("path", "package"),
    [
        ("/a/lib/python3.11/site-packages/deepspeed/runtime/engine.py", "deepspeed"),
        ("/usr/lib/python3/dist-packages/horovod.py", "horovod"),
        ("/usr/lib/python3.11/contextlib.py", ""),
    ],
)
def test_package_is_the_top_folder_or_module_of_an_installed_file(path: str, package: str) -> None:
    assert call_sites.package_of(path) == package


def function_of(path: str, text: str) -> Callable[..., Any]:
    """Return the function `call` that the text of a file defines."""
    names: dict[str, Any] = {"sys": sys}
    exec(compile(text, path, "exec"), names)
    return names["call"]  # type: ignore[no-any-return]


def test_site_has_the_package_between_the_line_and_the_operation() -> None:
    owners = call_sites.CodeOwners(tool=("/torch/",), library=("/env/site-packages/", "/lib/"))
    sites = call_sites.CallSites(owners)
    torchs = function_of("/torch/all_reduce.py", "def call(sites): return sites.find(sys._getframe())")
    stdlibs = function_of("/lib/functools.py", "def call(f, *a): return f(*a)")
    engine = function_of("/env/site-packages/deepspeed/engine.py", "def call(f, *a): return f(*a)")
    _, by_engine = engine(stdlibs, torchs, sites)
    _, by_program = stdlibs(torchs, sites)
    assert by_engine.package == "deepspeed"
    assert (by_program.package, by_program.function) == ("", by_engine.function)


def names_of(ops: tuple[str, ...], site: Site) -> list[str]:
    """Return the names of one operation of each kind, all issued at one site."""
    operations = np.zeros(len(ops), OPERATION)
    operations["op"], operations["site"] = range(len(ops)), 1
    apis = find_apis(RankTables(rank=0, attempt=0, world_size=1, ops=ops, sites={1: site}), operations)
    return [apis.names[i] for i in apis.of_operation.tolist()]


def test_line_that_sends_and_receives_in_turn_has_a_name_for_each() -> None:
    site = Site(file="train.py", line=3, function="exchange", api="isend")
    assert names_of(("send", "recv"), site) == ["isend", "irecv"]


def test_package_names_an_operation_that_no_framework_labels() -> None:
    site = Site(file="train.py", line=3, function="main", api="instrument.<locals>.wrapped_fn", package="deepspeed")
    assert names_of(("all_reduce",), site) == ["deepspeed"]
