"""`make gpu` where there is no GPU: what it computes, keeps and says."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import equal_losses, step_on_device, trained_layouts, trained_presets
from benchmarks.gpu.__main__ import PARTS, Measurement, main, run_measurement, time_for
from benchmarks.gpu.exposed_time import find_exposed
from benchmarks.gpu.figures import Figure, FigureFile, read_figure
from reference_trainer.options import parse_options
from reference_trainer.placement import Placement

REPOSITORY = Path(__file__).parents[1]
TRAINED = [
    *((1, arguments) for _, arguments in trained_presets.RUNS),
    *((num_ranks, (*trained_layouts.COMMON, *layout.split())) for num_ranks, layout in trained_layouts.LAYOUTS),
    *((num_ranks, arguments) for _, num_ranks, _, arguments in step_on_device.JOBS),
    *((num_ranks, ("--preset", "small", *layout)) for _, num_ranks, layout in equal_losses.LAYOUTS),
]


def kernel(name: str, begin_us: float, length_us: float) -> dict[str, object]:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": begin_us, "dur": length_us, "pid": 0, "tid": 7, "args": {}}


def test_exposed_time_is_that_of_nccl_without_other_kernels_inside_the_steps(tmp_path: Path) -> None:
    # us: NCCL 10-30 and 50-60, products 0-20 and 55-70; steps from 12 to 58. Exposed: 20-30 and 50-55, of 2 steps.
    events = [
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 10, 20),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 50, 10),
        kernel("sm90_gemm", 0, 20),
        kernel("elementwise", 55, 15),
    ]
    path = tmp_path / "0.pt.trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": 1_000_000, "traceEvents": events}))
    # The file counts from 1 ms since 1970; the host's clock shows 5 ms less.
    exposed = find_exposed(
        path, begin_ns=-4_000_000 + 12_000, end_ns=-4_000_000 + 58_000, clock_ns=-5_000_000, num_steps=2
    )
    assert exposed == 7_500


def test_trace_without_kernels_of_nccl_tells_nothing_of_exposed_time(tmp_path: Path) -> None:
    path = tmp_path / "0.pt.trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [kernel("sm90_gemm", 0, 20)]}))
    assert find_exposed(path, begin_ns=0, end_ns=10**6, clock_ns=0, num_steps=1) is None


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FigureFile, Path]:
    """Have measurements be run by an interpreter that does what its module is called."""
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\n"
        "import subprocess, sys, time\n"
        'print(\'other output\\nFIGURE {"name": "speed", "value": 1.5, "unit": "ms"}\', flush=True)\n'
        "kind = sys.argv[2].rpartition('.')[2]\n"
        "if kind == 'hangs':\n"
        "    subprocess.run(['sleep', '1000'], start_new_session=True)\n"
        "sys.exit(3 if kind == 'fails' else 0)\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return FigureFile(tmp_path / "out", "bench"), tmp_path / "out"


def test_measurement_that_fails_or_hangs_keeps_its_figures_and_the_others_run(
    measured: tuple[FigureFile, Path],
) -> None:
    file, folder = measured
    log = io.StringIO()
    began_s = time.monotonic()
    for module, most_s in (("fails", 60.0), ("hangs", 1.0), ("works", 60.0)):
        one = Measurement(module=module, most_s=most_s)
        run_measurement(one, file, log, limit_s=one.most_s)
    run_measurement(Measurement(module="late", most_s=60), file, log, limit_s=0.5)
    document = json.loads((folder / "bench.json").read_text())
    assert [(figure["measurement"], figure["value"]) for figure in document["figures"]] == [
        ("fails", 1.5),
        ("hangs", 1.5),
        ("works", 1.5),
    ]
    reasons = {failure["measurement"]: failure["reason"] for failure in document["failures"]}
    assert set(reasons) == {"fails", "hangs", "late"}
    assert reasons["fails"].startswith("exit status 3")
    assert reasons["hangs"].startswith("no end within 1 s")
    assert "other output" in log.getvalue()
    assert "| speed | 1.5 ms |" in (folder / "bench.md").read_text()
    assert time.monotonic() - began_s < 30


def test_measurements_of_a_short_call_run_in_the_order_of_their_worth_and_the_rest_is_named(
    measured: tuple[FigureFile, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = measured
    # Setting up took all but 0.5 s, less than any measurement is begun with.
    assert main(["all", "--into", str(folder), "--seconds", "540", "--spent", "539.5"]) == 1
    failures = json.loads((folder / "all.json").read_text())["failures"]
    assert [failure["measurement"] for failure in failures] == [one.module for one in PARTS["all"]]
    assert "alone: make gpu ONLY=trained_presets" in capsys.readouterr().err


def test_measurement_of_many_small_ones_leaves_half_of_the_time_to_the_next() -> None:
    tests = Measurement(module="tests", most_s=300, piecewise=True)
    assert time_for(tests, 400, last=False) == 200
    assert time_for(tests, 1000, last=False) == 300
    assert time_for(tests, 250, last=True) == 250
    assert time_for(Measurement(module="costs", most_s=90), 100, last=False) == 90


def test_all_measures_what_its_parts_measure() -> None:
    parts = [measurement for name, measurements in PARTS.items() if name != "all" for measurement in measurements]
    assert set(PARTS["all"]) == set(parts)


def test_unknown_value_is_said_to_be_unknown(tmp_path: Path) -> None:
    file = FigureFile(tmp_path, "bench")
    file.add("one", Figure(name="exposed", value=None, unit="us", goal="within 5 %", note="no kernels | in the trace"))
    assert "| exposed | not known |  |  | within 5 % | cannot tell | no kernels / in the trace |" in (
        (tmp_path / "bench.md").read_text()
    )
    assert read_figure("FIG") is None


@pytest.mark.parametrize(("num_ranks", "arguments"), TRAINED, ids=lambda value: str(value)[:80])
def test_trainer_takes_every_command_line_of_the_measurements(num_ranks: int, arguments: tuple[str, ...]) -> None:
    placement = Placement(world_size=num_ranks, local_world_size=num_ranks, launched=True)
    assert parse_options(arguments, placement).layout.world_size == num_ranks


def run_setup(folder: Path, answer: str, *, part: str) -> subprocess.CompletedProcess[str]:
    """Run .ci/gpu where every interpreter that it can find gives this answer to its probe; empty: has no torch."""
    interpreter = folder / "python3"
    interpreter.write_text(f"#!/bin/sh\n[ -n '{answer}' ] || exit 1\necho '{answer}'\n")
    interpreter.chmod(0o755)
    for name in ("python3.11", "python3.12", "python3.13", "python"):
        (folder / name).symlink_to("python3")
    environment = {"PATH": f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin", "OUT": str(folder / "out")}
    command = ["sh", str(REPOSITORY / ".ci" / "gpu"), part]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_without_a_device_make_gpu_says_so_in_one_sentence(tmp_path: Path) -> None:
    ended = run_setup(tmp_path, "2.11.0+cu130 0 Found no NVIDIA driver", part="bench")
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert "needs a CUDA device, and torch 2.11.0+cu130" in ended.stderr
    assert "Found no NVIDIA driver" in ended.stderr


def test_without_a_torch_for_cuda_make_gpu_names_the_interpreters_tried(tmp_path: Path) -> None:
    ended = run_setup(tmp_path, "", part="all")
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert f"{tmp_path}/python3 " in ended.stderr
