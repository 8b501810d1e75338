"""Who acts: labels set around the calls of a framework, and the replacing of its functions."""

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dtprof import fence
from dtprof.capture.attribution_labels import Describe, Labels
from dtprof.capture.frameworks.imports import after_import, replace_copies
from dtprof.capture.recorder import Recorder
from dtprof.capture.string_entries import entry, timed_entry

Begin = Callable[..., Any]
End = Callable[[Any, bool], object]
NOTHING = -1


class Acting:
    """On whose behalf the threads of this process act, told to the recorder."""

    def __init__(self, recorder: Callable[[bool], Recorder | None]) -> None:
        """Keep the way to the recorder, which none of these hooks opens."""
        self._recorder = recorder
        self._labels: Labels | None = None
        self._missing: list[str] = []
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._labels = None

    def labels(self) -> Labels | None:
        """Return the labels of the log of this process; None while there is none."""
        if self._labels is not None:
            return self._labels
        recorder = self._recorder(False)
        if recorder is None:
            return None
        self._labels = Labels(recorder)
        for text in self._missing:
            recorder.write_entry(timed_entry("note", text=text))
        return self._labels

    def label(self, describe: Describe, *parts: Any) -> int:
        """Return the id of the label that `describe(*parts)` gives, which is asked once for equal parts."""
        labels = self._labels or self.labels()
        if labels is None:
            return 0
        known = labels.known.get((describe, *parts))
        return known if known is not None else labels.declare(describe, *parts)

    def begin(self, describe: Describe, *parts: Any) -> int:
        """Let this thread act on behalf of a label; return what `end` needs."""
        labels = self._labels or self.labels()
        if labels is None:
            return NOTHING
        known = labels.known.get((describe, *parts))
        return labels.recorder.set_label(known if known is not None else labels.declare(describe, *parts))

    def begin_unless_labelled(self, describe: Describe, *parts: Any) -> int:
        """Let this thread act on behalf of a label, unless it acts for one that says more already."""
        before = self.begin(describe, *parts)
        if before > 0 and self._labels is not None:
            self._labels.recorder.set_label(before)
        return before

    def end(self, before: Any, failed: bool = False) -> None:
        """Let this thread act again on whose behalf it did before."""
        del failed
        if before is not None and before != NOTHING and self._labels is not None:
            self._labels.recorder.set_label(before)

    def declare_use(self, group: str, axis: str, by: str) -> None:
        """Say in the run, once, what a group is used for and by whom."""
        labels = self.labels()
        if labels is not None and labels.first_time(("axis", group, axis)):
            labels.recorder.write_entry(entry("axis", group=group, axis=axis, by=by))

    # ---- hooks ---------------------------------------------------------------------------------------------------

    def after_import(self, name: str, hook: Callable[[Any], object]) -> None:
        """Hook a module once it is imported; whatever goes wrong is told."""

        @fence.fenced(f"on whose behalf {name} acts")
        def hook_module(module: ModuleType) -> None:
            try:
                hook(module)
            except AttributeError as error:
                self._note(f"torch has no {name}.{error.name}: what it does carries no label")

        after_import(name, hook_module)

    def around(self, owner: Any, name: str, begin: Begin, end: End | None = None) -> None:
        """Replace a function by one that is watched; a torch without it is noted in the run."""
        self.replace(owner, name, lambda original: self.watched(original, name, begin, end))

    def watched(self, original: Callable[..., Any], name: str, begin: Begin, end: End | None = None) -> Any:
        """Return the function with `begin(*arguments)` before it and `end(what that returned, failed)` after it.

        Compiled code is left as it is. Without an end, what `begin` returned is the label to go back to.
        """
        import torch.compiler

        is_compiling, what = torch.compiler.is_compiling, f"on whose behalf {name} acts"
        finish = end if end is not None else self.end

        @functools.wraps(original)
        def watched(*arguments: Any, **options: Any) -> Any:
            if is_compiling():
                return original(*arguments, **options)
            begun = None
            try:
                begun = begin(*arguments, **options)
            except Exception as error:
                fence.report(what, error)
            failed = True
            try:
                result = original(*arguments, **options)
                failed = False
                return result
            finally:
                try:
                    finish(begun, failed)
                except Exception as error:
                    fence.report(what, error)

        return watched

    def after(self, owner: Any, name: str, see: Callable[..., object]) -> None:
        """Replace a function by one that calls `see(result, *arguments)` after it."""
        import torch.compiler

        is_compiling, what = torch.compiler.is_compiling, f"on whose behalf {name} acts"

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def watched(*arguments: Any, **options: Any) -> Any:
                result = original(*arguments, **options)
                if not is_compiling():
                    try:
                        see(result, *arguments, **options)
                    except Exception as error:
                        fence.report(what, error)
                return result

            return watched

        self.replace(owner, name, make)

    def replace(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
        """Replace a function of a module or class; note in the run that this torch has none of the name."""
        kept = vars(owner).get(name)
        is_static = isinstance(kept, staticmethod)
        original = getattr(owner, name, None)
        if kept is None or not callable(original):
            self._note(f"torch has no {owner.__name__}.{name}: what it does carries no label")
            return
        new = make(original)
        setattr(owner, name, staticmethod(new) if is_static else new)
        if isinstance(owner, ModuleType):
            replace_copies(original, name, new)

    def _note(self, text: str) -> None:
        self._missing.append(text)
        if self._labels is not None:
            self._labels.recorder.write_entry(timed_entry("note", text=text))
