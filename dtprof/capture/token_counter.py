"""Count the tokens and samples that a rank consumes in a step, from the shapes of the inputs of its models.

Of the arguments of a training forward pass, an integer tensor with two dimensions counts as token ids, batch by
sequence, and the first dimension of the first tensor as the batch. Of several models of a rank, such as the stages of a
pipeline or an actor and its critic, the one that consumed most counts.
"""

import numbers
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from dtprof import fence
from dtprof.capture.recorder import Recorder
from dtprof.capture.spans import Spans
from dtprof.capture.string_entries import entry
from dtprof.records import events

MOST_MODELS = 64
"""Models counted apart in a step."""
STEPS_BETWEEN = 32
"""An unchanged count is recorded again after so many steps: readers of a long run may read its newest records only."""
MAX_TOKENS = 1 << 62
BOUNDS = ("cu_seq_lens_q", "cu_seqlens", "cu_seqlens_q")
"""Inputs of models that say where sequences in one row begin, as attention without padding takes them."""


class _History:
    """What a model consumed in all steps, and in which it did."""

    __slots__ = ("first_step", "last_step", "total")

    def __init__(self, step: int) -> None:
        """Begin at the first step in which the model consumes."""
        self.first_step = self.last_step = step
        self.total = (0, 0)  # tokens, samples


class Turns:
    """Models that step in turn, as an actor and its critic do, or two that learn from each other.

    They are given the same sequences, so of their steps only those of the model that was given most consume. Models
    that a process trains one after the other do not step in turn.
    """

    def __init__(self) -> None:
        """Start without models."""
        self._models: dict[int, _History] = {}
        self._step = 0

    def add(self, model: int, consumed: tuple[int, int]) -> bool:
        """Count a step of the model that consumed most in it; say whether the step consumes."""
        self._step += 1
        history = self._models.get(model)
        if history is None:
            if len(self._models) >= MOST_MODELS:
                return True
            history = self._models[model] = _History(self._step)
        history.last_step = self._step
        history.total = history.total[0] + consumed[0], history.total[1] + consumed[1]
        return len(self._models) == 1 or not any(
            other.total >= history.total and other.last_step > history.first_step
            for other in self._models.values()
            if other is not history
        )


class Consumption:
    """The inputs of each model since the last step ended."""

    def __init__(self, spans: Spans) -> None:
        """Record through these spans."""
        self._spans = spans
        self._consumed: dict[int, tuple[int, int]] = {}  # by model: tokens, samples
        self._turns = Turns()
        self._sequence_first: set[int] = set()  # models whose layers of torch.nn may take ids sequence by batch
        self._packed: set[int] = set()  # models whose ids are one row, which may hold several sequences
        self._recorded: tuple[object, int, int] = (None, 0, 0)  # recorder, tokens, samples
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
        """Recognise tensors by this class, and token ids by these element types.

        A program may intercept every access to a tensor, that to its shape too, by __torch_function__: `intercepted`
        counts such interceptors, `aside` disables them.
        """
        self._tensor, self._ids = tensor, frozenset(ids)
        self._intercepted, self._aside = intercepted, aside

    @fence.fenced("the tokens and samples of a step")
    def register_model(self, model: int, layers: Iterable[Any], options: Mapping[str, Any]) -> None:
        """Look at the layers and named inputs of a model before its first pass: what is the batch depends on them.

        Layers of torch.nn are made with `batch_first=False` unless the program says otherwise; it may still give the
        model ids batch by sequence, and transpose them in it. Where padding is left out, sequences follow one another
        in one row of ids: positions, which begin anew with each, stand in for the mask.
        """
        features = []
        if any(getattr(part, "batch_first", True) is False for part in layers):
            self._sequence_first.add(model)
            features.append(events.SEQUENCE_FIRST)
        with self._aside():
            rows = getattr(options.get("position_ids"), "shape", ())
        if rows and rows[0] == 1 and options.get("attention_mask") is None:
            self._packed.add(model)
            features.append(events.PACKED)
        for feature in features:
            recorder = self._spans.recorder(True)
            if recorder is not None:
                recorder.write_entry(entry("feature", name=feature))

    def add_inputs(self, model: int, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """Count the arguments of a training forward pass of a model."""
        try:
            # The common case by the shortest path: between the computations of the job this code leaves the CPU caches.
            first: Any = arguments[0] if arguments else next(iter(options.values()), None)
            if (
                type(first) is self._tensor
                and not self._intercepted()
                and len(shape := first.shape) == 2
                and first.dtype in self._ids
                and model not in self._sequence_first
                and model not in self._packed
            ):
                samples, length = shape
                tokens = samples * length
            else:
                tokens, samples = self.count_inputs(model, arguments, options)
            self.add(model, tokens, samples)
        except Exception as error:  # noqa: BLE001  # the forward pass is recorded anyway
            fence.report("the tokens and samples of a step", error)

    def count_inputs(self, model: int, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[int, int]:
        """Return the tokens and samples among the arguments of a forward pass of a model."""
        with self._aside():
            tokens, samples = self._count(arguments, options, sequence_first=model in self._sequence_first)
            return tokens, samples if model not in self._packed else _sequences_in(options)

    def add(self, model: int, tokens: int, samples: int) -> None:
        """Count tokens and samples that a model was given."""
        known = self._consumed.get(model)
        if known is not None:
            self._consumed[model] = known[0] + tokens, known[1] + samples
        elif len(self._consumed) < MOST_MODELS:
            self._consumed[model] = tokens, samples

    def end_step(self, given_tokens: object = None) -> None:
        """Record tokens and samples of the step that ends now, where they differ from the step before.

        Parameters:
            given_tokens: the tokens of this rank as the program counts them; None: count them by shape.
        """
        try:
            tokens = samples = 0
            for model_tokens, model_samples in self._consumed.values():
                tokens, samples = max(tokens, model_tokens), max(samples, model_samples)
            if self._consumed:
                most = max(self._consumed, key=self._consumed.__getitem__)
                if not self._turns.add(most, self._consumed[most]):
                    tokens = samples = 0
                self._consumed.clear()
            if given_tokens is not None:
                tokens = _number(given_tokens, tokens)
            recorder = self._spans.recorder(True)
            now = recorder, tokens, samples
            self._until_repeat -= 1
            if recorder is not None and (now != self._recorded or self._until_repeat <= 0):
                self._record(recorder, tokens, samples)
                self._recorded = now
        except Exception as error:  # noqa: BLE001  # the step ends anyway
            fence.report("the tokens and samples of a step", error)

    def _record(self, recorder: Recorder, tokens: int, samples: int) -> None:
        known, *before = self._recorded
        if known is not recorder:
            before = [0, 0]  # a forked process opens another log
        again = self._until_repeat <= 0
        for name, value, recorded in zip(events.CONSUMED, (tokens, samples), before, strict=True):
            if value != recorded or (again and value):
                recorder.sample(self._spans.id_of(recorder, name), value)
        if again:
            self._until_repeat = STEPS_BETWEEN

    def _count(
        self, arguments: tuple[Any, ...], options: Mapping[str, Any], *, sequence_first: bool
    ) -> tuple[int, int]:
        values = (*arguments, *options.values())
        if (packed := _packed_sequences(values)) is not None:
            ids = next((tensor for tensor in self._tensors(arguments, options) if tensor.dtype in self._ids), None)
            return int(ids.shape[0]) if ids is not None else 0, packed
        first, given = None, self._listed_samples(values)
        batch = given
        for tensor in self._tensors(arguments, options):
            shape = tensor.shape
            if not shape:
                continue
            first = tensor if first is None else first
            if batch is None:
                batch = shape[0]
            # Integers with another first dimension are no token ids of the batch, but the edges of a graph, say.
            if len(shape) == 2 and shape[0] == batch and tensor.dtype in self._ids:
                if sequence_first and tensor is first and given is None:
                    batch = self._batch_of(shape, self._tensors(arguments, options))
                return int(tensor.numel()), int(batch)
        return 0, int(batch or 0)

    @staticmethod
    def _batch_of(ids: Sequence[int], tensors: Iterable[Any]) -> int:
        """Return the batch of ids of which either dimension may be the sequence; 0 where nothing tells.

        The state of a recurrent layer does: it has three dimensions, and the batch is the second.
        """
        for tensor in tensors:
            shape = tensor.shape
            if len(shape) == 3 and shape[1] in ids and ids[0] != ids[1]:
                return int(shape[1])
        return int(ids[0]) if ids[0] == ids[1] else 0

    def _listed_samples(self, values: tuple[Any, ...]) -> int | None:
        """Return the length of lists with an item for each sample; None where there are none.

        Detectors are given a list of images, tensors of their own sizes, and a list of dicts with what is on each.
        """
        lists = [value for value in values if isinstance(value, list | tuple) and value]
        for targets in lists:
            if isinstance(targets[0], Mapping) and any(
                len(images) == len(targets) and all(isinstance(image, self._tensor) for image in images)
                for images in lists
            ):
                return len(targets)
        return None

    def _tensors(self, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the tensors among the arguments and in their lists and dicts; of a DTensor the local shard."""
        for value in (*arguments, *options.values()):
            for tensor in flat_values(value):
                if isinstance(tensor, self._tensor):
                    yield tensor if type(tensor) is self._tensor else getattr(tensor, "_local_tensor", tensor)


def flat_values(value: Any) -> Iterable[Any]:
    """Return the values of a list, dict or dataclass, else the value itself."""
    if isinstance(value, list | tuple):
        return value
    if (fields := getattr(type(value), "__dataclass_fields__", None)) is not None:  # a batch of torchrec
        return [getattr(value, name, None) for name in fields]
    return value.values() if isinstance(value, dict | UserDict) else (value,)


def _packed_sequences(values: Iterable[Any]) -> int | None:
    """Return how many sequences a layout of fairseq2 says are packed in one row; None without such a layout."""
    for value in values:
        if type(value).__name__ == "BatchLayout" and getattr(value, "packed", False):
            return len(value.seq_lens)
    return None


def _sequences_in(options: Mapping[str, Any]) -> int:
    """Return how many sequences one row of ids holds, by where they begin and the last one ends; 0 where none says."""
    bounds = next((options[name] for name in BOUNDS if options.get(name) is not None), None)
    return int(bounds.shape[0]) - 1 if bounds is not None else 0


def _number(given_tokens: object, otherwise: int) -> int:
    """Return the count that the program gives; refuse a tensor, whose value may have to be waited for."""
    shown = f"a {type(given_tokens).__name__}"
    if isinstance(given_tokens, numbers.Real):
        if 0 <= (value := float(given_tokens)) < MAX_TOKENS:
            return round(value)
        shown = str(given_tokens)
    fence.warn_once(
        f"dtprof.step(tokens=...) was given {shown}; expected a number of 0 or more, and no tensor: tokens are counted "
        "by the shape of what the model is given",
        "dtprof.step(tokens=...)",
    )
    return otherwise
