"""`dtprof doctor` on real launches: the ranks meet, the program does not run, the verdict is right."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import DTPROF, torchrun

PROGRAM = "import sys\nimport torch\nopen(sys.argv[1], 'w').close()\n"


def doctor(
    folder: Path, *command: str, seconds: int = 20, environment: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """Return the exit status and the document; the program must not have run."""
    ran = folder / "ran"
    program = folder / "train.py"
    program.write_text(PROGRAM, encoding="utf-8")
    words = [*DTPROF, "doctor", "--json", "--time", str(seconds), "-o", str(folder / "doctor"), "--", *command]
    result = subprocess.run(
        [*words, str(ran)],
        env={**os.environ, "XDG_DATA_HOME": str(folder / "data"), "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert not ran.exists(), "the program ran"
    assert result.returncode in (0, 1), result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return result.returncode, document


def test_two_ranks_of_torchrun_meet_and_measure_their_link(tmp_path: Path) -> None:
    status, document = doctor(
        tmp_path, *torchrun(2, tmp_path / "train.py"), seconds=60, environment={"DTPROF_STAGES": "2"}
    )
    assert [finding["kind"] for finding in document["findings"] if finding["severity"] == "error"] == []
    assert status == bool(document["findings"])
    assert document["world_size"] == 2
    assert {(pair["from"], pair["to"]) for pair in document["pairs"]} == {(0, 1), (1, 0)}
    assert all(pair["gb_per_s"] > 0 and pair["latency_us"] > 0 for pair in document["pairs"])
    assert {"all_reduce", "broadcast"} <= {row["op"] for row in document["bandwidth"]}
    assert any("--microbatches" in reason for reason in document["cannot_tell"])
    (kept,) = (tmp_path / "data/dtprof/clusters").iterdir()
    assert json.loads(kept.read_text(encoding="utf-8"))["measurements"][0]["ranks"] == 2


@pytest.mark.thorough
def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29871"}
    status, document = doctor(tmp_path, sys.executable, str(tmp_path / "train.py"), seconds=10, environment=environment)
    assert status == 1
    (finding,) = document["findings"]
    assert (finding["kind"], finding["ranks"]) == ("missing-rank", [1])


@pytest.mark.thorough
def test_an_interface_that_is_not_there_is_named_before_gloos_own_error(tmp_path: Path) -> None:
    environment = {"GLOO_SOCKET_IFNAME": "nosuch0"}
    status, document = doctor(tmp_path, *torchrun(2, tmp_path / "train.py"), environment=environment)
    assert status == 1
    kinds = [finding["kind"] for finding in document["findings"] if finding["severity"] == "error"]
    assert kinds == ["interface", "rendezvous"]
    assert "nosuch0" in document["findings"][0]["summary"]


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_tasks_of_other_launchers_meet_without_an_address(tmp_path: Path, launcher: str) -> None:
    names = {
        "mpirun": "OMPI_COMM_WORLD_RANK=$i OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=$i",
        "srun": "SLURM_PROCID=$i SLURM_NTASKS=2 SLURM_LOCALID=$i",
    }
    script = f'for i in 0 1; do {names[launcher]} "$@" & done; wait'
    _, document = doctor(tmp_path, "bash", "-c", script, "bash", sys.executable, str(tmp_path / "train.py"))
    assert [finding for finding in document["findings"] if finding["severity"] == "error"] == []
    assert {(pair["from"], pair["to"]) for pair in document["pairs"]} == {(0, 1), (1, 0)}


@pytest.mark.thorough
def test_a_command_that_fails_before_torch_is_told(tmp_path: Path) -> None:
    status, document = doctor(tmp_path, "bash", "-c", "exit 3")
    assert status == 1
    assert [finding["kind"] for finding in document["findings"]] == ["no-rank"]
    assert "status 3" in document["findings"][0]["summary"]


def test_without_a_command_it_says_what_to_type() -> None:
    result = subprocess.run([*DTPROF, "doctor"], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "dtprof doctor -- torchrun" in result.stderr
