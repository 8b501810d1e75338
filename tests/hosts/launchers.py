"""What each host starts under a launcher, with the variables that the launcher or its scheduler sets there.

Slurm and Kubernetes are imitated by the variables that `srun` and the PyTorchJob operator set; torchrun, accelerate,
deepspeed and Open MPI are the real ones. Hosts have no folder in common.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PORT = 29400
RANK_OF_SLURM = (
    "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS "
    f"MASTER_ADDR=$SLURM_LAUNCH_NODE_IPADDR MASTER_PORT={PORT}"
)
RANK_OF_MPI = (
    "export RANK=$OMPI_COMM_WORLD_RANK LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE "
    f"MASTER_ADDR=a MASTER_PORT={PORT}"
)
CLIENTS = Path(__file__).resolve().parents[2] / ".make" / "clients"
"""Where `python -m tests.clients` puts accelerate and deepspeed."""
EVERYWHERE = {"DTPROF_COLLECT_TOKEN": "of-the-hosts", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
"""Variables of every rank."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A host of a job."""

    number: int  # of the host
    hosts: tuple[str, ...]  # names
    num_ranks: int  # a host
    record: tuple[str, ...]  # `dtprof run ... --`, or nothing
    program: tuple[str, ...]  # and its arguments

    @property
    def python(self) -> list[str]:
        """The command of one rank."""
        return [sys.executable, *self.program]

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return len(self.hosts) * self.num_ranks


@dataclass(frozen=True, kw_only=True)
class Start:
    """A process that a host starts."""

    command: list[str]
    env: dict[str, str] = field(default_factory=dict)


Launcher = Callable[[Place], Sequence[Start]]


def torchrun(place: Place) -> list[Start]:
    """Start the same torchrun on every host; they meet at host a."""
    return [Start(command=[*place.record, *_torchrun(place)])]


def slurm_torchrun(place: Place) -> list[Start]:
    """Start torchrun once a host: `srun --ntasks-per-node=1 dtprof run -- torchrun`."""
    return [Start(command=[*place.record, *_torchrun(place)], env=_slurm(place, tasks=1, task=0))]


def torchrun_behind_a_script(place: Place) -> list[Start]:
    """Start torchrun on the first host; on the others a script that comes before it does not end."""
    waits = ["sleep", "1000"]
    return [Start(command=[*place.record, *(waits if place.number else _torchrun(place))])]


def slurm_ranks(place: Place) -> list[Start]:
    """Start every rank by itself: `srun dtprof run -- python train.py`."""
    return [
        Start(
            command=["bash", "-c", f'{RANK_OF_SLURM}; exec "$0" "$@"', *place.record, *place.python],
            env=_slurm(place, tasks=place.num_ranks, task=task),
        )
        for task in range(place.num_ranks)
    ]


def kubernetes_torchrun(place: Place) -> list[Start]:
    """Start torchrun without options in each pod of a PyTorchJob."""
    command = [sys.executable, "-m", "torch.distributed.run", *place.program]
    return [Start(command=[*place.record, *command], env=_pytorchjob(place))]


def kubernetes_ranks(place: Place) -> list[Start]:
    """Start the program itself in each pod of a PyTorchJob: one rank a pod."""
    assert place.num_ranks == 1, "a pod of this kind is one rank"
    return [Start(command=[*place.record, *place.python], env=_pytorchjob(place))]


def accelerate(place: Place) -> list[Start]:
    """Start `accelerate launch` on each host with its number; without GPUs, --multi_gpu means no more than several."""
    return [
        Start(
            command=[
                *(*place.record, sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"),
                *("--num_machines", str(len(place.hosts)), "--num_processes", str(place.world_size)),
                *("--machine_rank", str(place.number), "--main_process_ip", place.hosts[0]),
                *("--main_process_port", str(PORT), "--mixed_precision", "no", "--dynamo_backend", "no"),
                *place.program,
            ],
            env=_client("accelerate"),
        )
    ]


def deepspeed(place: Place) -> list[Start]:
    """Start `deepspeed` on each host by itself with its number (--no_ssh)."""
    return [
        Start(
            command=[
                *(*place.record, sys.executable, "-m", "deepspeed.launcher.runner", "--no_ssh"),
                *("--hostfile", "/tmp/hostfile", "--node_rank", str(place.number)),
                *("--master_addr", place.hosts[0], "--master_port", str(PORT), *place.program),
            ],
            env=_client("deepspeed"),
        )
    ]


def deepspeed_within(place: Place) -> list[Start]:
    """Start `dtprof run -- deepspeed` on the first host, which starts all hosts by pdsh and ssh."""
    if place.number:
        return []
    return [Start(command=[*place.record, *_deepspeed_by_ssh(place), *place.program], env=_BY_SSH)]


def deepspeed_around(place: Place) -> list[Start]:
    """Start `deepspeed --no_python dtprof run -- python train.py` on the first host: one `dtprof run` a rank."""
    if place.number:
        return []
    command = [*_deepspeed_by_ssh(place), "--no_python", "--no_local_rank", *place.record, *place.python]
    return [Start(command=command, env=_BY_SSH)]


def mpirun(place: Place) -> list[Start]:
    """Start `mpirun dtprof run -- python train.py` on the first host: Open MPI starts every rank, by ssh elsewhere."""
    if place.number:
        return []
    return [
        Start(command=[*_mpirun(place), "bash", "-c", f'{RANK_OF_MPI}; exec "$0" "$@"', *place.record, *place.python])
    ]


def mpirun_within(place: Place) -> list[Start]:
    """Start `dtprof run -- mpirun python train.py` on the first host."""
    if place.number:
        return []
    return [
        Start(command=[*place.record, *_mpirun(place), "bash", "-c", f'{RANK_OF_MPI}; exec "$0" "$@"', *place.python])
    ]


def write_files(folder: Path, hosts: Sequence[str], num_ranks: int) -> None:
    """Write what deepspeed and Open MPI read: names and slots of the hosts; variables that deepspeed hands on."""
    (folder / "hostfile").write_text("".join(f"{host} slots={num_ranks}\n" for host in hosts))
    (folder / ".deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in EVERYWHERE.items()))


def _deepspeed_by_ssh(place: Place) -> list[str]:
    return [
        *(sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "/tmp/hostfile", "--force_multi"),
        *("--master_addr", place.hosts[0], "--master_port", str(PORT)),
    ]


def _torchrun(place: Place) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(place.hosts))),
        *("--nproc-per-node", str(place.num_ranks), "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"{place.hosts[0]}:{PORT}", "--rdzv-id", "7", *place.program),
    ]


def _slurm(place: Place, *, tasks: int, task: int) -> dict[str, str]:
    """Return what srun sets for a task (its manual, "output environment variables")."""
    num_nodes = len(place.hosts)
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOBID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_CLUSTER_NAME": "hosts",
        "SLURM_JOB_NODELIST": ",".join(place.hosts),
        "SLURM_NODELIST": ",".join(place.hosts),
        "SLURM_STEP_NODELIST": ",".join(place.hosts),
        "SLURM_JOB_NUM_NODES": str(num_nodes),
        "SLURM_NNODES": str(num_nodes),
        "SLURM_STEP_NUM_NODES": str(num_nodes),
        "SLURM_NTASKS": str(num_nodes * tasks),
        "SLURM_NPROCS": str(num_nodes * tasks),
        "SLURM_STEP_NUM_TASKS": str(num_nodes * tasks),
        "SLURM_NTASKS_PER_NODE": str(tasks),
        "SLURM_TASKS_PER_NODE": f"{tasks}(x{num_nodes})",
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{num_nodes})",
        "SLURM_NODEID": str(place.number),
        "SLURM_PROCID": str(place.number * tasks + task),
        "SLURM_LOCALID": str(task),
        "SLURM_CPUS_ON_NODE": "2",
        "SLURMD_NODENAME": place.hosts[place.number],
        "SLURM_LAUNCH_NODE_IPADDR": place.hosts[0],
        "SLURM_SRUN_COMM_HOST": place.hosts[0],
        "SLURM_TASK_PID": "0",
        "SLURM_GTIDS": ",".join(str(place.number * tasks + k) for k in range(tasks)),
    }


def _pytorchjob(place: Place) -> dict[str, str]:
    """Return what the operator of PyTorchJob sets in a pod: RANK is that of the node under torchrun."""
    nodes, first = str(len(place.hosts)), place.hosts[0]
    return {
        "MASTER_ADDR": first,
        "MASTER_PORT": "23456",
        "WORLD_SIZE": str(place.world_size),
        "RANK": str(place.number),
        "PET_MASTER_ADDR": first,
        "PET_MASTER_PORT": "23456",
        "PET_NNODES": nodes,
        "PET_NODE_RANK": str(place.number),
        "PET_NPROC_PER_NODE": str(place.num_ranks),
        "PYTHONUNBUFFERED": "1",
        "HOSTNAME": place.hosts[place.number],
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "KUBERNETES_SERVICE_PORT": "443",
        "KUBERNETES_PORT": "tcp://10.96.0.1:443",
    }


def _client(name: str) -> dict[str, str]:
    site = next(iter(sorted((CLIENTS / name).glob("lib/python*/site-packages"))), CLIENTS / name)
    return {"PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[2]), str(site)))}


_BY_SSH = _client("deepspeed") | {"PDSH_RCMD_TYPE": "ssh"}


def _mpirun(place: Place) -> list[str]:
    return [
        *(
            "mpirun",
            *(word for name in ("PYTHONPATH", *EVERYWHERE) for word in ("-x", name)),
            "--allow-run-as-root",
            "--hostfile",
            "/tmp/hostfile",
            "-np",
            str(place.world_size),
        ),
        *("--map-by", "slot", "--oversubscribe", "--bind-to", "none", "--mca", "btl_tcp_if_include", "eth0"),
    ]
