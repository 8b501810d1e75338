"""The health of the GPUs of each rank's host, from the newest samples of its node."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from dtprof.diagnosis.device_evidence import NO_SAMPLES, XIDS
from dtprof.diagnosis.job_state import DeviceHealth, RankState
from dtprof.records.nodes.node_reader import NodeSamples, newest_by_node


def find_device_health(run: Path, ranks: Iterable[RankState], boots: Mapping[int, str]) -> dict[int, DeviceHealth]:
    """Return NVML's state of the GPUs of each rank's host; unknown for hosts without samples."""
    by_boot = {samples.boot_id: _health_of(samples) for samples in newest_by_node(run)}
    unknown = DeviceHealth(reason=NO_SAMPLES)
    return {rank.rank: by_boot.get(boots.get(rank.rank, ""), unknown) for rank in ranks}


def _health_of(samples: NodeSamples) -> DeviceHealth:
    if not samples.gpus:
        return DeviceHealth(reason=samples.no_gpus_reason or NO_SAMPLES)
    troubles, silent = [], []
    for number, table in samples.gpus.items():
        newest = {name: float(table[name][-1]) for name in ("xid_errors", "last_xid", "ecc_uncorrected")}
        words = []
        if newest["xid_errors"] > 0:
            code = int(newest["last_xid"])
            words.append(f"Xid {code}{f' ({XIDS[code]})' if code in XIDS else ''}")
        if newest["ecc_uncorrected"] > 0:
            words.append(f"{newest['ecc_uncorrected']:.0f} uncorrected ECC errors")
        if words:
            troubles.append(f"GPU {number} of {samples.node}: {', '.join(words)}")
        if np.isnan(newest["xid_errors"]):
            silent.append(number)
    reason = "NVML reports no Xid events here; look in the kernel log (dmesg)" if silent else ""
    return DeviceHealth(troubles=tuple(troubles), reason=reason)
