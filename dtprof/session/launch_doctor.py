"""Check a launch before the job: the probe in its ranks' place, the verdict, and the cluster's earlier figures."""

import os
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

from dtprof.analysis.doctor import launch_checks
from dtprof.analysis.doctor.doctor_case import DoctorCase, PipelineFigures
from dtprof.analysis.doctor.doctor_judgement import DoctorResult, judge
from dtprof.launch import probed_launch, run_directory
from dtprof.records import rank_probes
from dtprof.session import cluster_bandwidths


@dataclass(frozen=True, kw_only=True)
class DoctorRequest:
    """What is asked for."""

    command: tuple[str, ...]
    seconds: float
    output: Path | None = None
    force: bool = False
    matrix: Path | None = None
    given: PipelineFigures = field(
        default_factory=PipelineFigures
    )  # what the user says; the command's arguments say the rest
    max_log_bytes: int = 256 << 20


@dataclass(frozen=True, kw_only=True)
class DoctorOutcome:
    """The verdict, where the documents of the ranks lie, and the file of the cluster, where one was written."""

    result: DoctorResult
    folder: Path
    matrix: Path | None


def check_launch(request: DoctorRequest) -> DoctorOutcome:
    """Start the command with the probe, and judge what the ranks found.

    Raises:
        UsageError: the file of the cluster is none.
        CommandNotFoundError: the command cannot be started.
        OutputError: the folder or the file of the cluster cannot be written to.
    """
    earlier = cluster_bandwidths.read_earlier(request.matrix) if request.matrix is not None else []
    folder = _make_folder(request)
    endpoint = probed_launch.find_endpoint(request.command, os.environ)
    status = probed_launch.probe_launch(request.command, folder, seconds=request.seconds)
    joint = rank_probes.read_probes(folder)
    said = launch_checks.read_pipeline(request.command)
    known = {name: value for name, value in vars(request.given).items() if value is not None}
    case = DoctorCase(
        joint=joint,
        command=request.command,
        seconds=request.seconds,
        exit_status=status,
        endpoint=endpoint,
        pipeline=replace(said, **known),
        max_log_bytes=request.max_log_bytes,
    )
    matrix = None
    if joint.links and case.hosts:
        matrix = request.matrix or cluster_bandwidths.default_file(sorted(case.hosts), os.environ)
        if request.matrix is None:
            earlier = cluster_bandwidths.read_earlier(matrix)
    result = judge(case, cluster_bandwidths.earlier_of(earlier))
    if matrix is not None:
        cluster_bandwidths.keep(matrix, earlier, result)
    return DoctorOutcome(result=result, folder=folder, matrix=matrix)


def _make_folder(request: DoctorRequest) -> Path:
    """Create the folder for the documents of the ranks; on a shared disk each host may have created it."""
    default = run_directory.default_directory(request.command)
    folder = (request.output or default.with_name(f"{default.name}-doctor")).absolute()
    try:
        old = list(folder.glob(f"{rank_probes.PREFIX}*.json")) + list(folder.glob(f"{rank_probes.JOINT}*.json"))
        others = {entry.name for entry in folder.iterdir()} - {file.name for file in old} if folder.is_dir() else set()
        if others or (old and not request.force):
            raise run_directory.taken_error(folder)
        if old:
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise run_directory.output_error(folder, error) from error
    return folder
