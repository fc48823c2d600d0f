"""How the chunks of a problem are dealt to CTAs. Plain integers, no DSL import.

The sequences (one for each batch and head) are dealt to runs, in turn. The chunks of a run stand one after the other on a
tape, cut into equal ranges, one for each CTA. A CTA takes the pieces of its range from the last sequence to the first. Where a
cut falls inside a sequence, the state must get across it (HandsOn.STATE and SUMS).

All runs are cut at the same places, so that their CTAs walk side by side through sequences that are neighbours in memory: a
row of q or k is 32 bytes at K = 16 and 16 at K = 8, which is less than what the card reads at once.
"""

import enum
import operator
from collections.abc import Callable
from typing import NamedTuple

from .config import Work

SUM_THREADS = 256  # of a block that adds states up along a sequence (segment_state.py)
AT_ONCE = 8  # states that one of its threads loads together: one after the other they take 0.6 us each


class HandsOn(enum.IntEnum):
    """What a CTA leaves to another.

    NOTHING no cut falls inside a sequence
    STATE   more sequences than SMs, so that at most one cut falls into a sequence: its first part is the first thing that one
            CTA does and its second part the last thing that the next one does, and the state waits in memory in between
            (McNaughton's wrap-around rule), with a flag that says that it is there. No work is done twice ("chained")
    SUMS    fewer sequences than SMs: they are cut, and the states at the cuts are computed by passes of their own beforehand
            (segment_state.py), which read a part of the inputs once more ("summed"). At most half as many: each into the
            same number of ranges, one a CTA; or those of a run together, so that a CTA may end one and begin the next. More:
            each in two, and a CTA takes either the long later part of one or the short first parts of several ("parted")
    """

    NOTHING, STATE, SUMS = range(3)


class Schedule(NamedTuple):
    """`ctas` CTAs, the same number in each of `runs` runs. Those below `late_ctas` take one sequence each, from its chunk
    `stride` on (there is one run then); the others ranges of `chunks_per_cta` chunks (the last of a run may be shorter) of a
    tape on which a sequence takes `stride` chunks."""

    ctas: int
    chunks_per_cta: int
    stride: int
    hands_on: HandsOn
    late_ctas: int = 0
    runs: int = 1

    @property
    def ctas_of_a_run(self) -> int:
        return self.ctas // self.runs

    @property
    def slots(self) -> int:
        """States that stand in memory: one for each CTA that leaves one."""
        return (self.late_ctas or self.ctas) if self.hands_on in (HandsOn.STATE, HandsOn.SUMS) else 0

    @property
    def flags(self) -> int:
        """One for each state that is handed on."""
        return self.ctas if self.hands_on == HandsOn.STATE else 0


def schedule(sequences: int, chunks: int, processors: int, work: Work) -> Schedule:
    """The schedule of `sequences` sequences of `chunks` chunks on a card of `processors` SMs, one CTA each, that takes least
    time by `work` (config.py)."""
    problem = sequences, chunks, processors, work
    options = [_whole(*problem)]
    if sequences > processors:
        options += [_chained(*problem, runs) for runs in _divisors(sequences, processors)]
    elif 2 * sequences <= processors:
        allowed = [runs for runs in _divisors(sequences, processors) if runs == sequences or runs >= work.neighbours]
        options += [_summed(*problem, runs) for runs in allowed]
    elif sequences < processors:
        several = -(-sequences // (processors - sequences))  # first parts that a CTA takes while others take a later part
        if several < chunks:
            options.append(_parted(sequences, chunks, work, several))
    return min(options, key=lambda option: option[0])[1]


def _divisors(sequences: int, processors: int) -> list[int]:
    """The numbers of runs of equal length, the largest first: where they take the same time, more CTAs walk side by side."""
    return [runs for runs in range(min(sequences, processors), 0, -1) if sequences % runs == 0]


def _whole(sequences, chunks, processors, work) -> tuple[float, Schedule]:
    waves = -(-sequences // processors)
    return work.whole * waves * chunks, Schedule(sequences, chunks, chunks, HandsOn.NOTHING)


def _cut_runs(sequences, chunks, processors, runs, hands_on) -> Schedule:
    """Every run cut into the same ranges, as long as they have to be. What the last CTA of a run would take less is left out
    behind every sequence instead, so that a CTA with a second piece, which takes time to begin, has fewer chunks: as many as
    can be, if no range then begins where nothing is."""
    length = sequences // runs
    per_cta = -(-length * chunks // (processors // runs))
    ctas = -(-length * chunks // per_cta)
    room = (ctas * per_cta) // length if length > 1 else chunks
    stride = next(s for s in range(room, chunks - 1, -1) if all(n * per_cta % s < chunks for n in range(ctas)))
    return Schedule(runs * ctas, per_cta, stride, hands_on, runs=runs)


def _chained(sequences, chunks, processors, work, runs) -> tuple[float, Schedule]:
    cut = _cut_runs(sequences, chunks, processors, runs, HandsOn.STATE)
    of_a_run = sequences // runs, chunks, cut.stride, cut.chunks_per_cta, 0
    pieces = max(range_of(number, *of_a_run)[-1] for number in range(cut.ctas_of_a_run))
    return (1.0 if runs >= work.neighbours else work.apart) * cut.chunks_per_cta + work.piece * pieces, cut


def _summed(sequences, chunks, processors, work, runs) -> tuple[float, Schedule]:
    cut = _cut_runs(sequences, chunks, processors, runs, HandsOn.SUMS)
    if runs == sequences:  # every cut is that of one sequence
        in_two = cut.ctas == 2 * sequences
        read, begin = (work.read_half, work.halves) if in_two else (work.read_twice, work.ranges)
        return (1 + read) * cut.chunks_per_cta + begin, cut
    return (1 + work.read_twice) * cut.chunks_per_cta + work.ranges + work.uneven, cut


def _parted(sequences, chunks, work, several) -> tuple[float, Schedule]:
    first = chunks // (several + 1)
    cut = Schedule(sequences + -(-sequences // several), several * first, first, HandsOn.SUMS, sequences)
    return chunks - first + work.read_twice * first + work.parts, cut


class Arithmetic(NamedTuple):
    """What the functions below need beside + - * and comparisons. On the device the numbers are run-time values (scan.py)."""

    select: Callable  # (condition, if it holds, if not)
    minimum: Callable
    maximum: Callable
    quotient: Callable  # of numbers that are not negative


HOST = Arithmetic(lambda condition, a, b: a if condition else b, min, max, operator.floordiv)


def range_of(number, sequences, chunks, stride, chunks_per_cta, late_ctas, on: Arithmetic = HOST) -> tuple:
    """(first, last, stride, offset, place, pieces): the range [first, last) of CTA `number` of a run of so many sequences, on a
    tape on which a sequence takes `stride` chunks and begins with its chunk `offset`; the place in the run of the last sequence
    it touches, and how many it touches."""
    late = number < late_ctas
    first = on.select(late, number * (chunks - stride), (number - late_ctas) * chunks_per_cta)
    last = on.select(late, first + (chunks - stride), on.minimum(first + chunks_per_cta, sequences * stride))
    offset, stride = on.select(late, stride, 0), on.select(late, chunks - stride, stride)
    place = on.quotient(last - 1, stride)
    return first, last, stride, offset, place, place - on.quotient(first, stride) + 1


def summed_ranges(ctas, stride, chunks_per_cta, late_ctas, on: Arithmetic = HOST) -> tuple:
    """(CTAs, chunks of a range) of the passes that sum states: the ranges or, where later parts of sequences are taken apart,
    what comes before them."""
    late = late_ctas > 0
    return on.select(late, late_ctas, ctas), on.select(late, stride, chunks_per_cta)


def adds_up(sequences, stride, chunks_per_cta, late_ctas):
    """Whether sums of states have to be added up along a sequence, of so many in a run: not where each is cut once."""
    return (late_ctas == 0) & ((stride > 2 * chunks_per_cta) | ((sequences > 1) & (stride > chunks_per_cta + 1)))


def sum_groups(stride, chunks_per_cta, on: Arithmetic = HOST):
    """Groups of threads in a block that adds states up, each for AT_ONCE of them: a power of two, up to 16, since a group of 16
    threads still loads whole sectors."""
    states, groups = on.quotient(stride - 1, chunks_per_cta), 1
    for smaller in (1, 2, 4, 8):
        groups = on.select(states > smaller * AT_ONCE, 2 * smaller, groups)
    return groups


def piece(first, last, stride, offset, place, chunks, number, on: Arithmetic = HOST) -> tuple:
    """Piece `number` of a range, the last sequence first: a piece that the next CTA continues is done at once, one that
    continues the CTA before is left to the end.

    Returns (place, step, count, position): the place of its sequence in the run, its first chunk in the order of the scan, its
    length, and the chunks before it in this range.
    """
    place = place - number
    start = place * stride
    step = on.maximum(first - start, 0)
    end = on.minimum(last - start, stride)
    return place, offset + step, on.minimum(end, chunks) - step, last - start - end
