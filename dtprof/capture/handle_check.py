"""Switch the check of handles on: the native hook then inspects the arguments of every operator of torch.

What a program does to wait for all devices at once is no operator: this module reports it.
"""

import functools
from collections.abc import Callable
from typing import Any

from dtprof import fence
from dtprof.capture.string_entries import entry


@fence.fenced("the check of handles")
def install(recorder: Any) -> None:
    """Begin the check; only the native recorder has one."""
    if not hasattr(recorder, "check_handles"):
        fence.warn_once("--check handles needs the native recorder: nothing is checked on this rank")
        return
    recorder.check_handles()
    recorder.write_entry(entry("feature", name="check:handles"))
    import torch

    for owner, name in (
        (torch.cuda, "synchronize"),
        (torch.cuda.Event, "synchronize"),
        (torch.cuda.Stream, "synchronize"),
        (getattr(torch, "accelerator", None), "synchronize"),
    ):
        if owner is not None and hasattr(owner, name):
            setattr(owner, name, _telling(getattr(owner, name), recorder.devices_synchronized))


def _telling(original: Callable[..., Any], tell: Callable[[], object]) -> Callable[..., Any]:
    """Return a function that tells when it has returned."""

    @fence.stands_in
    @functools.wraps(original)
    def synchronize(*arguments: Any, **options: Any) -> Any:
        try:
            result = original(*arguments, **options)
        except BaseException as error:
            fence.hide_frame(error)
            raise
        tell()
        return result

    return synchronize
