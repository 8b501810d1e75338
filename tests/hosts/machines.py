"""Hosts of their own on one machine: each with its network, name, processes, clock, boot, /tmp and /dev/shm.

A host is a process with namespaces of its own (network, mount, UTS, PID, time). Its network is one end of a veth pair,
the other end hangs on a bridge in a namespace that is no host: nothing of it is seen from the machine's own network.
Hosts see the machine's installed software and their own folder as /tmp, and no file of each other.
"""

import os
import select
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil

from tests.jobs import REPOSITORY

NETWORK = "10.77.0"
START_S = 60
LISTENING = "0A"
"""State of a socket in /proc/PID/net/tcp."""
CPU_CGROUP = Path("/sys/fs/cgroup/cpu")
_BECOME_A_HOST = """
set -e
hostname "$1"
mount --bind "$2" /tmp
mount -t tmpfs -o size=512m tmpfs /dev/shm
mount --bind /tmp/.host/boot_id /proc/sys/kernel/random/boot_id
mount --bind /tmp/.host/hosts /etc/hosts
if test -e /tmp/.host/sshd_config; then /usr/sbin/sshd -f /tmp/.host/sshd_config -E /tmp/.host/sshd.log; fi
echo up > /tmp/.host/up
exec sleep infinity
"""


@cache
def why_not() -> str:
    """Return why this machine cannot make hosts; empty where it can."""
    if os.geteuid():
        return "namespaces need root"
    for tool in ("ip", "unshare", "nsenter", "hostname", "mount"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` here"
    trial = subprocess.run(
        [
            *("unshare", "--net", "--uts", "--mount", "--pid", "--time", "--fork", "--mount-proc", "--monotonic", "5"),
            *("sh", "-c", "ip link add trial type bridge && ip link add one type veth peer name two"),
        ],
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    return f"namespaces cannot be made ({trial.stderr.strip()})" if trial.returncode else ""


@dataclass(kw_only=True)
class Host:
    """A host that runs."""

    name: str
    address: str
    folder: Path  # its /tmp
    network: str  # name of its network namespace
    link: str  # the end of its link at the bridge
    hub: str
    init: psutil.Process
    processes_of: Path  # its namespace of processes
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, log: str
    ) -> "subprocess.Popen[str]":
        """Start a command; what it prints goes to a file in the host's folder."""
        enter = ["nsenter", f"--target={self.init.pid}", "--mount", "--uts", "--pid", "--net", "--time", "--wd=/tmp"]
        with (self.folder / log).open("w") as stream:
            process = subprocess.Popen(
                [*enter, *command],
                env=os.environ
                | {
                    "PYTHONPATH": str(REPOSITORY),
                    "OMP_NUM_THREADS": "1",
                    "PATH": f"/tmp/.host/bin:{os.environ['PATH']}",
                }
                | dict(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.started.append(process)
        return process

    def said(self, log: str) -> str:
        """Return what a command has printed so far."""
        return (self.folder / log).read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Return the processes on this host but its first one."""
        found = []
        for process in psutil.process_iter():
            try:
                if Path(f"/proc/{process.pid}/ns/pid").readlink() == self.processes_of and process.pid != self.init.pid:
                    found.append(process)
            except OSError:
                continue
        return found

    def listens(self, port: int) -> bool:
        """Say whether a process on this host waits for connections at a port."""
        rows = [line.split() for name in ("tcp", "tcp6") for line in self._sockets(name)]
        return any(row[1].endswith(f":{port:04X}") and row[3] == LISTENING for row in rows)

    def _sockets(self, name: str) -> list[str]:
        return Path(f"/proc/{self.init.pid}/net/{name}").read_text().splitlines()[1:]

    def cut_link(self) -> None:
        """Let no packet pass any more, as when a cable is pulled out: nobody is told."""
        run("ip", "-n", self.hub, "link", "set", self.link, "down")

    def mend_link(self) -> None:
        """Let packets pass again."""
        run("ip", "-n", self.hub, "link", "set", self.link, "up")

    def freeze(self) -> None:
        """Stop every process where it is, as when a host hangs: its connections stay."""
        for process in self.processes():
            process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        for process in (*self.processes(), *self.started):  # nsenter stops with the command that it has started
            process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Take its power: no process ends in order, and no connection is closed."""
        self.cut_link()
        self.init.kill()

    @contextmanager
    def slowed(self, share: float) -> Iterator[None]:
        """Give its processes of now a share of one core together.

        Raises:
            OSError: this machine's cgroups cannot be written to.
        """
        group = CPU_CGROUP / f"dtprof-{self.network}"
        group.mkdir()
        try:
            (group / "cpu.cfs_quota_us").write_text(str(int(share * 100_000)))
            for process in self.processes():
                (group / "cgroup.procs").write_text(str(process.pid))
            yield
        finally:
            for line in (group / "cgroup.procs").read_text().split():
                (CPU_CGROUP / "cgroup.procs").write_text(line)
            group.rmdir()

    @contextmanager
    def link_slowed(self, kbit_per_s: int) -> Iterator[None]:
        """Let so much pass from its link and no more; short bursts pass at once."""
        shape = ("rate", f"{kbit_per_s}kbit", "burst", "16kb", "latency", "2s")
        run("tc", "-n", self.network, "qdisc", "add", "dev", "eth0", "root", "tbf", *shape)
        try:
            yield
        finally:
            run("tc", "-n", self.network, "qdisc", "delete", "dev", "eth0", "root")


def run(*command: str) -> None:
    """Run a command that is to succeed."""
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=START_S)


@contextmanager
def hosts(
    folder: Path, names: Sequence[str], *, clock_offsets_s: Sequence[int] = (), is_ssh: bool = False
) -> Iterator[list[Host]]:
    """Make hosts on one network; whatever is left of them afterwards is removed.

    Parameters:
        names: of the hosts; the first has the address 10.77.0.1.
        clock_offsets_s: by which their clocks since boot are ahead; 1,000 s more with each host where it is empty.
        is_ssh: each runs an ssh server, and `ssh NAME` on each leads to the others.
    """
    mark = uuid.uuid4().hex[:6]
    hub = f"dtprof-{mark}-hub"
    table = "127.0.0.1 localhost\n" + "".join(f"{NETWORK}.{k} {name}\n" for k, name in enumerate(names, 1))
    with ExitStack() as stack:
        key = _make_key(folder) if is_ssh else folder
        _network(hub, stack)
        run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "bridge", "up")
        made = []
        for number, name in enumerate(names, 1):
            network, link = f"dtprof-{mark}-{number}", f"link{number}"
            _network(network, stack)
            run("ip", "-n", hub, "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", network)
            run("ip", "-n", hub, "link", "set", link, "master", "bridge", "up")
            run("ip", "-n", network, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
            run("ip", "-n", network, "link", "set", "eth0", "up")
            run("ip", "-n", network, "link", "set", "lo", "up")
            place = folder / name
            (place / ".host").mkdir(parents=True)
            (place / ".host" / "boot_id").write_text(f"{uuid.uuid4()}\n")
            (place / ".host" / "hosts").write_text(table)
            if is_ssh:
                _configure_ssh(place / ".host", key)
            offset_s = clock_offsets_s[number - 1] if clock_offsets_s else 1000 * number
            init = _boot(network, name, place, offset_s, stack)
            host = Host(
                name=name,
                address=f"{NETWORK}.{number}",
                folder=place,
                network=network,
                link=link,
                hub=hub,
                init=init,
                processes_of=Path(f"/proc/{init.pid}/ns/pid").readlink(),
            )
            stack.callback(_end, host)
            made.append(host)
        yield made


def _network(name: str, stack: ExitStack) -> None:
    run("ip", "netns", "add", name)
    stack.callback(run, "ip", "netns", "delete", name)


def _boot(network: str, name: str, folder: Path, offset_s: int, stack: ExitStack) -> psutil.Process:
    os.mkfifo(folder / ".host" / "up")
    trouble = stack.enter_context((folder / ".host" / "trouble").open("w"))
    outer = subprocess.Popen(
        [
            *("ip", "netns", "exec", network, "unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child"),
            *("--mount-proc", "--time", "--monotonic", str(offset_s), "--boottime", str(offset_s)),
            *("sh", "-c", _BECOME_A_HOST, "host", name, str(folder)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=trouble,
    )
    stack.callback(outer.wait)
    stack.callback(outer.kill)
    descriptor = os.open(
        folder / ".host" / "up", os.O_RDWR
    )  # of both ends: whoever does not come leaves nobody waiting
    try:
        os.set_blocking(descriptor, False)
        deadline_s = time.monotonic() + START_S
        while not select.select([descriptor], [], [], 0.1)[0]:
            assert outer.poll() is None, (folder / ".host" / "trouble").read_text()
            assert time.monotonic() < deadline_s, "the host does not come up"
    finally:
        os.close(descriptor)
    return psutil.Process(outer.pid).children()[0]


def _make_key(folder: Path) -> Path:
    """Make the key by which hosts know each other, of servers and clients."""
    folder.mkdir(parents=True, exist_ok=True)
    Path("/run/sshd").mkdir(exist_ok=True)  # the server's own, which its service makes elsewhere
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key"))
    return folder / "key"


def _configure_ssh(place: Path, key: Path) -> None:
    """Write what server and client of a host read; `ssh` comes first on the host's PATH."""
    for name in ("key", "key.pub"):
        shutil.copy(key.with_name(name), place / name)
    (place / "sshd_config").write_text(
        "HostKey /tmp/.host/key\nAuthorizedKeysFile /tmp/.host/key.pub\nPidFile none\nUsePAM no\nStrictModes no\n"
        "PermitRootLogin yes\nPasswordAuthentication no\nMaxStartups 100\n"
    )
    (place / "ssh_config").write_text(
        "IdentityFile /tmp/.host/key\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
    )
    (place / "bin").mkdir()
    (place / "bin" / "ssh").write_text('#!/bin/sh\nexec /usr/bin/ssh -F /tmp/.host/ssh_config "$@"\n')
    (place / "bin" / "ssh").chmod(0o755)


def _end(host: Host) -> None:
    left = host.processes()
    if host.init.is_running():
        host.init.kill()
    psutil.wait_procs(left, START_S)
    for process in host.started:
        process.send_signal(signal.SIGCONT)
        process.wait(START_S)
