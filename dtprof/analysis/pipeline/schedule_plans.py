"""The order in which each rank of a pipeline acts, by the rules of common schedules, for any number of microbatches."""

from collections.abc import Sequence

from dtprof.analysis.pipeline.schedule_replay import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Act,
    SchedulePlan,
)


def make_plan(schedule: str, *, ranks: int, chunks: int, microbatches: int) -> SchedulePlan | None:
    """Return the actions of each rank in order; None where the schedule has none for these numbers, or is not known.

    Parameters:
        schedule: as `pipeline.schedule_name` calls it.
        chunks: stages of each rank; stage s is on rank s modulo `ranks`.
    """
    if schedule == "GPipe" and chunks == 1:
        return tuple(
            tuple(Act(kind, rank, number) for kind in (FORWARD, BACKWARD) for number in range(microbatches))
            for rank in range(ranks)
        )
    if schedule == "1F1B" and chunks == 1:
        return tuple(
            _alternate(rank, ranks, 1, microbatches, microbatches, num_ahead=ranks - 1 - rank) for rank in range(ranks)
        )
    if schedule == "Interleaved1F1B":
        rounds = max(1, microbatches // ranks)
        if microbatches % rounds:
            return None
        together = microbatches // rounds
        return tuple(
            _alternate(
                rank, ranks, chunks, microbatches, together, num_ahead=(chunks - 1) * together + 2 * (ranks - 1 - rank)
            )
            for rank in range(ranks)
        )
    return None


def _alternate(
    rank: int, ranks: int, chunks: int, microbatches: int, together: int, *, num_ahead: int
) -> tuple[Act, ...]:
    """Return so many forwards ahead, then forwards and backwards in turn, then the backwards that are left.

    Microbatches go through a chunk `together` before the next chunk takes them; backwards begin at the last chunk.
    """
    total = chunks * microbatches

    def act(kind: int, number: int) -> Act:
        chunk = number // together % chunks
        chunk = chunk if kind == FORWARD else chunks - 1 - chunk
        microbatch = number // (together * chunks) * together + number % together
        return Act(kind, chunk * ranks + rank, microbatch)

    num_ahead = min(num_ahead, total)
    acts = [act(FORWARD, number) for number in range(num_ahead)]
    for number in range(num_ahead, total):
        acts += (act(FORWARD, number), act(BACKWARD, number - num_ahead))
    return (*acts, *(act(BACKWARD, number) for number in range(total - num_ahead, total)))


def make_h1_plan(*, ranks: int, microbatches: int) -> SchedulePlan:
    """Return the plan ZB-H1: 1F1B with the gradients of weights apart.

    A rank puts them off for as many microbatches as ranks are before it, which is what the others wait less for (Qi et
    al., ICLR'24, "Zero Bubble Pipeline Parallelism").
    """
    plan = []
    for rank in range(ranks):
        ahead = min(ranks - rank, microbatches)
        acts = [Act(FORWARD, rank, number) for number in range(ahead)]
        for number in range(microbatches):
            acts.append(Act(BACKWARD_INPUT, rank, number))
            if number >= rank:
                acts.append(Act(BACKWARD_WEIGHT, rank, number - rank))
            if ahead + number < microbatches:
                acts.append(Act(FORWARD, rank, ahead + number))
        acts += [Act(BACKWARD_WEIGHT, rank, number) for number in range(max(0, microbatches - rank), microbatches)]
        plan.append(tuple(acts))
    return tuple(plan)


def make_zero_bubble_plan(
    *, ranks: int, rank_of_stage: Sequence[int], microbatches: int, took: tuple[Sequence[float], ...]
) -> SchedulePlan:
    """Return a plan with gradients of inputs and weights apart: each rank does the first of these that it can.

    Gradients of inputs, for which others wait; a forward, while no more activations are held than 1F1B holds on its
    first rank; and gradients of weights, which fill what is left (Qi et al., as above).

    Parameters:
        took: of each stage, the time of a forward, of gradients of inputs, and of gradients of weights.
    """
    forward, inputs, weights = took
    stages = len(rank_of_stage)
    own = [[stage for stage in range(stages) if rank_of_stage[stage] == rank] for rank in range(ranks)]
    next_forward, next_inputs = [0] * stages, [0] * stages
    has_forward: list[list[float]] = [[] for _ in range(stages)]  # when the forward of each microbatch ended
    has_inputs: list[list[float]] = [[] for _ in range(stages)]
    waiting: list[list[Act]] = [[] for _ in range(ranks)]  # gradients of weights
    held, now = [0] * ranks, [0.0] * ranks
    plan: list[list[Act]] = [[] for _ in range(ranks)]
    left = 3 * stages * microbatches

    def ready_inputs(stage: int) -> float | None:
        number = next_inputs[stage]
        if number >= len(has_forward[stage]):
            return None
        if stage == stages - 1:
            return has_forward[stage][number]
        return has_inputs[stage + 1][number] if number < len(has_inputs[stage + 1]) else None

    def ready_forward(stage: int) -> float | None:
        number = next_forward[stage]
        if number >= microbatches:
            return None
        if stage == 0:
            return 0.0
        return has_forward[stage - 1][number] if number < len(has_forward[stage - 1]) else None

    while left:
        # Of all that ranks can do next, what begins first; of one moment gradients of inputs, of the latest stage.
        best: tuple[float, int, int, int] | None = None
        for rank in range(ranks):
            for stage in own[rank]:
                at = ready_inputs(stage)
                if at is not None:
                    best = _earlier(best, (max(now[rank], at), 0, -stage, rank))
                # Only the first of a rank's stages takes new microbatches in: the others must go on with those.
                at = ready_forward(stage) if held[rank] < stages or stage != own[rank][0] else None
                if at is not None:
                    best = _earlier(best, (max(now[rank], at), 1, -stage, rank))
            if waiting[rank]:
                best = _earlier(best, (now[rank], 2, -waiting[rank][0].stage, rank))
        assert best is not None  # the oldest microbatch can always go on
        begin, kind, negative, rank = best
        stage = -negative
        if kind == 0:
            now[rank] = begin + inputs[stage]
            plan[rank].append(Act(BACKWARD_INPUT, stage, next_inputs[stage]))
            waiting[rank].append(Act(BACKWARD_WEIGHT, stage, next_inputs[stage]))
            has_inputs[stage].append(now[rank])
            next_inputs[stage] += 1
        elif kind == 1:
            now[rank] = begin + forward[stage]
            plan[rank].append(Act(FORWARD, stage, next_forward[stage]))
            has_forward[stage].append(now[rank])
            next_forward[stage] += 1
            held[rank] += 1
        else:
            now[rank] = begin + weights[stage]
            plan[rank].append(waiting[rank].pop(0))
            held[rank] -= 1
        left -= 1
    return tuple(map(tuple, plan))


def _earlier(
    best: tuple[float, int, int, int] | None, other: tuple[float, int, int, int]
) -> tuple[float, int, int, int]:
    return other if best is None or other < best else best
