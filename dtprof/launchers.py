"""The programs that start ranks, each declared once: its names, its options, and the variables its ranks have.

A new launcher is one entry of `LAUNCHERS`, or of `RANK_VARIABLES` where its ranks have variables of their own. The
standard library only: the interpreters of a job read it, too.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A program that starts ranks."""

    programs: tuple[str, ...]  # names of its command
    modules: tuple[str, ...] = ()  # with `python -m`; their submodules count, too
    has_rendezvous: bool = False  # waits in torch's elastic rendezvous until all hosts have joined
    is_recorded: bool = False  # always-on recording makes it the command of a `dtprof run`
    elsewhere: str | None = None  # its options that name other hosts, to start ranks there; "": it always does
    in_allocation: bool = False  # it starts ranks on all hosts of an allocation of Slurm


TORCHRUN = "torchrun"
LAUNCHERS = (
    Launcher(
        programs=(TORCHRUN, "torch-distributed-run"),
        modules=("torch.distributed.run", "torch.distributed.launch", "torch.distributed.launcher", "torchrun"),
        has_rendezvous=True,
        is_recorded=True,
    ),
    Launcher(
        programs=("accelerate", "accelerate-launch"),
        modules=("accelerate", "accelerate.commands.launch"),
        has_rendezvous=True,
        is_recorded=True,
    ),
    Launcher(
        programs=("deepspeed", "deepspeed.pt"),
        modules=("deepspeed", "deepspeed.launcher.runner"),
        is_recorded=True,
        elsewhere="H|hostfile",
    ),
    Launcher(programs=("fabric", "lightning"), modules=("lightning", "lightning_fabric")),
    Launcher(programs=("ray",), modules=("ray",)),
    Launcher(programs=("horovodrun",), modules=("horovod.runner",), elsewhere="H|hosts|hostfile"),
    Launcher(
        programs=("mpirun", "mpiexec", "orterun", "prterun"),
        elsewhere="H|hosts?|hostfile|machinefile|f",
        in_allocation=True,
    ),
    Launcher(programs=("srun",), elsewhere="N|nodes|w|nodelist", in_allocation=True),
    Launcher(programs=("ssh", "pdsh", "clush"), elsewhere=""),
)
ON_EACH_HOST = ("--no_ssh", "--no-ssh")
"""Options of deepspeed that is started on each host by itself."""
RENDEZVOUS_FILES = ("torch/distributed/run.py", "torch/distributed/launch.py")
"""Ends of the paths of torchrun where it is started as a file."""
EXCEPTIONS = (
    *("ChildFailedError", "SignalException", "ProcessRaisedException", "ProcessExitedException"),
    "CalledProcessError",
)
"""What a launcher raises because a rank has failed: never the cause."""
HELPER = re.compile(r"from multiprocessing[.\w]* import|from loky|joblib")
"""Programs given with `python -c` that are workers of multiprocessing, not ranks."""


@dataclass(frozen=True, kw_only=True)
class LauncherOption:
    """An option of torchrun, accelerate and deepspeed, by its meaning."""

    pattern: re.Pattern[str]  # its second group is a value after `=`
    variable: str  # which torchrun reads where the option is not given


def _option(names: str, variable: str) -> LauncherOption:
    return LauncherOption(pattern=option_pattern(names), variable=variable)


def option_pattern(names: str) -> re.Pattern[str]:
    """Return a pattern of the word that gives one of these options, for `find_option`."""
    return re.compile(f"--?({names})(?:=(.*))?")


NODES = _option("nnodes|num[-_]machines", "PET_NNODES")
RANKS_PER_NODE = _option("nproc[-_]per[-_]node", "PET_NPROC_PER_NODE")
ENDPOINT = _option("rdzv[-_]endpoint", "PET_RDZV_ENDPOINT")
ADDRESS = _option("master[-_]addr|main[-_]process[-_]ip", "PET_MASTER_ADDR")
PORT = _option("master[-_]port|main[-_]process[-_]port", "PET_MASTER_PORT")
RENDEZVOUS_ID = _option("rdzv[-_]id", "PET_RDZV_ID")
NODE_RANK = _option("node[-_]rank|machine[-_]rank", "PET_NODE_RANK")


@dataclass(frozen=True, kw_only=True)
class RankVariables:
    """The variables by which ranks learn their place."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    others: str = ""  # a pattern: variables that tell more of the job


RANK_VARIABLES = (
    RankVariables(
        launcher="env",
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size="LOCAL_WORLD_SIZE",
        others=r"NODE_RANK|GROUP_RANK|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_\w+",
    ),
    RankVariables(
        launcher="mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        others=r"OMPI_COMM_WORLD_\w+",
    ),
    RankVariables(
        launcher="mpirun",
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world_size="MPI_LOCALNRANKS",
    ),
    RankVariables(
        launcher="srun",
        rank="SLURM_PROCID",
        world_size="SLURM_NTASKS",
        local_rank="SLURM_LOCALID",
        local_world_size="SLURM_NTASKS_PER_NODE",
        others=r"SLURM_(NNODES|NODEID|JOB_ID|STEP_ID|STEP_NODELIST|JOB_NODELIST|CLUSTER_NAME)",
    ),
)
"""In the order in which they are believed: torchrun under srun gives its ranks RANK beside the variables of Slurm."""
RANKS = tuple(variables.rank for variables in RANK_VARIABLES)
_TELLING = re.compile(
    "|".join(
        pattern
        for names in RANK_VARIABLES
        for pattern in (names.rank, names.world_size, names.local_rank, names.local_world_size, names.others)
        if pattern
    )
)


@dataclass(frozen=True, kw_only=True)
class RankPlace:
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
        return any(_is_of(launcher, module) for launcher in LAUNCHERS)
    return any(Path(words[0]).name in launcher.programs for launcher in LAUNCHERS)


def has_rendezvous(command: Sequence[str]) -> bool:
    """Say whether a command runs a launcher that waits for its other hosts.

    The launcher is among the first few words, which an interpreter and its options may precede; words behind are the
    program's own.
    """
    return any(
        Path(word).name in launcher.programs or word in launcher.modules or word.endswith(RENDEZVOUS_FILES)
        for launcher in LAUNCHERS
        if launcher.has_rendezvous
        for word in command[:6]
    )


def recorded_launchers() -> tuple[str, ...]:
    """Return the names of programs and modules that always-on recording makes the command of a run."""
    return tuple(
        name for launcher in LAUNCHERS if launcher.is_recorded for name in (*launcher.programs, *launcher.modules)
    )


def find_option(command: Sequence[str], pattern: re.Pattern[str]) -> str | None:
    """Return the value of the first word that the pattern matches, whose second group is a value after `=`."""
    for position, word in enumerate(command):
        match = pattern.fullmatch(word)
        if match is not None:
            return match[2] if match[2] is not None else next(iter(command[position + 1 : position + 2]), None)
    return None


def read_rendezvous(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of a launcher for its rendezvous, from its command line, else from its environment.

    `nodes` is the smallest number, 1 where it is not given, `most_nodes` the largest; `ranks_per_node` and `node_rank`
    are None where they are no numbers, `endpoint` and `id` empty where they are not given.
    """

    def given(option: LauncherOption) -> str:
        return find_option(command, option.pattern) or environment.get(option.variable) or ""

    least, _, most = given(NODES).partition(":")
    return {
        "nodes": _whole_number(least) or 1,
        "most_nodes": _whole_number(most) or _whole_number(least) or 1,
        "ranks_per_node": _whole_number(given(RANKS_PER_NODE)),
        "node_rank": _whole_number(given(NODE_RANK)),
        "endpoint": given(ENDPOINT) or ":".join(filter(None, (given(ADDRESS), given(PORT)))),
        "id": given(RENDEZVOUS_ID),
    }


MOST_ALLOCATED = 10_000
"""Hosts of an allocation that are read."""
_ALLOCATIONS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "LSB_HOSTS")
_LISTED = re.compile(r"([^,\[\]\s]*)(?:\[([^\]]*)\])?([^,\[\]\s]*)")


def read_allocation(environment: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    """Return the names of the hosts that the scheduler gave the job, and the variable that has them; empty: unknown.

    Slurm writes ranges (`gpu[01-03,7],login`), LSF a name for each slot.
    """
    for variable in _ALLOCATIONS:
        if text := environment.get(variable, "").strip():
            return expand_hosts(text), variable
    return (), ""


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of a list as Slurm writes it, each once; one that cannot be read has no name of its own."""
    found: dict[str, None] = {}
    for match in _LISTED.finditer(text):
        before, ranges, after = match.groups()
        if ranges is None:
            found |= dict.fromkeys([before + after] if before + after else [])
            continue
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            if not (first.isdecimal() and (last or first).isdecimal()):
                continue
            numbers = range(int(first), min(int(last or first), int(first) + MOST_ALLOCATED) + 1)
            found |= dict.fromkeys(f"{before}{number:0{len(first)}d}{after}" for number in numbers)
    return tuple(found)[:MOST_ALLOCATED]


def find_remote_starter(command: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return the program of a command that starts ranks on other hosts, where no launcher of dtprof is; None: none."""
    program, options = Path(command[0]).name, list(command[1:])
    module = options[1] if options[:1] == ["-m"] and len(options) > 1 else ""
    starters = (launcher for launcher in LAUNCHERS if program in launcher.programs or _is_of(launcher, module))
    launcher = next(starters, None)
    if launcher is None or launcher.elsewhere is None or any(option in ON_EACH_HOST for option in options):
        return None
    if "dtprof" in (Path(option).name for option in options):
        return None  # behind it, on every host
    asks = option_pattern(launcher.elsewhere)
    is_asked = not launcher.elsewhere or any(asks.fullmatch(option) for option in options)
    num_allocated = _number(environment.get("SLURM_JOB_NUM_NODES")) or 1
    is_given = launcher.in_allocation and num_allocated > 1
    return (program if program in launcher.programs else launcher.programs[0]) if is_asked or is_given else None


def read_rank_place(environment: Mapping[str, str]) -> RankPlace:
    """Return the place of the process of this environment; one without variables of a launcher is the only rank."""
    for names in RANK_VARIABLES:
        rank, world_size = _number(environment.get(names.rank)), _number(environment.get(names.world_size))
        if rank is None or world_size is None:
            continue
        is_elastic = names.launcher == "env" and "TORCHELASTIC_RUN_ID" in environment
        return RankPlace(
            launcher=TORCHRUN if is_elastic else names.launcher,
            rank=rank,
            world_size=world_size,
            local_rank=_number(environment.get(names.local_rank)),
            local_world_size=_number(environment.get(names.local_world_size)),
        )
    return RankPlace(launcher="none", rank=0, world_size=1, local_rank=None, local_world_size=None)


def select_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which launchers tell ranks where they are."""
    return {name: text for name, text in environment.items() if _TELLING.fullmatch(name)}


def _is_of(launcher: Launcher, module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in launcher.modules)


def _number(text: str | None) -> int | None:
    match = re.match(r"\d{1,9}", text or "")  # Slurm writes 2(x3) for tasks of nodes
    return int(match[0]) if match else None


def _whole_number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 9 else None
