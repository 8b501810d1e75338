"""The least, the median and the most of devices over time, worked out by hand."""

import numpy as np
import pytest

from dtprof.analysis.memory.device_series import DeviceSeries, extremes_of, mean_busy, spread_of


def device(name: str, *, end: int, **values: tuple[float, float]) -> DeviceSeries:
    columns = {quantity: np.array(ends, np.float64) for quantity, ends in values.items()}
    return DeviceSeries(host="a", device=name, t_ns=np.array([0, end]), values=columns)


def test_devices_are_compared_at_the_same_times_as_far_as_each_was_sampled() -> None:
    gpus = [
        device("gpu 0", end=100, busy=(0.0, 1.0)),
        device("gpu 1", end=100, busy=(0.2, 0.2)),
        device("gpu 2", end=50, busy=(0.6, 0.6)),
    ]
    spread = spread_of(gpus)
    t_ns, least = spread["least"]
    assert (t_ns[0], t_ns[-1]) == (0, 100)
    ends = [values["busy"][[0, -1]].tolist() for _, values in (spread["least"], spread["median"], spread["most"])]
    # At the end gpu 2 was not sampled any longer: of 1.0 and 0.2 the median is 0.6.
    assert ends == [[0.0, 0.2], [0.2, pytest.approx(0.6)], [0.6, 1.0]]
    assert list(least) == ["busy"]
    assert mean_busy(gpus) == pytest.approx((0.5 + 0.2 + 0.6) / 3)


def test_what_was_not_sampled_is_unknown() -> None:
    assert spread_of([]) == {}
    assert mean_busy([device("gpu 0", end=1, power=(1.0, 2.0))]) is None
    assert extremes_of(np.array([np.nan, 1.0, 3.0])) == (1.0, 2.0, 3.0)
