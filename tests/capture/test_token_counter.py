"""What a model is given in a step: token ids and samples, told by shapes and where they change."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any, cast

import pytest

from dtprof import fence
from dtprof.capture.recorder import Recorder
from dtprof.capture.spans import Spans
from dtprof.capture.token_counter import STEPS_BETWEEN, Consumption

Told = list[tuple[str, int]]


class Tensor:
    """As much of a tensor as is looked at."""

    def __init__(self, *shape: int, dtype: str = "int64") -> None:
        """Have a shape."""
        self.shape = shape
        self.dtype = dtype

    def numel(self) -> int:
        """Return the product of the shape."""
        rows, columns = self.shape
        return rows * columns


class Shard(Tensor):
    """A tensor of which this rank has a part."""

    def __init__(self, whole: tuple[int, int], own: Tensor) -> None:
        """Have the shape of the whole."""
        super().__init__(*whole)
        self._local_tensor = own


@dataclass
class Batch:
    """A batch of torchrec: features are no tensors."""

    dense: Tensor
    labels: Tensor
    features: object = None


class BatchLayout:
    """As much of the layout of a batch of fairseq2 as is looked at."""

    def __init__(self, *, packed: bool) -> None:
        """Hold sequences in one row, or padded ones."""
        self.packed, self.seq_lens = packed, [20, 30, 14]


class Samples:
    """A recorder that keeps samples."""

    def __init__(self) -> None:
        """Start with none."""
        self.names: list[str] = []
        self.entries: list[str] = []
        self.recorded: Told = []

    def name_id(self, name: str) -> int:
        """Return the id of a name."""
        self.names.append(name)
        return len(self.names) - 1

    def write_entry(self, text: str) -> None:
        """Keep an entry."""
        self.entries.append(text)

    def sample(self, op: int, value: int) -> None:
        """Keep a sample."""
        self.recorded.append((self.names[op].removeprefix("step_"), value))


@pytest.fixture
def log() -> Samples:
    return Samples()


@pytest.fixture
def consumption(log: Samples) -> Consumption:
    found = Consumption(Spans(lambda _: cast(Recorder, log)))
    found.install(Tensor, ("int64", "int32"))
    return found


IDS, FLOATS, LABELS = Tensor(4, 16), Tensor(4, 8, 8, dtype="float32"), Tensor(4)


@pytest.mark.parametrize(
    ("arguments", "options", "expected"),
    [
        ((IDS,), {}, [("tokens", 64), ("samples", 4)]),
        ((), {"input_ids": IDS, "attention_mask": IDS, "labels": IDS}, [("tokens", 64), ("samples", 4)]),
        ((FLOATS, LABELS), {}, [("samples", 4)]),
        ((FLOATS, IDS), {}, [("tokens", 64), ("samples", 4)]),  # what a stage took over, and the ids again
        ((FLOATS, Tensor(2, 99)), {}, [("samples", 4)]),  # the edges of a graph
        ((Tensor(4, 16, dtype="float32"),), {}, [("samples", 4)]),
        (([FLOATS, LABELS], 7), {}, [("samples", 4)]),
        (([Tensor(3, 480, 640), Tensor(3, 333, 500)], [{"boxes": FLOATS}, {"boxes": FLOATS}]), {}, [("samples", 2)]),
        (([IDS, IDS], [{"ids": IDS}]), {}, [("tokens", 64), ("samples", 4)]),  # lists of different lengths
        (({"input_ids": IDS},), {}, [("tokens", 64), ("samples", 4)]),
        ((Tensor(64), BatchLayout(packed=True)), {}, [("tokens", 64), ("samples", 3)]),
        ((IDS, BatchLayout(packed=False)), {}, [("tokens", 64), ("samples", 4)]),
        ((Batch(FLOATS, LABELS),), {}, [("samples", 4)]),
        ((UserDict(input_ids=IDS),), {}, [("tokens", 64), ("samples", 4)]),
        ((Tensor(), None, IDS), {}, [("tokens", 64), ("samples", 4)]),
        ((Shard((8, 16), IDS),), {}, [("tokens", 64), ("samples", 4)]),
        ((), {}, []),
        ((3, "text"), {}, []),
    ],
)
def test_ids_are_counted_and_samples_where_there_are_none(
    consumption: Consumption, log: Samples, arguments: tuple[Any, ...], options: dict[str, Any], expected: Told
) -> None:
    consumption.add_inputs(1, arguments, options)
    consumption.end_step()
    assert log.recorded == expected


def test_passes_of_a_model_add_up_and_of_several_models_the_one_given_most_counts(
    consumption: Consumption, log: Samples
) -> None:
    for _ in range(3):
        consumption.add_inputs(1, (IDS,), {})
        consumption.add_inputs(2, (Tensor(2, 16),), {})
    consumption.end_step()
    assert log.recorded == [("tokens", 3 * 64), ("samples", 3 * 4)]


class Layer:
    """As much of a layer as is looked at."""

    batch_first = False


HIDDEN = Tensor(2, 16, 32, dtype="float32")


@pytest.mark.parametrize(
    ("arguments", "samples"),
    [
        ((IDS,), []),  # 4 sequences of 16, or 16 of 4
        ((IDS, HIDDEN), [16]),
        ((IDS, (HIDDEN, HIDDEN)), [16]),
        ((IDS, Tensor(2, 4, 32, dtype="float32")), [4]),
        ((Tensor(8, 8),), [8]),
        ((FLOATS, IDS), [4]),  # images, and ids that have as many rows
    ],
)
def test_the_batch_of_ids_is_not_taken_to_come_first_where_layers_may_take_the_sequence_first(
    consumption: Consumption, log: Samples, arguments: tuple[Any, ...], samples: list[int]
) -> None:
    consumption.register_model(1, [object(), Layer()], {})
    consumption.add_inputs(1, arguments, {})
    consumption.end_step()
    assert log.recorded == [("tokens", 64), *(("samples", number) for number in samples)]
    assert log.entries == ['{"k":"feature","name":"layers:sequence_first"}']


ROW = Tensor(1, 64)


@pytest.mark.parametrize(
    ("options", "samples", "features"),
    [
        ({"position_ids": ROW}, [], ["inputs:packed"]),
        ({"position_ids": ROW, "cu_seq_lens_q": Tensor(4)}, [3], ["inputs:packed"]),  # where they begin, and the end
        ({"position_ids": ROW, "attention_mask": ROW}, [1], []),
        ({}, [1], []),
    ],
)
def test_sequences_in_one_row_without_padding_are_counted_by_their_bounds_alone(
    consumption: Consumption, log: Samples, options: dict[str, Any], samples: list[int], features: list[str]
) -> None:
    options = {"input_ids": ROW} | options
    consumption.register_model(1, [], options)
    consumption.add_inputs(1, (), options)
    consumption.end_step()
    assert log.recorded == [("tokens", 64), *(("samples", number) for number in samples)]
    assert log.entries == [f'{{"k":"feature","name":"{name}"}}' for name in features]


def _tokens_of_steps(consumption: Consumption, log: Samples, models: str) -> list[int]:
    """Return the tokens that hold after the step of each of these models, in whose passes 64 are given."""
    held = []
    for model in models:
        consumption.add_inputs(ord(model), (IDS,), {})
        consumption.end_step()
        held.append(next(value for name, value in reversed(log.recorded) if name == "tokens"))
    return held


def test_models_that_step_in_turn_consume_the_same_once(consumption: Consumption, log: Samples) -> None:
    # An actor and its critic: what the critic is given in its first turn may be the begin of another training.
    assert _tokens_of_steps(consumption, log, "acacac") == [64, 64, 64, 0, 64, 0]


def test_models_that_have_several_steps_a_turn_consume_the_same_once(consumption: Consumption, log: Samples) -> None:
    assert _tokens_of_steps(consumption, log, "aacc" * 3) == [64] * 6 + [0, 0, 64, 64, 0, 0]


def test_models_that_train_one_after_the_other_each_consume(consumption: Consumption, log: Samples) -> None:
    assert _tokens_of_steps(consumption, log, "aaaabbbbcccc") == [64] * 12


def test_a_count_is_reported_where_it_changes_and_now_and_then(consumption: Consumption, log: Samples) -> None:
    for rows in [4] * 10 + [2, 2, 4]:
        consumption.add_inputs(1, (Tensor(rows, 16),), {})
        consumption.end_step()
    assert [value for name, value in log.recorded if name == "tokens"] == [64, 32, 64]
    log.recorded.clear()
    for _ in range(3 * STEPS_BETWEEN):
        consumption.add_inputs(1, (IDS,), {})
        consumption.end_step()
    assert log.recorded == [("tokens", 64), ("samples", 4)] * 3


def test_a_step_without_a_forward_pass_consumed_nothing(consumption: Consumption, log: Samples) -> None:
    consumption.end_step()
    assert log.recorded == []
    consumption.add_inputs(1, (FLOATS,), {})
    consumption.end_step()
    consumption.end_step()
    assert log.recorded == [("samples", 4), ("samples", 0)]


def test_what_the_program_says_goes_before_what_shapes_say(consumption: Consumption, log: Samples) -> None:
    consumption.add_inputs(1, (IDS,), {})
    consumption.end_step(61)
    assert log.recorded == [("tokens", 61), ("samples", 4)]


@pytest.mark.parametrize("said", [IDS, "many", float("nan"), -1], ids=["tensor", "text", "nan", "negative"])
def test_what_is_no_number_is_refused_once_and_counted_by_shape(
    consumption: Consumption, log: Samples, said: object, capsys: pytest.CaptureFixture[str]
) -> None:
    fence._warned.clear()
    for _ in range(2):
        consumption.add_inputs(1, (IDS,), {})
        consumption.end_step(said)
    assert log.recorded == [("tokens", 64), ("samples", 4)]
    assert capsys.readouterr().err.count("expected a number of 0 or more") == 1


def test_an_error_of_ours_is_reported_and_not_raised(
    consumption: Consumption, log: Samples, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(Tensor):
        @property
        def dtype(self) -> str:
            raise RuntimeError("no such thing")

        @dtype.setter
        def dtype(self, value: str) -> None:
            """Take any."""

    fence._warned.clear()
    consumption.add_inputs(1, (Broken(4, 16),), {})
    consumption.end_step()
    assert log.recorded == []
    assert "the tokens and samples of a step is not recorded in this process: RuntimeError" in capsys.readouterr().err


def test_a_log_of_its_own_is_reported_again(log: Samples) -> None:
    logs = [log]
    consumption = Consumption(Spans(lambda _: cast(Recorder, logs[-1])))
    consumption.install(Tensor, ("int64",))
    for own in (log, Samples()):
        logs.append(own)
        consumption.add_inputs(1, (IDS,), {})
        consumption.end_step()
        assert own.recorded == [("tokens", 64), ("samples", 4)]
