"""Reverse scan: chunks from the last to the first, state dS = sum (r phi(q)) do^T, out come dk and dv.

Per chunk, keys as rows (j), queries as columns (i >= j), t = 1 + s, r and h of the queries from the forward scan:

    (1) s^T = k q^T                (2) dov^T = v do^T
    (3) dk  = ((r dov + h) t)^T q  (4) dv    = (r A)^T do
    (5) dk += scale G_h k + g_h    (6) dv   += psi(k) dS      G_h = sum h q q^T, g_h = sum h q
                                                            over the queries behind the chunk
    (7) W   = v dS^T
    dk = scale dk + adjoint(W)

scale and r ride on the features of the state, so W and (6) need neither, and the rows of q that G_h and g_h are summed from
have weights h / r.
"""

from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.math import fma
from cutlass.cute.nvgpu import cpasync, warpgroup

from .blocks import sync
from .blocks.gemm import Product, k_steps, register_operand
from .blocks.inter import add_inter
from .blocks.normaliser import NormaliserProducts
from .blocks.ptx import float_of, lds128, pack2, pick, pick_word, sts128, unpack
from .blocks.sync import WARP, WARPGROUP, Barrier
from .blocks.taylor import (
    Factor,
    ScaledProducts,
    adjoint,
    linear_entries,
    own_columns,
    row_statistics,
    store_own,
)
from .blocks.tiles import (
    SwizzledTile,
    TmaTensor,
    smem_layout,
    statistics_layout,
    store_words,
    tma_load_statistics,
    tma_store,
)
from .scan import Scan
from .schedule import HandsOn


class Outputs(NamedTuple):
    """statistics (B, H, T padded to chunks, 2) fp32 in; dk (B, T, H, K) and dv (B, T, H, V) bf16 out."""

    statistics: TmaTensor
    dk: cute.Tensor
    dv: TmaTensor


class WeightedRows:
    """Of passes whose features have r in them: the normaliser's product takes rows of q with weights h / r."""

    def tiles(self) -> dict:
        """Beside the others those of the rows, written with the features."""
        c = self.config
        return super().tiles() | {"weighted": smem_layout((c.chunk, c.padded_key_dim), c.feature_tiles)}

    def gram_rows(self, smem):
        return smem.weighted

    def gram_place(self, stage, tile):
        return tile

    def feature_parts(self, smem, thread):
        parts = super().feature_parts(smem, thread)
        parts.weighted = SwizzledTile(smem.weighted.iterator.toint(), self.config.chunk, self.config.padded_key_dim)
        return parts

    def write_weighted(self, g, tile, row, part, words, statistics):
        r, h = row_statistics(statistics, row)
        weight = Factor(pick(r > 0.0, h * cute.arch.rcp_approx(r), 0.0))
        words = [weight.times(word) for word in words]
        if self.config.key_dim == 8:  # both parts have the only eight, and zeros stand behind it
            words = [pick_word(part == 0, word, 0) for word in words]
        sts128(g.weighted.buffer(tile).chunk(row, part), *words)


class KeyTokens(Scan):
    """Base of the passes whose tokens are keys, from the last chunk to the first."""

    backward = True

    def await_inputs(self, at):
        """Behind a forward scan, or the pass before a sweep, they are there."""

    def token_parts(self, smem, group):
        c = self.config
        return SimpleNamespace(
            group=group,
            scores=Product(c.chunk, smem.k, smem.q),  # (1)
            values=Product(c.chunk, smem.v, smem.do),  # (2)
            rows=Product(16, b=smem.q, b_transposed=True),  # (3)
            intra=Product(c.value_dim, b=smem.do, b_transposed=True),  # (4)
            normaliser=NormaliserProducts(smem.k, smem.ones, smem.gram),  # (5)
            inter=Product(c.value_dim, b=smem.state),  # (6)
            adjoint=Product(c.features, smem.v, smem.state, b_transposed=True),  # (7)
            own=SwizzledTile(smem.k.iterator.toint(), c.chunk, c.padded_key_dim),
            v=SwizzledTile(smem.v.iterator.toint(), c.chunk, c.value_dim),
            statistics=smem.statistics.iterator.toint(),
        )

    def token_adjoint(self, g, at, chunk, work, rows):
        """dk of the own entries of both rows."""
        c = self.config
        results = []
        for half in range(2):
            k = unpack(rows[half].words)
            grad = adjoint(work.w, half, k, g.quad_lane, g.lane, c.key_dim)
            linear = linear_entries(work.w, half, c.key_dim)
            dk = [work.dk[column] for column in own_columns(half, c.key_dim)]
            results.append([fma(x, at.scale, y + z) for x, y, z in zip(dk, grad, linear, strict=True)])
        return results


class ReverseScan(WeightedRows, KeyTokens):
    loads_statistics = True
    consumer_warps = 9  # the storing warp too

    def outputs(self, tensors):
        c = self.config
        rows = tma_load_statistics(tensors.statistics, statistics_layout(c.chunk, c.stages), c.chunk)
        return Outputs(rows, tensors.dk, tma_store(tensors.dv, smem_layout((64, 64)), (64, 64)))

    @cute.jit
    def await_statistics(self, at):
        """r and h are there: behind a pass that sums states the forward scan is through."""
        if at.hands_on != HandsOn.SUMS:
            cute.arch.griddepcontrol_wait()
        cute.arch.fence_proxy("async.global")  # TMA reads what ordinary stores wrote

    def state_products(self, at, statistics, row):
        r, _ = row_statistics(statistics, row)
        return partial(ScaledProducts, scale=at.scale, weight=r)

    @cute.jit
    def help(self, outputs, smem, pipe, problem, warp):
        """Warps 1, 2: each stores dv of one token warpgroup from the chunk's v tile, then releases the stage.

        Waiting for the store inside the token warpgroup costs 10% of the pass.
        """
        if warp <= self.config.token_warpgroups:
            at = self.place(problem, smem)
            for number in cutlass.range(at.pieces, unroll=1):
                self.store_piece(outputs, smem, pipe, self.piece(at, number), warp - 1)
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def store_piece(self, outputs, smem, pipe, p, group):
        """dv of the chunks that token warpgroup `group` takes of a piece."""
        c = self.config
        target = cute.local_tile(outputs.dv.tensor[None, None, p.head, p.batch], (64, 64), (None, None))
        source, target = cpasync.tma_partition(
            outputs.dv.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(cute.flat_divide(smem.v, (64, 64)), 0, 2),
            cute.group_modes(target, 0, 2),
        )
        stage = sync.consumer_state(c.stages, p.position + group)
        for turn in cutlass.range(self.turns(p, group), unroll=1):
            chunk = self.chunk_of(p, c.token_warpgroups * turn + group)
            sync.wait(Barrier.STAGED, group, WARPGROUP + WARP)
            for panel in cutlass.range_constexpr(c.value_dim // 64):
                cute.copy(outputs.dv.atom, source[None, 0, panel, stage.index], target[None, chunk, panel])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            pipe.consumer_release(stage)
            stage = sync.advanced(stage, c.token_warpgroups)

    def token_products(self, g, at, chunk, stage):
        """Products (1) to (7) of one chunk; dv leaves through shared memory, dk and W are returned."""
        c = self.config
        s, dov = g.scores.accumulator(), g.values.accumulator()
        warpgroup.fence()
        g.scores.issue(s, k_steps(g.scores.a, stage), k_steps(g.scores.b, stage), commit=False)
        g.values.issue(dov, k_steps(g.values.a, stage), k_steps(g.values.b, stage))
        w = self.issue_adjoint(g, stage) if c.early_inter else None
        warpgroup.wait_group(1 if c.early_inter else 0)
        a, ds = self.weights(g, at, s, dov, g.statistics + stage * (8 * c.chunk))

        dk, dv = g.rows.accumulator(), g.intra.accumulator()
        warpgroup.fence()
        g.rows.issue(dk, k_steps(ds), k_steps(g.rows.b, stage), commit=False)
        g.intra.issue(dv, k_steps(a), k_steps(g.intra.b, stage))
        if not c.early_inter:
            sync.wait(Barrier.STATE_FULL, g.group, 2 * WARPGROUP)
        warpgroup.wait_group(0)

        warpgroup.fence()
        g.normaliser.issue_matrix(dk, stage, g.group, accumulate=True)
        g.normaliser.issue_sums(dk, g.group)
        add_inter(g.inter, dv, self.own_rows(g, stage), g.quad_lane, c.key_dim, g.group)
        warpgroup.wait_group(0)
        packed = [pack2(dv[2 * i], dv[2 * i + 1]) for i in range(c.value_dim // 4)]

        if not c.early_inter:
            w = self.issue_adjoint(g, stage)
            warpgroup.wait_group(0)
        self.stage_dv(g, packed, stage)
        return SimpleNamespace(dk=dk, w=w)

    def issue_adjoint(self, g, stage):
        """Issue (7); with `early_inter` it is the first product to need the state."""
        if self.config.early_inter:
            sync.wait(Barrier.STATE_FULL, g.group, 2 * WARPGROUP)
        w = g.adjoint.accumulator()
        warpgroup.fence()
        g.adjoint.issue(w, k_steps(g.adjoint.a, stage), k_steps(g.adjoint.b, g.group))
        return w

    def weights(self, g, at, s, dov, statistics):
        """(r A)^T and ((r dov + h) t)^T as bf16 A operands, 0 where the query comes before the key."""
        (a, a_words), (ds, ds_words) = (register_operand(self.config.chunk // 16) for _ in range(2))
        take = partial(self.weigh_columns, g, at, s, dov, statistics, a_words, ds_words)
        self.take_column_blocks(g, take, partial(self.clear_columns, [a_words, ds_words]))
        return a, ds

    def weigh_columns(self, g, at, s, dov, statistics, a_words, ds_words, number: int, diagonal: bool):
        """`weights` of block `number` of the columns, of which the rows see all, or for the block on the diagonal some."""
        eights = self.config.causal_block // 8
        for eight in range(eights * number, eights * (number + 1)):
            rh = [float_of(word) for word in lds128(statistics + (8 * eight + 2 * g.quad_lane) * 8)]
            half_r = [0.5 * rh[0], 0.5 * rh[2]]
            for half in range(2):
                pair = []
                for c in range(2):
                    i, r, h = c + 2 * half + 4 * eight, rh[2 * c], rh[2 * c + 1]
                    t = fma(s[i], at.scale, 1.0)
                    weight, adjoint_weight = fma(t, t, 1.0) * half_r[c], fma(dov[i], r, h) * t
                    if diagonal:
                        keep = 8 * eight + 2 * g.quad_lane + c >= g.row + 8 * half
                        weight, adjoint_weight = pick(keep, weight, 0.0), pick(keep, adjoint_weight, 0.0)
                    pair.append((weight, adjoint_weight))
                a_words[half + 2 * eight] = pack2(pair[0][0], pair[1][0])
                ds_words[half + 2 * eight] = pack2(pair[0][1], pair[1][1])

    def stage_dv(self, g, packed, stage):
        """dv as bf16 over the chunk's v tile, which (2) and (7) have read; a helper warp stores it."""
        store_words(g.v.buffer(stage), g.row - g.lane // 4, g.lane, packed)
        sync.publish()
        sync.arrive(Barrier.STAGED, g.group, WARPGROUP + WARP)

    @cute.jit
    def write_rows(self, outputs, g, at, chunk, results):
        """dk of rows before T."""
        for half in cutlass.range_constexpr(2):
            row = chunk * self.config.chunk + g.row + 8 * half
            if row < at.tokens:
                store_own(outputs.dk[at.batch, row, at.head, None], g.quad_lane, results[half])
