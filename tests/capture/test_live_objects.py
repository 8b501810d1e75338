"""Objects are known for as long as they live, and what is kept of dead ones does not grow."""

from dtprof.capture.live_objects import FIRST_SWEEP, LiveObjects


class Thing:
    """Can be referred to weakly."""


def test_an_object_is_known_while_it_lives_and_no_longer() -> None:
    known, thing = LiveObjects(), Thing()
    known.add(thing)
    assert thing in known
    assert list(known) == [thing]
    key = id(thing)
    del thing
    assert list(known) == []
    others = [Thing() for _ in range(100)]
    assert not any(other in known for other in others)  # be it at the same address
    assert key in known._refs


def test_dead_ones_are_swept_out() -> None:
    known, kept = LiveObjects(), [Thing() for _ in range(10)]
    for thing in kept:
        known.add(thing)
    held = []
    for _ in range(10_000):
        held = [*held[-200:], Thing()]  # ids of their own for a while
        known.add(held[-1])
    assert len(known) <= 2 * (200 + len(kept)) + FIRST_SWEEP
    assert all(thing in known for thing in kept)
