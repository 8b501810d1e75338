"""What a program calls after a line."""

from pathlib import Path

import pytest

from dtprof.lint.program_order import BranchKind, read_places

TEXT = """\
setup()
def train(rank):
    start()
    for step in range(9):
        if rank:
            dist.barrier()
            send(step)
        else:
            recv(step)
        with timer():
            average(
                step
            )
    finish()
"""


def test_a_place_has_the_calls_that_follow_it_in_its_round_and_function(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(TEXT)
    places = read_places(file)
    assert (places[1].in_loop, places[1].following) == (False, frozenset())  # a definition calls nothing
    round_ = {("barrier", 6), ("send", 7), ("recv", 9), ("timer", 10), ("average", 11)}
    assert (places[3].in_loop, places[3].following) == (False, {("range", 4), *round_, ("finish", 14)})
    assert (places[6].in_loop, places[6].following) == (True, {("send", 7), ("timer", 10), ("average", 11)})
    assert places[9].following == {("timer", 10), ("average", 11)}
    assert places[12].following == frozenset()  # what comes in the next round comes before it as well
    assert places[14].following == frozenset()


def test_a_place_has_the_loops_and_the_branches_around_it(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(TEXT)
    places = read_places(file)
    assert (places[3].loops, places[14].loops, places[14].branches) == ((), (), ())
    assert (places[6].loops, places[6].branches) == (((4, 13),), ((6, 7),))
    assert (places[9].loops, places[9].branches) == (((4, 13),), ((9, 9),))
    assert (places[12].loops, places[12].branches) == (((4, 13),), ())  # a `with` leaves nothing out


def test_nothing_follows_in_a_round_after_a_branch_that_leaves_it(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("for batch in data:\n    if bad(batch):\n        log()\n        continue\n    step()\n")
    assert read_places(file)[3].following == frozenset()
    assert read_places(file)[2].following == {("step", 5)}


def test_a_branch_of_a_loop_inside_a_branch_is_one_of_both(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("if first:\n    for tensor in tensors:\n        publish(tensor)\n")
    assert read_places(file)[3].branches == ((2, 3),)


def test_what_ends_a_try_follows_all_of_its_parts(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "try:\n    step()\nexcept ValueError:\n    log()\nelse:\n    report()\nfinally:\n    close()\nend()\n"
    )
    places = read_places(file)
    assert places[2].following == {("report", 6), ("close", 8), ("end", 9)}
    assert places[4].following == places[6].following == {("close", 8), ("end", 9)}
    assert places[8].following == {("end", 9)}


def test_a_with_has_its_block_and_a_generator_its_first_yield(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("def timed():\n    begin()\n    yield\n    end()\n\nwith timed():\n    step()\n    log()\n")
    places = read_places(file)
    assert (places[6].block, places[7].block) == ((7, 8), None)
    assert (places[4].yields, places[7].yields) == (3, 0)


LEAVES = """\
def train(last):
    every = 3
    for step in range(9):
        if bad(step):
            continue
        if step % every == 2:
            save()
        if last:
            return
        if step == last:
            report()
        for batch in data:
            if batch:
                break
            step_of(batch)
    try:
        finish()
    except OSError:
        retry()
    finally:
        close()
"""


def test_a_place_has_the_ways_past_it_and_the_conditions_that_it_depends_on(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(LEAVES)
    places = read_places(file)
    assert set(places[7].ways_past) == {(5, "continue"), (9, "return")}  # the call of a later round
    assert set(places[15].ways_past) == {(5, "continue"), (9, "return"), (14, "break")}
    assert (places[7].conditions, places[7].counted) == ((6,), (6,))
    assert (places[11].conditions, places[11].counted) == ((10,), ())  # `last` may differ between ranks
    assert places[14].conditions == (13,)


def test_a_raise_of_system_exit_leads_past_what_follows_and_another_exception_does_not(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    text = "for step in range(9):\n    if a:\n        raise SystemExit\n    if b:\n        raise SystemExit('done')\n"
    file.write_text(text + "    if c:\n        raise ValueError\n    average()\n")
    assert read_places(file)[8].ways_past == ((3, "raise"), (5, "raise"))


@pytest.mark.parametrize(("leaves", "is_again"), [("return step()", True), ("step()", False)])
def test_a_handler_in_a_loop_that_success_leaves_leads_to_another_attempt(
    leaves: str, is_again: bool, tmp_path: Path
) -> None:
    file = tmp_path / "train.py"
    text = f"def call():\n    for attempt in range(3):\n        try:\n            {leaves}\n"
    file.write_text(text + "        except ValueError:\n            log()\n")
    assert read_places(file)[4].ways_past == ((5, BranchKind.RETRY if is_again else BranchKind.HANDLER),)


def test_a_loop_over_a_range_of_constants_has_fixed_rounds(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(LEAVES)
    places = read_places(file)
    assert (places[7].fixed_loops, places[15].fixed_loops) == ((3,), (3,))


@pytest.mark.parametrize(("test", "lines"), [("True", (1,)), ("1", (1,)), ("queue", ()), ("0", ())])
def test_a_while_whose_condition_is_a_true_constant_has_no_end_of_its_own(
    test: str, lines: tuple[int, ...], tmp_path: Path
) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"while {test}:\n    if a:\n        break\n    average()\n")
    assert read_places(file)[4].endless_loops == lines


def test_a_place_in_a_handler_or_a_finally_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(LEAVES)
    places = read_places(file)
    assert (places[17].handler, places[19].handler, places[21].handler) == (None, (18, False), (21, True))


def test_an_exception_handler_is_a_way_past_what_is_tried_unless_it_raises(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("try:\n    step()\nexcept OSError:\n    log()\nexcept ValueError:\n    raise\n")
    assert read_places(file)[2].ways_past == ((3, "except"),)


def test_a_way_past_a_call_is_counted_where_all_it_depends_on_is(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    lines = ["for step in range(9):", "    if step < 2:", "        continue", "    if is_bad:", "        if step > 5:"]
    lines += [
        "            break",
        "    elif step == 3:",
        "        continue",
        "    if rank != 0:",
        "        continue",
        "    f()",
    ]
    file.write_text("\n".join(lines) + "\n")
    place = read_places(file)[11]
    assert sorted(place.ways_past) == [(3, "continue"), (6, "break"), (8, "continue"), (10, "continue")]
    assert (place.counted, place.by_rank) == ((3,), (10,))  # lines 6 and 8 depend on `is_bad`, too


def test_what_is_counted_in_a_branch_that_hangs_on_data_is_no_counter(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    for test, counted in (("loss > best", ()), ("step % 2", (6,))):
        text = f"waited = 0\nfor step in range(9):\n    if {test}:\n        waited += 1\n"
        file.write_text(text + "    if waited > 3:\n        break\n    average()\n")
        assert read_places(file)[7].counted == counted


def test_a_block_that_suppresses_exceptions_is_a_way_past_what_is_in_it(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("with contextlib.suppress(OSError):\n    load()\n    step()\nwith open(path):\n    step()\n")
    places = read_places(file)
    assert (places[3].ways_past, places[5].ways_past) == (((1, "suppress"),), ())


def test_what_is_counted_by_steps_may_begin_at_any_number(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("step = saved\nwhile step < 9:\n    step += 1\n    if step % 3 == 0:\n        save()\n")
    assert read_places(file)[5].counted == (4,)
    file.write_text("while True:\n    step = rank()\n    step += 1\n    if step % 3 == 0:\n        save()\n")
    assert read_places(file)[5].counted == ()


@pytest.mark.parametrize(
    ("begin", "is_counter"),
    [
        ("saved", True),
        ("1 if rank == 1 else 0", True),  # one rank alone begins elsewhere
        ("int(dist.get_rank() == 0)", True),
        ("rank", False),  # each rank is at another place of the round by design
        ("self.rank % 2", False),
        ("0 if dist.get_rank() % 2 else 1", False),
        ("int(rank % 2 == 0)", False),
    ],
)
def test_a_count_that_begins_at_a_number_made_of_the_rank_is_no_counter(
    begin: str, tmp_path: Path, *, is_counter: bool
) -> None:
    file = tmp_path / "train.py"
    for loop in (
        f"turn = {begin}\nwhile True:\n    turn += 1",
        f"for turn in range({begin}, 9):\n    step()\n    log()",
    ):
        file.write_text(f"{loop}\n    if turn % 2:\n        save()\n")
        line = max(read_places(file))
        assert read_places(file)[line].counted == ((line - 1,) if is_counter else ())


@pytest.mark.parametrize(
    ("test", "is_fixed"),
    [
        ("rank != 0", True),
        ("dist.get_rank() == 0", True),
        ("self.is_world_process_zero", True),
        ("rank == 0 and cached", False),
        ("ranked", False),
    ],
)
def test_a_condition_on_which_rank_it_is_never_changes(test: str, tmp_path: Path, *, is_fixed: bool) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"if {test}:\n    barrier()\n")
    assert read_places(file)[2].by_rank == ((1,) if is_fixed else ())


def test_a_condition_that_asks_for_the_rank_among_other_things_is_known(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        "def train(rank, args):\n"
        "    for step in range(9):\n"
        "        if step == 3 and rank == 1:\n"
        "            continue\n"
        "        if step % 2:\n"
        "            continue\n"
        "        if args.rank == 0 or step:\n"
        "            call()\n"
    )
    place = read_places(file)[8]
    assert (place.by_rank, place.naming_rank) == ((), (7, 4))
