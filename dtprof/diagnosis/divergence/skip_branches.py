"""Branches and exits of the source by which a rank may have skipped the call of another."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import NamedTuple

from dtprof.diagnosis.divergence.call_divergence import (
    MAX_STACKS,
    RankCall,
    align_frames,
    frames_of,
    is_in_same_function,
)
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.job.issued_operations import Operation
from dtprof.lint.program_order import BranchKind, SourcePlace
from dtprof.records.sites import Site

HANDLERS = (BranchKind.HANDLER, BranchKind.RETRY)
_LOOP_EXITS = (BranchKind.EXIT, BranchKind.BREAK, BranchKind.RETURN)
OTHER_ITERATION_ADVICE = "Compare the iterations at which ranks began, as after a resume, and how often each skips one."


class Branch(NamedTuple):
    """A branch or exit of the source by which a rank may have skipped a call."""

    site: Site
    kind: BranchKind
    on_counter: bool = False  # on counters of the loop alone, which are alike on ranks that keep pace

    @property
    def words(self) -> str:
        """How evidence names it."""
        return "end of the loop" if self.kind == BranchKind.LOOP_END else f"`{self.kind.split()[0]}`"


def is_ahead_by_counter(job: JobState, mine: RankCall, theirs: RankCall) -> bool:
    """Say whether a rank is in a branch that depends on counters alone, before which the others wait in the same loop.

    No branch of the source skips their call: then the rank made it in this round, which is another one.
    """
    a, b, common = align_frames(mine, theirs)
    # What a function of the program calls may depend on more than the branch around its own call.
    if common is None or common < len(a) - 1 or find_branches_past(job, theirs, mine.rank, after=None):
        return False
    here, there = job.place_in_source(a[common]), job.place_in_source(b[common])
    if here is None or there is None or not {*here.loops[:1]} <= {*there.loops} or not here.loops:
        return False
    conditions = [line for line in here.conditions if line not in there.conditions]
    return bool(conditions) and set(conditions) <= set(here.counted) and b[common].line < a[common].line


def find_counter_branch(job: JobState, mine: RankCall, theirs: RankCall) -> Site | None:
    """Return the condition on a counter that a rank in the same loop went past, and the others did not.

    Both are at the same position of the group, so that the rank is in its next round. None where others skip it, too.
    """
    a, b, common = align_frames(mine, theirs)
    if common is None or (mine.operation.group, mine.operation.seq) != (theirs.operation.group, theirs.operation.seq):
        return None
    here, there = job.place_in_source(a[common]), job.place_in_source(b[common])
    if here is None or there is None or not there.loops or {*there.loops[:1]} != {*here.loops[:1]}:
        return None
    branches = find_branches_past(job, theirs, mine.rank, after=None)
    is_counted = bool(branches) and all(branch.on_counter for branch in branches)
    return branches[0].site if is_counted and a[common].line < b[common].line else None


def find_handler(job: JobState, rank: RankState) -> tuple[Site, bool] | None:
    """Return the line of the innermost handler around where a rank waits, and whether it is a `finally`."""
    now = rank.first_blocking
    for frame in frames_of(rank, now) if now is not None else ():
        place = job.place_in_source(frame)
        if place is not None and place.handler is not None:
            line, is_finally = place.handler
            return Site(file=frame.file, line=line, function=frame.function), is_finally
    return None


def find_branches_past(
    job: JobState,
    made: RankCall,
    by: RankState,
    *,
    after: Operation | None,
    has_left: bool = False,
) -> list[Branch]:
    """Return the branches and exits of the source by which a rank may have skipped a call.

    A `continue`, `break` or `return` in a branch before the call, or the condition that the call depends on; in the
    functions from that on in which the two ranks part.

    Parameters:
        made: a rank that waits in the call.
        by: a rank that went past it.
        after: the operation before it, which both made.
        has_left: it left what goes round: functions further out count where inner ones hold no exit.
    """
    branches = _without_usual_conditions(job, made, by, _find_all_branches(job, made, by, after, has_left=has_left))
    branches = without_single_iterations(job, made, by, branches) or branches
    if not by.finished and by.exit is None:
        branches = [branch for branch in branches if branch.kind != BranchKind.EXIT]  # the process is still running
    return [branch for branch in branches if _names_rank(job, branch.site, made)] or branches


def _names_rank(job: JobState, branch: Site, made: RankCall) -> bool:
    """Say whether a condition of a branch asks which rank it is, be it among other things."""
    places = (job.place_in_source(frame) for frame in frames_of(*made) if is_in_same_function(frame, branch))
    return any(branch.line in place.naming_rank for place in places if place is not None)


def _without_usual_conditions(job: JobState, made: RankCall, by: RankState, branches: list[Branch]) -> list[Branch]:
    """Return the branches without conditions on the rank, where the rank has met them before."""
    places = [*filter(None, map(job.place_in_source, frames_of(*made)))]
    steady = {line for place in places for line in place.by_rank}
    if not steady or not any(o.site == made.operation.site for o in by.operations):
        return branches
    return [branch for branch in branches if branch.site.line not in steady]


def without_single_iterations(job: JobState, made: RankCall, by: RankState, branches: list[Branch]) -> list[Branch]:
    """Return the branches without those that skip one iteration of the loop, where a rank skipped all iterations.

    As a condition on each parameter of a model: the loop made the call several times in the round before.
    """
    now, operations = by.first_blocking, made.rank.operations
    at = next((i for i in range(len(operations) - 1, 0, -1) if operations[i] == made.operation), 0)
    calls = [(operation.label, operation.numel) for operation in operations]
    earlier = next((i for i in range(at - 1, 0, -1) if calls[i - 1 : i + 1] == calls[at - 1 : at + 1]), None)
    if (
        now is None
        or now.label == made.operation.label
        or earlier is None
        or operations[earlier + 1].label != made.operation.label
    ):
        return branches
    a, _, common = align_frames(made, RankCall(by, now))
    for depth in range(len(a) - 1, common if common is not None else len(a), -1):
        if (inside := job.place_in_source(a[depth])) is not None and inside.loops:
            first, last = inside.loops[0]
            return [
                branch
                for branch in branches
                if branch.kind in (*_LOOP_EXITS, BranchKind.LOOP_END)
                or not (is_in_same_function(branch.site, a[depth]) and first <= branch.site.line <= last)
            ]
    return branches


def operation_before(rank: RankState, operation: Operation) -> Operation | None:
    """Return the operation that a rank issued before one of its newest; None where that is not known."""
    operations = rank.operations
    at = next((i for i in range(len(operations) - 1, 0, -1) if operations[i] == operation), None)
    return operations[at - 1] if at is not None else None


def find_loop_left(job: JobState, inside: RankCall, past: RankCall) -> Site | None:
    """Return the first line of the outermost loop that a rank left and another is in, but those the source counts."""
    frames, others, common = align_frames(inside, past)
    for at, frame in enumerate(frames[common:] if common is not None else ()):
        place = job.place_in_source(frame)
        left = left_loops(place, others[common or 0].line if at == 0 else 0) if place is not None else []
        taking = [first for first, _ in left if place is not None and first not in place.fixed_loops]
        if taking:
            return Site(file=frame.file, line=taking[-1], function=frame.function)
    return None


def find_exit(job: JobState, gone: RankState, waiting: Mapping[int, Operation]) -> Site | None:
    """Return the one line of the source by which a rank that ended may have left before the call of the others.

    A `raise SystemExit` comes before a `break` or `return`, which end no more than a loop or a function; so does a loop
    whose rounds the source does not count. One on a counter comes last: it is alike on ranks that keep pace. None where
    several may be, and where no source is known.
    """
    known = {rank: frames_of(job.ranks[rank], operation) for rank, operation in [*waiting.items()][:MAX_STACKS]}
    if not known:
        return None
    made = job.ranks[max(known, key=lambda rank: len(known[rank]))]
    after = operation_before(made, waiting[made.rank])
    branches = find_branches_past(job, RankCall(made, waiting[made.rank]), gone, after=after, has_left=True)
    ends_program = [branch for branch in branches if branch.kind == BranchKind.EXIT]
    begins_step = _begins_step(made, after)
    exits = (
        [branch for branch in ends_program if not branch.on_counter]
        or [
            branch
            for branch in branches
            if branch.kind in (BranchKind.BREAK, BranchKind.RETURN)
            and _are_rounds_counted(job, known[made.rank], branch.site, begins_step=begins_step)
        ]
        or ends_program
    )
    return exits[0].site if len(exits) == 1 else None


def _are_rounds_counted(job: JobState, frames: tuple[Site, ...], branch: Site, *, begins_step: bool) -> bool:
    """Say whether the source counts the rounds of all loops around a call, or of those that a branch is in.

    Before the first call of a step no loop within it had come to its end early.
    """
    is_around = not begins_step
    for frame in frames:  # the innermost first
        if PurePath(frame.file).parent != PurePath(frames[0].file).parent:
            break  # what starts the program
        place = job.place_in_source(frame)
        loops = place.loops if place is not None and is_around else ()
        if place is not None and not is_around and is_in_same_function(frame, branch):
            loops, is_around = _loops_of(place, branch.line), True
        if place is not None and any(first not in place.fixed_loops for first, _ in loops):
            return False
    return True


def find_branches_past_iteration(job: JobState, gone: RankState, waiting: Mapping[int, Operation]) -> list[Site]:
    """Return the lines by which a rank that ended may have skipped the call of the others in one iteration of a loop.

    It made as many rounds as they: the source counts those of each loop around, or its data loaders gave it as many
    batches and have no more. Empty where a line of the source may have led it out of a loop instead.
    """
    known = {rank: frames_of(job.ranks[rank], operation) for rank, operation in [*waiting.items()][:MAX_STACKS]}
    if not known:
        return []
    frames = known[max(known, key=lambda rank: len(known[rank]))]
    took_all = _took_all_batches(job, gone)
    sites: list[Site] = []
    goes_round = False
    for frame in frames:  # the innermost first
        place = job.place_in_source(frame)
        if place is None or PurePath(frame.file).parent != PurePath(frames[0].file).parent:
            break
        steady = (*place.counted, *place.by_rank)
        exits = [(line, kind) for line, kind in place.ways_past if kind in _LOOP_EXITS and line not in steady]
        if any(kind == BranchKind.EXIT or _loops_of(place, line) for line, kind in exits):
            return []
        branches = [
            branch.site
            for branch in _branches_at(place, frame, set(), None, begins_step=False)
            if branch.site.line not in steady and branch.kind != BranchKind.RETRY
        ]
        around = {*place.loops} if sites else {loop for site in branches for loop in _loops_of(place, site.line)}
        sites += branches
        if not took_all and any(first not in place.fixed_loops for first, _ in around):
            return []
        goes_round |= bool(around)
    return sites if goes_round else []


def _loops_of(place: SourcePlace, line: int) -> tuple[tuple[int, int], ...]:
    """Return the loops around a place that a line of its function is in, too."""
    return tuple((first, last) for first, last in place.loops if first <= line <= last)


def _took_all_batches(job: JobState, gone: RankState) -> bool:
    """Say whether the data loaders of a rank have no batch left after as many as those of any other rank gave."""
    return gone.newest_is_exhaustion and gone.batches >= max(rank.batches for rank in job.ranks.values())


def _find_all_branches(
    job: JobState, made: RankCall, by: RankState, after: Operation | None, *, has_left: bool
) -> list[Branch]:
    now = by.first_blocking
    a, b, common = (
        align_frames(made, RankCall(by, now)) if now is not None else ([*reversed(frames_of(*made))], [], None)
    )
    begins_step = _begins_step(made.rank, after)
    if common is not None:
        first = _frame_looped_back(job, a, b, common)
        return _branches_from(job, a, first, b[first], after, begins_step=begins_step)
    # Where they part is not known: it may be in any function whose loop goes round, the innermost first.
    innermost: list[Branch] = []
    for at in range(len(a) - 1, -1, -1):
        place = job.place_in_source(a[at])
        if PurePath(a[at].file).parent != PurePath(a[-1].file).parent:
            break
        if (
            place is not None
            and place.loops
            and (branches := _branches_from(job, a, at, None, after, begins_step=begins_step))
        ):
            if not has_left or any(branch.kind in _LOOP_EXITS and not branch.on_counter for branch in branches):
                return branches
            innermost = innermost or branches
    return innermost


def _frame_looped_back(job: JobState, made: list[Site], past: list[Site], common: int) -> int:
    """Return the frame in whose loop a rank came back to the function where two part, before the line of the other.

    It has left the function since it was where the other is, if only because it raised. Else that function itself.
    """
    here = job.place_in_source(made[common])
    if (
        here is None
        or past[common].line > made[common].line
        or any(first <= past[common].line <= last for first, last in here.loops)
    ):
        return common
    for at in range(common - 1, -1, -1):
        place = job.place_in_source(made[at])
        if place is None or PurePath(made[at].file).parent != PurePath(made[common].file).parent:
            break
        if place.loops:
            return at
    return common


def _branches_from(
    job: JobState,
    frames: list[Site],
    first: int,
    now: Site | None,
    after: Operation | None,
    *,
    begins_step: bool,
) -> list[Branch]:
    """Return the branches in the frames from one on, given where the other rank is in the function of that."""
    there = job.place_in_source(now)
    met = set(there.conditions) if there is not None else set[int]()
    branches: dict[Site, Branch] = {}
    begins_round = begins_step
    for at, frame in enumerate(frames[first:], first):
        place = job.place_in_source(frame)
        if place is None:
            return []
        is_parting = at == first and now is not None
        of_frame = _branches_at(place, frame, met if at == first else set(), after, begins_step=begins_step)
        # What the function calls, in which the ranks part, one of them has left altogether.
        left = left_loops(place, now.line if is_parting and now is not None else 0)
        if begins_step:  # no loop of a step had begun, as one over the parameters of a model
            left = [loop for loop in left if loop == place.loops[-1]]
        begun = {loop: _has_begun(loop, frames, at, after) for loop in left}
        if is_parting:
            # A condition around loops skipped all of their iterations.
            left = [loop for loop in left if begun[loop] is not False]
            of_frame = _loop_exits(place, frame, left) if left and (not of_frame or any(begun.values())) else of_frame
        elif now is not None:
            left = [loop for loop in left if (begins_round if begins_step else begun[loop])]
            of_frame = [*of_frame, *_loop_exits(place, frame, left)]
        branches |= {branch.site: branch for branch in of_frame}
        if begins_step and now is not None and left and _loop_exits(place, frame, left):
            break  # it made all calls of the step before, and left the loop: what this calls skipped none of them
        begins_round = begins_round and not place.loops
    return [*branches.values()]


def _has_begun(loop: tuple[int, int], frames: list[Site], at: int, after: Operation | None) -> bool | None:
    """Say whether a loop around a call has had a turn before it, given the operation before the call; None: not known.

    Parameters:
        at: the frame that the loop is in, of those of the call, the outermost first.
    """
    site = after.site if after is not None else None
    if site is None:
        return True
    depth = next((i for i in range(len(frames) - 1, at - 1, -1) if is_in_same_function(site, frames[i])), None)
    if depth is None:
        # Where the call is all that there is in the loop, an operation of another function came before its iterations.
        return False if at == len(frames) - 1 and loop[1] == loop[0] + 1 else None
    return True if depth > at or site.line == frames[at].line or site.line >= loop[0] else None


def left_loops(place: SourcePlace, line: int) -> list[tuple[int, int]]:
    """Return the loops around a place that a line of its function is not in, the innermost first."""
    return [(first, last) for first, last in place.loops if not first <= line <= last]


def _loop_exits(place: SourcePlace, frame: Site, left: list[tuple[int, int]]) -> list[Branch]:
    """Return the exits of loops that others are still in, whose rounds a `continue` may have made fewer."""
    inside = [(line, kind) for line, kind in place.ways_past if any(first <= line <= last for first, last in left)]
    without_own_end = (*place.fixed_loops, *place.endless_loops)
    inside += [(first, BranchKind.LOOP_END) for first, _ in left if first not in without_own_end]
    return [Branch(_at(frame, line), kind) for line, kind in inside]


def _at(frame: Site, line: int) -> Site:
    """Return another line of the function of a frame."""
    return Site(file=frame.file, line=line, function=frame.function)


def _begins_step(rank: RankState, after: Operation | None) -> bool:
    """Say whether the operation that a rank issued after another one is of a later step."""
    at = next((i for i in range(len(rank.operations) - 2, -1, -1) if rank.operations[i] == after), None)
    if after is None or at is None:
        return False
    step = rank.operations[at + 1].step
    return step is not None and after.step is not None and step > after.step


def _branches_at(
    place: SourcePlace, frame: Site, met: set[int], after: Operation | None, *, begins_step: bool
) -> list[Branch]:
    """Return the branches and exits that may skip a line, of those that come after the operation before it.

    Of the first call of a step what this function calls may have made the last one, in the round before.
    """
    site = after.site if after is not None else None
    is_here = site is not None and site.shares_function(frame)
    begin = site.line if site is not None and is_here else 0
    conditions = ((line, BranchKind.CONDITION) for line in place.conditions if line not in met)
    is_later_round = begin >= frame.line or (begins_step and not is_here)
    # A handler stands after the call that it skips.
    return [
        Branch(_at(frame, line), kind, on_counter=line in place.counted)
        for line, kind in (*place.ways_past, *conditions)
        if kind in HANDLERS or (line > begin or line <= frame.line if is_later_round else begin < line <= frame.line)
    ]
