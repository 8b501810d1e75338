"""What runs beside the job may fail to start, fail at its end, or lose its run: the job ends as it would have."""

import types
from pathlib import Path

import pytest

from dtprof.launch import child_process, hang_watcher, interpreter, job_launch, launcher_thread


def end_of(command: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> job_launch.JobEnd:
    none = interpreter.HookChoice(library=None, torch_version=None, message=None)
    monkeypatch.setattr(interpreter, "choose_hook", lambda *_, **__: none)
    settings = job_launch.JobSettings(
        output=run, force=False, join=False, native=True, max_log_mb=64, hang_after_s=60, stop_on_hang=False
    )
    return job_launch.run_job(
        ["sh", "-c", command], settings, lambda _: hang_watcher.StallVerdict(is_hang=False, text="")
    )


def refuse(*_: object, **__: object) -> None:
    raise RuntimeError("can't start new thread")


def test_where_no_thread_can_be_started_the_job_runs_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    threads = types.SimpleNamespace(Thread=lambda **_: types.SimpleNamespace(start=refuse, is_alive=bool))
    monkeypatch.setattr(
        child_process, "threading", types.SimpleNamespace(**vars(child_process.threading) | vars(threads))
    )
    monkeypatch.setattr(launcher_thread.threading.Thread, "start", refuse)
    assert end_of("exit 7", tmp_path / "run", monkeypatch).status == 7
    said = capfd.readouterr().err
    assert "a part of the watch over the job is not started: RuntimeError: can't start new thread" in said
    assert "the watch over the job is not started: RuntimeError: can't start new thread" in said
    assert '"exit_status": 7' in (tmp_path / "run" / "run.json").read_text()


def test_what_fails_at_the_end_does_not_keep_the_rest_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stop = job_launch.Sampler.stop

    def stop_and_fail(sampler: job_launch.Sampler) -> None:
        stop(sampler)
        raise RuntimeError("broken")

    monkeypatch.setattr(job_launch.Sampler, "stop", stop_and_fail)
    assert end_of("exit 5", tmp_path / "run", monkeypatch).status == 5
    assert "a part of the watch over the job did not end in order: RuntimeError: broken" in capfd.readouterr().err
    assert '"exit_status": 5' in (tmp_path / "run" / "run.json").read_text()
