"""Flight Recorder dumps of made-up jobs, in a few lines, as torch writes them."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.torch_pickle import as_torch_pickles
from dtprof.diagnosis.findings import Verdict
from dtprof.diagnosis.sources.flight_recorder.dump_files import read_dumps
from dtprof.diagnosis.sources.flight_recorder.dump_tables import ArgumentTable
from dtprof.diagnosis.sources.flight_recorder.dumped_ranks import gather_dumps
from dtprof.diagnosis.verdict import decide

BEGIN_NS = 1_700_000_000_000_000_000
TORCH = "/opt/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


@dataclass
class Rank:
    """One rank's recorder; `done` is when operations are known to have ended."""

    rank: int
    groups: dict[str, tuple[str, list[int]]]
    backend: str = "nccl"
    entries: list[dict[str, Any]] = field(default_factory=list)
    status: dict[str, dict[str, int]] = field(default_factory=dict)
    first_id: int = 0
    _seq: dict[tuple[str, bool], int] = field(default_factory=dict)

    def op(
        self,
        name: str,
        *,
        line: int = 0,
        called_at: int = 0,
        group: str = "0",
        done: bool = True,
        size: int = 8,
        dtype: str = "Float",
        state: str = "",
        out: int | None = None,
        same_seq: bool = False,
    ) -> "Rank":
        """Issue an operation; a send or receive is named `send 0->1`, as ranks in the group."""
        p2p = name.startswith(("send", "recv")) or (name == "coalesced" and self.entries[-1]["is_p2p"])
        seq = self._seq[group, p2p] = self._seq.get((group, p2p), 0) + (not same_seq)
        i = len(self.entries)
        frames = [{"name": name, "filename": TORCH, "line": 99}]
        frames += [{"name": "train", "filename": "/home/user/train.py", "line": line}] if line else []
        frames += [{"name": "main", "filename": "/home/user/train.py", "line": called_at}] if called_at else []
        self.entries.append(
            {
                "frames": frames,
                "record_id": self.first_id + i,
                "pg_id": list(self.groups).index(group),
                "process_group": (group, self.groups[group][0]),
                "thread_name": "python3",
                "thread_id": "1",
                "collective_seq_id": self._seq.get((group, False), 0) if p2p else seq,
                "p2p_seq_id": seq if p2p else self._seq.get((group, True), 0),
                "op_id": i,
                "profiling_name": f"{self.backend}:{name}",
                "time_created_ns": BEGIN_NS + i * 1_000_000 + self.rank,
                "input_sizes": [[size]],
                "input_dtypes": [dtype],
                "output_sizes": [[size if out is None else out]],
                "output_dtypes": [dtype],
                "state": state or ("completed" if done else "scheduled"),
                "time_discovered_started_ns": BEGIN_NS if done or state == "started" else None,
                "time_discovered_completed_ns": BEGIN_NS + i * 1_000_000 + 500_000 if done else None,
                "retired": done,
                "timeout_ms": 600_000,
                "is_p2p": p2p,
            }
        )
        return self

    def document(self) -> dict[str, Any]:
        """Return what the dump holds."""
        config = {n: {"name": n, "desc": desc, "ranks": str(ranks)} for n, (desc, ranks) in self.groups.items()}
        return {
            "version": "2.10",
            "nccl_version": "2.27.5",
            "pg_config": config,
            "pg_status": self.status,
            "entries": self.entries,
        }


def job(world: int, backend: str = "nccl", **groups: list[int]) -> list[Rank]:
    """Return the ranks of a job with the default group and others, each known to its members: `a=[0, 1]`."""
    everyone = {"0": ("default_pg", list(range(world)))}
    return [
        Rank(rank, everyone | {name: ("undefined", m) for name, m in groups.items() if rank in m}, backend)
        for rank in range(world)
    ]


def write(folder: Path, ranks: list[Rank], *, as_json: bool = False) -> list[Path]:
    """Write the dumps."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for rank in ranks:
        path = folder / f"nccl_trace_rank_{rank.rank}"
        text = json.dumps(rank.document()).encode()
        path.write_bytes(text if as_json else as_torch_pickles(rank.document()))
        paths.append(path)
    return paths


def verdict_on(paths: list[Path]) -> Verdict:
    """Diagnose dumps."""
    labels = ArgumentTable()
    return decide(gather_dumps(*read_dumps(paths, labels), labels))
