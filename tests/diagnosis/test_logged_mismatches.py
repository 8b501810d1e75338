"""Operations that do not agree, operations that do not meet, ranks that did not join: as logs tell them."""

import pytest

from tests.diagnosis import log_texts as texts
from tests.diagnosis.log_texts import Diagnose


def sides(*prints: str) -> str:
    """Return the exceptions of ranks that each blame the next."""
    return "\n".join(texts.mismatch(one, prints[(i + 1) % len(prints)]) for i, one in enumerate(prints))


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        ({"dtype": "Double"}, "dtype-mismatch"),
        ({"shape": "12"}, "size-mismatch"),
        ({"op": "ALLGATHER"}, "collective-order-mismatch"),
    ],
)
def test_odd_rank_of_three_is_the_culprit(diagnose_texts: Diagnose, other: dict[str, str], kind: str) -> None:
    text = sides(texts.fingerprint(0), texts.fingerprint(1, **other), texts.fingerprint(2))  # type: ignore[arg-type]
    verdict = diagnose_texts(text)
    (finding,) = verdict.findings
    assert (finding.kind, finding.culprit_ranks, finding.seq) == (kind, (1,), 5)
    assert verdict.outcome == "crash"


def test_of_two_sides_both_are_named(diagnose_texts: Diagnose) -> None:
    text = texts.mismatch(texts.fingerprint(1, shape="7, 1435"), texts.fingerprint(2, shape="7, 1436"))
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks) == ("size-mismatch", (1, 2))


def test_zeros_of_a_peer_that_sent_nothing_are_no_mismatch(diagnose_texts: Diagnose) -> None:
    empty = "Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=0OpType=GATHER)"
    text = "\n".join(
        [
            texts.mismatch(texts.fingerprint(0, op="BARRIER"), empty),
            texts.mismatch(texts.fingerprint(1), empty.replace("Rank 1", "Rank 0")),
            texts.mismatch(texts.fingerprint(2), empty.replace("Rank 1", "Rank 0")),
        ]
    )
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks) == ("collective-order-mismatch", (0,))


def test_a_peer_that_sent_nothing_is_named_and_blamed_for_its_exception_if_it_raised_one(
    diagnose_texts: Diagnose,
) -> None:
    text = texts.mismatch(
        texts.fingerprint(1, seq=101, op="ALLGATHER"),
        "Rank 3 is running collective: CollectiveFingerPrint(SequenceNumber=0OpType=REDUCE)",
    )
    verdict = diagnose_texts(text)
    assert [finding.culprit_ranks for finding in verdict.findings] == [()]
    assert "nothing had come from rank 3" in " ".join(verdict.cannot_tell)
    raised = texts.traceback("ValueError: empty batch", line=12, source="step(batch)", prefix="[rank3]: ")
    (finding,) = diagnose_texts(f"{text}\n{raised}").findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-crashed", (3,))


def test_counters_alone_that_differ_name_no_culprit(diagnose_texts: Diagnose) -> None:
    one = "Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=1OpType=BARRIER)"
    verdict = diagnose_texts(texts.mismatch(one, one.replace("Rank 1", "Rank 2").replace("=1Op", "=0Op")))
    assert verdict.findings == ()
    assert "false alarm" in " ".join(verdict.cannot_tell)


def test_oldest_form_without_a_peer_names_no_culprit(diagnose_texts: Diagnose) -> None:
    text = (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 2 is running inconsistent collective: "
        "CollectiveFingerPrint(OpType=BROADCAST, TensorShape=[1], TensorDtypes=Long, TensorDeviceTypes=TensorOptions())"
    )
    (finding,) = diagnose_texts(text).findings
    assert finding.culprit_ranks == ()
    assert finding.confidence < 0.5


def message(rank: int, *, call: str, source: str, line: int) -> str:
    """Return the traceback of a send or receive that waited in vain."""
    return texts.traceback(texts.GLOO_LATE, line=line, source=source, call=call, prefix=f"[rank{rank}]: ")


def test_send_and_receive_with_other_tags_do_not_meet(diagnose_texts: Diagnose) -> None:
    text = "\n".join(
        [
            message(0, call="send", source="if rank == 0: dist.send(x, 1, tag=3)", line=30),
            message(1, call="recv", source="else: dist.recv(x, src=0, tag=4)  # (the answer)", line=32),
        ]
    )
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks) == ("p2p-tag-mismatch", (0, 1))
    assert finding.culprit_call_sites[1].line == 32


def test_two_that_both_receive_wait_in_a_circle(diagnose_texts: Diagnose) -> None:
    text = "\n".join(message(r, call="recv", source=f"dist.recv(x, {1 - r})", line=30 + r) for r in (0, 1))
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks) == ("p2p-deadlock-cycle", (0, 1))


def test_a_send_and_a_receive_that_a_closed_connection_ended_do_not_wait_for_each_other(
    diagnose_texts: Diagnose,
) -> None:
    calls = {0: ("recv", "dist.recv(x, src=1)"), 1: ("send", "dist.send(x, 0)")}
    verdict = diagnose_texts(
        "\n".join(
            texts.traceback(texts.GLOO_LOST, line=30 + rank, source=source, call=call, prefix=f"[rank{rank}]: ")
            for rank, (call, source) in calls.items()
        )
    )
    assert verdict.findings == ()
    assert "lost a peer" in " ".join(verdict.cannot_tell)


def test_receiver_that_takes_no_part_is_the_culprit(diagnose_texts: Diagnose) -> None:
    text = "\n".join(
        [
            message(0, call="send", source="dist.send(x, 1)", line=30),
            message(2, call="barrier", source="dist.barrier()", line=40),
            texts.table({0: 1, 1: -15, 2: 1}, first=0),
        ]
    )
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks, finding.op) == ("p2p-unmatched", (1,), "send")


def test_odd_operation_among_tracebacks_is_the_culprits(diagnose_texts: Diagnose) -> None:
    text = "\n".join(
        message(r, call="all_gather" if r == 1 else "all_reduce", source="f(t)", line=31 if r == 1 else 30)
        for r in range(3)
    )
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks) == ("collective-order-mismatch", (1,))


def test_ranks_alike_in_everything_name_no_culprit(diagnose_texts: Diagnose) -> None:
    text = "\n".join(message(r, call="all_reduce", source="dist.all_reduce(t)", line=30) for r in range(3))
    verdict = diagnose_texts(text)
    assert verdict.findings[0].culprit_ranks == ()
    assert verdict.findings[0].confidence < 0.5


def test_monitored_barrier_names_who_did_not_come(diagnose_texts: Diagnose) -> None:
    text = (
        "[rank0]:[E1121 10:00:00.1 ProcessGroupGloo.cpp:67] [Rank 0]: Ranks 4, 5 failed to pass monitoredBarrier\n"
        "[rank2]:[E1121 10:00:00.2 ProcessGroupGloo.cpp:67] Rank 2 successfully reached monitoredBarrier, but received "
        "errors while waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank."
    )
    (finding,) = diagnose_texts(text).findings
    assert finding.culprit_ranks == (4, 5)


def test_barriers_that_point_at_each_other_name_no_culprit(diagnose_texts: Diagnose) -> None:
    text = (
        "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv "
        "from rank 0. Please check rank 0 logs for faulty rank.\n"
        "RuntimeError: Rank 0 timed out in monitoredBarrier waiting for rank 1"
    )
    verdict = diagnose_texts(text)
    assert verdict.findings == ()
    assert verdict.outcome == "hang"


def test_gloo_that_received_too_much_names_the_rank_that_lived(diagnose_texts: Diagnose) -> None:
    abort = (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail at "
        "../third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 80 vs 40. "
    )
    late = texts.traceback(texts.GLOO_LOST, line=30, source="f(t)", call="all_to_all_single", prefix="[rank1]: ")
    text = "\n".join([abort, abort, late, texts.table({0: -6, 1: -15, 2: -6}, first=0)])
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks) == ("split-size-mismatch", (1,))


def test_store_key_names_the_rank_that_never_joined(diagnose_texts: Diagnose) -> None:
    error = "torch.distributed.DistStoreError: wait timeout after 8000ms, keys: /default_pg/0//cpu//0/1"
    text = texts.traceback(error, line=12, source="dist.init_process_group()", prefix="[rank0]: ")
    verdict = diagnose_texts(text)
    (finding,) = verdict.findings
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("hang", "rank-never-joined", (1,))


def test_store_barrier_names_the_only_rank_that_did_not_report(diagnose_texts: Diagnose) -> None:
    text = "\n".join(
        f"RuntimeError: Timed out initializing process group in store based barrier on rank: {r}, for key: "
        "store_based_barrier_key:1 (world_size=4, worker_count=3, timeout=0:30:00)"
        for r in (0, 1, 3)
    )
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-never-joined", (2,))


def test_count_of_clients_alone_names_no_rank(diagnose_texts: Diagnose) -> None:
    text = "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 2/4 clients joined."
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-never-joined", ())


def test_failed_transport_is_no_ranks_fault(diagnose_texts: Diagnose) -> None:
    text = (
        "node1:12:34 [0] transport/net_ib.cc:95 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<4000> with "
        "status=12 opcode=0 len=0 vendor err 129"
    )
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks) == ("backend-stall", ())


@pytest.mark.parametrize(("group_rank", "culprits"), [(3, (0,)), (1, ())])
def test_rank_of_a_group_that_gave_no_communicator_is_named_where_it_is_the_global_one(
    diagnose_texts: Diagnose, group_rank: int, culprits: tuple[int, ...]
) -> None:
    error = (
        f"torch.distributed.DistBackendError: [{group_rank}] is setting up NCCL communicator and retrieving "
        "ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Socket Timeout"
    )
    text = texts.traceback(error, line=12, source="dist.barrier()", call="barrier", prefix="[rank3]: ")
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-skipped-collective", culprits)


def test_barrier_of_a_later_group_is_about_that_group(diagnose_texts: Diagnose) -> None:
    text = "\n".join(
        f"RuntimeError: Timed out initializing process group in store based barrier on rank: {r}, for key: "
        "store_based_barrier_key:5 (world_size=4, worker_count=3, timeout=0:30:00)"
        for r in (0, 1, 3)
    )
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks) == ("group-creation-mismatch", (2,))


def test_rank_past_a_broadcast_may_only_be_ahead(diagnose_texts: Diagnose) -> None:
    text = "\n".join(
        message(r, call="barrier" if r == 1 else "broadcast", source="f(t)", line=31 if r == 1 else 30)
        for r in range(3)
    )
    (finding,) = diagnose_texts(text).findings
    assert finding.confidence < 0.5


def test_gloo_that_refuses_a_ranks_own_splits_names_that_rank(diagnose_texts: Diagnose) -> None:
    refused = (
        "RuntimeError: [enforce fail at ../third_party/gloo/gloo/alltoallv.cc:138] "
        "inLengthPerRank[myRank] == outLengthPerRank[myRank]. 12 vs 8"
    )
    errors = {0: texts.GLOO_LOST, 1: refused, 2: texts.GLOO_LOST}
    text = "\n".join(
        texts.traceback(e, line=30, source="f(t)", call="all_to_all_single", prefix=f"[rank{r}]: ")
        for r, e in errors.items()
    )
    verdict = diagnose_texts(text + "\n" + texts.table({0: -15, 1: 1, 2: -15}, first=1))
    (finding,) = verdict.findings
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("crash", "split-size-mismatch", (1,))
    assert (finding.op, finding.waiting_ranks) == ("all_to_all", (0, 2))


def test_of_two_that_gloo_found_unlike_in_size_both_are_named(diagnose_texts: Diagnose) -> None:
    abort = "  what():  [enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= "
    late = texts.traceback(texts.GLOO_LOST, line=30, source="f(t)", call="all_gather", prefix="[rank1]: ")
    text = "\n".join([abort + "op.nbytes. 48 vs 40. ", late, texts.table({0: -6, 1: -15}, first=0)])
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks, finding.op) == ("size-mismatch", (0, 1), "all_gather")
    assert finding.confidence <= 0.5


@pytest.mark.parametrize(("stopped", "sender"), [(0, 1), (3, 0)])
def test_rank_that_gloo_stopped_in_an_all_reduce_differs_from_the_next(
    diagnose_texts: Diagnose, stopped: int, sender: int
) -> None:
    abort = "  what():  [enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= "
    late = texts.traceback(texts.GLOO_LOST, line=30, source="f(t)", call="all_reduce", prefix="[rank1]: ")
    ends = texts.table({rank: -6 if rank == stopped else -15 for rank in range(4)}, first=stopped)
    (finding,) = diagnose_texts("\n".join([abort + "op.nbytes. 48 vs 40. ", late, ends])).findings
    assert finding.culprit_ranks == ()
    assert f"rank {stopped} received from rank {sender}," in finding.evidence[1]


def test_who_sends_before_it_receives_closes_no_circle(diagnose_texts: Diagnose) -> None:
    text = "\n".join(
        [
            message(0, call="recv", source="dist.isend(a, dst=1); dist.recv(b, src=1)", line=30),
            message(1, call="recv", source="dist.recv(b, src=0)", line=32),
        ]
    )
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks) == ("p2p-unmatched", (1,))
    assert finding.confidence < 0.5


def test_root_that_one_rank_names_alone_is_read_from_who_sends_and_receives_in_vain(diagnose_texts: Diagnose) -> None:
    # From root 3 gloo sends 3 to 0 and 1, 0 to 2: rank 1 waits for another root, so 3 waits for rank 1.
    (finding,) = diagnose_texts(texts.in_broadcast({3: "send", 1: "recv"}, {0: 20, 2: 20})).findings
    assert (finding.kind, finding.culprit_ranks, finding.op) == ("root-mismatch", (1,), "broadcast")
    assert finding.confidence <= 0.6


def test_rank_that_left_out_a_broadcast_is_not_the_root_that_waits_for_it(diagnose_texts: Diagnose) -> None:
    # Rank 2 takes from the root and has nobody to send to; its all_reduce is another one than that of 1 and 3.
    text = texts.in_broadcast({0: "send"}, {1: 20, 2: 44, 3: 20}, source="dist.broadcast(w, 0)")
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-skipped-collective", (2,))


def test_root_alone_in_a_broadcast_may_have_made_one_more(diagnose_texts: Diagnose) -> None:
    text = texts.in_broadcast({0: "send"}, {1: 20, 2: 20, 3: 20}, source="dist.broadcast(w, 0)")
    (finding,) = diagnose_texts(text).findings
    assert finding.culprit_ranks == (0, 2)
    assert finding.confidence <= 0.4


@pytest.mark.parametrize("source", ["dist.broadcast(w, 0, group=g)", "dist.broadcast_object_list(o, src=0)", "sync(w)"])
def test_broadcast_that_may_be_of_some_ranks_or_one_of_several_names_nobody_by_its_tree(
    diagnose_texts: Diagnose, source: str
) -> None:
    (finding,) = diagnose_texts(texts.in_broadcast({3: "send", 1: "recv"}, {0: 20, 2: 20}, source=source)).findings
    assert finding.kind != "root-mismatch"
    assert finding.confidence <= 0.4


def backward(rank: int, *, below: tuple[str, str] | None = None) -> str:
    """Return the traceback of a backward pass that failed in native code, or in a hook in Python below it."""
    torch = "/usr/lib/python3.11/site-packages/torch"
    frames = [(f"{torch}/_tensor.py", "backward"), (f"{torch}/autograd/graph.py", "_engine_run_backward")]
    calls = [f'  File "{file}", line 9, in {name}\n    run()' for file, name in [*frames, *([below] if below else [])]]
    lines = texts.traceback(texts.GLOO_LATE, line=30, source="loss.backward()").splitlines()
    return "\n".join(f"[rank{rank}]: {line}" for line in "\n".join([*lines[:-1], *calls, lines[-1]]).splitlines())


@pytest.mark.parametrize(
    ("below", "op"),
    [(None, "all_reduce"), (("/usr/lib/python3.11/site-packages/torch/distributed/other/hook.py", "wait"), "barrier")],
)
def test_backward_pass_that_fails_in_native_code_is_in_an_all_reduce(
    diagnose_texts: Diagnose, below: tuple[str, str] | None, op: str
) -> None:
    text = "\n".join([backward(0, below=below), message(1, call="barrier", source="dist.barrier()", line=40)])
    text += "\n" + backward(2, below=below)
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks, finding.op) == ("rank-skipped-collective", (1,), op)


def test_operation_first_on_a_line_of_several_is_the_one_that_did_not_end(diagnose_texts: Diagnose) -> None:
    source = "dist.all_gather(parts, x); dist.barrier()"
    text = "\n".join(message(r, call="all_gather" if r == 2 else "barrier", source=source, line=30) for r in range(3))
    (finding,) = diagnose_texts(text).findings
    assert (finding.op, finding.culprit_ranks) == ("all_gather", (2,))
    assert finding.confidence < 0.5
