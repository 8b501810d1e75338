"""Count what the models of a rank are fed in a step: token ids and samples, from shapes alone.

Of the arguments of a training forward pass, a tensor of integers with two dimensions is taken for token ids, batch by
sequence, and the first dimension of the first tensor for the batch. Where a rank has several models, such as the stages
of a pipeline, what was fed most counts.
"""

import numbers
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from dtprof import fence
from dtprof.capture.recorder import Recorder
from dtprof.capture.spans import Spans
from dtprof.records import events

MOST_MODELS = 64
"""That are told apart in a step."""
STEPS_BETWEEN = 32
"""A count that stays the same is recorded again after so many steps: of a long run only the newest may be looked at."""
MOST = 1 << 62


class Consumption:
    """What is fed to each model since the last step ended."""

    def __init__(self, spans: Spans) -> None:
        """Record where these spans go."""
        self._spans = spans
        self._fed: dict[int, tuple[int, int]] = {}  # by model: tokens, samples
        self._told: tuple[object, int, int] = (None, 0, 0)  # recorder, tokens, samples
        self._until_repeat = 0
        self._tensor: Any = None
        self._ids: frozenset[Any] = frozenset()
        self._intercepted: Callable[[], int] = int
        self._aside: Callable[[], AbstractContextManager[object]] = nullcontext

    def install(
        self,
        tensor: type[Any],
        ids: Collection[object],
        *,
        intercepted: Callable[[], int] = int,
        aside: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Know what a tensor is, and which types of numbers token ids have.

        A program may intercept what is done with tensors, even that their shape is asked for: `intercepted` tells, and
        `aside` passes it by.
        """
        self._tensor, self._ids = tensor, frozenset(ids)
        self._intercepted, self._aside = intercepted, aside

    def see(self, model: int, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """Count the arguments of a training forward pass of a model."""
        try:
            # The plain case by the shortest way: between the computations of the job all code has left the caches.
            first: Any = arguments[0] if arguments else next(iter(options.values()), None)
            if (
                type(first) is self._tensor
                and not self._intercepted()
                and len(shape := first.shape) == 2
                and first.dtype in self._ids
            ):
                samples, length = shape
                tokens = samples * length
            else:
                with self._aside():
                    tokens, samples = self._count(arguments, options)
            known = self._fed.get(model)
            if known is not None:
                self._fed[model] = known[0] + tokens, known[1] + samples
            elif len(self._fed) < MOST_MODELS:
                self._fed[model] = tokens, samples
        except Exception as error:  # noqa: BLE001  # a fence of its own: the forward pass is recorded anyway
            fence.report("what the model is fed", error)

    def end_step(self, said: object = None) -> None:
        """Record what was fed in the step that ends now, where that differs from the step before.

        Parameters:
            said: the tokens of this rank as the program counts them; None: it does not.
        """
        try:
            tokens = samples = 0
            for own_tokens, own_samples in self._fed.values():
                tokens, samples = max(tokens, own_tokens), max(samples, own_samples)
            self._fed.clear()
            if said is not None:
                tokens = _number(said, tokens)
            recorder = self._spans.recorder(True)
            now = recorder, tokens, samples
            self._until_repeat -= 1
            if recorder is not None and (now != self._told or self._until_repeat <= 0):
                self._tell(recorder, tokens, samples)
                self._told = now
        except Exception as error:  # noqa: BLE001  # a fence of its own: the step ends anyway
            fence.report("what the model is fed", error)

    def _tell(self, recorder: Recorder, tokens: int, samples: int) -> None:
        known, *before = self._told
        if known is not recorder:
            before = [0, 0]  # a forked process has a log of its own
        again = self._until_repeat <= 0
        for name, value, told in zip(events.CONSUMED, (tokens, samples), before, strict=True):
            if value != told or (again and value):
                recorder.sample(self._spans.id_of(recorder, name), value)
        if again:
            self._until_repeat = STEPS_BETWEEN

    def _count(self, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[int, int]:
        batch = None
        for tensor in self._tensors(arguments, options):
            shape = tensor.shape
            if not shape:
                continue
            if batch is None:
                batch = shape[0]
            # Integers of another length say something else of the batch: the edges of a graph, say.
            if len(shape) == 2 and shape[0] == batch and tensor.dtype in self._ids:
                return int(tensor.numel()), int(batch)
        return 0, int(batch or 0)

    def _tensors(self, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Iterator[Any]:
        """Give the tensors among the arguments, and those in lists and dicts among them; of a DTensor its own part."""
        for value in (*arguments, *options.values()):
            for one in (value,) if isinstance(value, self._tensor) else _parts(value):
                if isinstance(one, self._tensor):
                    yield one if type(one) is self._tensor else getattr(one, "_local_tensor", one)


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, list | tuple):
        return value
    return value.values() if isinstance(value, dict | UserDict) else ()


def _number(said: object, otherwise: int) -> int:
    """Return what a program says that it counted; a tensor is refused, which might have to be waited for."""
    shown = f"a {type(said).__name__}"
    if isinstance(said, numbers.Real):
        if 0 <= (value := float(said)) < MOST:
            return round(value)
        shown = str(said)
    fence.warn_once(
        f"dtprof.step(tokens=...) was given {shown}; expected a number of 0 or more, and no tensor: tokens are counted "
        "by the shape of what the model is given",
        "dtprof.step(tokens=...)",
    )
    return otherwise
