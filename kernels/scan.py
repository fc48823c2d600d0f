"""The body that all scans share: storage, TMA loads, warp roles, and the warpgroup that carries the state.

One CTA scans one (batch, head), chunk by chunk. 16 warps:

    warp 0            loads q, k, v, do (and r, h) of a chunk into a stage of the ring
    warps 1, 2        helpers of the pass (the reverse scan stores dv through them)
    warps 4..7        the state warpgroup: S^T (V x F) in its accumulators, the normaliser beside it. Per chunk: build
                      phi, S^T += x^T phi, publish the bf16 copy for the next chunk
    warps 8..11, 12..15   two token warpgroups that take chunks in turn: everything a chunk's own tokens need

    buffer            writer            reader
    sQ sK sV sO       TMA (warp 0)      token products, features, S^T update     ring of `stages`
    sStatistics       TMA (warp 0)      token elementwise, features (reverse)    ring of `stages`
    sState x 2        state warpgroup   token products (Y, W, dv)                STATE_FULL / STATE_FREE, by parity
    sGram x 2         state warpgroup   token products (normaliser)              the same
    sOnes             state warpgroup   token products (normaliser)              the first STATE_FULL
    sPhi x tiles      state warpgroup   S^T update                               STATE
"""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from .blocks import sync
from .blocks.gemm import Product, k_steps
from .blocks.ptx import recompute
from .blocks.state import Normaliser, gram_operand, publish_state, write_ones
from .blocks.sync import WARPGROUP, Barrier
from .blocks.taylor import load_rotated, write_features
from .blocks.tiles import (
    SwizzledTile,
    TmaTensor,
    smem_layout,
    statistics_layout,
    tma_load,
    tma_partition,
    tma_partition_statistics,
)
from .config import ScanConfig


class Scan:
    """Base of the passes, which write `state_products`, `token_parts`, `token_products`, `token_adjoint`, `write_rows`."""

    inputs = ("q", "k", "v", "do")
    backward: bool  # chunks are taken from the last to the first
    consumer_warps: int  # warps that release a stage: state 4, one token warpgroup 4, helpers

    def __init__(self, config: ScanConfig):
        self.config = config

    # ---- host side, traced once per compile ----

    def tiles(self) -> dict:
        """Layouts of the bf16 tiles in shared memory, by name."""
        c = self.config
        rows, values = (smem_layout((c.chunk, width), c.stages) for width in (c.padded_key_dim, c.value_dim))
        return {name: values if name in ("v", "do") else rows for name in self.inputs} | {
            "state": smem_layout((c.value_dim, c.features), 2),
            "phi": smem_layout((c.chunk, c.features), c.feature_tiles),
            "gram": smem_layout((16, 16), 2 * Normaliser.TILES),
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
            fields["statistics"] = cute.struct.Align[cute.struct.MemRange[Float32, 2 * c.chunk * c.stages], 128]
        fields["barriers"] = cute.struct.MemRange[Int64, 2 * c.stages]
        storage = cute.struct(type("Storage", (), {"__annotations__": fields}))
        size = storage.size_in_bytes()
        assert size == c.shared_memory, f"{c.name}: storage takes {size} bytes, config says {c.shared_memory}"
        return storage

    def loads(self, **tensors) -> tuple[TmaTensor, ...]:
        """The input tensors (B, T, H, D) as TMA loads of one chunk, in the order of `inputs`."""
        layouts = self.tiles()
        return tuple(tma_load(tensors[name], layouts[name], self.tile_shape(name)) for name in self.inputs)

    def tile_shape(self, name: str) -> tuple[int, int]:
        c = self.config
        return c.chunk, c.value_dim if name in ("v", "do") else c.padded_key_dim

    # ---- device side ----

    def allocate(self):
        """Shared memory as tensors by name, and the barriers."""
        c, storage = self.config, SmemAllocator().allocate(self.storage())
        smem = {
            name: getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner)
            for name, layout in self.tiles().items()
        }
        if self.backward:
            smem["statistics"] = storage.statistics.get_tensor(statistics_layout(c.chunk, c.stages))
        return SimpleNamespace(**smem, barriers=storage.barriers.data_ptr())

    @cute.jit
    def run(self, loads, outputs, scale, tokens, heads):
        """The device entry's body: allocate, then hand each warp its role."""
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for source in loads:
                cpasync.prefetch_descriptor(source.atom)
        smem = self.allocate()
        pipe = sync.load_pipeline(smem.barriers, c.stages, self.consumer_warps, c.tile_bytes)
        block = cute.arch.block_idx()[0]
        at = SimpleNamespace(
            head=block % heads,
            batch=block // heads,
            tokens=tokens,
            chunks=cute.ceil_div(tokens, c.chunk),
            scale=scale,
        )
        if warp < 4:
            cute.arch.setmaxregister_decrease(c.producer_registers)
            if warp == 0:
                self.load(loads, outputs, smem, pipe, at)
            else:
                self.help(outputs, smem, pipe, at, warp)
        else:
            if warp < 8:
                cute.arch.setmaxregister_increase(c.state_registers)
                self.carry_state(smem, pipe, at)
            else:
                cute.arch.setmaxregister_increase(c.token_registers)
                self.take_chunks(outputs, smem, pipe, at)

    def chunk_of(self, at, step):
        """The chunk taken at step `step` of the scan."""
        return at.chunks - 1 - step if self.backward else step

    @cute.jit
    def load(self, loads, outputs, smem, pipe, at):
        """Warp 0: one stage a chunk, the inputs and in the reverse scan r, h on one mbarrier."""
        c = self.config
        sides = [
            (source.atom, *tma_partition(source, getattr(smem, name), self.tile_shape(name), at.head, at.batch))
            for source, name in zip(loads, self.inputs, strict=True)
        ]
        if cutlass.const_expr(self.backward):
            rows = outputs.statistics
            sides.append((rows.atom, *tma_partition_statistics(rows, smem.statistics, c.chunk, at.head, at.batch)))
            cute.arch.griddepcontrol_wait()  # r and h: the forward scan may still be running
        else:
            cute.arch.griddepcontrol_launch_dependents()
        stage = sync.producer_state(c.stages)
        for step in cutlass.range(at.chunks, unroll=1):
            chunk = self.chunk_of(at, step)
            pipe.producer_acquire(stage)
            barrier = pipe.producer_get_barrier(stage)
            for atom, shared, source in sides:
                cute.copy(atom, source[None, chunk], shared[None, stage.index], tma_bar_ptr=barrier)
            stage.advance()

    @cute.jit
    def help(self, outputs, smem, pipe, at, warp):
        """Warps 1 to 3: nothing, unless the pass has work for them."""

    @cute.jit
    def carry_state(self, smem, pipe, at):
        """The state warpgroup: publish the state before the first chunk (zero), then absorb a chunk and publish, and so on.

        The last chunk is not absorbed: nobody asks for the state behind it.
        """
        c = self.config
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        g = self.state_parts(smem, thread)
        for block in g.state:
            block.fill(0.0)
        g.gram.fill(0.0)
        write_ones(SwizzledTile(smem.ones.iterator.toint(), c.chunk, c.padded_key_dim), thread, c.chunk)
        g.normaliser.clear(thread)
        sync.wait(Barrier.STATE, 0, WARPGROUP)
        self.publish(g, at, Int32(0))
        ahead = c.feature_tiles == 2
        stage = sync.consumer_state(c.stages)
        if cutlass.const_expr(ahead):
            pipe.consumer_wait(stage)
            self.build_features(g, at, stage.index, 0)
        for step in cutlass.range(at.chunks - 1, unroll=1):
            tile = step % 2 if cutlass.const_expr(ahead) else 0
            if cutlass.const_expr(not ahead):
                pipe.consumer_wait(stage)
                sync.wait(Barrier.STATE, 0, WARPGROUP)  # every warp is done with the product that reads the only tile
                self.build_features(g, at, stage.index, tile)
            self.issue_update(g, stage.index, tile)
            if cutlass.const_expr(ahead):
                upcoming = stage.clone()
                upcoming.advance()
                pipe.consumer_wait(upcoming)
                self.build_features(g, at, upcoming.index, 1 - tile)
            self.publish(g, at, (step + 1) % 2)
            pipe.consumer_release(stage)
            stage.advance()

    def state_parts(self, smem, thread):
        """Operands, accumulators and tiles of the state warpgroup."""
        c = self.config
        rows, values = (smem.q, smem.do) if self.backward else (smem.k, smem.v)
        panels = cute.flat_divide(values, (c.chunk, 64))  # (C, 64, 1, V / 64, stage)
        updates = [
            Product(c.features, panels[None, None, 0, block, None], smem.phi, a_transposed=True, b_transposed=True)
            for block in range(c.value_dim // 64)
        ]
        normaliser = Normaliser(smem.gram, rows)
        return SimpleNamespace(
            thread=thread,
            updates=updates,  # S^T (V x F) += x^T (V x C) phi (C x F), 64 rows each
            normaliser=normaliser,  # G += y^T y
            state=[update.accumulator() for update in updates],
            gram=normaliser.update.accumulator(),
            state_tile=SwizzledTile(smem.state.iterator.toint(), c.value_dim, c.features),
            phi_tile=SwizzledTile(smem.phi.iterator.toint(), c.chunk, c.features),
            rows=SwizzledTile(rows.iterator.toint(), c.chunk, c.padded_key_dim),
            statistics=smem.statistics.iterator.toint() if self.backward else None,
        )

    def chunk_rows(self, g, stage):
        """The state's row tile (k or q) and the address of its (r, h), in `stage`."""
        c = self.config
        rows = g.rows.at(stage * (2 * c.chunk * c.padded_key_dim))
        return rows, g.statistics + stage * (8 * c.chunk) if self.backward else None

    def build_features(self, g, at, stage, tile):
        """phi of the chunk in `stage` into feature tile `tile`."""
        c, thread = self.config, recompute(g.thread)
        rows, statistics = self.chunk_rows(g, stage)
        target = g.phi_tile.at(tile * (2 * c.chunk * c.features))
        products = self.state_products(at, statistics, thread % c.chunk)
        write_features(rows, target, thread, c.key_dim, c.chunk, products)
        sync.publish()

    def issue_update(self, g, stage, tile):
        """S^T += x^T phi and G += y^T y over the chunk in `stage`, once all warps have written feature tile `tile`.

        Passing the barrier also says that every warp has finished the product before this one: the other tile is free.
        """
        c, gram = self.config, g.normaliser.update
        rows, statistics = self.chunk_rows(g, stage)
        operand = gram_operand(rows, recompute(g.thread), c.chunk, statistics)
        sync.wait(Barrier.STATE, 0, WARPGROUP)
        warpgroup.fence()
        gram.issue(g.gram, k_steps(operand), k_steps(gram.b, stage), accumulate=True, commit=False)
        for update, block in zip(g.updates, g.state, strict=True):
            update.issue(block, k_steps(update.a, stage), k_steps(update.b, tile), accumulate=True)

    def publish(self, g, at, buf):
        """Copies of the state and the normaliser for the chunk of parity `buf`, once its buffer is free: each block of 64
        rows as soon as its own product is done, while the next one's still runs."""
        c, thread = self.config, recompute(g.thread)
        sync.wait(Barrier.STATE_FREE, buf, 2 * WARPGROUP)
        tile = g.state_tile.at(buf * (2 * c.value_dim * c.features))
        for number, block in enumerate(g.state):
            warpgroup.wait_group(len(g.state) - 1 - number)
            publish_state(block, tile, 64 * number, thread, c.features)
            if number == 0:
                g.normaliser.publish(g.gram, at.scale, buf, thread)
        sync.publish()
        sync.arrive(Barrier.STATE_FULL, buf, 2 * WARPGROUP)

    @cute.jit
    def take_chunks(self, outputs, smem, pipe, at):
        """A token warpgroup: every other chunk, from the stage and the state copy of its parity."""
        c = self.config
        thread = cute.arch.thread_idx()[0] - 2 * WARPGROUP
        parity = cute.arch.make_warp_uniform(thread // WARPGROUP)
        parts = self.token_parts(smem, parity)
        mine = (at.chunks - parity + 1) // 2
        stage = sync.consumer_state(c.stages)
        if parity == 1:
            stage.advance()
        if mine > 0:
            sync.arrive(Barrier.STATE_FREE, parity, 2 * WARPGROUP)
        for turn in cutlass.range(mine, unroll=1):
            chunk = self.chunk_of(at, 2 * turn + parity)
            g = self.placed(parts, thread % WARPGROUP)
            pipe.consumer_wait(stage)
            work = self.token_products(g, at, chunk, stage.index)
            if turn + 1 < mine:
                sync.arrive(Barrier.STATE_FREE, parity, 2 * WARPGROUP)
            g = self.placed(parts, thread % WARPGROUP)
            rows = self.own_rows(g, stage.index)
            pipe.consumer_release(stage)
            stage.advance()
            stage.advance()
            results = self.token_adjoint(g, at, chunk, work, rows)
            self.write_rows(outputs, g, at, chunk, results)

    def own_rows(self, g, stage):
        """The rotated rows (q, in the reverse scan k) of this thread's two tokens."""
        c = self.config
        tile = g.own.at(stage * (2 * c.chunk * c.padded_key_dim))
        return [load_rotated(tile, g.row + 8 * half, g.quad_lane, c.key_dim) for half in range(2)]

    def placed(self, parts, thread):
        """The parts with this thread's place in a 64-row tile: its lane, its lane in the quad, its first row."""
        thread = recompute(thread)
        lane = thread % 32
        return SimpleNamespace(**vars(parts), lane=lane, quad_lane=lane % 4, row=16 * (thread // 32) + lane // 4)
