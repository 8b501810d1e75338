"""Sample the NVIDIA GPUs of this node through NVML, from outside the job."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from dtprof.records.nodes.node_samples import GPU, Value

INITIAL_PID_NAMESPACE = "pid:[4026531836]"
ALL_LINKS = 0xFFFFFFFF
KIB = 1024
XID_EVENTS_AT_ONCE = 64
IS_LOST = (15, 16)
"""NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED: the driver reaches the device no longer."""
MIG_ENABLED = 1
_MEMBER_OF_TYPE = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Members of NVML's union of values, by value type."""


class Device:
    """One GPU; a query that it does not support is not repeated, and none once the driver has lost the device.

    Of a device that is divided into MIG slices, NVML's figures of memory and load are those of no slice: unknown here.
    """

    def __init__(self, nvml: Any, index: int) -> None:
        """Find the device by NVML's index."""
        self._nvml = nvml
        self._unsupported: set[tuple[object, ...]] = set()
        self.index = index
        self.handle = nvml.nvmlDeviceGetHandleByIndex(index)
        self.xids: list[int] = []
        self.lost = False
        mode = self.ask("GetMigMode")
        self.is_divided = mode is not None and mode[0] == MIG_ENABLED

    def ask(self, function: str, *arguments: object) -> Any:
        """Return the result of one of NVML's functions of devices; None where it is not supported."""
        query = (function, *arguments)
        if self.lost or query in self._unsupported:
            return None
        try:
            return getattr(self._nvml, f"nvmlDevice{function}")(self.handle, *arguments)
        except (self._nvml.NVMLError, AttributeError) as error:  # this device, driver or version of the module lacks it
            self.lost = getattr(error, "value", None) in IS_LOST
            self._unsupported.add(query)
            return None

    def ask_field(self, number: int, scope: int = 0) -> float | None:
        """Return one of NVML's numbered values."""
        answers = self.ask("GetFieldValues", ((number, scope),))
        if answers is None or answers[0].nvmlReturn != 0:
            return None
        return float(getattr(answers[0].value, _MEMBER_OF_TYPE[answers[0].valueType]))

    def describe(self) -> dict[str, object]:
        """Return the properties of the device."""
        memory = None if self.is_divided else self.ask("GetMemoryInfo")
        bus = self.ask("GetPciInfo")
        return {
            "index": self.index,
            "name": _text(self.ask("GetName")),
            "uuid": _text(self.ask("GetUUID")),
            "bus": _text(bus.busId) if bus is not None else None,
            "memory_bytes": memory.total if memory is not None else None,
            "is_divided": self.is_divided,
        }

    def values(self, *, is_of_job: Callable[[int], bool] | None, sees_errors: bool) -> list[Value]:
        """Return the values of the table `GPU`; `is_of_job` is None where NVML's pids are of another PID namespace."""
        nvml = self._nvml
        rates, memory = (
            None if self.is_divided else self.ask(query) for query in ("GetUtilizationRates", "GetMemoryInfo")
        )
        values: dict[str, Value] = {
            "utilisation": rates.gpu / 100 if rates is not None else None,
            "memory_utilisation": rates.memory / 100 if rates is not None else None,
            "memory_used_bytes": memory.used if memory is not None else None,
            "power_w": _scaled(self.ask("GetPowerUsage"), 0.001),
            "energy_j": _scaled(self.ask("GetTotalEnergyConsumption"), 0.001),
            "temperature_c": self.ask("GetTemperature", nvml.NVML_TEMPERATURE_GPU),
            "sm_clock_mhz": self.ask("GetClockInfo", nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": self.ask("GetClockInfo", nvml.NVML_CLOCK_MEM),
            "throttle_reasons": self._throttle_reasons(),
            "ecc_corrected": self._ecc_errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            "ecc_uncorrected": self._ecc_errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            "xid_errors": len(self.xids) if sees_errors else None,
            "last_xid": self.xids[-1] if self.xids else None,
        }
        values |= self._links()
        if is_of_job is not None and not self.is_divided:
            values |= self._memory_by_owner(is_of_job)
        values["lost"] = int(self.lost)
        return [values.get(field.name) for field in GPU]

    def _throttle_reasons(self) -> int | None:
        reasons: int | None = self.ask("GetCurrentClocksEventReasons")
        return self.ask("GetCurrentClocksThrottleReasons") if reasons is None else reasons  # drivers before 535

    def _ecc_errors(self, kind: int) -> int | None:
        count: int | None = self.ask("GetTotalEccErrors", kind, self._nvml.NVML_VOLATILE_ECC)
        return count

    def _memory_by_owner(self, is_of_job: Callable[[int], bool]) -> dict[str, Value]:
        processes = self.ask("GetComputeRunningProcesses")
        if processes is None or any(process.usedGpuMemory is None for process in processes):
            return {}
        of_job = sum(process.usedGpuMemory for process in processes if is_of_job(process.pid))
        total = sum(process.usedGpuMemory for process in processes)
        return {"memory_of_job_bytes": of_job, "memory_of_others_bytes": total - of_job}

    def _links(self) -> dict[str, Value]:
        """Return the bytes sent and received over PCIe and NVLink."""
        nvml = self._nvml
        values: dict[str, Value] = {
            "pcie_sent_bytes": self.ask_field(nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES),
            "pcie_received_bytes": self.ask_field(nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES),
            "nvlink_sent_bytes": _scaled(self.ask_field(nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS), KIB),
            "nvlink_received_bytes": _scaled(
                self.ask_field(nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS), KIB
            ),
        }
        if values["pcie_sent_bytes"] is None:
            sent, received = nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES
            values["pcie_sent_bytes_per_s"] = _scaled(self.ask("GetPcieThroughput", sent), KIB)
            values["pcie_received_bytes_per_s"] = _scaled(self.ask("GetPcieThroughput", received), KIB)
        return values


class Gpus:
    """All devices of NVML, and their critical errors."""

    def __init__(self, nvml: Any, launcher_pid: int, *, sees_pids: bool) -> None:
        """Open NVML, as the module `pynvml`, for a job whose processes descend from the launcher.

        Raises:
            Exception: NVML's own error, where there is no driver.
        """
        self._nvml = nvml
        self._launcher_pid = launcher_pid
        self._sees_pids = sees_pids
        self._of_job: dict[int, bool] = {}
        nvml.nvmlInit()
        self._devices: list[Device] = []
        self.problems: list[str] = []
        """Device quantities that cannot be sampled, one sentence each."""
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                self._devices.append(Device(nvml, index))
            except nvml.NVMLError as error:
                self.problems.append(f"GPU {index} cannot be sampled: {error}")
        self.problems += [
            f"GPU {device.index} is divided into MIG slices, of which NVML gives no load and no memory"
            for device in self._devices
            if device.is_divided
        ]
        self._events = self._watch_errors()

    def describe(self) -> list[dict[str, object]]:
        """Return the properties of each device."""
        return [device.describe() for device in self._devices]

    def sample(self) -> dict[int, list[Value]]:
        """Return the values of every device, in the order of the table `GPU`."""
        self._collect_errors()
        is_of_job = self._is_of_job if self._sees_pids else None
        sees_errors = self._events is not None
        return {device.index: device.values(is_of_job=is_of_job, sees_errors=sees_errors) for device in self._devices}

    def close(self) -> None:
        """Close NVML."""
        self._nvml.nvmlShutdown()

    def _is_of_job(self, pid: int) -> bool:
        if pid not in self._of_job:
            self._of_job[pid] = descends_from(pid, self._launcher_pid)
        return self._of_job[pid]

    def _watch_errors(self) -> Any:
        """Subscribe to critical XID events; return None where no device reports them."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return None
        watched = 0
        for device in self._devices:
            try:
                nvml.nvmlDeviceRegisterEvents(device.handle, nvml.nvmlEventTypeXidCriticalError, events)
                watched += 1
            except nvml.NVMLError:
                continue
        return events if watched else None

    def _collect_errors(self) -> None:
        for _ in range(XID_EVENTS_AT_ONCE if self._events is not None else 0):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError:
                return  # no more events
            try:
                index = self._nvml.nvmlDeviceGetIndex(event.device)
            except self._nvml.NVMLError:
                continue  # it is lost, and which one it was is not known
            for device in self._devices:
                if device.index == index:
                    device.xids.append(int(event.eventData))


def open_gpus(launcher_pid: int) -> tuple[Gpus | None, str | None]:
    """Return the GPUs of this node; or None, and the reason."""
    try:
        import pynvml
    except ImportError:
        return None, "nvidia-ml-py is not installed"
    try:
        gpus = Gpus(pynvml, launcher_pid, sees_pids=_in_initial_pid_namespace())
    except pynvml.NVMLError as error:
        return None, f"NVML cannot be used: {error}"
    if not gpus.describe():
        gpus.close()
        return None, "; ".join(gpus.problems) or "NVML shows no GPU"
    return gpus, None


def descends_from(pid: int, ancestor: int) -> bool:
    """Say whether a process is another, or one of its descendants."""
    try:
        return pid == ancestor or any(parent.pid == ancestor for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False


def _in_initial_pid_namespace() -> bool:
    """Say whether the driver's pids are those of this PID namespace."""
    try:
        return str(Path("/proc/self/ns/pid").readlink()) == INITIAL_PID_NAMESPACE
    except OSError:
        return False


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _text(value: object) -> str | None:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return None if value is None else str(value)
