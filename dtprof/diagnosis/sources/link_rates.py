"""How fast the links between the hosts of a run are, from what the kernels of both ends count of TCP connections.

The rate of a link is what its receiver acknowledged over the time in which something was under way: a link that is
seldom used, or that a program leaves alone, is no slower for it.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from dtprof.diagnosis.job_state import LinkRate
from dtprof.records import paths
from dtprof.records.nodes.node_reader import NodeSamples, Table, newest_by_node, read_node_samples

NEWEST_BYTES = 1 << 17
"""Of the samples of each host: half a minute of eight ranks, two minutes of one."""
NEWEST_S = 10.0
LEAST_BUSY_S, LEAST_BYTES = 0.5, 1 << 16
"""Of the newest samples, for a rate."""
SAMPLES_OF_RUN = 64
LEAST_INTERVALS, LEAST_INTERVAL_BUSY_S = 4, 0.01
USUAL_QUANTILE = 0.75
"""A link that has been slow for less than three quarters of a run was faster before."""
SEGMENTS_A_ROUND_TRIP = 0.5
"""What waits for answers sends at least one segment a round trip: less than half of that has another reason."""


def find_link_rates(run: Path, hosts: Collection[str]) -> tuple[LinkRate, ...]:
    """Return the rates of the links between hosts over which ranks send now, or sent at the end of the run."""
    folders = {paths.node_name(host): host for host in hosts}
    newest = [samples for samples in newest_by_node(run, nbytes=NEWEST_BYTES) if samples.node in folders]
    owners: dict[str, set[str]] = {}
    for samples in newest:
        for address in samples.addresses:
            owners.setdefault(address, set()).add(folders[samples.node])
    # Bridges of containers have the same address on every host.
    owner = {address: next(iter(names)) for address, names in owners.items() if len(names) == 1}
    if not any(owner.keys() & samples.links.keys() for samples in newest):
        return ()
    whole = read_node_samples(run, max_samples=SAMPLES_OF_RUN)
    found = (
        rate
        for samples in newest
        for receiver in sorted({owner[address] for address in samples.links if address in owner})
        if (rate := _rate_of(samples, whole.get(samples.node), owner, folders[samples.node], receiver)) is not None
    )
    return tuple(found)


def _rate_of(
    samples: NodeSamples, whole: NodeSamples | None, owner: Mapping[str, str], sender: str, receiver: str
) -> LinkRate | None:
    """Return the rate from one host to another; None where too little was sent lately."""
    tables = [table for address, table in samples.links.items() if owner.get(address) == receiver]
    table = max(tables, key=_sent)  # of several interfaces, the one that the data goes by
    address = next(name for name, one in samples.links.items() if one is table)
    lately = table[table["t_ns"] >= table["t_ns"][-1] - int(NEWEST_S * 1e9)]
    host = samples.host
    if len(lately) < 2 or host["t_ns"][-1] - table["t_ns"][-1] > NEWEST_S * 1e9:
        return None
    seconds = float(lately["t_ns"][-1] - lately["t_ns"][0]) / 1e9
    nbytes, busy_s, segments, again = (
        float(lately[name][-1] - lately[name][0]) for name in ("acked_bytes", "busy_s", "segments", "retransmitted")
    )
    if busy_s < LEAST_BUSY_S or nbytes < LEAST_BYTES or segments <= 0:
        return None
    of_run = whole.links.get(address) if whole is not None else None
    round_trips = [float(np.nanmin(one["min_rtt_s"])) for one in (table, of_run) if one is not None and len(one)]
    segment_bytes, min_rtt_s = nbytes / segments, min(round_trips)
    queued = host["net_queued_bytes"][host["t_ns"] >= lately["t_ns"][0]]
    rate = nbytes / busy_s
    return LinkRate(
        sender=sender,
        receiver=receiver,
        bytes_per_s=rate,
        busy_share=busy_s / seconds,
        window_s=seconds,
        usual_bytes_per_s=_usual(of_run) if of_run is not None else None,
        is_below_round_trips=rate * min_rtt_s < SEGMENTS_A_ROUND_TRIP * segment_bytes,
        segment_bytes=segment_bytes,
        rtt_s=float(np.median(lately["rtt_s"])),
        min_rtt_s=min_rtt_s,
        retransmitted_share=again / segments,
        queued_share=float(np.mean(queued > 0)) if len(queued) and not np.isnan(queued).all() else None,
    )


def _sent(table: Table) -> float:
    return float(table["acked_bytes"][-1] - table["acked_bytes"][0])


def _usual(table: Table) -> float | None:
    """Return the rate that the link reached, or exceeded, in a quarter of the run; None where too little was sent."""
    nbytes, busy_s = np.diff(table["acked_bytes"]), np.diff(table["busy_s"])
    used = (busy_s >= LEAST_INTERVAL_BUSY_S) & (nbytes >= LEAST_BYTES)
    if np.count_nonzero(used) < LEAST_INTERVALS:
        return None
    return float(np.quantile(nbytes[used] / busy_s[used], USUAL_QUANTILE))
