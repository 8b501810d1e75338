"""Sends and receives that did not meet, from the lines that failed."""

import ast
import re

from dtprof.diagnosis.findings import Finding, capitalised
from dtprof.diagnosis.log_findings.log_rule import log_finding
from dtprof.diagnosis.sources.logs.log_facts import Trace
from dtprof.diagnosis.sources.logs.logged_job import LoggedJob, operation
from dtprof.formatting import list_ranks

CALLS = {"send": re.compile(r"(?<!\w)i?send\("), "recv": re.compile(r"(?<!\w)i?recv\(")}
PEERS = {"send": ("dst", "group_dst"), "recv": ("src", "group_src")}


def find_messages(job: LoggedJob, fronts: dict[int, Trace], absent: set[int]) -> Finding | None:
    """Return the finding for point-to-point operations that waited in vain; None where there were none."""
    in_messages = {r: op for r, trace in fronts.items() if (op := operation(trace.call)) in ("send", "recv")}
    if not in_messages:
        return None
    literal = {rank: arguments_of(fronts[rank].source, op) for rank, op in in_messages.items()}
    peers = {rank: peer for rank, (peer, _) in literal.items() if peer is not None}
    if cycle := _cycle(peers, in_messages):
        ahead = {
            rank for rank in cycle if in_messages[rank] == "recv" and _sends_first(fronts[rank].source, peers[rank])
        }
        if ahead:  # who sends before it receives closes no circle: a message was taken and not answered
            silent = tuple(rank for rank in cycle if rank not in ahead) or cycle
            how = "left a message out: the line of a rank that waits sends before it receives"
            return _finding(job, fronts, "p2p-unmatched", silent, 0.45, how)
        return _finding(job, fronts, "p2p-deadlock-cycle", cycle, 0.7, "wait for each other in a circle")
    for rank, peer in sorted(peers.items()):
        if in_messages.get(peer, "") not in ("", in_messages[rank]) and peers.get(peer, rank) == rank:
            tags = literal[rank][1], literal[peer][1]
            both = (rank, peer)
            if None not in tags and tags[0] != tags[1]:
                how = f"use different tags, {tags[0]} and {tags[1]}, for one message"
                return _finding(job, fronts, "p2p-tag-mismatch", both, 0.85, how)
            return _finding(job, fronts, "p2p-unmatched", both, 0.6, "wait for each other, one sends, one receives")
    missing = {peer for peer in peers.values() if peer not in in_messages} or absent
    if missing:
        awaited = tuple(sorted(missing))
        return _finding(job, fronts, "p2p-unmatched", awaited, 0.55, "did not take part in the messages waited for")
    everybody = tuple(sorted(in_messages))
    if len(set(in_messages.values())) == 1 and len(everybody) > 1:
        way = "receive" if "recv" in in_messages.values() else "send"
        return _finding(job, fronts, "p2p-deadlock-cycle", everybody, 0.5, f"all {way}, and nobody does the opposite")
    return _finding(job, fronts, "p2p-unmatched", everybody, 0.5, "wait in messages that do not meet")


def _cycle(peers: dict[int, int], ops: dict[int, str]) -> tuple[int, ...]:
    """Return the ranks of a circle in which all send, or all receive."""
    for start in sorted(peers):
        path = [start]
        while (peer := peers.get(path[-1], -1)) >= 0 and peer not in path and ops.get(peer) == ops[start]:
            path.append(peer)
        if len(path) > 1 and peers.get(path[-1]) == start:
            return tuple(sorted(path))
    return ()


def arguments_of(source: str, op: str) -> tuple[int | None, int | None]:
    """Return peer and tag of the call in a source line, where they are written as numbers."""
    found = CALLS[op].search(source)
    if found is None:
        return None, None
    call = _parsed(source[found.start() :])
    if call is None:
        return None, None
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    peer = next((given[name] for name in PEERS[op] if name in given), call.args[1] if len(call.args) > 1 else None)
    tag = given.get("tag", call.args[3] if len(call.args) > 3 else None)
    return _number(peer), _number(tag)


def plain_broadcast(source: str) -> tuple[bool, int | None]:
    """Say whether a line holds a broadcast among all ranks that is waited for at once, and its root if a number."""
    found = re.search(r"(?<!\w)broadcast\(", source)
    call = _parsed(source[found.start() :]) if found else None
    if call is None or len(call.args) > 2:
        return False, None
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    root = given.get("src", call.args[1] if len(call.args) > 1 else None)
    return set(given) <= {"src", "tensor"}, _number(root)


def _sends_first(source: str, peer: int) -> bool:
    """Say whether a line sends to the peer before it receives."""
    sent, received = CALLS["send"].search(source), CALLS["recv"].search(source)
    before = sent is not None and received is not None and sent.start() < received.start()
    return before and arguments_of(source, "send")[0] == peer


def _parsed(text: str) -> ast.Call | None:
    """Return the call at the start of a line, without the text after its closing bracket."""
    for end in [i + 1 for i, letter in enumerate(text) if letter == ")"][:20]:
        try:
            tree = ast.parse(text[:end], mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        return tree.body if isinstance(tree.body, ast.Call) else None
    return None


def _number(node: ast.expr | None) -> int | None:
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _finding(
    job: LoggedJob, fronts: dict[int, Trace], kind: str, culprits: tuple[int, ...], grade: float, how: str
) -> Finding:
    waiting = tuple(rank for rank in sorted(fronts) if rank not in culprits)
    facts = [f"rank {rank}: {fronts[rank].call}, line: {fronts[rank].source[:80]}" for rank in sorted(fronts)[:4]]
    gone = [rank for rank in culprits if rank not in fronts]
    if gone:
        facts.append(f"{list_ranks(gone)} raised nothing")
    shown = next((rank for rank in sorted(fronts) if operation(fronts[rank].call) in ("send", "recv")), None)
    return log_finding(
        job,
        kind,
        f"{capitalised(culprits)} {how}.",
        culprits=culprits,
        waiting=waiting,
        grade=grade,
        op=operation(fronts[shown].call) if shown is not None else None,
        evidence=tuple(facts),
        advice=("Compare peer, tag, size and order of the sends and receives at these lines.",),
    )
