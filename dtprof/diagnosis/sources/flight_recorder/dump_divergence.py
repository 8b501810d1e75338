"""Members of a group that made different operations at one position, and the operation a rank left out or added."""

from array import array
from collections import Counter
from dataclasses import dataclass

from dtprof.diagnosis.findings import Finding, at_line, capitalised, group_words, rank_list
from dtprof.diagnosis.rules.skipped_collectives import MAX_SHIFT
from dtprof.diagnosis.sources.flight_recorder.dump_tables import NO_LABEL, Label, Track
from dtprof.diagnosis.sources.flight_recorder.dumped_job import Job
from dtprof.job.groups import GroupId
from dtprof.records.tables import Site

MIN_ALIKE = 2
"""Operations that must agree again afterwards, where a line alone shows that programs parted."""

_KINDS = (
    ("collective-order-mismatch", "op", "operations"),
    ("dtype-mismatch", "dtype", "element types"),
    ("size-mismatch", "numel_in", "sizes"),
    ("size-mismatch", "numel_out", "sizes"),
)


@dataclass(frozen=True, kw_only=True)
class Parting:
    """A position at which members of a group made operations that cannot go together, or left one out."""

    key: GroupId
    seq: int
    kind: str
    culprits: tuple[int, ...]
    labels: dict[int, Label]  # by rank, at the position
    usual: Label
    fact: str
    confidence: float


def find_mismatches(job: Job) -> list[Parting]:
    """Return the first position of every group at which arguments or operations do not agree."""
    found = []
    for key in dict.fromkeys(job.keys.values()):
        tracks = {rank: track for rank in key.ranks if (track := job.track(rank, key)) is not None}
        if len(tracks) > 1 and (parting := _first_mismatch(job, key, tracks)) is not None:
            found.append(parting)
    return found


def _first_mismatch(job: Job, key: GroupId, tracks: dict[int, Track]) -> Parting | None:
    for seq in sorted(_positions_of_conflict(job, tracks)):
        labels = {rank: job.labels[number] for rank, track in tracks.items() if (number := track.at(seq)) != NO_LABEL}
        for kind, name, words in _KINDS:
            values = {rank: value for rank, label in labels.items() if (value := getattr(label, name)) not in (-1, "")}
            if len(set(values.values())) > 1:
                return _parting(job, key, tracks, seq=seq, kind=kind, labels=labels, values=values, words=words)
    return None


def _positions_of_conflict(job: Job, tracks: dict[int, Track]) -> set[int]:
    """Return positions at which what a rank made cannot go with what the rank that is furthest made."""
    reference = max(tracks.values(), key=lambda track: (track.end, len(track.labels)))
    conflicts: dict[tuple[int, int], bool] = {}
    found: set[int] = set()
    for track in tracks.values():
        begin, end = max(track.first, reference.first), min(track.end, reference.end)
        a, b = _slice(track, begin, end), _slice(reference, begin, end)
        if a == b:
            continue
        for i, pair in enumerate(zip(a, b, strict=True)):
            if pair[0] != pair[1]:
                if pair not in conflicts:
                    conflicts[pair] = NO_LABEL not in pair and _conflict(job.labels[pair[0]], job.labels[pair[1]])
                if conflicts[pair]:
                    found.add(begin + i)
    return found


def _conflict(a: Label, b: Label) -> bool:
    pairs = ((getattr(a, name), getattr(b, name)) for _, name, _ in _KINDS)
    return any(x != y and x not in (-1, "") and y not in (-1, "") for x, y in pairs)


def _slice(track: Track, begin: int, end: int) -> "array[int]":
    return track.labels[begin - track.first : max(begin, end) - track.first]


def _parting(
    job: Job,
    key: GroupId,
    tracks: dict[int, Track],
    *,
    seq: int,
    kind: str,
    labels: dict[int, Label],
    values: dict[int, object],
    words: str,
) -> Parting:
    counted = Counter(values.values())
    most = max(counted.values())
    usual_value = next(value for value in values.values() if counted[value] == most)
    usual_rank = next(rank for rank, value in values.items() if value == usual_value)
    culprits = tuple(sorted(rank for rank, value in values.items() if value != usual_value))
    tie = 2 * len(culprits) >= len(values)
    ours = values[culprits[0]]
    if kind == "collective-order-mismatch":
        for one, other in ((usual_rank, culprits[0]), (culprits[0], usual_rank)):
            shift = _left_out(job, tracks[one], tracks[other], seq)
            if shift and (one == usual_rank or tie):
                skippers = culprits if one == usual_rank else tuple(sorted(set(values) - set(culprits)))
                fact = f"{rank_list(skippers)} went on with what comes {shift} later in the program of the others"
                return Parting(
                    key=key,
                    seq=seq,
                    kind="rank-skipped-collective",
                    culprits=skippers,
                    labels=labels,
                    usual=labels[one],
                    fact=fact,
                    confidence=0.95 if len(values) > 2 else 0.8,
                )
    has = "has" if len(culprits) == 1 else "have"
    fact = f"different {words}: {rank_list(culprits)} {has} {ours}, the others {usual_value}"
    return Parting(
        key=key,
        seq=seq,
        kind=kind,
        culprits=culprits,
        labels=labels,
        usual=labels[usual_rank],
        fact=fact,
        confidence=0.6 if tie else 0.9,
    )


def _left_out(job: Job, reference: Track, rank: Track, seq: int) -> int:
    """Return how many operations the rank left out at a position, 0 where it did something else."""
    ahead = [job.labels[n].place if n != NO_LABEL else None for n in reference.labels]
    theirs = [job.labels[n].place if n != NO_LABEL else None for n in rank.labels]
    here, there = seq - reference.first, seq - rank.first
    if not (0 <= here < len(ahead) and 0 <= there < len(theirs)):
        return 0
    for shift in range(1, MAX_SHIFT + 1):
        wanted, held = ahead[here + shift :], theirs[there:]
        common = min(len(wanted), len(held))
        if common and wanted[:common] == held[:common]:
            return shift
    # The others are held up and have not come to what follows: look one round earlier, where they did.
    earlier = next((i for i in range(here - 1, -1, -1) if ahead[i] == ahead[here]), None)
    if earlier is not None:
        for shift in range(1, min(MAX_SHIFT, here - earlier) + 1):
            if ahead[earlier + shift] == theirs[there] and ahead[earlier + shift] != ahead[here]:
                return shift
    return 0


def find_origin(job: Job, key: GroupId, rank: int, peers: tuple[int, ...]) -> Parting | None:
    """Return where a rank that is behind in a group left an operation out, though each position matched in form.

    Only lines can show it: the rank's go on as the others' do, shifted.
    """
    track = job.track(rank, key)
    others = {peer: found for peer in peers if peer != rank and (found := job.track(peer, key)) is not None}
    if track is None or not others:
        return None
    peer, reference = max(others.items(), key=lambda item: item[1].end)
    begin, end = max(track.first, reference.first), min(track.end, reference.end)
    for seq in range(begin, end):
        a, b = track.at(seq), reference.at(seq)
        if a == b or NO_LABEL in (a, b):
            continue
        ours, usual = job.labels[a], job.labels[b]
        if ours.site is None or usual.site is None or ours.place == usual.place:
            return None
        shift = _left_out(job, reference, track, seq) if end - seq >= MIN_ALIKE else 0
        if not shift:
            return None
        return Parting(
            key=key,
            seq=seq,
            kind="rank-skipped-collective",
            culprits=(rank,),
            labels={rank: ours, peer: usual},
            usual=usual,
            fact=f"from #{seq} on its lines are those that rank {peer} has {shift} later",
            confidence=0.9,
        )
    return None


def finding_of(job: Job, parting: Parting, *, waiting: tuple[int, ...], held_up: bool) -> Finding:
    """Return the finding for members whose operations do not go together."""
    group = job.group(parting.key)
    places: dict[int, Site] = {rank: label.site for rank, label in parting.labels.items() if label.site is not None}
    name = capitalised(parting.culprits)
    op = parting.usual.op
    if parting.kind == "rank-skipped-collective":
        summary = (
            f"{name} never entered {op} #{parting.seq} of {group_words(group)}{at_line(parting.usual.site)}"
            f" and went on to {parting.labels[parting.culprits[0]].op}{at_line(places.get(parting.culprits[0]))}."
        )
        advice = (
            f"Make the call{at_line(parting.usual.site)} on every member of the group: look for a branch on the "
            "rank, the data or an early continue around it."
        )
    else:
        summary = f"Position #{parting.seq} of {group_words(group)} ({op}) meets {parting.fact}."
        advice = "Compare the two lines: every member must make the same call at this position."
    listed = [
        f"rank {rank}: {label.op} of {label.numel_in if label.numel_in >= 0 else '?'} {label.dtype or '?'}"
        f"{at_line(label.site)}"
        for rank, label in sorted(parting.labels.items(), key=lambda item: item[0] not in parting.culprits)[:4]
    ]
    tie = ("as many ranks on either side: which one is wrong is a guess",) if parting.confidence < 0.7 else ()
    passed = () if held_up else ("the back end let it pass: results from here on may be wrong",)
    return Finding(
        kind=parting.kind,
        summary=summary,
        culprit_ranks=parting.culprits,
        waiting_ranks=waiting,
        confidence=parting.confidence,
        group=group,
        op=op,
        seq=parting.seq,
        call_sites={rank: site for rank, site in places.items() if rank not in parting.culprits},
        culprit_call_sites={rank: site for rank, site in places.items() if rank in parting.culprits},
        evidence=(*tie, *passed, *([parting.fact] if parting.kind == "rank-skipped-collective" else []), *listed),
        advice=(advice,),
    )
