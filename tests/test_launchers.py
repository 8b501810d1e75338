"""Which processes of a launch are ranks, and which one, by their command lines and environments."""

import pytest

from dtprof.launchers import (
    MOST_ALLOCATED,
    RANKS,
    RankPlace,
    expand_hosts,
    find_remote_starter,
    has_rendezvous,
    is_launcher,
    read_allocation,
    read_rank_place,
    read_rendezvous,
    recorded_launchers,
)
from dtprof.lint import vocabulary

LAUNCHING = [
    "python /venv/bin/torchrun --nproc-per-node 2 train.py",
    "python -m torch.distributed.run train.py",
    "python -u -X dev -m torch.distributed.launch train.py",
    "python -m accelerate.commands.launch train.py",
    "python /venv/bin/accelerate launch train.py",
    "python /venv/bin/deepspeed train.py",
    "python -m deepspeed.launcher.launch train.py",
]
TRAINING = [
    "python train.py",
    "python -u train.py --launcher torchrun",
    "python -m training.run",
    "python -X dev train.py",
    "python",
]


@pytest.mark.parametrize("line", LAUNCHING)
def test_programs_that_start_ranks_are_left_to_it(line: str) -> None:
    assert is_launcher(line.split())


@pytest.mark.parametrize("line", TRAINING)
def test_other_programs_are_ranks(line: str) -> None:
    assert not is_launcher(line.split())


def test_helpers_of_multiprocessing_are_no_ranks() -> None:
    assert is_launcher(["python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(3)"])
    assert not is_launcher(["python", "-c", "import torch"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=x", ("torchrun", 3, 4, 1, 2)),
        ("RANK=3 WORLD_SIZE=4 MASTER_ADDR=a", ("env", 3, 4, None, None)),
        (
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2",
            ("mpirun", 1, 2, 1, 2),
        ),
        ("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1", ("mpirun", 1, 2, 0, 1)),
        ("SLURM_PROCID=5 SLURM_NTASKS=6 SLURM_LOCALID=1 SLURM_NTASKS_PER_NODE=2(x3)", ("srun", 5, 6, 1, 2)),
        ("RANK=0 WORLD_SIZE=2 SLURM_PROCID=1 SLURM_NTASKS=2", ("env", 0, 2, None, None)),
        ("RANK=none WORLD_SIZE=2", ("none", 0, 1, None, None)),
        ("", ("none", 0, 1, None, None)),
    ],
)
def test_the_place_of_a_rank_is_what_its_launcher_gave_it(text: str, expected: tuple[object, ...]) -> None:
    place = read_rank_place(dict(word.split("=", 1) for word in text.split()))
    names = ("launcher", "rank", "world_size", "local_rank", "local_world_size")
    assert place == RankPlace(**dict(zip(names, expected, strict=True)))  # type: ignore[arg-type]


@pytest.mark.parametrize("line", ["python -m torch.distributed.run t.py", "python /venv/bin/accelerate launch t.py"])
def test_launchers_with_torchs_rendezvous_may_wait_for_other_hosts(line: str) -> None:
    assert has_rendezvous(line.split())


@pytest.mark.parametrize("line", ["python /venv/bin/deepspeed t.py", "python a.py b c d --run torchrun"])
def test_other_programs_wait_in_no_rendezvous(line: str) -> None:
    assert not has_rendezvous(line.split())


def test_always_on_recording_takes_launchers_that_start_all_ranks_of_a_host() -> None:
    assert {"torchrun", "torch.distributed.run", "accelerate", "deepspeed"} <= set(recorded_launchers())
    assert not {"srun", "mpirun", "ray"} & set(recorded_launchers())


def test_lint_takes_every_variable_of_a_rank_for_one() -> None:
    """Lint imports nothing, so its words are its own."""
    assert {name: vocabulary.RANK_VARIABLES.get(name) for name in RANKS} == dict.fromkeys(RANKS, "global")


@pytest.mark.parametrize(
    ("command", "environment", "expected"),
    [
        (
            "torchrun --nnodes=2:4 --nproc_per_node 8 --rdzv-endpoint a:1 --rdzv_id=5 train.py --nnodes 9",
            {},
            {"nodes": 2, "most_nodes": 4, "ranks_per_node": 8, "node_rank": None, "endpoint": "a:1", "id": "5"},
        ),
        (
            "accelerate launch --num_machines 2 --machine_rank 1 --main_process_ip a --main_process_port 7 train.py",
            {},
            {"nodes": 2, "most_nodes": 2, "ranks_per_node": None, "node_rank": 1, "endpoint": "a:7", "id": ""},
        ),
        (
            "torchrun --nnodes 3 train.py",
            {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "b:2", "PET_RDZV_ID": "x", "PET_NPROC_PER_NODE": "gpu"},
            {"nodes": 3, "most_nodes": 3, "ranks_per_node": None, "node_rank": None, "endpoint": "b:2", "id": "x"},
        ),
        (
            "torchrun train.py",
            {},
            {"nodes": 1, "most_nodes": 1, "ranks_per_node": None, "node_rank": None, "endpoint": "", "id": ""},
        ),
    ],
)
def test_options_are_those_of_the_command_line_else_of_the_environment(
    command: str, environment: dict[str, str], expected: dict[str, object]
) -> None:
    assert read_rendezvous(command.split(), environment) == expected


@pytest.mark.parametrize(
    ("command", "environment", "expected"),
    [
        ("mpirun -np 4 --hostfile hosts python train.py", {}, "mpirun"),
        ("/opt/bin/mpirun -np 4 -H a:2,b:2 python train.py", {}, "mpirun"),
        ("mpirun -np 4 python train.py", {}, None),
        ("mpirun -np 4 python train.py", {"SLURM_JOB_NUM_NODES": "2"}, "mpirun"),
        ("mpirun -np 4 --hostfile=hosts dtprof run -o d -- python train.py", {}, None),
        ("srun --nodes=2 python train.py", {}, "srun"),
        ("srun python train.py", {"SLURM_JOB_NUM_NODES": "1"}, None),
        ("deepspeed --hostfile hosts train.py", {}, "deepspeed"),
        ("python -m deepspeed.launcher.runner --hostfile hosts train.py", {}, "deepspeed"),
        ("deepspeed --hostfile hosts --no_ssh --node_rank 1 train.py", {}, None),
        ("deepspeed train.py", {}, None),
        ("pdsh -w a,b python train.py", {}, "pdsh"),
        # Words of the program are its own.
        ("torchrun train.py ssh", {}, None),
        ("python train.py --hostfile hosts", {}, None),
    ],
)
def test_programs_that_start_ranks_on_other_hosts_are_known(
    command: str, environment: dict[str, str], expected: str | None
) -> None:
    assert find_remote_starter(command.split(), environment) == expected


def test_hosts_of_an_allocation_are_read_as_slurm_and_lsf_write_them() -> None:
    assert expand_hosts("gpu[01-03,7],login") == ("gpu01", "gpu02", "gpu03", "gpu7", "login")
    assert expand_hosts("r1n[9-10]x,b") == ("r1n9x", "r1n10x", "b")
    assert expand_hosts("a a b") == ("a", "b")
    assert expand_hosts("n[x-3],") == ()
    assert len(expand_hosts("n[0-999999999]")) == MOST_ALLOCATED
    both = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_STEP_NODELIST": "n[1-2]"}
    assert read_allocation(both) == (("n1", "n2"), "SLURM_STEP_NODELIST")
    assert read_allocation({"LSB_HOSTS": "a a b b"}) == (("a", "b"), "LSB_HOSTS")
    assert read_allocation({}) == ((), "")
