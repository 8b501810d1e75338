"""Exceptions whose own text does not say how to mend them, in records and in logs."""

import re

HOST_MEMORY = "The host ran out of memory: lower what each rank holds in host memory (loader workers), or ask for more."
SHARED_MEMORY = (
    "SIGBUS: a mapped file shrank, or shared memory ran out: look at `df /dev/shm`, give the container a larger one "
    "(docker run --shm-size, an emptyDir with medium Memory)."
)
SIGNALLED = {
    "SIGKILL": "Look for the OOM killer in the kernel log of the host (dmesg), and at who may kill.",
    "SIGBUS": SHARED_MEMORY,
}
"""Advice by the signal that ended a process, where nothing else tells of it; else NATIVE_CRASH."""
NATIVE_CRASH = "Native code crashed: take a core dump or set PYTHONFAULTHANDLER=1 for the stack."
DEVICE_MEMORY = "Lower what the rank holds on its device: batch, sequence length, activations; see what grew before."
NO_SUCH_MEMORY = (
    "Ask for less at that line, lower what each rank holds (loader workers), or give the host more; where it had "
    "memory left, a limit of the process refused it (`ulimit -v`, vm.overcommit_memory)."
)

NCCL_RESOURCES = (
    (
        "Error while creating shared memory segment",
        "NCCL needs shared memory: look at `df /dev/shm`, give the container a larger one (docker run --shm-size, an "
        "emptyDir with medium Memory).",
    ),
    (
        "nvmlDeviceGetHandleByPciBusId() failed",
        "NCCL meets a GPU of a peer that this container does not see: give the containers of one job all GPUs of the "
        "host, and choose by CUDA_VISIBLE_DEVICES.",
    ),
    (
        "no socket interface found",
        "Set NCCL_SOCKET_IFNAME to an interface that this host has (`ip addr`), or take away the one that is set.",
    ),
)
"""Last messages of NCCL where its own host refused it a resource, and the advice: no peer of that rank is gone."""

KNOWN = (
    *NCCL_RESOURCES,
    (
        "Expected to have finished reduction in the prior iteration",
        "Let every parameter take part in the loss, or give DistributedDataParallel find_unused_parameters=True.",
    ),
    (
        "device-side assert triggered",
        "Run once with CUDA_LAUNCH_BLOCKING=1: the line is that of the assert then, most often an index out of range.",
    ),
    ("is killed by signal: Bus error", SHARED_MEMORY),
    ("is killed by signal: Killed", HOST_MEMORY),
    (
        "is killed by signal",
        "A worker of the data loader died; the line is where the news found its rank. Run with num_workers=0 to see "
        "at which sample.",
    ),
    ("Too many open files", "Raise `ulimit -n`, or torch.multiprocessing.set_sharing_strategy('file_system')."),
)
"""Advice for exceptions whose own text does not say how to mend them: words of the message, advice."""

_MOST_SHOWN = 160
_NCCL_STATE = re.compile(r"(nccl\w+Error|ncclInvalid\w+): .*\nLast error: ?\n(.+)")
_ENFORCED = re.compile(r"\[enforce fail at [^\]]*\] .*?\. (?=[A-Z])")
"""What torch's CAFFE_ENFORCE writes before the message: a line of its own source and a condition."""
_ON_DEVICE = ("CUDA out of memory", "HIP out of memory")
_ON_HOST = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


def find_advice(type_name: str, message: str) -> str | None:
    """Return the advice for an exception; None where its own text is enough."""
    exhausted = name_exhausted(type_name, message)
    if exhausted is not None:
        return DEVICE_MEMORY if exhausted == "device" else NO_SUCH_MEMORY
    return next((advice for words, advice in KNOWN if words in message), None)


def name_exhausted(type_name: str, message: str) -> str | None:
    """Return whose memory an exception says ran out: that of the `host` or the `device`; None for another one."""
    if "OutOfMemory" in type_name or any(words in message for words in _ON_DEVICE):
        return "device"
    if type_name == "MemoryError" or any(words in message for words in _ON_HOST):
        return "host"
    return None


def is_refused_by_host(message: str) -> bool:
    """Say whether NCCL failed because its own host refused it something."""
    return any(words in message for words, _ in NCCL_RESOURCES)


def first_words(message: str) -> str:
    """Return the first words of the message of an exception, on one line; of NCCL's its state and its last error."""
    state = _NCCL_STATE.search(message)
    line = f"{state[1]}: {state[2].strip()}" if state else _ENFORCED.sub("", message.strip()).partition("\n")[0]
    return line if len(line) <= _MOST_SHOWN else f"{line[: _MOST_SHOWN - 3].rstrip()}..."
