"""Tell from its environment which rank a process is, and whether it starts ranks itself."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LAUNCHER_MODULES = (
    *("torch.distributed.run", "torch.distributed.launch", "torch.distributed.launcher", "torchrun"),
    *("accelerate", "deepspeed", "lightning", "lightning_fabric", "ray", "horovod.runner"),
)
LAUNCHER_PROGRAMS = re.compile(
    r"(torchrun|accelerate(-launch)?|deepspeed(\.pt)?|fabric|lightning|ray|horovodrun|mpirun|mpiexec|srun)"
)
HELPER = re.compile(r"from multiprocessing[.\w]* import|from loky|joblib")
VARIABLES = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_\w+"
    r"|SLURM_(PROCID|NTASKS|LOCALID|NTASKS_PER_NODE|NNODES|NODEID|JOB_ID|STEP_ID|STEP_NODELIST|JOB_NODELIST|CLUSTER_NAME)"
    r"|OMPI_COMM_WORLD_\w+|PMI_(RANK|SIZE)|MPI_LOCALRANKID|MPI_LOCALNRANKS)"
)
"""Variables by which launchers tell ranks where they are."""
_BY_LAUNCHER = (
    ("env", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's place in the job, as its launcher gave it."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None


def is_launcher(argv: Sequence[str]) -> bool:
    """Say whether the command line of an interpreter is that of a program that starts ranks, or of a helper of one."""
    words = list(argv[1:])
    while words and words[0].startswith("-") and words[0] not in ("-c", "-m"):
        words = words[2:] if words[0] in ("-X", "-W") else words[1:]
    if not words:
        return False
    if words[0] == "-c":
        return len(words) > 1 and HELPER.search(words[1]) is not None
    if words[0] == "-m":
        module = words[1] if len(words) > 1 else ""
        return any(module == name or module.startswith(f"{name}.") for name in LAUNCHER_MODULES)
    return LAUNCHER_PROGRAMS.fullmatch(Path(words[0]).name) is not None


def find_place(environment: Mapping[str, str]) -> Place:
    """Return the place of this process; a process without variables of a launcher is the only rank."""
    for launcher, *names in _BY_LAUNCHER:
        rank, size, local_rank, local_size = (_number(environment.get(name)) for name in names)
        if rank is None or size is None:
            continue
        if launcher == "env" and "TORCHELASTIC_RUN_ID" in environment:
            launcher = "torchrun"
        return Place(launcher=launcher, rank=rank, world_size=size, local_rank=local_rank, local_world_size=local_size)
    return Place(launcher="none", rank=0, world_size=1, local_rank=None, local_world_size=None)


def _number(text: str | None) -> int | None:
    match = re.match(r"\d{1,9}", text or "")  # Slurm writes 2(x3) for tasks of nodes
    return int(match[0]) if match else None
