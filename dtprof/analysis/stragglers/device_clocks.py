"""Whether the GPU of a slow rank ran at a lower clock than those of the others, and the throttling reason.

A rank says which device it computes on; the samples of its node are of the same device where their UUIDs agree. Only
samples count that were taken while kernels ran: a device without work lowers its clock by itself. Of a slice of a
device (MIG) the clock is not known: its UUID is none of a whole device.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dtprof.analysis.results import Caveat
from dtprof.columns import median
from dtprof.job.clock_alignment import Clocks
from dtprof.records.nodes.node_reader import NodeSamples
from dtprof.records.nodes.node_samples import THROTTLE_REASONS

MIN_SAMPLES = 3
BUSY = 0.5
"""Utilisation from which on a device is not idle."""
MIN_DEFICIT = 0.05
"""Of the clock of the others: devices of one kind differ by less."""
MIN_EXPLAINED = 0.5
"""Of the surplus of work of a rank, for its clock to be the cause."""


@dataclass(frozen=True, kw_only=True)
class RankDevice:
    """The device that a rank computes on, and when its measured steps were, on the clock of the reference."""

    rank: int
    boot_id: str
    uuid: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class DeviceClock:
    """The clock of a device while it worked."""

    mhz: float  # median
    reasons: tuple[str, ...]  # what held it down in most samples

    def explain(self, others: Iterable["DeviceClock"], *, surplus: float) -> str | None:
        """Return the sentence that its clock made a rank slow; None where it did not, or where that is not known.

        Parameters:
            others: the clocks of the other ranks' devices.
            surplus: what the work of the rank exceeds that of the others by, as a share of theirs.
        """
        usual_mhz = median([other.mhz for other in others] or [np.nan])
        if not usual_mhz > 0 or self.mhz > (1 - MIN_DEFICIT) * usual_mhz:
            return None
        if usual_mhz / self.mhz - 1 < MIN_EXPLAINED * surplus:
            return None
        held = f", held down by {' and '.join(self.reasons)}" if self.reasons else ""
        return f"clock of its GPU: {self.mhz:.0f} MHz, the others' {usual_mhz:.0f} MHz{held}"


def measure_clocks(
    devices: Iterable[RankDevice], nodes: Iterable[NodeSamples], clocks: Clocks
) -> dict[int, DeviceClock | str]:
    """Return the clock of the device of each rank in its measured steps, or the reason why it is not known."""
    by_boot = {node.boot_id: node for node in nodes}
    return {device.rank: _find_clock(device, by_boot.get(device.boot_id), clocks) for device in devices}


def list_losses(nodes: Iterable[NodeSamples]) -> list[Caveat]:
    """Return the gaps in samples of the GPUs of the nodes, one sentence each."""
    caveats = []
    for node in nodes:
        caveats += [Caveat("devices", f"{node.node}: {problem}") for problem in node.gpu_problems]
        for index, rows in node.gpus.items():
            lost = np.flatnonzero(rows["lost"] == 1)
            if len(lost):
                xids = rows["last_xid"][: lost[0] + 1]
                known = xids[np.isfinite(xids)]
                xid = f" (Xid {known[-1]:.0f})" if len(known) else ""
                caveats.append(
                    Caveat(
                        "devices", f"{node.node}: the driver lost GPU {index}{xid}; nothing is known of it from then on"
                    )
                )
    return caveats


def _find_clock(device: RankDevice, node: NodeSamples | None, clocks: Clocks) -> DeviceClock | str:
    if node is None:
        return "its node was not sampled"
    if not node.gpus:
        return node.no_gpus_reason or "no GPU of its node was sampled"
    described = node.described_gpus.items()
    rows = next((node.gpus.get(index) for index, gpu in described if gpu.get("uuid") == device.uuid), None)
    if rows is None:
        return "NVML knows no whole GPU of this UUID: a MIG slice has no clock of its own"
    times = (
        rows["t_ns"] if node.boot_id == clocks.reference else rows["t_ns"] + clocks.offset(node.boot_id, rows["t_ns"])
    )
    within = (times >= device.begin_ns) & (times <= device.end_ns)
    chosen = rows[within & (rows["utilisation"] >= BUSY) & (rows["sm_clock_mhz"] > 0)]
    if len(chosen) < MIN_SAMPLES:
        return f"fewer than {MIN_SAMPLES} samples were taken while it worked"
    bits = chosen["throttle_reasons"]
    known = bits[np.isfinite(bits)].astype(np.int64)
    reasons = [name for mask, name in THROTTLE_REASONS.items() if len(known) and ((known & mask) != 0).mean() > 0.5]
    return DeviceClock(mhz=median(chosen["sm_clock_mhz"]), reasons=tuple(reasons))
