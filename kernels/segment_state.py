"""States at the cuts, for sequences that are cut into more than two pieces (HandsOn.SUMS).

    ForwardState, ReverseState, OutputState    what each range of the tape adds to the state of its last sequence
    StateSum                                   their sums along a sequence: the state behind each range

The first reads what the state update of its scan reads: k and v, or q, do, r and h. Its CTA is a scan whose token warpgroups
build features, so that the state warpgroup does nothing but multiply:

    warp 0                    loads a chunk into a stage of the ring
    warps 4..7                the state warpgroup: S^T in its accumulators, the normaliser beside it
    warps 8..11, 12..15       chunks in turn: phi into the next of the feature tiles

    buffer            writer                    reader
    sPhi x tiles      token warpgroups          S^T and normaliser update       TILE_FULL / TILE_FREE, one a tile
    sWeighted x tiles token warpgroups          normaliser update (reverse)     the same
"""

from itertools import accumulate
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, select_
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from .blocks import sync
from .blocks.ptx import bits_of, float_of, ldg128_or_zeros, lds128, pick, read_word, stg128, sts128, write_word
from .blocks.state import save_state
from .blocks.sync import WARPGROUP, Barrier
from .blocks.tiles import TmaTensor, statistics_layout, tma_load_statistics
from .config import state_size
from .forward_scan import ForwardScan
from .output import OutputScan
from .reverse_scan import ReverseScan, WeightedRows
from .scan import DEVICE, Scan, quotient
from .schedule import AT_ONCE, SUM_THREADS, HandsOn, adds_up, sum_groups, summed_ranges


class Statistics(NamedTuple):
    """(r, h) as the reverse scan loads them."""

    statistics: TmaTensor | None


class SegmentState(Scan):
    """Base of the passes that sum states. Where a range ends with its sequence, nobody asks for its sum."""

    backward = False
    consumer_warps = 8  # those of the state warpgroup, and of the one that builds the chunk's features

    def narrowed(self, problem):
        """One range a CTA."""
        cut = problem.ctas, problem.stride, problem.chunks_per_cta, problem.late_ctas
        ctas, chunks_per_cta = summed_ranges(*cut, DEVICE)
        numbers = {"ctas": ctas, "chunks_per_cta": chunks_per_cta, "late_ctas": 0, "hands_on": HandsOn.NOTHING}
        return problem._replace(**{name: Int32(number) for name, number in numbers.items()})

    def outputs(self, tensors):
        return Statistics(None)

    @cute.jit
    def carry_state(self, smem, pipe, at):
        """The state warpgroup: one piece, that of the sequence that goes on in the next CTA, or none."""
        g = self.state_parts(smem, cute.arch.thread_idx()[0] - WARPGROUP)
        self.start_gram(g, smem)
        for number in cutlass.range(at.pieces, unroll=1):
            p = self.piece(at, number)
            self.sum_piece(g, pipe, p)
            save_state((*g.state, g.gram), self.slot(p, p.cta), g.thread)

    @cute.jit
    def sum_piece(self, g, pipe, p):
        """All chunks of a piece: each product is issued behind that of the chunk before, whose stage and tile are then given
        back."""
        for block in (*g.state, g.gram):
            block.fill(0.0)
        stage = sync.consumer_state(self.config.stages, p.position)
        before = stage
        for turn in cutlass.range(p.count, unroll=1):
            pipe.consumer_wait(stage)
            tile = turn % self.config.feature_tiles
            sync.wait(Barrier.TILE_FULL, tile, 2 * WARPGROUP)
            self.issue_products(g, stage.index, tile)
            warpgroup.wait_group(len(g.updates))
            if turn > 0:
                self.give_back(pipe, before, p.count, turn - 1)
            before = stage
            stage = sync.advanced(stage, 1)
        warpgroup.wait_group(0)

    @cute.jit
    def give_back(self, pipe, stage, count, turn):
        """The stage and the tile of a chunk that has been multiplied; nobody asks for the last tiles again."""
        tiles = self.config.feature_tiles
        pipe.consumer_release(stage)
        if turn + tiles < count:
            sync.arrive(Barrier.TILE_FREE, turn % tiles, 2 * WARPGROUP)

    @cute.jit
    def take_chunks(self, outputs, smem, pipe, at):
        """A token warpgroup: features of the chunks that it takes in turn; one that gets none must not write what the kernel
        before still reads."""
        cute.arch.griddepcontrol_wait()
        thread = cute.arch.thread_idx()[0] - 2 * WARPGROUP
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        g = self.feature_parts(smem, thread % WARPGROUP)
        for number in cutlass.range(at.pieces, unroll=1):
            self.build_piece(g, pipe, self.piece(at, number), group)

    @cute.jit
    def build_piece(self, g, pipe, p, group):
        """This warpgroup's chunks of a piece: phi of each into a tile that the state warpgroup is done with."""
        c = self.config
        for turn in cutlass.range(self.turns(p, group), unroll=1):
            step = c.token_warpgroups * turn + group
            tile = step % c.feature_tiles
            stage = sync.consumer_state(c.stages, p.position + step)
            pipe.consumer_wait(stage)
            if step >= c.feature_tiles:
                sync.wait(Barrier.TILE_FREE, tile, 2 * WARPGROUP)
            self.build_features(g, p, stage.index, tile)
            sync.arrive(Barrier.TILE_FULL, tile, 2 * WARPGROUP)
            pipe.consumer_release(stage)

    def place(self, problem, smem):
        """As in every scan, with one piece, and none where the range ends with its sequence."""
        at = super().place(problem, smem)
        p = self.piece(at, 0)
        at.pieces = select_(p.step + p.count < at.chunks, Int32(1), Int32(0))
        return at


class ForwardState(SegmentState):
    inputs = ("k", "v")
    scaled_features = False
    state_products = ForwardScan.state_products


class OutputState(SegmentState):
    inputs = ("k", "v")
    build_features = OutputScan.build_features


class ReverseState(WeightedRows, SegmentState):
    inputs = ("q", "do")
    backward = True
    loads_statistics = True
    state_products = ReverseScan.state_products
    await_inputs, await_statistics = ReverseScan.await_inputs, ReverseScan.await_statistics

    def outputs(self, tensors):
        c = self.config
        return Statistics(tma_load_statistics(tensors.statistics, statistics_layout(c.chunk, c.stages), c.chunk))


class StateSum:
    """states[c] = the sum of states[b] over the CTAs b <= c whose range ends in the sequence that c's ends in, in place.

    A thread takes four values of AT_ONCE states in a row. For more states than that a block has several groups of threads that
    tell each other their totals: 128 states take one round of loads, and not 16 one after the other (40 us).
    """

    def __init__(self, config):
        self.name, self.size = config.name, state_size(config.key_dim, config.value_dim)
        assert self.size % (4 * SUM_THREADS) == 0, f"{self.name}: blocks of {SUM_THREADS} threads do not fit {self.size} values"

    @cute.jit
    def start(self, tensors, problem, stream):
        cut = problem.stride, problem.chunks_per_cta
        if adds_up(problem.sequences, *cut, problem.late_ctas):
            groups = Int32(sum_groups(*cut, DEVICE))
            self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
            self.kernel(problem.states, problem.ctas, *cut, groups, SUM_THREADS // groups).launch(
                grid=[groups * (self.size // (4 * SUM_THREADS)), problem.sequences, problem.runs],
                block=[SUM_THREADS, 1, 1],
                stream=stream,
                use_pdl=True,
            )

    @cute.kernel
    def kernel(self, states: Int64, ctas: Int32, stride: Int32, chunks_per_cta: Int32, groups: Int32, width: Int32):
        block, sequence, run = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        group = quotient(thread * groups, SUM_THREADS)  # of `width` threads
        place = thread - group * width
        first = run * ctas + quotient(sequence * stride, chunks_per_cta)
        last = run * ctas + quotient((sequence + 1) * stride - 1, chunks_per_cta)
        column = states + 16 * Int64(block * width + place)
        totals = SmemAllocator().allocate(16 * SUM_THREADS, 16).toint() + 16 * place
        mine = totals + 16 * group * width
        write_word(mine, first)  # so that ptxas does not move the divisions behind the wait: the kernel before still runs
        write_word(mine + 4, last)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        first, last = read_word(mine), read_word(mine + 4)
        before = [Float32(0.0)] * 4
        for start in cutlass.range(first, last, groups * AT_ONCE, unroll=1):
            cta = start + group * AT_ONCE
            sums = list(accumulate(self.load_slots(column, cta, last), add_all))
            sts128(mine, *[bits_of(value) for value in sums[-1]])
            cute.arch.sync_threads()
            behind = before
            for other in cutlass.range(groups, unroll=1):
                total = [float_of(word) for word in lds128(totals + 16 * other * width)]
                before = add_all(before, [pick(other < group, value, 0.0) for value in total])
                behind = add_all(behind, total)
            for i in cutlass.range_constexpr(AT_ONCE):
                if (first < cta + i) & (cta + i < last):  # the first is its own sum
                    stg128(self.slot(column, cta + i), *add_all(before, sums[i]))
            before = behind
            cute.arch.sync_threads()

    def slot(self, column, cta):
        return column + Int64(cta) * (4 * self.size)

    def load_slots(self, column, start, last) -> list:
        """What the next CTAs add, four values each; zeros from `last` on."""
        loaded = []
        for cta in range(AT_ONCE):
            wanted = cutlass.select_(start + cta < last, Int32(1), Int32(0))
            loaded.append(ldg128_or_zeros(self.slot(column, start + cta), wanted))
        return [[float_of(word) for word in words] for words in loaded]


def add_all(a: list, b: list) -> list:
    return [x + y for x, y in zip(a, b, strict=True)]
