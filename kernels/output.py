"""Output: chunks in order, state S = sum phi(scale k) v^T, out come o and the row normaliser r = 1/den.

Per chunk, queries as rows (i), keys as columns (j <= i), A = ((1 + s)^2 + 1)/2 rounded to bf16:

    (1) s    = scale q k^T         (2) acc  = A v
    (3) acc += psi(q) S            (4) Z    = 2 sum k + scale G q
    den = sum_j A + psi(scale q).z + 1e-6        o = acc / den

scale rides on the features of the state, so psi(q) is one bf16 rounding of an exact product. o is divided by the sum of the
rounded A, of which it is then exactly a mean: at T = 1 it is v, and everywhere its error is 5 to 15% smaller. r is that of
the unrounded sum.
"""

from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.math import fma
from cutlass.cute.nvgpu import warpgroup

from .blocks import sync
from .blocks.gemm import Product, k_steps, register_operand
from .blocks.inter import add_inter
from .blocks.normaliser import NormaliserProducts
from .blocks.ptx import pack2, pick, unpack, unpack2
from .blocks.sync import WARPGROUP, Barrier
from .blocks.taylor import PowerProducts, ScaledProducts, own_columns, own_entries, quad_sum, scales_exactly
from .blocks.tiles import STORED, SwizzledTile, TmaTensor, smem_layout, store_warp_rows, store_words, tma_store
from .forward_scan import DENOMINATOR_EPSILON
from .scan import Scan


class Outputs(NamedTuple):
    """What the pass writes: o (B, T, H, V) bf16 and r (B, H, T) fp32."""

    o: TmaTensor
    r: cute.Tensor


class OutputScan(Scan):
    inputs = ("q", "k", "v")
    backward = False
    consumer_warps = 8
    times_sums = 2.0  # (4), in the registers of one accumulator: two would serialise the products

    def outputs(self, tensors):
        return Outputs(tma_store(tensors.o, smem_layout(STORED), STORED), tensors.r)

    def tiles(self) -> dict:
        """Beside the tiles of every pass, one of o for each token warpgroup."""
        c = self.config
        return super().tiles() | {"o": smem_layout((c.chunk, c.value_dim), c.token_warpgroups)}

    # ---- the chunk's own tokens ----

    @cute.jit
    def build_features(self, g, at, stage, tile):
        """By half the instructions where scale allows it."""
        if scales_exactly(at.scale):
            self.write_chunk(g, at, stage, tile, lambda *_: partial(PowerProducts, scale=at.scale))
        else:
            self.write_chunk(g, at, stage, tile, lambda *_: partial(ScaledProducts, scale=at.scale, weight=1.0))

    def token_parts(self, smem, group):
        c = self.config
        tile = SwizzledTile(smem.o.iterator.toint(), c.chunk, c.value_dim)
        return SimpleNamespace(
            group=group,
            scores=Product(c.chunk, smem.q, smem.k),  # (1)
            intra=Product(c.value_dim, b=smem.v, b_transposed=True),  # (2)
            inter=Product(c.value_dim, b=smem.state),  # (3)
            normaliser=NormaliserProducts(smem.q, smem.ones, smem.gram),  # (4)
            own=SwizzledTile(smem.q.iterator.toint(), c.chunk, c.padded_key_dim),
            staged=smem.o,
            tile=tile.buffer(group),
        )

    def finish(self, at, group, thread):
        """The last stores must have read shared memory before the CTA ends."""
        cute.arch.cp_async_bulk_wait_group(0, read=False)

    def token_products(self, g, at, chunk, stage):
        """Products (1) to (4) of one chunk, with the chunk's own row sums."""
        c = self.config
        s = g.scores.accumulator()
        warpgroup.fence()
        g.scores.issue(s, k_steps(g.scores.a, stage), k_steps(g.scores.b, stage))
        warpgroup.wait_group(0)
        a, den, rounded = self.weights(g, at, s)

        acc, z = g.intra.accumulator(), g.normaliser.matrix.accumulator()
        warpgroup.fence()
        g.intra.issue(acc, k_steps(a), k_steps(g.intra.b, stage))
        sync.wait(Barrier.STATE_FULL, g.group, 2 * WARPGROUP)
        g.normaliser.issue_matrix(z, stage, g.group)
        g.normaliser.issue_sums(z, g.group)
        add_inter(g.inter, acc, self.own_rows(g, stage), g.quad_lane, c.key_dim, g.group)
        warpgroup.wait_group(0)
        return SimpleNamespace(acc=acc, den=den, rounded=rounded, z=z)

    def weights(self, g, at, s):
        """A as a bf16 A operand, 0 where j > i, and its row sums before and after that rounding, over the quad."""
        a, words = register_operand(self.config.chunk // 16)
        sums = cute.make_rmem_tensor((2, 2), Float32)
        sums.fill(0.0)
        take = partial(self.weigh_columns, g, at, s, words, sums)
        self.take_column_blocks(g, take, partial(self.clear_columns, [words]))
        return a, *([quad_sum(sums[half, kind]) for half in range(2)] for kind in range(2))

    def weigh_columns(self, g, at, s, words, sums, number: int, diagonal: bool):
        """`weights` of block `number` of the columns, of which the rows see all, or for the block on the diagonal some."""
        eights = self.config.causal_block // 8
        for eight in range(eights * number, eights * (number + 1)):
            for half in range(2):
                pair = []
                for c in range(2):
                    t = fma(s[c + 2 * half + 4 * eight], at.scale, 1.0)
                    weight = fma(t * t, 0.5, 0.5)
                    if diagonal:
                        weight = pick(8 * eight + 2 * g.quad_lane + c <= g.row + 8 * half, weight, 0.0)
                    pair.append(weight)
                word = pack2(*pair)
                words[half + 2 * eight] = word
                for kind, (left, right) in enumerate((pair, unpack2(word))):
                    sums[half, kind] = sums[half, kind] + (left + right)

    def token_adjoint(self, g, at, chunk, work, rows):
        """o as packed bf16 words in accumulator order, and r of both rows."""
        count = Float32(chunk * self.config.chunk) + DENOMINATOR_EPSILON
        inter = [quad_sum(self.behind(at, work.z, half, unpack(rows[half].words))) + count for half in range(2)]
        r = [cute.arch.rcp_approx(own + behind) for own, behind in zip(work.den, inter, strict=True)]
        factor = [cute.arch.rcp_approx(own + behind) for own, behind in zip(work.rounded, inter, strict=True)]
        acc = work.acc
        packed = [pack2(acc[2 * i] * factor[i % 2], acc[2 * i + 1] * factor[i % 2]) for i in range(cute.size(acc) // 2)]
        return packed, r

    def behind(self, at, z, half, q):
        """This lane's part of psi(scale q) . z less the count, from 2 sum k + scale G q."""
        key_dim, total = self.config.key_dim, Float32(0.0)
        for entry, column in zip(own_entries(key_dim), own_columns(half, key_dim), strict=True):
            total = fma(q[entry] * (0.5 * at.scale), z[column], total)
        return total

    @cute.jit
    def write_rows(self, outputs, g, at, chunk, results):
        """r of rows before T; o through shared memory, each warp its own 16 rows, once its last store has read them."""
        c = self.config
        packed, r = results
        for half in cutlass.range_constexpr(2):
            row = chunk * c.chunk + g.row + 8 * half
            if (g.quad_lane == 0) & (row < at.tokens):
                outputs.r[at.batch, at.head, row] = r[half]
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        store_words(g.tile, g.row - g.lane // 4, g.lane, packed)
        sync.publish()
        cute.arch.sync_warp()
        self.store_rows(outputs, g, at, chunk)

    def store_rows(self, outputs, g, at, chunk):
        """The warp's 16 rows of o by TMA, which drops those past T."""
        warp = cute.arch.make_warp_uniform(g.row // 16)
        block = chunk * (self.config.chunk // 16) + warp
        places = [(warp, panel, g.group) for panel in range(self.config.value_dim // 64)]
        store_warp_rows(outputs.o, g.staged, places, block, block * 16 < at.tokens, at.head, at.batch)
