"""Hooks that a wheel carries: taken where they fit exactly, and never where they might not."""

import hashlib
import os
import shutil
import sysconfig
from pathlib import Path

import pytest

from dtprof.capture.native import build

COMMIT = "5811a8d7da873dd699ff6687092c225caffcf1bb"
SOABI = sysconfig.get_config_var("SOABI")
HEADER = "// constants\n"


def install_torch(folder: Path, version: str, *, commit: str = COMMIT, abi: str = "") -> Path:
    """Write what is asked of a torch; return its folder."""
    (folder / "share/cmake/Torch").mkdir(parents=True, exist_ok=True)
    (folder / "version.py").write_text(f"__version__ = '{version}'\ngit_version = '{commit}'\n")
    told = f'set(TORCH_CXX_FLAGS "-D_GLIBCXX_USE_CXX11_ABI={abi}")\n' if abi else ""
    (folder / "share/cmake/Torch/TorchConfig.cmake").write_text(told)
    return folder


def put(library: Path, content: bytes = b"prebuilt") -> Path:
    library.parent.mkdir(parents=True)
    library.write_bytes(content)
    library.with_name(build.CHECKSUM).write_text(hashlib.sha256(content).hexdigest() + "\n")
    return library


@pytest.fixture
def torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a torch 2.9.1+cpu, empty folders of prebuilt and of compiled hooks, and no compiler."""
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setenv("DTPROF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    folder = install_torch(tmp_path / "torch", "2.9.1+cpu")
    monkeypatch.setattr(build, "find_torch", lambda: (folder, "2.9.1+cpu"))
    return folder


def prebuilt_hook(header: str = HEADER, tag: str = f"2.9.1-5811a8d7-abi1-{SOABI}") -> Path:
    return put(build.PREBUILT / f"{tag}-{build.source_digest(header)}" / "dtprof_native_hook.so")


@pytest.mark.usefixtures("torch")
def test_hook_that_fits_is_taken_where_it_lies_and_nothing_is_written(tmp_path: Path) -> None:
    library = prebuilt_hook()
    os.chmod(library.parent, 0o555)  # noqa: PTH101
    assert build.ensure(HEADER, timeout_s=0) == {"library": str(library), "torch": "2.9.1+cpu", "reason": None}
    assert not (tmp_path / "cache").exists()
    assert build.misfit(library, "2.9.1+cpu", HEADER) is None


@pytest.mark.parametrize("version", ["2.9.1+cu128", "2.9.1+cpu", "2.9.1"])
def test_builds_of_one_release_share_a_hook(torch: Path, version: str) -> None:
    assert build.prebuilt_tag(install_torch(torch, version), version) == f"2.9.1-5811a8d7-abi1-{SOABI}"


@pytest.mark.parametrize(
    ("version", "commit", "abi"),
    [
        ("2.9.0+cpu", COMMIT, ""),
        ("2.9.1+cpu", COMMIT.replace("5811", "5812"), ""),  # built from other sources
        ("2.9.1a0+git5811a8d", COMMIT, ""),
        ("2.9.1+rocm6.4", COMMIT, ""),
        ("2.9.1+cpu", "Unknown", ""),
        ("2.9.1+cpu", COMMIT, "0"),  # the strings of C++ before C++11, as wheels for CUDA had them up to torch 2.6
    ],
)
def test_hook_of_another_build_is_not_taken(
    torch: Path, monkeypatch: pytest.MonkeyPatch, version: str, commit: str, abi: str
) -> None:
    library = prebuilt_hook()
    install_torch(torch, version, commit=commit, abi=abi)
    monkeypatch.setattr(build, "find_torch", lambda: (torch, version))
    answer = build.ensure(HEADER, timeout_s=0)
    assert answer["library"] is None
    assert answer["reason"] == "no C++ compiler was found (install g++, or set CXX)"
    assert build.misfit(library, version, HEADER) is not None


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize(
    "soabi", ["cpython-311-x86_64-linux-musl", "cpython-311-aarch64-linux-gnu", "cpython-314t-x86_64"]
)
def test_other_systems_have_the_hook_compiled(monkeypatch: pytest.MonkeyPatch, soabi: str) -> None:
    prebuilt_hook()
    real = sysconfig.get_config_var
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: soabi if name == "SOABI" else real(name))
    assert build.ensure(HEADER, timeout_s=0)["reason"] == "no C++ compiler was found (install g++, or set CXX)"
    monkeypatch.setenv("CXX", "/bin/true")
    assert build.ensure(HEADER, timeout_s=0) == {"library": None, "torch": "2.9.1+cpu", "reason": None}  # to compile


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("damage", ["cut", "other constants", "no checksum"])
def test_damaged_or_outdated_hook_is_not_taken(damage: str) -> None:
    library = prebuilt_hook("// older\n" if damage == "other constants" else HEADER)
    if damage == "cut":
        library.write_bytes(b"pre")
    elif damage == "no checksum":
        library.with_name(build.CHECKSUM).unlink()
    assert build.ensure(HEADER, timeout_s=0)["library"] is None


def test_torch_with_nccl_has_a_copy_beside_the_library_that_is_compiled(
    torch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = prebuilt_hook()
    (torch / "lib").mkdir()
    (torch / "lib/libtorch_cuda.so").touch()
    assert build.ensure(HEADER, timeout_s=0)["library"] == str(library)  # nothing can be compiled here
    compiler = tmp_path / "g++"
    compiler.write_text(
        f'#!/bin/sh\necho x >> {tmp_path}/calls\nwhile [ "$1" != -o ]; do shift; done\necho nccl > $2\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "NCCL_HEADERS", ())
    driver = tmp_path / "nvidiactl"
    monkeypatch.setattr(build, "NVIDIA_DRIVER", driver)
    assert build.ensure(HEADER, timeout_s=0)["library"] == str(library)  # no process can use NCCL here
    driver.touch()
    assert build.ensure(HEADER, timeout_s=0)["library"] is None
    copied = build.library_path("2.9.1+cpu", HEADER)
    assert build.ensure(HEADER, timeout_s=60)["library"] == str(copied)
    assert copied.read_bytes() == b"prebuilt"
    assert build.is_intact(copied.with_name(build.NCCL_LIBRARY), build.NCCL_CHECKSUM)
    assert (tmp_path / "calls").read_text() == "x\n"
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file: nothing can be written")
    assert build.ensure(HEADER, timeout_s=60)["library"] == str(library)
