"""NVML's answers become samples; what a device refuses is unknown and not asked for again."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from dtprof.launch import gpu_sampler
from dtprof.records.nodes.node_samples import GPU, Value


class NVMLError(Exception):
    """As pynvml raises for anything."""

    value = 3  # not supported


class LostError(NVMLError):
    """As pynvml raises for a device that has fallen off the bus."""

    value = 15


class FakeNvml:
    """A node of some GPUs as pynvml shows it; `refuses` names functions that raise."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_VOLATILE_ECC = 0, 1, 2, 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    NVML_FI_DEV_PCIE_COUNT_TX_BYTES, NVML_FI_DEV_PCIE_COUNT_RX_BYTES = 197, 198
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1
    nvmlEventTypeXidCriticalError = 8  # noqa: N815

    def __init__(self, count: int = 1, refuses: tuple[str, ...] = ()) -> None:
        self.count = count
        self.refuses = refuses
        self.asked: list[str] = []
        self.xids: list[tuple[int, int]] = []
        self.lost: set[int] = set()
        self.unopened: set[int] = set()
        self.processes: list[Any] = []
        self.is_open = False
        self.answers: dict[str, Any] = {
            "GetName": b"NVIDIA H100",
            "GetUUID": "GPU-1",
            "GetPciInfo": SimpleNamespace(busId=b"00000000:1B:00.0"),
            "GetMemoryInfo": SimpleNamespace(total=80 << 30, used=30 << 30),
            "GetUtilizationRates": SimpleNamespace(gpu=75, memory=20),
            "GetPowerUsage": 412_500,
            "GetTotalEnergyConsumption": 9_000_500,
            "GetTemperature": 61,
            "GetCurrentClocksThrottleReasons": 4,
            "GetTotalEccErrors": 0,
        }

    def nvmlInit(self) -> None:  # noqa: N802
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        if index in self.unopened:
            raise LostError("GPU is lost")
        return f"handle {index}"

    def nvmlDeviceGetIndex(self, handle: str) -> int:  # noqa: N802
        index = int(handle.split()[1])
        if index in self.lost:
            raise LostError("GPU is lost")
        return index

    def nvmlEventSetCreate(self) -> str:  # noqa: N802
        return "events"

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> Any:  # noqa: N802
        assert (events, timeout_ms) == ("events", 0), "never waits"
        if not self.xids:
            raise NVMLError("timeout")
        index, xid = self.xids.pop(0)
        return SimpleNamespace(device=f"handle {index}", eventData=xid)

    def __getattr__(self, name: str) -> Any:
        function = name.removeprefix("nvmlDevice")
        if name == function:
            raise AttributeError(name)

        def answer(handle: str, *arguments: Any) -> Any:
            assert handle.startswith("handle ")
            self.asked.append(function)
            if int(handle.split()[1]) in self.lost:
                raise LostError("GPU is lost")
            if function in self.refuses:
                raise NVMLError("not supported")
            if function == "GetClockInfo":
                return {1: 1980, 2: 2619}[arguments[0]]
            if function == "GetComputeRunningProcesses":
                return self.processes
            if function == "GetPcieThroughput":
                return {0: 5, 1: 7}[arguments[0]]
            if function == "GetFieldValues":
                return [self.field(*field) for field in arguments[0]]
            return self.answers.get(function)

        return answer

    def field(self, number: int, scope: int) -> Any:
        if number in (197, 198) and "pcie counters" in self.refuses:
            return SimpleNamespace(nvmlReturn=3, valueType=0, value=None)
        assert scope == (gpu_sampler.ALL_LINKS if number in (138, 139) else 0)
        return SimpleNamespace(nvmlReturn=0, valueType=3, value=SimpleNamespace(ullVal=number * 1000))


def named(values: list[Value]) -> dict[str, Value]:
    assert len(values) == len(GPU)
    return {field.name: value for field, value in zip(GPU, values, strict=True)}


def opened(nvml: FakeNvml, *, sees_pids: bool = True) -> gpu_sampler.Gpus:
    return gpu_sampler.Gpus(nvml, os.getpid(), sees_pids=sees_pids)


def test_every_value_has_its_unit() -> None:
    nvml = FakeNvml()
    nvml.processes = [
        SimpleNamespace(pid=os.getpid(), usedGpuMemory=20 << 30),
        SimpleNamespace(pid=1, usedGpuMemory=9 << 30),
    ]
    (values,) = opened(nvml).sample().values()
    assert named(values) == {
        "utilisation": 0.75,
        "memory_utilisation": 0.2,
        "memory_used_bytes": 30 << 30,
        "memory_of_job_bytes": 20 << 30,
        "memory_of_others_bytes": 9 << 30,
        "power_w": 412.5,
        "energy_j": 9000.5,
        "temperature_c": 61,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 2619,
        "throttle_reasons": 4,
        "pcie_sent_bytes": 197_000,
        "pcie_received_bytes": 198_000,
        "pcie_sent_bytes_per_s": None,
        "pcie_received_bytes_per_s": None,
        "nvlink_sent_bytes": 138_000 * 1024,
        "nvlink_received_bytes": 139_000 * 1024,
        "ecc_corrected": 0,
        "ecc_uncorrected": 0,
        "xid_errors": 0,
        "last_xid": None,
        "lost": 0,
    }


def test_devices_are_described_once() -> None:
    described = opened(FakeNvml(count=2)).describe()
    assert [device["index"] for device in described] == [0, 1]
    assert described[0] == {
        "index": 0,
        "name": "NVIDIA H100",
        "uuid": "GPU-1",
        "bus": "00000000:1B:00.0",
        "memory_bytes": 80 << 30,
        "is_divided": False,
    }


def test_what_a_device_refuses_is_unknown_and_not_asked_again() -> None:
    nvml = FakeNvml(refuses=("GetTotalEccErrors", "GetTotalEnergyConsumption", "RegisterEvents", "GetFieldValues"))
    devices = opened(nvml)
    (values,) = devices.sample().values()
    unknown = {name for name, value in named(values).items() if value is None}
    assert unknown == {
        "energy_j",
        "ecc_corrected",
        "ecc_uncorrected",
        "xid_errors",
        "last_xid",
        "nvlink_sent_bytes",
        "nvlink_received_bytes",
        "pcie_sent_bytes",
        "pcie_received_bytes",
    }
    nvml.asked.clear()
    devices.sample()
    assert set(nvml.asked) & set(nvml.refuses) == set()


def test_without_counters_of_pcie_its_rate_is_sampled() -> None:
    (values,) = opened(FakeNvml(refuses=("pcie counters",))).sample().values()
    assert named(values)["pcie_sent_bytes_per_s"] == 5 * 1024
    assert named(values)["pcie_received_bytes_per_s"] == 7 * 1024


def test_errors_are_counted_for_the_device_that_had_them() -> None:
    nvml = FakeNvml(count=2)
    devices = opened(nvml)
    nvml.xids = [(1, 13), (1, 79)]
    samples = devices.sample()
    assert [named(samples[index])["xid_errors"] for index in (0, 1)] == [0, 2]
    assert [named(samples[index])["last_xid"] for index in (0, 1)] == [None, 79]
    assert named(devices.sample()[1])["xid_errors"] == 2, "a total"


@pytest.mark.parametrize(("sees_pids", "memory"), [(False, 1 << 30), (True, None)])
def test_memory_of_others_is_unknown_in_a_container_or_where_the_driver_keeps_it_back(
    sees_pids: bool, memory: int | None
) -> None:
    nvml = FakeNvml()
    nvml.processes = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=memory)]
    values = named(opened(nvml, sees_pids=sees_pids).sample()[0])
    assert values["memory_used_bytes"] == 30 << 30
    assert values["memory_of_job_bytes"] is None
    assert values["memory_of_others_bytes"] is None


def test_node_without_a_driver_says_why_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert gpu_sampler.open_gpus(1) == (None, "NVML cannot be used: NVML Shared Library Not Found")


def test_ancestors_are_followed_to_the_launcher() -> None:
    assert gpu_sampler.descends_from(os.getpid(), os.getppid())
    assert gpu_sampler.descends_from(os.getpid(), os.getpid())
    assert not gpu_sampler.descends_from(os.getppid(), os.getpid())
    assert not gpu_sampler.descends_from(2**22 + 1, os.getpid())


def test_device_that_vanishes_is_lost_and_all_else_of_it_unknown() -> None:
    nvml = FakeNvml(count=2)
    devices = opened(nvml)
    nvml.xids = [(1, 79)]
    before = devices.sample()
    assert (named(before[1])["last_xid"], named(before[1])["lost"]) == (79, 0)
    nvml.lost = {1}
    nvml.xids = [(1, 79)]  # which device it is of cannot be asked any more
    sound, lost = (named(values) for values in devices.sample().values())
    assert (sound["lost"], sound["sm_clock_mhz"]) == (0, 1980)
    known = {name: value for name, value in lost.items() if value is not None}
    assert known == {"xid_errors": 1, "last_xid": 79, "lost": 1}
    nvml.asked.clear()
    devices.sample()
    assert nvml.asked.count("GetTemperature") == 1  # of the sound one


def test_device_lost_before_the_start_does_not_hide_the_others() -> None:
    nvml = FakeNvml(count=3)
    nvml.unopened = {1}
    devices = opened(nvml)
    assert list(devices.sample()) == [0, 2]
    assert devices.problems == ["GPU 1 cannot be sampled: GPU is lost"]
    nvml.xids = [(2, 13)]
    assert named(devices.sample()[2])["last_xid"] == 13


def test_of_a_device_in_mig_slices_load_and_memory_are_unknown() -> None:
    nvml = FakeNvml()
    nvml.answers["GetMigMode"] = [1, 1]
    devices = opened(nvml)
    nvml.processes = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=5)]
    values = named(devices.sample()[0])
    of_slices = ("utilisation", "memory_utilisation", "memory_used_bytes", "memory_of_job_bytes")
    assert [values[name] for name in of_slices] == [None] * 4
    assert (values["temperature_c"], values["lost"]) == (61, 0)
    assert (devices.describe()[0]["memory_bytes"], devices.describe()[0]["is_divided"]) == (None, True)
    assert devices.problems == ["GPU 0 is divided into MIG slices, of which NVML gives no load and no memory"]


def test_reasons_of_low_clocks_are_asked_for_by_their_new_name_where_the_driver_has_it() -> None:
    nvml = FakeNvml(refuses=("GetCurrentClocksEventReasons",))
    assert named(opened(nvml).sample()[0])["throttle_reasons"] == 4
    nvml = FakeNvml(refuses=("GetCurrentClocksThrottleReasons",))
    nvml.answers["GetCurrentClocksEventReasons"] = 64
    assert named(opened(nvml).sample()[0])["throttle_reasons"] == 64
