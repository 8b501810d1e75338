"""The probe of one rank from start to end: what it knows by itself, the rendezvous, the measurements.

The process ends with it, whatever happens: the program that it stands in for must not run.
"""

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from dtprof import launchers, settings
from dtprof.launch.rank_probe import host_facts, link_timings, rank_rendezvous
from dtprof.launch.rank_probe.rank_rendezvous import ClockReadings, Deadline, Listener, Rendezvous
from dtprof.records import rank_probes
from dtprof.records.rank_probes import JointProbe, RankProbe

MEETING_SHARE, PAIRS_SHARE, COLLECTIVES_SHARE = 0.4, 0.25, 0.2
"""Of the time of the probe: for the ranks to come, for pairs of ranks, for collectives."""
END_S = 5.0
"""How long rank 0 keeps the store open for the others at the end."""


def take_over() -> None:
    """Probe in place of this process's program, and end it; return only in a process that starts ranks itself."""
    if launchers.is_launcher(sys.orig_argv):
        return
    try:
        _run(Path(os.environ[settings.ENV_PROBE_DIR]), float(os.environ.get(settings.ENV_PROBE_SECONDS, "60")))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # a launcher would start it again, or print its traceback


def _run(folder: Path, seconds: float) -> None:
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    probe = host_facts.place_of_rank(dict(os.environ))
    writes = _Writes(folder, probe)
    writes.end_after(seconds)
    writes.reach("started")
    try:
        host_facts.fill_host_facts(probe, folder, torch)
        writes.reach("facts")
        if probe.world_size > 1:
            _meet(probe, writes, torch, seconds)
        else:
            writes.joint(JointProbe(rank=probe.rank, probes=[probe]))
        writes.reach("done")
    except Exception as error:  # noqa: BLE001 - of torch, by version and back end: the document carries it
        text = str(error).strip().splitlines()
        probe.error = f"{type(error).__name__}: {text[0] if text else ''}"
        writes.reach(probe.stage)
        if os.environ.get("DTPROF_PROBE_DEBUG"):
            traceback.print_exc()


class _Writes:
    """Writes this rank's document at each stage; ends the process when its time is up."""

    def __init__(self, folder: Path, probe: RankProbe) -> None:
        self._folder, self._probe = folder, probe
        self._lock = threading.Lock()

    def reach(self, stage: str) -> None:
        """Write the document at a stage."""
        self._probe.stage = stage
        with self._lock, suppress(OSError):  # a host without the common folder: others carry what it found
            rank_probes.write_probe(self._folder, self._probe)

    def joint(self, joint: JointProbe) -> None:
        """Write what all ranks found out."""
        with self._lock, suppress(OSError):
            rank_probes.write_joint(self._folder, joint)

    def end_after(self, seconds: float) -> None:
        """End this process after a time, with the reason in its document."""
        timer = threading.Timer(seconds, self._end, (seconds,))
        timer.daemon = True
        timer.start()

    def _end(self, seconds: float) -> None:
        self._probe.error = self._probe.error or f"no end of stage {self._probe.stage!r} within {seconds:.0f} s"
        self.reach(self._probe.stage)
        if os.environ.get("DTPROF_PROBE_DEBUG"):
            faulthandler.dump_traceback()
        os._exit(0)


def _meet(probe: RankProbe, writes: _Writes, torch: Any, seconds: float) -> None:
    """Exchange what the ranks know, join a group, and measure."""
    dist = torch.distributed
    writes.reach("rendezvous")
    if probe.master is None:
        _use_own_address()
    deadline = Deadline(seconds * MEETING_SHARE)
    rendezvous = Rendezvous(dist, probe, deadline)
    is_first = _is_first_of_host(probe)
    listener = Listener(probe) if is_first else None
    probe.listens_at = listener.address if listener is not None else None
    rank_rendezvous.publish(rendezvous, probe)
    probes = rank_rendezvous.read_probes(rendezvous, "rendezvous", deadline) if is_first else []
    if is_first:
        writes.joint(JointProbe(rank=probe.rank, probes=probes))
    if not rendezvous.agree("all-came", lambda: len(probes) == probe.world_size, Deadline(deadline.left_s() + 2)):
        raise RuntimeError("not all ranks came to the rendezvous")
    clocks = ClockReadings(probe, rendezvous, deadline) if is_first or probe.rank == 0 else None
    if is_first:
        rank_rendezvous.try_hosts(probe, [one for one in probes if one.listens_at is not None])
    writes.reach("joining")
    timings: list[link_timings.Timings] = []
    failure: Exception | None = None
    try:
        _join_and_measure(probe, writes, torch, rendezvous, timings, seconds)
    except Exception as error:  # noqa: BLE001 - as above: what was measured is shared first
        failure = error
    if clocks is not None:
        clocks.measure_again()
    probe.error = None if failure is None else f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"
    measured = JointProbe(
        rank=probe.rank,
        links=[link for timing in timings for link in timing.links],
        collectives=[row for timing in timings for row in timing.collectives],
        unmeasured=[text for timing in timings for text in timing.unmeasured],
    )
    _share(probe, rendezvous, measured, writes, is_first=is_first)
    if clocks is not None:
        clocks.close()
    if listener is not None:
        listener.close()
    if failure is not None:
        raise failure


def _share(probe: RankProbe, rendezvous: Rendezvous, measured: JointProbe, writes: _Writes, *, is_first: bool) -> None:
    """Give what this rank measured to the others; one rank of each host writes that of all."""
    if probe.error is None:
        probe.stage = "done"
    end = Deadline(END_S)
    rendezvous.put("end", rank_probes.to_json(probe))
    rendezvous.put("measured", rank_probes.to_json(measured))
    if is_first or probe.rank == 0:
        ends = [rank_probes.parse_probe(json.loads(text)) for text in rendezvous.take_all("end", end).values()]
        joint = JointProbe(rank=probe.rank, probes=ends)
        for text in rendezvous.take_all("measured", end).values():
            rank_probes.add_measured(joint, rank_probes.parse_joint(json.loads(text)))
        writes.joint(joint)
    rendezvous.put("left", "1")
    if probe.rank == 0:
        rendezvous.take_all("left", end)  # the store is in this process


def _use_own_address() -> None:
    """Meet on this host where the launcher names no address: that of the program is not known."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ.setdefault("MASTER_PORT", os.environ.get(settings.ENV_PROBE_PORT, "29500"))


def _is_first_of_host(probe: RankProbe) -> bool:
    return not probe.local_rank


def _join_and_measure(
    probe: RankProbe,
    writes: _Writes,
    torch: Any,
    rendezvous: Rendezvous,
    timings: list[link_timings.Timings],
    seconds: float,
) -> None:
    dist = torch.distributed
    began = time.perf_counter_ns()
    dist.init_process_group(
        "gloo",
        store=rendezvous.group_store,
        rank=probe.rank,
        world_size=probe.world_size,
        timeout=Deadline(seconds * MEETING_SHARE / 2).span(),
    )
    probe.joined_ns = float(time.perf_counter_ns() - began)
    writes.reach("measuring")
    hosts: list[str] = [""] * probe.world_size
    dist.all_gather_object(hosts, probe.host)
    _measure(probe, torch, timings, hosts, seconds, backend="gloo")
    if torch.cuda.is_available() and dist.is_nccl_available():
        index = (probe.local_rank or 0) % torch.cuda.device_count()
        torch.cuda.set_device(index)
        _measure(probe, torch, timings, hosts, seconds / 2, backend="nccl")


def _measure(
    probe: RankProbe,
    torch: Any,
    timings: list[link_timings.Timings],
    hosts: list[str],
    seconds: float,
    *,
    backend: str,
) -> None:
    dist = torch.distributed
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    group = dist.group.WORLD if backend == "gloo" else dist.new_group(backend=backend)
    mine = link_timings.Timings(dist, torch, probe, backend=backend, group=group, device=device)
    timings.append(mine)
    mine.measure_pairs(Deadline(seconds * PAIRS_SHARE))
    everyone = list(range(probe.world_size))
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    inner = {host: ranks for host, ranks in by_host.items() if 1 < len(ranks) < probe.world_size}
    groups = {host: dist.new_group(ranks, backend=backend) for host, ranks in inner.items()}
    share = COLLECTIVES_SHARE / (1 + bool(inner))
    mine.measure_collectives("0", everyone, group, Deadline(seconds * share))
    for host, ranks in inner.items():
        mine.measure_collectives(host, ranks, groups[host], Deadline(seconds * share))
