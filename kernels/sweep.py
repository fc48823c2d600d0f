"""The backward at K = 8 in one sweep over the chunks, from the last to the first, behind a pass that reads k and v alone.

Two scans read q, k, v and do twice, and at K = 8 that is what bounds them. Here the first pass (sweep_state.py) leaves the
state S = sum phi(k) v^T before the last chunk, and the sweep takes each chunk once: S is rewound by what the chunk before adds,
and dS = sum (r phi(q)) do^T grows. What fp32 rounds there would add up, so S is taken from memory again before the last of
every CHECKPOINT chunks, and before the first it is zero. Later tokens up to the next of these reach dq in its last bits.
Per chunk, queries as rows (i), keys as columns (j <= i), u = (1 + s) / sqrt 2 and A = u^2 + 1/2:

    (1) s   = q k^T                 (2) dov = do v^T        (3) Y = do S^T        (4) Z = sum k + scale G q
    r, h from the row sums of (1) to (4), as in the forward scan; ds = (r dov + h) (1 + s)
    (5) dq  = ds k, then scale (dq + r adjoint(Y) + h Z)
    (6) dk  = ds^T q                (7) dv  = (r A)^T do    with ds and r A from shared memory
    (8) dk += scale G_h k + g_h     (9) dv += psi(k) dS     (10) W = v dS^T, all three as in the reverse scan

The roles are those of every scan (scan.py), and

    warps 1 and 2     features of the keys, for rewinding
    warp 3            both normalisers: that before the chunk from memory, that of the queries behind it from q, r and h

    buffer            writer              reader
    sBeforeState      state warpgroup     (3)                               BEFORE_FULL / FEATURES
    sBeforeGram       warp 3              (4)                               BEFORE_FULL / ROWS_FULL
    sGram             warp 3              (8)                               STATE_FULL / STATE_FREE
    sStatistics       token warpgroups    warp 3                            ROWS_FULL / BEFORE_FULL
    sPhi 0            warps 1 and 2       rewinding                         KEYS_FULL / KEYS_FREE
    sPhi 1, 2         token warpgroups    dS                                FEATURES / BEFORE_FULL
    sStaged           token warpgroups    (6), (7), then TMA stores of dv   WEIGHTS
"""

import operator
from types import SimpleNamespace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.math import fma
from cutlass.cute.nvgpu import warpgroup

from .blocks import sync
from .blocks.gemm import Product, k_steps, register_operand
from .blocks.inter import add_inter
from .blocks.normaliser import Normaliser
from .blocks.ptx import ldg64, lds64, pack2, pick, prefetch_l2, recompute, sts64, unpack
from .blocks.state import load_state, publish_state
from .blocks.sync import WARP, WARPGROUP, Barrier
from .blocks.taylor import ExactProducts, own_columns, scaled_phi_words, store_own, write_features
from .blocks.tiles import STORED, SwizzledTile, TmaTensor, smem_layout, store_warp_rows, store_words, tma_store
from .forward_scan import ROOT_HALF, ROOT_TWO, ForwardScan
from .reverse_scan import KeyTokens
from .sweep_state import WholeSequences

BUILDERS = WARPGROUP + 2 * WARP  # of the features of the keys, which the state warpgroup multiplies
PUBLISHERS = 2 * WARPGROUP + WARP  # of what the state warpgroup and warp 3 publish for a token warpgroup


class Outputs(NamedTuple):
    """dq, dk (B, T, H, K) and dv (B, T, H, V), bf16."""

    dq: cute.Tensor
    dk: cute.Tensor
    dv: TmaTensor


class Sweep(WholeSequences, KeyTokens):
    reads_again = False
    issue_inter = ForwardScan.issue_inter
    statistics = ForwardScan.statistics
    state_threads = PUBLISHERS
    before_barrier, before_threads = Barrier.BEFORE_FULL, PUBLISHERS
    consumer_warps = 9  # warp 3 too
    inputs = ("k", "v", "q", "do")  # the state is rewound with k and v, so they come first, on an mbarrier of their own

    def outputs(self, tensors):
        return Outputs(tensors.dq, tensors.dk, tma_store(tensors.dv, smem_layout(STORED), STORED))

    def tiles(self) -> dict:
        """Beside the tiles of every scan, those of the state before the chunk, and ds and r A of both token warpgroups."""
        c = self.config
        before = {f"before_{name}": layout for name, layout in self.published_tiles().items() if name != "ones"}
        return super().tiles() | before | {"staged": smem_layout((c.chunk, 64), 2 * c.token_warpgroups)}

    @property
    def ring_bytes(self) -> int:
        """q and do; k and v have as many."""
        return self.config.tile_bytes // 2

    def set_up_barriers(self, smem):
        with cute.arch.elect_one():
            for stage in range(self.config.stages):
                cute.arch.mbarrier_init(self.keys_barrier(smem, stage), 1)
        cute.arch.mbarrier_init_fence()

    def keys_barrier(self, smem, stage):
        """On which k and v of a stage arrive."""
        return smem.barriers + (2 * self.config.stages + stage)

    def full_barriers(self, smem, pipe, stage, sides):
        keys, queries = self.keys_barrier(smem, stage.index), pipe.producer_get_barrier(stage)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(keys, self.ring_bytes)
        return keys, keys, queries, queries

    def await_keys(self, smem, stage):
        cute.arch.mbarrier_wait(self.keys_barrier(smem, stage.index), stage.phase)

    def await_chunk(self, g, pipe, stage):
        self.await_keys(g, stage)
        pipe.consumer_wait(stage)

    @property
    def row_buffers(self) -> int:
        return self.config.token_warpgroups

    # ---- warps 1 to 3 ----

    @cute.jit
    def help(self, outputs, smem, pipe, problem, warp):
        """Warp 3 publishes the normalisers, warps 1 and 2 build the features of the keys."""
        at = self.place(problem, smem)
        for number in cutlass.range(at.pieces, unroll=1):
            p = self.piece(at, number)
            if warp == 3:
                self.publish_normalisers(smem, pipe, p)
            else:
                self.build_keys(smem, pipe, p)

    @cute.jit
    def build_keys(self, smem, pipe, p):
        """phi(k) of every chunk but the first that is taken, once it is loaded and the tile has been multiplied. The first is
        waited for too: loads overtake each other, and whoever has not seen one round of a stage would take it for the next."""
        stage = sync.consumer_state(self.config.stages, p.position)
        self.await_keys(smem, stage)
        for turn in cutlass.range(p.count - 1, unroll=1):
            stage = sync.advanced(stage, 1)
            self.await_keys(smem, stage)
            if turn > 0:
                sync.wait(Barrier.KEYS_FREE, 0, BUILDERS)
            self.write_keys(smem, stage.index, recompute(cute.arch.thread_idx()[0] - WARP, 2 * WARP))
            sync.publish()
            sync.arrive(Barrier.KEYS_FULL, 0, BUILDERS)

    def write_keys(self, smem, stage, row):
        """Both parts, by a thread for each row."""
        c = self.config
        k = SwizzledTile(smem.k.iterator.toint(), c.chunk, c.padded_key_dim).buffer(stage)
        target = SwizzledTile(smem.phi.iterator.toint(), c.chunk, c.features)
        for part in range(2):
            write_features(k, target, row, part, c.key_dim, ExactProducts)

    @cute.jit
    def publish_normalisers(self, smem, pipe, p):
        """For each chunk the normaliser before it, from memory, and that of the queries behind it."""
        lane, groups = cute.arch.thread_idx()[0] % 32, self.config.token_warpgroups
        self.clear_normalisers(smem, lane)
        total = cute.make_rmem_tensor(4, Float32)
        total.fill(0.0)
        self.publish_keys(smem, p, self.load_normaliser(p, p.chunk, lane), Int32(0), lane)
        before = self.load_normaliser(p, cutlass.max(p.chunk - 1, 0), lane)
        sync.wait(Barrier.STATE_FREE, 0, PUBLISHERS)
        sync.arrive(Barrier.STATE_FULL, 0, PUBLISHERS)
        stage = sync.consumer_state(self.config.stages, p.position)
        for turn in cutlass.range(p.count, unroll=1):
            buf = (turn + 1) % groups
            if turn + 1 < p.count:
                self.fetch_checkpoint(p, p.chunk - turn - 2, lane)
                self.publish_keys(smem, p, before, buf, lane)
                before = self.load_normaliser(p, cutlass.max(p.chunk - turn - 2, 0), lane)  # 1000 cycles ahead
            sync.wait(Barrier.ROWS_FULL, turn % groups, WARP + WARPGROUP)
            statistics = smem.statistics.iterator.toint() + turn % groups * (8 * self.config.chunk)
            self.add_gram_of(total, smem.q, stage.index, lane, statistics)
            if turn + 1 < p.count:
                sync.wait(Barrier.STATE_FREE, buf, PUBLISHERS)
                self.publish_queries(smem, p, total, buf, lane)
            pipe.consumer_release(stage)  # behind the stores of what was read, as in the first pass
            stage = sync.advanced(stage, 1)

    @cute.jit
    def fetch_checkpoint(self, p, chunk, lane):
        """To the L2, if the state warpgroup will load the state before `chunk`: it would wait 1000 cycles for it."""
        if (lane == 0) & self.starts_here(chunk):
            prefetch_l2(self.checkpoint(p, chunk, p.chunks), 4 * self.config.value_dim * self.config.features)

    def clear_normalisers(self, smem, lane):
        for gram in (smem.before_gram, smem.gram):
            Normaliser(gram).clear(lane, WARP)
        cute.arch.sync_warp()
        sync.publish()

    def publish_keys(self, smem, p, values, buf, lane):
        Normaliser(smem.before_gram).publish_small(values[:2], values[2:], p.scale, buf, lane)
        sync.publish()
        sync.arrive(Barrier.BEFORE_FULL, buf, PUBLISHERS)

    def publish_queries(self, smem, p, total, buf, lane):
        values = [total[i] for i in range(4)]
        Normaliser(smem.gram).publish_small(values[:2], values[2:], p.scale, buf, lane)
        sync.publish()
        sync.arrive(Barrier.STATE_FULL, buf, PUBLISHERS)

    def load_normaliser(self, p, chunk, lane):
        """This lane's two values of G and, in the first four lanes, of the sums."""
        address = self.normaliser_before(p, chunk, p.chunks)
        return [*ldg64(address + 8 * Int64(lane)), *ldg64(address + 256 + 8 * Int64(lane % 4))]

    # ---- the state warpgroup ----

    def state_parts(self, smem, thread):
        """Those of dS, and of S as `before`."""
        c = self.config
        parts = super().state_parts(smem, thread)
        updates = self.update_products(smem, smem.v)
        parts.barriers = smem.barriers
        parts.before = SimpleNamespace(
            updates=updates,
            added=[update.accumulator() for update in updates],
            state=[update.accumulator() for update in updates],
            state_tile=SwizzledTile(smem.before_state.iterator.toint(), c.value_dim, c.features),
        )
        return parts

    def start_normaliser(self, g, smem):
        """Warp 3 does, but for the ones."""
        self.set_ones(g, smem)

    @cute.jit
    def carry_piece(self, g, pipe, p):
        """Publish both states of the last chunk; then, chunk by chunk, S of the next one, and dS of it once r and h of this one
        are there."""
        c = self.config
        for block in g.state:
            block.fill(0.0)
        self.load_before(g, p, p.chunk)
        sync.wait(Barrier.STATE, 0, WARPGROUP)
        self.publish_before(g, Int32(0))
        self.publish(g, p, Int32(0))
        stage = sync.consumer_state(c.stages, p.position)
        for turn in cutlass.range(p.count - 1, unroll=1):
            upcoming = sync.advanced(stage, 1)
            self.await_keys(g, upcoming)
            buf = (turn + 1) % c.token_warpgroups
            self.rewind(g, p, p.chunk - turn - 1, upcoming.index)
            if turn + 2 < p.count:
                sync.arrive(Barrier.KEYS_FREE, 0, BUILDERS)
            self.publish_before(g, buf)
            sync.wait(Barrier.FEATURES, turn % c.token_warpgroups, 2 * WARPGROUP)
            self.absorb_queries(g, p, stage.index, turn % c.token_warpgroups)
            self.publish(g, p, buf)
            pipe.consumer_release(stage)
            stage = upcoming
        sync.wait(Barrier.FEATURES, (p.count - 1) % c.token_warpgroups, 2 * WARPGROUP)
        pipe.consumer_release(stage)

    def load_before(self, g, p, chunk):
        """The state before `chunk` from memory; none before the first."""
        load_state(g.before.state, self.checkpoint(p, chunk, p.chunks), g.thread, chunk)

    @cute.jit
    def rewind(self, g, p, chunk, stage):
        """The state before `chunk`, which is in `stage`, from that behind it; or from memory, where it is known exactly."""
        sync.wait(Barrier.KEYS_FULL, 0, BUILDERS)
        if (chunk == 0) | self.starts_here(chunk):
            self.load_before(g, p, chunk)
        else:
            self.combine_apart(operator.sub, g.before, stage, 0)

    def publish_before(self, g, buf):
        """A copy of S; the buffer is free, since r and h of its last chunk are there."""
        c, before, thread = self.config, g.before, recompute(g.thread, WARPGROUP)
        tile = before.state_tile.buffer(buf)
        for number, block in enumerate(before.state):
            publish_state(block, tile, 64 * number, thread, c.features)
        sync.publish()
        sync.arrive(Barrier.BEFORE_FULL, buf, PUBLISHERS)

    def absorb_queries(self, g, p, stage, group):
        """dS takes up the chunk in `stage`, whose features token warpgroup `group` has left."""
        warpgroup.fence()
        for update, block in zip(g.updates, g.state, strict=True):
            update.issue(block, k_steps(update.a, stage), k_steps(update.b, 1 + group), accumulate=True)

    def publish_normaliser(self, g, at, buf, thread):
        """Warp 3 does."""

    # ---- a token warpgroup ----

    def token_parts(self, smem, group):
        """Those of the reverse scan with ds and r A from shared memory, and those of the forward scan as `queries`."""
        c = self.config
        parts = super().token_parts(smem, group)
        parts.rows = Product(16, smem.staged, smem.q, a_transposed=True, b_transposed=True)  # (6)
        parts.intra = Product(c.value_dim, smem.staged, smem.do, a_transposed=True, b_transposed=True)  # (7)
        parts.staged_tiles = smem.staged
        parts.staged = SwizzledTile(smem.staged.iterator.toint(), c.chunk, 64)
        before = SimpleNamespace(**(vars(smem) | {"state": smem.before_state, "gram": smem.before_gram}))
        parts.barriers = smem.barriers
        parts.phi = SwizzledTile(smem.phi.iterator.toint(), c.chunk, c.features)
        parts.queries = ForwardScan.token_parts(self, before, group)
        return parts

    def placed(self, parts, thread):
        """With the number of the warpgroup for addresses, which would else wait in registers for the whole loop."""
        g = super().placed(parts, thread)
        g.place = recompute(g.group)
        return g

    def token_products(self, g, at, chunk, stage):
        """Products (1) to (10) of one chunk; dv goes to the staging tiles."""
        c = self.config
        work = self.query_products(g, at, chunk, stage)
        dk, dv, rows = g.rows.accumulator(), g.intra.accumulator(), self.own_rows(g, stage)
        warpgroup.fence()
        g.rows.issue(dk, k_steps(g.rows.a, 2 * g.group + 1), k_steps(g.rows.b, stage), commit=False)
        g.intra.issue(dv, k_steps(g.intra.a, 2 * g.group), k_steps(g.intra.b, stage))
        warpgroup.wait_group(1)
        dq = [self.finish_dq(at, work, half) for half in range(2)]
        sync.wait(Barrier.STATE_FULL, g.group, PUBLISHERS)
        w = g.adjoint.accumulator()
        warpgroup.fence()
        g.adjoint.issue(w, k_steps(g.adjoint.a, stage), k_steps(g.adjoint.b, g.group), commit=False)
        g.normaliser.issue_matrix(dk, stage, g.group, accumulate=True)
        g.normaliser.issue_sums(dk, g.group)
        add_inter(g.inter, dv, rows, g.quad_lane, c.key_dim, g.group)
        warpgroup.wait_group(0)
        self.stage_dv(g, [pack2(dv[2 * i], dv[2 * i + 1]) for i in range(c.value_dim // 4)])
        return SimpleNamespace(dq=dq, dk=dk, w=w, rows=rows)

    def query_products(self, g, at, chunk, stage):
        """(1) to (5); r, h and the features of the queries go to the state warpgroup as soon as they are known, ds and r A to
        the staging tiles."""
        f = SimpleNamespace(**vars(g.queries), lane=g.lane, quad_lane=g.quad_lane, row=g.row)
        s, dov = f.scores.accumulator(), f.values.accumulator()
        warpgroup.fence()
        f.scores.issue(s, k_steps(f.scores.a, stage), k_steps(f.scores.b, stage), commit=False)
        f.values.issue(dov, k_steps(f.values.a, stage), k_steps(f.values.b, stage))
        work = SimpleNamespace(**self.issue_inter(f, stage), dq=f.rows.accumulator())
        warpgroup.wait_group(1)
        a, work.den, work.nd = self.row_sums(f, at, s, dov)
        warpgroup.wait_group(0)
        rows = self.own_rows(f, stage)
        work.results = [self.statistics(f, at, chunk, work, half, unpack(rows[half].words)) for half in range(2)]
        again = self.hand_over(g, at, rows, work.results)
        a, ds = self.weights(a, s, dov, again)
        self.stage_weights(g, a[1], ds[1])
        warpgroup.fence()
        f.rows.issue(work.dq, k_steps(ds[0]), k_steps(f.rows.b, stage))
        sync.publish()
        sync.wait(Barrier.WEIGHTS, g.group, WARPGROUP)
        return work

    def hand_over(self, g, at, rows, results):
        """r, h and r phi(scale q) to the state warpgroup, which also says that the copy of S has been read. Returns r and h as
        they were stored: what is computed from them then cannot be moved in front of the barrier."""
        c = self.config
        slots = [scaled_phi_words(row, g.quad_lane, c.key_dim, at.scale, r) for row, (r, *_) in zip(rows, results, strict=True)]
        tile = g.phi.buffer(1 + g.place)
        store_words(tile, g.row - g.lane // 4, g.lane, [word for pair in zip(*slots, strict=True) for word in pair])
        sync.publish()
        address = g.statistics + g.place * (8 * c.chunk) + 8 * g.row
        self.write_statistics(address, g.quad_lane, results)
        sync.arrive(Barrier.FEATURES, g.group, 2 * WARPGROUP)
        sync.arrive(Barrier.ROWS_FULL, g.group, WARP + WARPGROUP)
        cute.arch.sync_warp()
        return [lds64(address + 64 * half) for half in range(2)]

    @cute.jit
    def write_statistics(self, address, quad_lane, results):
        if quad_lane == 0:
            for half in cutlass.range_constexpr(2):
                sts64(address + 64 * half, results[half][0], results[half][1])

    def row_sums(self, g, at, s, dov):
        """A, and this lane's part of den and nd, the row sums of A and of A dov; leaves u in s. A and u are 0 where j > i."""
        root, first = at.scale * ROOT_HALF, g.row - 2 * g.quad_lane
        a = cute.make_rmem_tensor(cute.size(s), Float32)
        sums = cute.make_rmem_tensor((2, 2), Float32)
        sums.fill(0.0)
        for eight in range(self.config.chunk // 8):
            for half in range(2):
                for c in range(2):
                    i, keep = c + 2 * half + 4 * eight, 8 * eight + c - 8 * half <= first
                    s[i] = pick(keep, fma(s[i], root, ROOT_HALF), 0.0)
                    a[i] = pick(keep, fma(s[i], s[i], 0.5), 0.0)
                    sums[half, 0] = sums[half, 0] + a[i]
                    sums[half, 1] = fma(a[i], dov[i], sums[half, 1])
        return a, *([sums[half, i] for half in range(2)] for i in range(2))

    def weights(self, a, u, dov, results):
        """r A and ds as bf16, each as an A operand and its words."""
        operands = [register_operand(self.config.chunk // 16) for _ in range(2)]
        for half in range(2):
            r, h = results[half]
            root_r, root_h = ROOT_TWO * r, ROOT_TWO * h
            for i in range(2 * half, cute.size(a), 4):
                pairs = [(a[j] * r, fma(dov[j], root_r, root_h) * u[j]) for j in (i, i + 1)]
                for (_, words), values in zip(operands, zip(*pairs, strict=True), strict=True):
                    words[i // 2] = pack2(*values)
        return operands

    def stage_weights(self, g, *operands):
        """r A and ds to shared memory, for products that take them transposed."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # dv of the chunk before has been read
        cute.arch.sync_warp()
        for number, words in enumerate(operands):
            self.stage_words(g, number, [words[i] for i in range(cute.size(words))])

    def stage_dv(self, g, packed):
        """dv as bf16 where ds and r A were, once all four warps are through with them."""
        sync.wait(Barrier.WEIGHTS, g.group, WARPGROUP)
        for number in range(self.config.value_dim // 64):
            self.stage_words(g, number, packed[16 * number : 16 * (number + 1)])

    def stage_words(self, g, number: int, words):
        """64 columns into staging tile `number` of the warpgroup's two."""
        tile = g.staged.buffer(2 * g.place + number)
        store_words(tile, g.row - g.lane // 4, g.lane, words)

    def finish_dq(self, at, work, half):
        """dq of the own entries of row `half`."""
        r, h, inter = work.results[half]
        columns = own_columns(half, self.config.key_dim)
        return [(fma(r, y, work.dq[j]) + h * work.z[j]) * at.scale for j, y in zip(columns, inter, strict=True)]

    def token_adjoint(self, g, at, chunk, work, rows):
        """dq and dk of the own entries of both rows."""
        return work.dq, super().token_adjoint(g, at, chunk, work, rows)

    @cute.jit
    def write_rows(self, outputs, g, at, chunk, results):
        """dq and dk of rows before T; dv through shared memory, where ds and r A were."""
        self.store_dv(outputs, g, at, chunk)
        for half in cutlass.range_constexpr(2):
            row = chunk * self.config.chunk + g.row + 8 * half
            batch, head = self.sequence(at)
            if row < at.tokens:
                for tensor, values in zip((outputs.dq, outputs.dk), results, strict=True):
                    store_own(tensor[batch, row, head, None], g.quad_lane, values[half])

    def store_dv(self, outputs, g, at, chunk):
        """The warp's 16 rows of dv by TMA, which drops those past T. Published only here, where the writes have long ended: a
        fence behind them would wait 100 cycles."""
        sync.publish()
        cute.arch.sync_warp()
        warp = cute.arch.make_warp_uniform(g.row // 16)
        block = chunk * (self.config.chunk // 16) + warp
        places = [(warp, 0, 2 * g.group + panel) for panel in range(self.config.value_dim // 64)]
        store_warp_rows(outputs.dv, g.staged_tiles, places, block, block * 16 < at.tokens, at.head, at.batch)

    def finish(self, at, group, thread):
        """The last stores must have read shared memory before the CTA ends."""
        cute.arch.cp_async_bulk_wait_group(0, read=False)
