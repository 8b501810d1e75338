"""The hues stay apart, for every kind of sight."""

from itertools import combinations

import numpy as np
import pytest

from dtprof.analysis.results import PARTS, PHASES
from dtprof.intervals import Floats
from dtprof.report.figures.palette import HUES, UNKNOWN, hue_of

# Machado, Oliveira, Fernandes (2009), full severity, on linear sRGB.
SIGHT = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
COMMUNICATION = ("exposed", "overlapped", "point to point")
MEMORY_LINES = tuple(name for name in HUES if name.startswith("memory ") and name != "memory other")


def linear(colour: str) -> Floats:
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def oklab(rgb: Floats) -> Floats:
    to_cones = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    to_lab = np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    )
    return to_lab @ np.cbrt(to_cones @ np.clip(rgb, 0, 1))


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize(
    "names", [PARTS, PHASES, COMMUNICATION, MEMORY_LINES], ids=["parts", "phases", "communication", "memory"]
)
def test_hues_that_meet_in_one_figure_stay_apart(names: tuple[str, ...], sight: str, theme: str) -> None:
    seen = {name: oklab(SIGHT[sight] @ linear(getattr(hue_of(name), theme))) for name in names}
    near = {
        (one, other): round(float(np.linalg.norm(seen[one] - seen[other])), 3)
        for one, other in combinations(names, 2)
        if np.linalg.norm(seen[one] - seen[other]) < 0.07
    }
    assert near == {}


def test_every_part_and_phase_has_a_hue_and_a_meaning() -> None:
    for name in (*PARTS, *PHASES, *COMMUNICATION):
        assert HUES[name].label
        assert HUES[name].meaning


def test_waits_can_be_distinguished_from_transfer_without_colour() -> None:
    assert HUES["exposed_wait"].pattern
    assert not HUES["exposed_transfer"].pattern


def test_a_name_that_nobody_knows_is_grey() -> None:
    assert hue_of("</style>") is UNKNOWN
