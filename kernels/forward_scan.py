"""Forward scan: chunks in order, state S = sum phi(k) v^T, out come dq and the row statistics r = 1/den, h = -nd r^2.

Per chunk, queries as rows (i), keys as columns (j <= i), t = 1 + s:

    (1) s   = q k^T                (2) dov = do v^T
    (3) X   = ((dov - m) t) k      (4) T   = t k          (both over sqrt 2; m: the chunk's own mean of dov, weighted by A)
    (5) Y   = do S^T               (6) Z   = sum k + scale G q
    den = sum_j A + psi(q).z + 1e-6        nd = sum_j A dov + psi(q).Y
    dq  = scale (r (X + adjoint(Y)) + h Z + (h + r m) T)

r and h are known last, so the two brackets that they multiply are formed apart. Taking m out of dov before rounding changes
nothing in exact arithmetic, but keeps the brackets from cancelling where A has few entries (T = 1: dq is 0 to 1e-6). In later
chunks m = 0.
"""

from types import SimpleNamespace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, select_
from cutlass.cute.math import fma
from cutlass.cute.nvgpu import warpgroup

from .blocks import sync
from .blocks.gemm import Product, k_steps, register_operand
from .blocks.normaliser import NormaliserProducts, dot_value
from .blocks.ptx import pack2, pick, stg64, unpack
from .blocks.sync import WARPGROUP, Barrier
from .blocks.taylor import (
    ExactProducts,
    adjoint,
    constant_entry,
    linear_entries,
    own_columns,
    own_entries,
    quad_sum,
    store_own,
)
from .blocks.tiles import EVICT_LAST, EVICT_NORMAL, SwizzledTile
from .scan import Scan

DENOMINATOR_EPSILON = 1e-6
ROOT_HALF, ROOT_TWO = 0.5**0.5, 2.0**0.5
CENTRED_CHUNKS = 4  # behind them a chunk's own keys are a small part of the sums: without m dq has the same error


class Outputs(NamedTuple):
    """What the scan writes: dq (B, T, H, K) bf16 and statistics (B, H, T padded to chunks, 2) fp32, r and h."""

    dq: cute.Tensor
    statistics: cute.Tensor


class ForwardScan(Scan):
    backward = False
    consumer_warps = 8
    scaled_features = False
    kept_chunks = 5  # 22 MB of all SMs at V = 128, of an L2 of 50 MB
    before_barrier, before_threads = Barrier.STATE_FULL, 2 * WARPGROUP  # where tokens wait for the state before the chunk

    def outputs(self, tensors):
        return Outputs(tensors.dq, tensors.statistics)

    def l2_policy(self, p, chunk):
        """The last chunks stay, since the next pass starts with them: 0.3 to 0.8% of both scans at K = 8, 0 at K = 16."""
        return Int64(select_(chunk >= p.chunk + p.count - self.kept_chunks, Int64(EVICT_LAST), Int64(EVICT_NORMAL)))

    def state_products(self, at, statistics, row):
        return ExactProducts

    def token_parts(self, smem, group):
        c = self.config
        return SimpleNamespace(
            group=group,
            scores=Product(c.chunk, smem.q, smem.k),  # (1)
            values=Product(c.chunk, smem.do, smem.v),  # (2)
            rows=Product(16, b=smem.k, b_transposed=True),  # (3), (4)
            inter=Product(c.features, smem.do, smem.state, b_transposed=True),  # (5)
            normaliser=NormaliserProducts(smem.q, smem.ones, smem.gram, c.key_dim),  # (6)
            own=SwizzledTile(smem.q.iterator.toint(), c.chunk, c.padded_key_dim),
        )

    def token_products(self, g, at, chunk, stage):
        """Products (1) to (6) of one chunk; returns them with the chunk's own row sums."""
        c = self.config
        s, dov = g.scores.accumulator(), g.values.accumulator()
        warpgroup.fence()
        g.scores.issue(s, k_steps(g.scores.a, stage), k_steps(g.scores.b, stage), commit=False)
        g.values.issue(dov, k_steps(g.values.a, stage), k_steps(g.values.b, stage))
        inter = self.issue_inter(g, stage) if c.early_inter else None
        warpgroup.wait_group(1 if c.early_inter else 0)
        sums = self.row_sums(g, at, s, dov)
        mean = self.centre(g, chunk, s, dov, sums)
        centred, ones = self.operand(dov), self.operand(s)

        x, t = g.rows.accumulator(), g.rows.accumulator()
        keys = k_steps(g.rows.b, stage)
        warpgroup.fence()
        g.rows.issue(x, k_steps(centred), keys, commit=False)
        g.rows.issue(t, k_steps(ones), keys)
        if not c.early_inter:
            warpgroup.wait_group(0)
            inter = self.issue_inter(g, stage)
        den, nd = self.own_sums(g, sums)
        warpgroup.wait_group(0)
        return SimpleNamespace(den=den, nd=nd, mean=mean, x=x, t=t, **inter)

    def issue_inter(self, g, stage):
        """Issue (5), (6) and q . sum k, the products with the state before the chunk, once it is there."""
        sync.wait(self.before_barrier, g.group, self.before_threads)
        y, z, dot = g.inter.accumulator(), g.normaliser.matrix.accumulator(), g.normaliser.dot.accumulator()
        warpgroup.fence()
        g.normaliser.issue_matrix(z, stage, g.group)
        g.normaliser.issue_sums(z, g.group)
        g.normaliser.issue_dot(dot, stage, g.group)
        g.inter.issue(y, k_steps(g.inter.a, stage), k_steps(g.inter.b, g.group))
        return {"y": y, "z": z, "dot": dot}

    @cute.jit
    def row_sums(self, g, at, s, dov):
        """This lane's part of the row sums of the chunk itself: of u^2, u^2 dov and dov, with u = t / sqrt 2. Leaves u in s and
        u dov in dov, 0 where j > i.
        """
        sums = cute.make_rmem_tensor((2, 3), Float32)
        sums.fill(0.0)
        for number in cutlass.range_constexpr(self.config.row_blocks):
            if self.row_block(g) == number:
                self.sum_columns(g, at, s, dov, sums, number)
        return sums

    def sum_columns(self, g, at, s, dov, sums, number: int):
        """`row_sums` of block `number` of the rows, whose last columns are those of the diagonal."""
        root, eights = at.scale * ROOT_HALF, self.config.causal_block // 8
        for i in range(4 * eights * (number + 1), cute.size(s)):
            s[i], dov[i] = Float32(0.0), Float32(0.0)
        for eight in range(eights * (number + 1)):
            for half in range(2):
                for c in range(2):
                    i = c + 2 * half + 4 * eight
                    u, value = fma(s[i], root, ROOT_HALF), dov[i]
                    if eight >= eights * number:
                        keep = 8 * eight + 2 * g.quad_lane + c <= g.row + 8 * half
                        u, value = pick(keep, u, 0.0), pick(keep, value, 0.0)
                    s[i], dov[i] = u, u * value
                    sums[half, 0] = fma(u, u, sums[half, 0])
                    sums[half, 1] = fma(dov[i], u, sums[half, 1])
                    sums[half, 2] = sums[half, 2] + value

    def own_sums(self, g, sums):
        """This lane's part of den and nd of the chunk itself: with A = u^2 + 1/2, den = sum u^2 + (i + 1) / 2 and nd = sum
        u^2 dov + sum dov / 2."""
        den = [fma(Float32(g.row + 8 * half + 1), 0.125, sums[half, 0]) for half in range(2)]
        return den, [fma(sums[half, 2], 0.5, sums[half, 1]) for half in range(2)]

    @cute.jit
    def centre(self, g, chunk, u, weighted, sums):
        """m of both rows, and (dov - m) t over sqrt 2 in place of dov t; in later chunks m is 0 and nothing is done."""
        mean = cute.make_rmem_tensor(2, Float32)
        mean.fill(0.0)
        if chunk < CENTRED_CHUNKS:
            den, nd = ([quad_sum(value) for value in part] for part in self.own_sums(g, sums))
            for half in cutlass.range_constexpr(2):
                mean[half] = nd[half] * cute.arch.rcp_approx(den[half])
            for i in cutlass.range_constexpr(cute.size(u)):
                weighted[i] = fma(-mean[i // 2 % 2], u[i], weighted[i])
        return mean

    def operand(self, acc):
        """A (64 x 64) accumulator as a bf16 A operand."""
        fragment, words = register_operand(self.config.chunk // 16)
        for i in range(cute.size(words)):
            words[i] = pack2(acc[2 * i], acc[2 * i + 1])
        return fragment

    def token_adjoint(self, g, at, chunk, work, rows):
        """r, h and dq of the own entries of both rows."""
        return [self.finish_row(g, at, chunk, work, half, unpack(rows[half].words)) for half in range(2)]

    def finish_row(self, g, at, chunk, work, half, q):
        """r, h and dq of row `half`, whose rotated entries are q."""
        r, h, inter = self.statistics(g, at, chunk, work, half, q)
        own_weight = fma(r, work.mean[half], h) * ROOT_TWO
        dq = []
        for j, behind in zip(own_columns(half, self.config.key_dim), inter, strict=True):
            value = r * fma(work.x[j], ROOT_TWO, behind) + h * work.z[j] + own_weight * work.t[j]
            dq.append(value * at.scale)
        return r, h, dq

    def statistics(self, g, at, chunk, work, half, q):
        """r and h of row `half`, and adjoint(Y) of its own entries."""
        c, scale = self.config, at.scale
        own = own_entries(c.key_dim)
        grad = adjoint(work.y, half, q, g.quad_lane, g.lane, c.key_dim)
        linear = linear_entries(work.y, half, c.key_dim)
        columns = own_columns(half, c.key_dim)
        nd, den = constant_entry(work.y, half, g.quad_lane, c.key_dim), dot_value(work.dot, half)
        for i, e in enumerate(own):
            nd = fma(q[e] * scale, fma(grad[i], 0.5 * scale, linear[i]), nd)
            den = fma(q[e], work.z[columns[i]], den)
        den = quad_sum(fma(den, 0.5 * scale, work.den[half])) + (Float32(chunk * c.chunk) + DENOMINATOR_EPSILON)
        nd = quad_sum(nd + work.nd[half])
        r = cute.arch.rcp_approx(den)
        return r, -nd * r * r, [fma(x, scale, y) for x, y in zip(grad, linear, strict=True)]

    @cute.jit
    def write_rows(self, outputs, g, at, chunk, results):
        """dq of rows before T; r and h of every row, so that the reverse scan loads finite numbers."""
        for half in cutlass.range_constexpr(2):
            row = chunk * self.config.chunk + g.row + 8 * half
            r, h, dq = results[half]
            if g.quad_lane == 0:
                stg64(outputs.statistics[at.batch, at.head, row, None].iterator.toint(), r, h)
            if row < at.tokens:
                store_own(outputs.dq[at.batch, row, at.head, None], g.quad_lane, dq)
