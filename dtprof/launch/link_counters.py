"""Count what the ranks of this host send to each other host: the kernel's statistics of their TCP connections.

The kernel gives them over netlink (sock_diag(7), `struct tcp_info`) to anyone, for the network namespace of the caller.
What goes by InfiniBand, RoCE or shared memory is no TCP connection, and not counted.
"""

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from dtprof.records.nodes.node_samples import LINK, Value

NETLINK_ROUTE, NETLINK_SOCK_DIAG = 0, 4
RTM_GETQDISC, SOCK_DIAG_BY_FAMILY = 38, 20
NLM_F_REQUEST_DUMP = 0x301
NLMSG_ERROR, NLMSG_DONE = 2, 3
INET_DIAG_INFO = 2
TCP_ESTABLISHED = 1
TC_H_ROOT, TCA_STATS = 0xFFFFFFFF, 3
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_REQUEST = struct.Struct("=BBBxI48x")  # inet_diag_req_v2
_ANSWER = struct.Struct("=4x4x16s16s12xIIIII")  # inet_diag_msg: ... src, dst, ..., expires, queues, uid, inode
_QUEUE = struct.Struct("=B3xiIII")  # tcmsg
_BACKLOG_AT = 32
"""Of the bytes that wait, in `struct tc_stats`."""
_TCP_INFO = struct.Struct("=68xII24xI16xQ20xIII8xQQ")
"""Of `struct tcp_info`: rtt, rttvar; total_retrans; bytes_acked; min_rtt, data_segs_in, data_segs_out; busy_time,
rwnd_limited."""
ANSWER_BYTES = 1 << 16
ANSWER_S = 0.5


@dataclass(kw_only=True)
class Connection:
    """Totals of one connection since it was made."""

    address: str  # of its other end
    acked_bytes: int
    busy_s: float
    segments: int
    retransmitted: int
    rtt_s: float
    min_rtt_s: float


@dataclass(kw_only=True)
class _Link:
    """Totals of all connections to an address that there were, and the round trip of the one that sent most lately."""

    acked_bytes: int = 0
    busy_s: float = 0.0
    segments: int = 0
    retransmitted: int = 0
    rtt_s: float = 0.0
    min_rtt_s: float = 0.0
    most_bytes: int = field(default=0)


class LinkCounters:
    """Follows the connections of some processes to other hosts."""

    def __init__(self) -> None:
        """Know of no connection yet."""
        self._links: dict[str, _Link] = {}
        self._known: dict[int, Connection] = {}  # by inode
        self._others: set[int] = set()  # inodes of sockets of other processes

    def sample(self, pids: Iterable[int]) -> dict[str, list[Value]]:
        """Return by the address of each other host the values of the table `LINK`; empty where the kernel has none."""
        try:
            own = {str(ipaddress.ip_address(address)) for address in own_addresses()}
            seen = {inode: connection for inode, connection in read_connections() if connection.address not in own}
        except OSError:
            return {}  # a kernel without these statistics, or a sandbox that forbids them
        self._others &= seen.keys()
        if new := seen.keys() - self._known.keys() - self._others:
            self._others |= new - _sockets_of(pids)
        seen = {inode: connection for inode, connection in seen.items() if inode not in self._others}
        for link in self._links.values():
            link.most_bytes = 0
        for inode, connection in seen.items():
            self._add(connection, self._known.get(inode))
        self._known = seen
        return {address: _values(link) for address, link in self._links.items()}

    def _add(self, now: Connection, before: Connection | None) -> None:
        link = self._links.setdefault(now.address, _Link())
        sent = now.acked_bytes - (before.acked_bytes if before else 0)
        link.acked_bytes += sent
        link.busy_s += now.busy_s - (before.busy_s if before else 0)
        link.segments += now.segments - (before.segments if before else 0)
        link.retransmitted += now.retransmitted - (before.retransmitted if before else 0)
        if sent >= link.most_bytes:
            link.most_bytes, link.rtt_s, link.min_rtt_s = sent, now.rtt_s, now.min_rtt_s


def own_addresses() -> list[str]:
    """Return the addresses of this host, without those of the loopback."""
    found = (address for addresses in psutil.net_if_addrs().values() for address in addresses)
    internet = (address.address for address in found if address.family in (socket.AF_INET, socket.AF_INET6))
    named = (address.partition("%")[0] for address in internet)
    return sorted({address for address in named if not ipaddress.ip_address(address).is_loopback})


def read_connections() -> Iterator[tuple[int, Connection]]:
    """Give the TCP connections of this network namespace that are not over the loopback, each with its inode.

    Raises:
        OSError: the kernel does not tell.
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << INET_DIAG_INFO - 1, 1 << TCP_ESTABLISHED)
        for answer in _ask(NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, request):
            _, remote, *_, inode = _ANSWER.unpack_from(answer)
            info = dict(_attributes(answer[_ANSWER.size :])).get(INET_DIAG_INFO, b"")
            address = _address(remote, family)
            if address.is_loopback or len(info) < _TCP_INFO.size:
                continue
            rtt, _, retransmitted, acked, min_rtt, _, segments, busy, no_room = _TCP_INFO.unpack_from(info)
            yield (
                inode,
                Connection(
                    address=str(address),
                    acked_bytes=acked,
                    busy_s=(busy - no_room) / 1e6,
                    segments=segments,
                    retransmitted=retransmitted,
                    rtt_s=rtt / 1e6,
                    min_rtt_s=min_rtt / 1e6,
                ),
            )


def queued_bytes() -> int | None:
    """Return the bytes that wait in the queues of the interfaces for the network to take them; None: not known."""
    try:
        answers = list(_ask(NETLINK_ROUTE, RTM_GETQDISC, _QUEUE.pack(socket.AF_UNSPEC, 0, 0, 0, 0)))
    except OSError:
        return None
    total = 0
    for answer in answers:
        *_, parent, _ = _QUEUE.unpack_from(answer)
        stats = dict(_attributes(answer[_QUEUE.size :])).get(TCA_STATS, b"")
        if parent == TC_H_ROOT and len(stats) >= _BACKLOG_AT + 4:
            total += int.from_bytes(stats[_BACKLOG_AT : _BACKLOG_AT + 4], "little")
    return total


def _address(packed: bytes, family: int) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    if family == socket.AF_INET:
        return ipaddress.IPv4Address(packed[:4])
    address = ipaddress.IPv6Address(packed)
    return address.ipv4_mapped or address


def _ask(protocol: int, kind: int, request: bytes) -> Iterator[bytes]:
    """Give what a netlink dump answers, one message after the other, without its header."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol) as asked:
        asked.settimeout(ANSWER_S)
        asked.send(_HEADER.pack(_HEADER.size + len(request), kind, NLM_F_REQUEST_DUMP, 1, 0) + request)
        while True:
            received = asked.recv(ANSWER_BYTES)
            while len(received) >= _HEADER.size:
                length, answered, _, _, _ = _HEADER.unpack_from(received)
                if answered == NLMSG_DONE:
                    return
                if answered == NLMSG_ERROR:
                    (code,) = struct.unpack_from("=i", received, _HEADER.size)
                    raise OSError(-code, os.strerror(-code))
                yield received[_HEADER.size : length]
                received = received[(length + 3) & ~3 :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        if length < _ATTRIBUTE.size:
            return
        yield kind, data[_ATTRIBUTE.size : length]
        data = data[(length + 3) & ~3 :]


def _sockets_of(pids: Iterable[int]) -> set[int]:
    """Return the inodes of the sockets that processes have open."""
    found = set()
    for pid in pids:
        try:
            opened = list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            continue  # it has ended
        for descriptor in opened:
            with contextlib.suppress(OSError):  # it was closed meanwhile
                target = str(descriptor.readlink())
                if target.startswith("socket:["):
                    found.add(int(target[8:-1]))
    return found


def _values(link: _Link) -> list[Value]:
    """Return the values of a link, in the order of the table `LINK`."""
    return [getattr(link, each.name) for each in LINK]
