"""States at the cuts, for sequences that are cut into more than two pieces ("summed" in schedule.py).

    ForwardState, ReverseState, OutputState    what each range of the tape adds to the state of its last sequence
    StateSum                                   their sums along a sequence: the state behind each range

The first reads what the state update of its scan reads: k and v, or q, do, r and h. Its CTA is a scan without tokens:

    warp 0                    loads a chunk into a stage of the ring
    warps 4..7, 8..11         two state warpgroups take chunks in turn, each with a sum of its own in its accumulators; in the
                              end the second hands its sum to the first through the stages
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from .blocks import sync
from .blocks.ptx import float_of, ldg128_or_zeros, stg128
from .blocks.state import save_sum, stash_state
from .blocks.sync import WARPGROUP, Barrier
from .blocks.tiles import TmaTensor, statistics_layout, tma_load_statistics
from .config import state_size
from .forward_scan import ForwardScan
from .output import OutputScan
from .reverse_scan import ReverseScan
from .scan import Scan

AT_ONCE = 8  # slots that StateSum loads together: one after the other they take 0.6 us each


class Statistics(NamedTuple):
    """(r, h) as the reverse scan loads them."""

    statistics: TmaTensor | None


class SegmentState(Scan):
    """Base of the passes that sum states. Where a range ends with its sequence, nobody asks for its sum."""

    backward = False
    consumer_warps = 4  # those of the state warpgroup that takes the chunk

    @cute.jit
    def carry_state(self, smem, pipe, at):
        """The state warpgroups: one piece, that of the sequence that goes on in the next CTA, or none."""
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        g = self.state_parts(smem, thread % WARPGROUP, group)
        stash = (smem.do if self.backward else smem.v).iterator.toint()
        for number in cutlass.range(at.pieces, unroll=1):
            self.sum_piece(g, pipe, self.piece(at, number), stash)

    @cute.jit
    def sum_piece(self, g, pipe, p, stash):
        """This warpgroup's chunks of a piece, then the sum over both warpgroups into the CTA's slot."""
        count = self.turns(p, g.group)
        for block in (*g.state, g.gram):
            block.fill(0.0)
        if count > 0:
            position, stages = p.position + g.group, self.config.stages
            self.absorb_all_but_last(g, pipe, p, sync.consumer_state(stages, position), count)
            last = position + self.config.state_warpgroups * (count - 1)
            self.absorb_last(g, p, sync.consumer_state(stages, last), count)
        sync.wait(Barrier.STATES, 0, 2 * WARPGROUP)  # nobody reads the stages any more
        if g.group == 1:
            stash_state((*g.state, g.gram), stash, g.thread)
        sync.wait(Barrier.STATES, 0, 2 * WARPGROUP)
        if g.group == 0:
            save_sum((*g.state, g.gram), stash, self.slot(p, p.cta), g.thread)

    def publish(self, g, p, buf):
        """Nobody to publish for: only the product of this chunk is waited for."""
        warpgroup.wait_group(0)

    def place(self, problem, smem):
        """As in every scan, with one piece, and none where the range ends with its sequence."""
        at = super().place(problem, smem)
        p = self.piece(at, 0)
        at.pieces = cutlass.select_(p.step + p.count < at.chunks, Int32(1), Int32(0))
        return at


class ForwardState(SegmentState):
    inputs = ("k", "v")
    state_products = ForwardScan.state_products

    @cute.jit
    def __call__(
        self,
        k: cute.Tensor,
        v: cute.Tensor,
        scale: Float32,
        ctas: Int32,
        stride: Int32,
        chunks_per_cta: Int32,
        states: cute.Tensor,
        stream,
    ):
        problem = self.problem(k, scale, (ctas, stride, chunks_per_cta, Int32(0), Int32(0), states, states))
        self.launch(self.kernel(self.loads(k=k, v=v), Statistics(None), problem), problem, stream)


class OutputState(ForwardState):
    state_products = OutputScan.state_products


class ReverseState(SegmentState):
    inputs = ("q", "do")
    backward = True
    state_products = ReverseScan.state_products

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        do: cute.Tensor,
        statistics: cute.Tensor,
        scale: Float32,
        ctas: Int32,
        stride: Int32,
        chunks_per_cta: Int32,
        states: cute.Tensor,
        stream,
    ):
        c = self.config
        row_terms = tma_load_statistics(statistics, statistics_layout(c.chunk, c.stages), c.chunk)
        problem = self.problem(q, scale, (ctas, stride, chunks_per_cta, Int32(0), Int32(0), states, states))
        self.launch(self.kernel(self.loads(q=q, do=do), Statistics(row_terms), problem), problem, stream)


class StateSum:
    """states[c] = the sum of states[b] over the CTAs b <= c whose range ends in the sequence that c's ends in, in place; a
    thread for four values, a row of blocks for each sequence."""

    def __init__(self, config):
        self.size = state_size(config.key_dim, config.value_dim)

    @cute.jit
    def __call__(self, states: cute.Tensor, sequences: Int32, stride: Int32, chunks_per_cta: Int32, stream):
        self.kernel(states, stride, chunks_per_cta).launch(
            grid=[cute.ceil_div(self.size, 4 * WARPGROUP), sequences, 1],
            block=[WARPGROUP, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, states: cute.Tensor, stride: Int32, chunks_per_cta: Int32):
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        block, sequence, _ = cute.arch.block_idx()
        first = sequence * stride // chunks_per_cta
        last = ((sequence + 1) * stride - 1) // chunks_per_cta  # the CTA that ends the sequence: nobody goes on from there
        column = states.iterator.toint() + 16 * (Int64(block) * WARPGROUP + cute.arch.thread_idx()[0])
        total = [Float32(0.0)] * 4
        for start in cutlass.range(first, last, AT_ONCE, unroll=1):
            values = self.load_slots(column, start, last)
            for i in cutlass.range_constexpr(AT_ONCE):
                total = [a + b for a, b in zip(total, values[i], strict=True)]
                if start + i < last:
                    stg128(self.slot(column, start + i), *total)

    def slot(self, column, cta):
        return column + Int64(cta) * (4 * self.size)

    def load_slots(self, column, start, last) -> list:
        """What the next CTAs add, four values each; zeros from `last` on."""
        loaded = []
        for cta in range(AT_ONCE):
            wanted = cutlass.select_(start + cta < last, Int32(1), Int32(0))
            loaded.append(ldg128_or_zeros(self.slot(column, start + cta), wanted))
        return [[float_of(word) for word in words] for words in loaded]
