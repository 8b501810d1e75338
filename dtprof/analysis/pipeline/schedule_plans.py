"""The order in which each rank of a pipeline acts, by the rules of common schedules, for any number of microbatches."""

from dtprof.analysis.pipeline.schedule_replay import BACKWARD, FORWARD, Act, Plan


def make_plan(schedule: str, *, ranks: int, chunks: int, microbatches: int) -> Plan | None:
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
