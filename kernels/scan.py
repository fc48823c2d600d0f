"""The body that all scans share: storage, TMA loads, warp roles, and the warpgroup that carries the state.

The chunks of all sequences, one sequence for each (batch, head), stand one after the other on tapes that are cut into equal
ranges (schedule.py). One CTA scans one range, piece by piece, a piece being what the range holds of one sequence. 16 warps:

    warp 0            loads q, k, v, do (and r, h) of a chunk into a stage of the ring
    warps 1, 2, 3     helpers of the pass (the reverse scan stores dv through them, one for each token warpgroup); warp 3 lets
                      the next kernel start
    warps 4..7        the state warpgroup: S^T (V x F) in its accumulators, the normaliser beside it. Per chunk: build
                      phi, S^T += x^T phi, publish the bf16 copy for the next chunk
    warps 8..11, ...  token warpgroups that take chunks in turn: everything a chunk's own tokens need

    buffer            writer            reader
    sQ sK sV sO       TMA (warp 0)      token products, features, S^T update     ring of `stages`
    sStatistics       TMA (warp 0)      token elementwise, features (reverse)    ring of `stages`
    sState            state warpgroup   token products (Y, W, dv)                STATE_FULL / STATE_FREE, one a token warpgroup
    sGram             state warpgroup   token products (normaliser)              the same
    sOnes             state warpgroup   token products (normaliser)              the first STATE_FULL
    sPhi x tiles      state warpgroup   S^T and normaliser update                STATE
    sWeighted x tiles state warpgroup   normaliser update (reverse)              STATE
"""

from types import SimpleNamespace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, select_
from cutlass.cute.nvgpu import warpgroup

from .blocks import sync
from .blocks.gemm import Product, k_steps
from .blocks.normaliser import Normaliser, gram_columns, write_ones
from .blocks.ptx import read_word, read_words, recompute, write_word
from .blocks.state import load_state, publish_state, save_state
from .blocks.sync import WARPGROUP, Barrier
from .blocks.taylor import load_rotated, write_features
from .blocks.tiles import (
    EVICT_NORMAL,
    SwizzledTile,
    smem_layout,
    statistics_layout,
    tma_load,
    tma_partition,
    tma_partition_statistics,
)
from .config import ScanConfig, state_size
from .schedule import Arithmetic, HandsOn, piece, range_of

RANGE_WORDS = 8  # those of schedule.range_of, the run, and the number of the CTA
PIECES = 5  # the place of one of them


def quotient(a, b):
    """As Uint32: with signs a division takes twice as many instructions, and each pass begins with some."""
    return Int32(Uint32(a) // Uint32(b))


DEVICE = Arithmetic(select_, cutlass.min, cutlass.max, quotient)


class Problem(NamedTuple):
    """One launch: the sizes, the factor of q.k, and how the tape is cut.

    sequences: of one run.
    ctas ... runs: those of schedule.Schedule, but `ctas` of one run.
    states: address of one slot a CTA, fp32; what is not handed on is there before the launch.
    flags: address of one word a CTA, zero before and after the launch, where states are handed on; in a sweep, of the
    normalisers before the chunks.
    """

    tokens: Int32
    heads: Int32
    sequences: Int32
    scale: Float32
    ctas: Int32
    chunks_per_cta: Int32
    stride: Int32
    hands_on: Int32
    late_ctas: Int32
    runs: Int32
    states: Int64
    flags: Int64


class Scan:
    """Base of the passes, which write `outputs`, `state_products`, `token_parts`, `token_products`, `token_adjoint`,
    `write_rows`."""

    inputs = ("q", "k", "v", "do")
    backward: bool  # chunks are taken from the last to the first
    loads_statistics = False  # r and h, which another pass wrote
    scaled_features = True  # entries and products have scale in them, and so G
    times_sums = 1.0  # how often tokens get the sums
    reads_again = True  # a token warpgroup its own rows in a stage, behind its products
    state_threads = 2 * WARPGROUP  # that hand over copies of the state: the state warpgroup and a token warpgroup
    consumer_warps: int  # warps that release a stage: state 4, one token warpgroup 4, helpers

    def __init__(self, config: ScanConfig):
        self.config = config

    # ---- host side, traced once per compile ----

    def narrowed(self, problem):
        """What of the problem this pass takes."""
        return problem

    def loads(self, tensors):
        """The TMA loads of its inputs, from tensors by name."""
        return tuple(tma_load(getattr(tensors, name), self.tiles()[name], self.tile_shape(name)) for name in self.inputs)

    def tiles(self) -> dict:
        """Layouts of the bf16 tiles in shared memory, by name."""
        c = self.config
        rows, values = (smem_layout((c.chunk, width), c.stages) for width in (c.padded_key_dim, c.value_dim))
        inputs = {name: values if name in ("v", "do") else rows for name in self.inputs}
        phi = smem_layout((c.chunk, c.features), c.feature_tiles)
        first = {"phi": phi}  # at K = 8 the normaliser's product reads 16 columns more than the last tile has
        return first | inputs | (self.published_tiles() if c.publishes else {})

    def published_tiles(self) -> dict:
        """What the state warpgroup writes for the token warpgroups."""
        c = self.config
        return {
            "state": smem_layout((c.value_dim, c.features), c.token_warpgroups),
            "gram": smem_layout((16, 16), c.token_warpgroups * Normaliser.TILES),
            "ones": smem_layout((c.chunk, c.padded_key_dim)),
        }

    def storage(self):
        """The shared-memory struct; its size is the config's arithmetic, checked here."""
        c = self.config
        fields = {
            name: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout)], 1024]
            for name, layout in self.tiles().items()
        }
        if self.backward:
            fields["statistics"] = cute.struct.Align[cute.struct.MemRange[Float32, 2 * c.chunk * self.row_buffers], 128]
        fields["barriers"] = cute.struct.MemRange[Int64, c.barriers]
        fields["range"] = cute.struct.Align[cute.struct.MemRange[Int32, RANGE_WORDS], 16]
        storage = cute.struct(type("Storage", (), {"__annotations__": fields}))
        size = storage.size_in_bytes()
        assert size == c.shared_memory, f"{c.name}: storage takes {size} bytes, config says {c.shared_memory}"
        return storage

    @property
    def ring_bytes(self) -> int:
        """What arrives on the full barrier of a stage."""
        return self.config.tile_bytes

    @property
    def row_buffers(self) -> int:
        """Chunks whose r and h stand in shared memory."""
        return self.config.stages

    def tile_shape(self, name: str) -> tuple[int, int]:
        c = self.config
        return c.chunk, c.value_dim if name in ("v", "do") else c.padded_key_dim

    # ---- device side ----

    def allocate(self, memory):
        """Shared memory, from address `memory` on, as tensors by name, and the barriers."""
        c, storage = self.config, self.storage()(memory)
        smem = {
            name: getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner) for name, layout in self.tiles().items()
        }
        if self.backward:
            smem["statistics"] = storage.statistics.get_tensor(statistics_layout(c.chunk, self.row_buffers))
        return SimpleNamespace(**smem, barriers=storage.barriers.data_ptr(), range=storage.range.data_ptr().toint())

    def write_range(self, problem, address, block):
        """The CTA's range of the tape, for all roles; the barrier behind the set-up of the ring makes it visible. block: the
        CTA's number in its run, and the run."""
        sizes = (problem.sequences, self.chunks(problem), problem.stride, problem.chunks_per_cta, problem.late_ctas)
        number, run = block
        for i, word in enumerate((*range_of(number, *sizes, DEVICE), run, run * problem.ctas + number)):
            write_word(address + 4 * i, word)

    def set_up_barriers(self, smem):
        """Those beside the ring's, by warp 0."""

    def chunks(self, problem):
        """Of one sequence."""
        return cute.ceil_div(problem.tokens, self.config.chunk)

    def place(self, problem, smem):
        """The problem as a role sees it. The range is read from shared memory for every piece: in registers it is spilled."""
        return SimpleNamespace(
            **problem._asdict(),
            chunks=self.chunks(problem),
            range=smem.range,
            pieces=read_word(smem.range + 4 * PIECES),
        )

    def piece(self, at, number):
        """Piece `number` of the range: `step` and `count` are its first step and its length, `chunk` the chunk of that step,
        `position` the chunks before it in this CTA."""
        *words, _, run, cta = read_words(at.range) + read_words(at.range + 16)
        place, step, count, position = piece(*words, at.chunks, number, DEVICE)
        sequence = place * at.runs + run
        batch = quotient(sequence, at.heads)
        return SimpleNamespace(
            **vars(at),
            batch=batch,
            head=sequence - batch * at.heads,
            step=step,
            chunk=at.chunks - 1 - step if self.backward else step,
            count=count,
            position=position,
            cta=cta,
            source=select_(cta < at.late_ctas, cta, cta - 1),  # whose state the last piece may start from
        )

    def chunk_of(self, p, turn):
        """The chunk taken at turn `turn` of a piece."""
        return p.chunk - turn if self.backward else p.chunk + turn

    @cute.jit
    def load(self, loads, outputs, smem, pipe, at):
        """Warp 0: one stage a chunk, the inputs and in the reverse scan r, h on one mbarrier."""
        self.await_inputs(at)
        stage = sync.producer_state(self.config.stages)
        for number in cutlass.range(at.pieces, unroll=1):
            p = self.piece(at, number)
            sides = self.load_sides(loads, outputs, smem, p)
            for step in cutlass.range(p.count, unroll=1):
                chunk = self.chunk_of(p, step)
                pipe.producer_acquire(stage)
                barriers = self.full_barriers(smem, pipe, stage, len(sides))
                policy = self.l2_policy(p, chunk)
                for side, ((atom, shared, source), barrier) in enumerate(zip(sides, barriers, strict=True)):
                    if cutlass.const_expr(side == len(self.inputs)):
                        if p.position + step == 0:
                            self.await_statistics(at)
                    target = shared[None, stage.index]
                    cute.copy(atom, source[None, chunk], target, tma_bar_ptr=barrier, cache_policy=policy)
                stage.advance()

    def full_barriers(self, smem, pipe, stage, sides: int):
        """The mbarrier on which each load of `stage` arrives."""
        return [pipe.producer_get_barrier(stage)] * sides

    def l2_policy(self, p, chunk):
        """How long the inputs of a chunk stay in the L2."""
        return Int64(EVICT_NORMAL)

    @cute.jit
    def await_inputs(self, at):
        """The inputs are there, which the kernel before the call may have written. Behind a pass of the same call they are,
        since it has waited itself before it let this one start: their loads begin while it still runs."""
        if at.hands_on != HandsOn.SUMS:
            cute.arch.griddepcontrol_wait()

    def await_statistics(self, at):
        """r and h are there, if the pass reads them."""

    def load_sides(self, loads, outputs, smem, p):
        """(copy atom, shared side, global side) of each load of one sequence."""
        sides = [
            (source.atom, *tma_partition(source, getattr(smem, name), self.tile_shape(name), p.head, p.batch))
            for source, name in zip(loads, self.inputs, strict=True)
        ]
        if self.loads_statistics:
            rows = outputs.statistics
            sides.append((rows.atom, *tma_partition_statistics(rows, smem.statistics, self.config.chunk, p.head, p.batch)))
        return sides

    def help(self, outputs, smem, pipe, problem, warp):
        """Warps 1 to 3: nothing, unless the pass has work for them."""

    @cute.jit
    def carry_state(self, smem, pipe, at):
        """The state warpgroup."""
        g = self.state_parts(smem, cute.arch.thread_idx()[0] - WARPGROUP)
        self.start_normaliser(g, smem)
        for number in cutlass.range(at.pieces, unroll=1):
            self.carry_piece(g, pipe, self.piece(at, number))

    def start_normaliser(self, g, smem):
        """The normaliser beside the state, the ones, and zeros where its copies will be."""
        self.start_gram(g, smem)
        g.normaliser = Normaliser(smem.gram)
        self.set_ones(g, smem)
        g.normaliser.clear(g.thread)

    def start_gram(self, g, smem):
        """The normaliser's product and its accumulator."""
        phi = gram_columns(smem.phi, self.config.key_dim)
        g.gram_update = Product(16, phi, self.gram_rows(smem), a_transposed=True, b_transposed=True)
        g.gram = g.gram_update.accumulator()

    def gram_rows(self, smem):
        """The rows whose product with the features is the normaliser."""
        return smem.k

    def gram_place(self, stage, tile):
        """Which of them are the chunk's, in `stage`, with its features in `tile`."""
        return stage

    def gram_factor(self, at):
        """What G still lacks."""
        return Float32(1.0) if self.scaled_features else at.scale

    def set_ones(self, g, smem):
        """The tile of ones: tokens get the sums by a product with it."""
        c = self.config
        tile = SwizzledTile(smem.ones.iterator.toint(), c.chunk, c.padded_key_dim)
        write_ones(tile, g.thread, c.chunk, self.times_sums)

    @cute.jit
    def carry_piece(self, g, pipe, p):
        """Publish the state before the first chunk, then absorb a chunk and publish, and so on.

        The last chunk is absorbed only if another CTA goes on from here: nobody else asks for the state behind it.
        """
        self.start_state(g, p)
        self.publish(g, p, Int32(0))
        stage = sync.consumer_state(self.config.stages, p.position)
        self.absorb_all_but_last(g, pipe, p, stage)
        stage = sync.consumer_state(self.config.stages, p.position + p.count - 1)
        if cutlass.const_expr(not self.config.ahead):
            pipe.consumer_wait(stage)
        if (p.hands_on == HandsOn.STATE) & (p.step + p.count < p.chunks):
            self.absorb_last(g, p, stage)
            save_state((*g.state, g.gram), self.slot(p, p.cta), g.thread)
            sync.raise_flag(p.flags + 4 * p.cta, g.thread)
        pipe.consumer_release(stage)

    @cute.jit
    def start_state(self, g, p):
        """Zero, or what the CTA before this one left, once every warp is done with the piece before."""
        if (p.step > 0) & (p.hands_on == HandsOn.STATE):
            sync.await_flag(p.flags + 4 * p.source, g.thread)
        load_state((*g.state, g.gram), self.slot(p, p.source), g.thread, p.step)
        sync.wait(Barrier.STATE, 0, WARPGROUP)

    @cute.jit
    def absorb_all_but_last(self, g, pipe, p, stage):
        """Absorb the chunks of a piece but the last, from `stage` on, publishing after each. With two feature tiles the
        features of the last one are built too."""
        c = self.config
        if cutlass.const_expr(c.ahead):
            pipe.consumer_wait(stage)
            self.build_features(g, p, stage.index, 0)
        for turn in cutlass.range(p.count - 1, unroll=1):
            tile = turn % 2 if cutlass.const_expr(c.ahead) else 0
            if cutlass.const_expr(not c.ahead):
                pipe.consumer_wait(stage)
                sync.wait(Barrier.STATE, 0, WARPGROUP)  # every warp is done with the product that reads the only tile
                self.build_features(g, p, stage.index, tile)
            self.issue_update(g, stage.index, tile)
            if cutlass.const_expr(c.ahead):
                upcoming = sync.advanced(stage, 1)
                pipe.consumer_wait(upcoming)
                self.build_features(g, p, upcoming.index, 1 - tile)
            self.publish(g, p, (turn + 1) % c.token_warpgroups)
            pipe.consumer_release(stage)
            stage = sync.advanced(stage, 1)

    def absorb_last(self, g, p, stage):
        """The last chunk of a piece, from `stage`, which has been waited for."""
        tile = (p.count - 1) % 2 if self.config.ahead else 0
        if not self.config.ahead:
            sync.wait(Barrier.STATE, 0, WARPGROUP)
            self.build_features(g, p, stage.index, tile)
        self.issue_update(g, stage.index, tile)
        warpgroup.wait_group(0)

    def slot(self, p, number):
        """Address of a stored state: that which CTA `number` leaves."""
        return p.states + Int64(number) * (4 * state_size(self.config.key_dim, self.config.value_dim))

    def feature_parts(self, smem, thread):
        """What a thread needs to build features: tiles of rows and of features."""
        c = self.config
        rows = smem.q if self.backward else smem.k
        return SimpleNamespace(
            thread=thread,
            phi_tile=SwizzledTile(smem.phi.iterator.toint(), c.chunk, c.features),
            rows=SwizzledTile(rows.iterator.toint(), c.chunk, c.padded_key_dim),
            statistics=smem.statistics.iterator.toint() if self.backward else None,
        )

    def update_products(self, smem, values):
        """S^T (V x F) += x^T (V x C) phi (C x F), the x of a chunk in a stage of `values`: 64 rows each."""
        c = self.config
        panels = cute.flat_divide(values, (c.chunk, 64))  # (C, 64, 1, V / 64, stage)
        return [
            Product(c.features, panels[None, None, 0, block, None], smem.phi, a_transposed=True, b_transposed=True)
            for block in range(c.value_dim // 64)
        ]

    def state_parts(self, smem, thread):
        """Operands, accumulators and tiles of the state warpgroup."""
        c = self.config
        updates = self.update_products(smem, smem.do if self.backward else smem.v)
        parts = SimpleNamespace(
            **vars(self.feature_parts(smem, thread)),
            updates=updates,
            state=[update.accumulator() for update in updates],
        )
        if c.publishes:
            parts.state_tile = SwizzledTile(smem.state.iterator.toint(), c.value_dim, c.features)
        return parts

    def chunk_rows(self, g, stage):
        """The state's row tile (k or q) and the address of its (r, h), in `stage`."""
        c = self.config
        rows = g.rows.buffer(stage)
        return rows, g.statistics + stage * (8 * c.chunk) if self.backward else None

    def build_features(self, g, at, stage, tile):
        """phi of the chunk in `stage` into feature tile `tile`."""
        self.write_chunk(g, at, stage, tile, self.state_products)

    def write_chunk(self, g, at, stage, tile, products):
        """The same by `products(at, statistics, row)`, which says how products of packed words are made."""
        c, thread = self.config, recompute(g.thread, WARPGROUP)
        rows, statistics = self.chunk_rows(g, stage)
        target = g.phi_tile.buffer(tile)
        row = thread % c.chunk
        words = write_features(rows, target, row, thread // c.chunk, c.key_dim, products(at, statistics, row))
        self.write_weighted(g, tile, row, thread // c.chunk, words, statistics)
        sync.publish()

    def write_weighted(self, g, tile, row, part, words, statistics):
        """The rows of the normaliser's product, where they are not those that were loaded. words: the row's eight entries on
        the thread's side (`write_features`)."""

    def issue_update(self, g, stage, tile):
        """The products of the chunk in `stage`, once all warps have written feature tile `tile`.

        Passing the barrier also says that every warp has finished the product before this one: the other tile is free.
        """
        sync.wait(Barrier.STATE, 0, WARPGROUP)
        self.issue_products(g, stage, tile)

    def issue_products(self, g, stage, tile):
        """S^T += x^T phi and G += phi^T y over the chunk in `stage`, a group for each 64 rows of S^T."""
        warpgroup.fence()
        phi, rows = k_steps(g.gram_update.a, tile), k_steps(g.gram_update.b, self.gram_place(stage, tile))
        g.gram_update.issue(g.gram, phi, rows, accumulate=True, commit=False)
        for update, block in zip(g.updates, g.state, strict=True):
            update.issue(block, k_steps(update.a, stage), k_steps(update.b, tile), accumulate=True)

    def publish(self, g, at, buf):
        """Copies of the state and the normaliser into buffer `buf`, once it is free: each block of 64
        rows as soon as its own product is done, while the next one's still runs."""
        c, thread = self.config, recompute(g.thread, WARPGROUP)
        sync.wait(Barrier.STATE_FREE, buf, self.state_threads)
        tile = g.state_tile.buffer(buf)
        for number, block in enumerate(g.state):
            warpgroup.wait_group(len(g.state) - 1 - number)
            publish_state(block, tile, 64 * number, thread, c.features)
            if number == 0:
                self.publish_normaliser(g, at, buf, thread)
        sync.publish()
        sync.arrive(Barrier.STATE_FULL, buf, self.state_threads)

    def publish_normaliser(self, g, at, buf, thread):
        """The normaliser beside the state."""
        g.normaliser.publish(g.gram, self.gram_factor(at), buf, thread, self.config.key_dim)

    @cute.jit
    def take_chunks(self, outputs, smem, pipe, at):
        """A token warpgroup."""
        thread = cute.arch.thread_idx()[0] - 2 * WARPGROUP
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        parts = self.token_parts(smem, group)
        for number in cutlass.range(at.pieces, unroll=1):
            self.take_piece(outputs, parts, thread % WARPGROUP, pipe, self.piece(at, number))
        self.finish(at, group, thread % WARPGROUP)

    def finish(self, at, group, thread):
        """What token warpgroup `group` does behind its last chunk: nothing, unless the pass says so."""

    def turns(self, p, group):
        """How many chunks of the piece token warpgroup `group` takes."""
        sharing = self.config.token_warpgroups
        return (p.count - group + sharing - 1) // sharing

    @cute.jit
    def take_piece(self, outputs, parts, thread, pipe, p):
        """Each chunk of this warpgroup from its stage and its copy of the state."""
        c = self.config
        mine = self.turns(p, parts.group)
        if mine > 0:
            sync.arrive(Barrier.STATE_FREE, parts.group, self.state_threads)
        for turn in cutlass.range(mine, unroll=1):
            step = c.token_warpgroups * turn + parts.group
            chunk = self.chunk_of(p, step)
            stage = sync.consumer_state(c.stages, p.position + step)
            g = self.placed(parts, thread)
            self.await_chunk(g, pipe, stage)
            work = self.token_products(g, p, chunk, stage.index)
            if turn + 1 < mine:
                sync.arrive(Barrier.STATE_FREE, parts.group, self.state_threads)
            g = self.placed(parts, thread)
            if cutlass.const_expr(self.reads_again):
                rows = self.own_rows(g, stage.index)
            else:
                rows = work.rows
                pipe.consumer_release(stage)
            results = self.token_adjoint(g, p, chunk, work, rows)
            self.write_rows(outputs, g, p, chunk, results)
            if cutlass.const_expr(self.reads_again):
                pipe.consumer_release(stage)  # behind the stores of what was read: ptxas lets it pass loads under way

    def await_chunk(self, g, pipe, stage):
        pipe.consumer_wait(stage)

    def own_rows(self, g, stage):
        """The rotated rows (q, in the reverse scan k) of this thread's two tokens."""
        c = self.config
        tile = g.own.buffer(stage)
        return [load_rotated(tile, g.row + 8 * half, g.quad_lane, c.key_dim) for half in range(2)]

    def row_block(self, g):
        """The number of the block of rows, of `causal_block`, that this warp's rows are in."""
        return cute.arch.make_warp_uniform(g.row // self.config.causal_block) if self.config.row_blocks > 1 else 0

    @cute.jit
    def take_column_blocks(self, g, take, clear):
        """The elementwise work of this warp's rows, block by block of the columns: take(number, diagonal) where the rows see
        all of a block or, on the diagonal, a part of it; clear(number) where they see nothing."""
        for number in cutlass.range_constexpr(self.config.row_blocks):
            if self.row_block(g) == number:
                take(number, True)
            elif (self.row_block(g) < number) == self.backward:
                take(number, False)
            else:
                clear(number)

    def clear_columns(self, operands, number: int):
        """Zeros in block `number` of the columns of A operands, given as words."""
        words = self.config.causal_block // 4
        for operand in operands:
            for i in range(words * number, words * (number + 1)):
                operand[i] = Int32(0)

    def placed(self, parts, thread):
        """The parts with this thread's place in a 64-row tile: its lane, its lane in the quad, its first row."""
        thread = recompute(thread, WARPGROUP)
        lane = thread % 32
        row = ((thread >> 5) << 4) | (lane >> 2)  # of ways to write 16 warp + lane / 4 that in which every row compiles clean
        return SimpleNamespace(**vars(parts), lane=lane, quad_lane=thread % 4, row=row)
