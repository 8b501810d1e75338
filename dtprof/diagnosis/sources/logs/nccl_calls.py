"""Calls printed by NCCL_DEBUG=INFO with NCCL_DEBUG_SUBSYS=COLL: read as a stream, the newest kept."""

import re

from dtprof.diagnosis.sources.logs.log_facts import Communicator, Communicators, NcclCall

MOST_COMMUNICATORS = 20_000

CALL = re.compile(
    rb"([\w.-]{1,200}:\d{1,10}):\d{1,10} \[(\d{1,4})\] NCCL INFO (?:\[\d{1,4}\] )?"
    rb"(\w{1,40}): opCount ([0-9a-f]{1,16}) sendbuff \S{1,40} recvbuff \S{1,40} (?:acc \S{1,40} )?count (\d{1,20}) "
    rb"datatype (\d{1,3}) op (\d{1,3}) root (-?\d{1,9}) comm (0x[0-9a-f]{1,16}) \[nranks=(\d{1,7})\]"
)
BEGUN = re.compile(
    rb"([\w.-]{1,200}:\d{1,10}):\d{1,10} \[(\d{1,4})\] NCCL INFO (?:\w{1,40} )?"
    rb"comm (0x[0-9a-f]{1,16}) rank (\d{1,7}) n[rR]anks (\d{1,7}) "
)
NUMBER = re.compile(rb"commId (0x[0-9a-f]{1,16})")
TELLING = (b"opCount", b" - Init ")
"""Lines of NCCL without any of these say nothing here."""
BETWEEN_TWO = ("Send", "Recv")


def read(raw: bytes, file_rank: int | None, found: Communicators) -> None:
    """Take in a line of NCCL."""
    if found_call := CALL.search(raw):
        process, device, op, nth, count, dtype, reduction, root, address, size = (
            part.decode() for part in found_call.groups()
        )
        if op in BETWEEN_TWO:
            return
        communicator = _newest(found, process, address)
        if communicator is None:
            communicator = _add(found, process, address, Communicator(process, int(size), device=int(device)))
        if communicator is None:
            return
        communicator.file_rank = file_rank
        nth_number = int(nth, 16)
        communicator.counts_rise = communicator.counts_rise and (
            not communicator.calls or nth_number > communicator.calls[-1][0]
        )
        communicator.calls.append((nth_number, NcclCall(op, int(count), int(dtype), int(reduction), int(root))))
        communicator.total += 1
    elif found_begun := BEGUN.search(raw):
        process, device, address, rank, size = (part.decode() for part in found_begun.groups())
        number = NUMBER.search(raw)
        known = _newest(found, process, address)
        if known is None or known.calls:  # the address of a communicator that has gone may serve again
            known = _add(found, process, address, Communicator(process, int(size), device=int(device)))
        if known is not None:
            known.rank, known.file_rank = int(rank), file_rank
            known.number = number[1].decode() if number else known.number


def _count(found: Communicators, process: str, address: str) -> int:
    """Return how many communicators of a process have had this address."""
    count = 0
    while (process, address, count) in found:
        count += 1
    return count


def _newest(found: Communicators, process: str, address: str) -> Communicator | None:
    return found.get((process, address, _count(found, process, address) - 1))


def _add(found: Communicators, process: str, address: str, communicator: Communicator) -> Communicator | None:
    if len(found) >= MOST_COMMUNICATORS:
        return None
    found[process, address, _count(found, process, address)] = communicator
    return communicator
