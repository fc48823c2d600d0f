"""The pass before a sweep (sweep.py): S = sum phi(k) v^T over the chunks of each sequence, in order.

It leaves the state before the last chunk, and before the last of every CHECKPOINT chunks, and the normaliser before each chunk.
Its CTA is that of a pass that sums states (segment_state.py), but what a chunk adds is formed apart and added in fp32, as the
sweep will subtract it: accumulated in place the truncation of WGMMA would leave 3e-2 of dq where keys shrink 1000 times towards
the start. The normaliser is summed by warp 3.
"""

import operator
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from .blocks import sync
from .blocks.gemm import k_steps
from .blocks.normaliser import gram_of_eight
from .blocks.ptx import read_word, stg64, write_word
from .blocks.state import save_state
from .blocks.sync import WARPGROUP, Barrier
from .blocks.tiles import SwizzledTile
from .config import CHECKPOINT, NORMALISER_WORDS, checkpoints
from .forward_scan import ForwardScan
from .scan import quotient
from .segment_state import SegmentState


class WholeSequences:
    """What both passes have in common: a CTA takes one sequence. Its words in shared memory are the batch, the head, the chunks
    and how many pieces it takes, 1: uniform registers are scarce, and what is read again where it is used waits in none."""

    def write_range(self, problem, address, block):
        sequence, _ = block
        batch = quotient(sequence, problem.heads)
        for i, word in enumerate((batch, sequence - batch * problem.heads, self.chunks(problem), Int32(1))):
            write_word(address + 4 * i, word)

    def place(self, problem, smem):
        chunks, pieces = self.chunks(problem), read_word(smem.range + 12)
        return SimpleNamespace(**problem._asdict(), chunks=chunks, range=smem.range, pieces=pieces)

    def piece(self, at, number):
        chunk = at.chunks - 1 if self.backward else Int32(0)
        batch, head = self.sequence(at)
        return SimpleNamespace(**vars(at), batch=batch, head=head, chunk=chunk, count=at.chunks, position=0)

    def chunk_of(self, p, turn):
        return read_word(p.range + 8) - 1 - turn if self.backward else turn

    def sequence(self, at):
        """(batch, head)"""
        return read_word(at.range), read_word(at.range + 4)

    def starts_here(self, chunk):
        """Whether the sweep takes the state before `chunk` from memory, wherever its sequence ends: the last of CHECKPOINT."""
        return chunk % CHECKPOINT == CHECKPOINT - 1

    def checkpoint(self, p, chunk, chunks):
        """Address of the saved state before `chunk`, the last of its CHECKPOINT chunks or of its sequence."""
        number = (p.batch * p.heads + p.head) * checkpoints(chunks) + chunk // CHECKPOINT
        return p.states + Int64(number) * (4 * self.config.value_dim * self.config.features)

    def combine_apart(self, combine, g, stage, tile):
        """The state plus or minus, by `combine`, x^T phi over the chunk in `stage`, which is formed apart."""
        warpgroup.fence()
        for update, block in zip(g.updates, g.added, strict=True):
            update.issue(block, k_steps(update.a, stage), k_steps(update.b, tile))
        warpgroup.wait_group(0)
        for block, added in zip(g.state, g.added, strict=True):
            for i in range(cute.size(block)):
                block[i] = combine(block[i], added[i])

    def add_gram_of(self, total, rows, stage, lane, statistics=None):
        """What the rows in `stage` add to the normaliser, four values a lane, in fp32."""
        c = self.config
        tile = SwizzledTile(rows.iterator.toint(), c.chunk, c.padded_key_dim).buffer(stage)
        for i, value in enumerate(gram_of_eight(tile, statistics, lane, c.chunk)):
            total[i] = total[i] + value

    def normaliser_before(self, p, chunk, chunks):
        """Address of the normaliser before `chunk`: two values of G a lane, then two of the sums in each of four."""
        number = Int64((p.batch * p.heads + p.head) * chunks + chunk)
        return p.flags + number * (4 * NORMALISER_WORDS)


class SweepState(WholeSequences, SegmentState):
    """A CTA sums one sequence but its last chunk."""

    inputs = ("k", "v")
    consumer_warps = 9  # those of every pass that sums states, and warp 3
    kept_chunks = 10  # of two inputs: as many bytes as 5 of four
    l2_policy = ForwardScan.l2_policy
    state_products = ForwardScan.state_products

    def chunks(self, problem):
        return super().chunks(problem) - 1

    def state_parts(self, smem, thread):
        parts = super().state_parts(smem, thread)
        parts.added = [update.accumulator() for update in parts.updates]
        return parts

    @cute.jit
    def help(self, outputs, smem, pipe, problem, warp):
        """Warp 3 sums the normaliser."""
        if warp == 3:
            at = self.place(problem, smem)
            for number in cutlass.range(at.pieces, unroll=1):
                self.sum_normalisers(smem, pipe, self.piece(at, number))

    @cute.jit
    def sum_normalisers(self, smem, pipe, p):
        """What stands before every chunk. A stage is released behind the store of what was read from it: ptxas lets the release
        pass loads that are still under way."""
        lane = cute.arch.thread_idx()[0] % 32
        total = cute.make_rmem_tensor(4, Float32)
        total.fill(0.0)
        self.save_normaliser(p, Int32(0), total, lane)
        stage = sync.consumer_state(self.config.stages, p.position)
        for turn in cutlass.range(p.count, unroll=1):
            pipe.consumer_wait(stage)
            self.add_gram_of(total, smem.k, stage.index, lane)
            self.save_normaliser(p, turn + 1, total, lane)
            pipe.consumer_release(stage)
            stage = sync.advanced(stage, 1)

    @cute.jit
    def save_normaliser(self, p, chunk, total, lane):
        address = self.normaliser_before(p, chunk, p.chunks + 1)
        stg64(address + 8 * Int64(lane), total[0], total[1])
        if lane < 4:
            stg64(address + 256 + 8 * Int64(lane), total[2], total[3])

    @cute.jit
    def carry_state(self, smem, pipe, at):
        """The state warpgroup."""
        g = self.state_parts(smem, cute.arch.thread_idx()[0] - WARPGROUP)
        for number in cutlass.range(at.pieces, unroll=1):
            self.sum_piece(g, pipe, self.piece(at, number))

    @cute.jit
    def sum_piece(self, g, pipe, p):
        """What every chunk adds."""
        for block in g.state:
            block.fill(0.0)
        stage = sync.consumer_state(self.config.stages, p.position)
        for turn in cutlass.range(p.count, unroll=1):
            self.save_before(g, p, turn)
            pipe.consumer_wait(stage)
            tile = turn % self.config.feature_tiles
            sync.wait(Barrier.TILE_FULL, tile, 2 * WARPGROUP)
            self.combine_apart(operator.add, g, stage.index, tile)
            self.give_back(pipe, stage, p.count, turn)
            stage = sync.advanced(stage, 1)
        self.save_before(g, p, p.count)

    @cute.jit
    def save_before(self, g, p, chunk):
        """The state before `chunk`, where the sweep will ask for it."""
        if (chunk == p.chunks) | self.starts_here(chunk):
            save_state(g.state, self.checkpoint(p, chunk, p.chunks + 1), g.thread)
