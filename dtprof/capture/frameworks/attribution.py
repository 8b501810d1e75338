"""Attribution of operations: labels set around the functions of a framework, and the hooks into these functions."""

import functools
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from dtprof import fence
from dtprof.capture.attribution_labels import AttributionLabels, Describe
from dtprof.capture.call_sites import code_owners, user_line
from dtprof.capture.frameworks.copies import Copies
from dtprof.capture.frameworks.imports import after_import, replace_copies
from dtprof.capture.group_descriptions import name_of
from dtprof.capture.recorder import Recorder
from dtprof.capture.string_entries import entry, timed_entry

Begin = Callable[..., Any]
End = Callable[[Any, bool], object]
NOTHING = -1
MOST_EARLY_USES = 1_000
"""Declared axes that wait for a log: a process that never has one keeps no more."""
FRAMEWORKS_UPON_TORCH = ("megatron", "deepspeed", "fairscale", "torchft", "torchrec")
"""Packages with adapters of their own: a version that moved its names loses the adapter."""
MOST_WRAPPERS = 4096
"""Wrappers whose parameters are written: a program may make any number."""
SOME_NAMES, MOST_OF_NAME = 8, 200
"""Names of the parameters of a wrapper that are written, and their length; a checksum stands for all."""


class Attribution:
    """Labels the operations that the threads of this process issue, and hooks the functions of frameworks."""

    def __init__(self, recorder: Callable[[bool], Recorder | None]) -> None:
        """Get the recorder from `recorder`; no hook of a framework opens the log."""
        self._recorder = recorder
        self._labels: AttributionLabels | None = None
        self._missing: list[str] = []
        self._wrappers = 0
        self._early_uses: list[tuple[str, str, str]] = []
        self.copies = Copies()
        # A forked child opens a log of its own, in which labels must be declared again.
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._labels = None

    def labels(self) -> AttributionLabels | None:
        """Return the labels of the log of this process; None while there is none."""
        if self._labels is not None:
            return self._labels
        recorder = self._recorder(False)
        if recorder is None:
            return None
        self._labels = AttributionLabels(recorder)
        # Frameworks are hooked as they are imported, often before this process has a log to note in.
        for text in self._missing:
            recorder.write_entry(timed_entry("note", text=text))
        while self._early_uses:
            self.declare_use(*self._early_uses.pop(0))
        return self._labels

    def label(self, describe: Describe, *parts: Any) -> int:
        """Return the id of the label `describe(*parts)`, which is built once for equal parts."""
        labels = self._labels or self.labels()
        if labels is None:
            return 0
        known = labels.known.get((describe, *parts))
        return known if known is not None else labels.declare(describe, *parts)

    def begin(self, describe: Describe, *parts: Any) -> int:
        """Attribute the operations of this thread to a label; return the label before, for `end`."""
        labels = self._labels or self.labels()
        if labels is None:
            return NOTHING
        known = labels.known.get((describe, *parts))
        return labels.recorder.set_label(known if known is not None else labels.declare(describe, *parts))

    def begin_unless_labelled(self, describe: Describe, *parts: Any) -> int:
        """Attribute the operations of this thread to a label, unless it has a label, which says more."""
        before = self.begin(describe, *parts)
        if before > 0 and self._labels is not None:
            self._labels.recorder.set_label(before)
        return before

    def end(self, before: Any, failed: bool = False) -> None:
        """Restore the label that this thread had before."""
        del failed
        if before is not None and before != NOTHING and self._labels is not None:
            self._labels.recorder.set_label(before)

    def declare_use(self, group: Any, axis: str, by: str) -> None:
        """Write the axis of a group, given as such or by its name, and who uses it so, once.

        Before this process has a log, the declaration waits for it: groups are configured before their first use.
        """
        labels, name = self.labels(), group if isinstance(group, str) else name_of(group)
        if labels is None and len(self._early_uses) < MOST_EARLY_USES:
            self._early_uses.append((name, axis, by))
        if labels is not None and labels.first_time(("axis", name, axis)):
            labels.recorder.write_entry(entry("axis", group=name, axis=axis, by=by))

    def declare_parameters(self, group: Any, names: Iterable[str], by: str) -> None:
        """Write in which order a wrapper communicates parameters: members must have the same ones in the same order."""
        labels = self.labels()
        if labels is None or self._wrappers >= MOST_WRAPPERS:
            return
        import torch

        self._wrappers += 1
        ordered = list(names)
        checksum = zlib.crc32("\n".join(ordered).encode()) & 0x7FFFFFFF
        place = user_line(code_owners(str(Path(torch.__file__).parent)))
        labels.recorder.write_entry(
            timed_entry(
                "parameters",
                group=group if isinstance(group, str) else name_of(group),
                by=by,
                names=checksum,
                count=len(ordered),
                some=[name[:MOST_OF_NAME] for name in ordered[:SOME_NAMES]],
                place=place,
            )
        )

    def declare_sharding(self, scheme: str, group: Any, by: str) -> None:
        """Write over how many ranks a framework shards the model, and how: none, zero1, zero2, zero3."""
        labels, shards = self.labels(), group.size()
        if labels is not None and labels.first_time(("sharding", scheme, shards, by)):
            labels.recorder.write_entry(entry("sharding", scheme=scheme, shards=shards, by=by))

    def has_all(self, owner: Any, names: Iterable[str], described: str = "") -> bool:
        """Check that an object has all names that hooks rely on; else note once what stays unrecognised."""
        held = owner if isinstance(owner, Mapping) else vars(owner)
        missing = [name for name in names if name not in held]
        if missing:
            self._note(_describe_missing(described or _full_name(owner), missing[0]))
        return not missing

    def after_import(self, name: str, hook: Callable[[Any], object], defines: tuple[str, ...] = ()) -> None:
        """Hook a module once it is imported; note in the run where this torch lacks a name.

        Parameters:
            defines: what a copy of the module under another name defines, as `Copies` has it; empty: no copy is hooked.
        """

        @fence.fenced(f"attribution to {name}")
        def hook_module(module: ModuleType) -> None:
            try:
                hook(module)
            except AttributeError as error:
                self._note(_describe_missing(name, error.name))

        after_import(name, hook_module)
        if defines:
            self.copies.seek(name, defines, hook_module)

    def around(self, owner: Any, name: str, begin: Begin, end: End | None = None) -> None:
        """Replace a function by a `wrapped` one."""
        self.replace(owner, name, lambda original: self.wrapped(original, name, begin, end))

    def wrapped(self, original: Callable[..., Any], name: str, begin: Begin, end: End | None = None) -> Any:
        """Return the function with `begin(*arguments)` before it and `end(result of begin, failed)` after it.

        Compiled code runs unhooked. Without an `end`, `begin` returns the label to restore.
        """
        import torch.compiler

        is_compiling, what = torch.compiler.is_compiling, f"attribution to {name}"
        finish = end if end is not None else self.end

        @fence.stands_in
        @functools.wraps(original)
        def wrapped(*arguments: Any, **options: Any) -> Any:
            if is_compiling():
                return original(*arguments, **options)
            started = None
            # The fence is written out: a fenced function would add a frame to every stack of the program.
            try:
                started = begin(*arguments, **options)
            except Exception as error:
                fence.report(what, error)
            failed = True
            try:
                result = original(*arguments, **options)
                failed = False
                return result
            except BaseException as error:
                fence.hide_frame(error)
                raise
            finally:
                try:
                    finish(started, failed)
                except Exception as error:
                    fence.report(what, error)

        return wrapped

    def after(self, owner: Any, name: str, see: Callable[..., object]) -> None:
        """Replace a function by one that calls `see(result, *arguments)` after it."""
        import torch.compiler

        is_compiling, what = torch.compiler.is_compiling, f"attribution to {name}"

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            @fence.stands_in
            @functools.wraps(original)
            def wrapped(*arguments: Any, **options: Any) -> Any:
                if is_compiling():
                    return original(*arguments, **options)
                try:
                    result = original(*arguments, **options)
                except BaseException as error:
                    fence.hide_frame(error)
                    raise
                try:
                    see(result, *arguments, **options)
                except Exception as error:
                    fence.report(what, error)
                return result

            return wrapped

        self.replace(owner, name, make)

    def replace(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
        """Replace a function of a module or class; note in the run where this torch lacks it."""
        defined = vars(owner).get(name)
        is_static = isinstance(defined, staticmethod)
        original = getattr(owner, name, None)
        if defined is None or not callable(original):
            self._note(_describe_missing(_full_name(owner), name))
            return
        new = make(original)
        setattr(owner, name, staticmethod(new) if is_static else new)
        # Other modules of the framework hold the function by `from ... import` and would call the original.
        if isinstance(owner, ModuleType):
            replace_copies(original, name, new)

    def _note(self, text: str) -> None:
        self._missing.append(text)
        if self._labels is not None:
            self._labels.recorder.write_entry(timed_entry("note", text=text))


def _full_name(owner: Any) -> str:
    """Return the name of a class or module; of a class of a framework with its module."""
    module = str(getattr(owner, "__module__", ""))
    return f"{module}.{owner.__name__}" if module.startswith(FRAMEWORKS_UPON_TORCH) else str(owner.__name__)


def _describe_missing(owner: str, name: str | None) -> str:
    package = owner.partition(".")[0]
    if package in FRAMEWORKS_UPON_TORCH:
        return f"{package} has no {owner}.{name}: what this version shards, or runs as a pipeline, is not recognised"
    return f"torch has no {owner}.{name}: its operations carry no label"
