"""Forward scan: chunks in order, state S = sum phi(k) v^T, out come dq and the row statistics r = 1/den, h = -nd r^2.

Per chunk, queries as rows (i), keys as columns (j <= i), t = 1 + s:

    (1) s   = q k^T                (2) dov = do v^T
    (3) X   = ((dov - m) t) k      (4) T   = t k          (both over sqrt 2; m: the chunk's own mean of dov, weighted by A)
    (5) Y   = do S^T               (6) Z   = sum k + scale G q
    den = sum_j A + psi(q).z + 1e-6        nd = sum_j A dov + psi(q).Y
    dq  = scale (r (X + adjoint(Y)) + h Z + (h + r m) T)

r and h are known last, so the two brackets that they multiply are formed apart. Taking m out of dov before rounding changes
nothing in exact arithmetic, but keeps the brackets from cancelling where A has few entries (T = 1: dq is 0 to 1e-6).
"""

from types import SimpleNamespace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.math import fma
from cutlass.cute.nvgpu import warpgroup

from .blocks import sync
from .blocks.gemm import Product, k_steps, register_operand
from .blocks.ptx import pack2, pick, stg32, stg64, unpack
from .blocks.state import NormaliserProducts, dot_value
from .blocks.sync import WARPGROUP, Barrier
from .blocks.taylor import (
    ExactProducts,
    adjoint,
    constant_entry,
    linear_entries,
    own_columns,
    own_entries,
    quad_sum,
)
from .blocks.tiles import SwizzledTile
from .scan import Problem, Scan

DENOMINATOR_EPSILON = 1e-6
ROOT_HALF, ROOT_TWO = 0.5**0.5, 2.0**0.5


class Outputs(NamedTuple):
    """What the scan writes: dq (B, T, H, K) bf16 and statistics (B, H, T padded to chunks, 2) fp32, r and h."""

    dq: cute.Tensor
    statistics: cute.Tensor


class ForwardScan(Scan):
    backward = False
    consumer_warps = 8

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        do: cute.Tensor,
        dq: cute.Tensor,
        statistics: cute.Tensor,
        scale: Float32,
        ctas: Int32,
        stride: Int32,
        chunks_per_cta: Int32,
        late_ctas: Int32,
        chained: Int32,
        states: cute.Tensor,
        flags: cute.Tensor,
        stream,
    ):
        loads = self.loads(q=q, k=k, v=v, do=do)
        problem = self.problem(q, scale, (ctas, stride, chunks_per_cta, late_ctas, chained, states, flags))
        self.launch(self.kernel(loads, Outputs(dq, statistics), problem), problem, stream)

    @cute.kernel
    def kernel(self, loads, outputs, problem: Problem):
        self.run(loads, outputs, problem)

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
            normaliser=NormaliserProducts(smem.q, smem.ones, smem.gram),  # (6)
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
        den, nd = self.row_sums(g, at, s, dov)
        mean = [n * cute.arch.rcp_approx(d) for n, d in zip(nd, den, strict=True)]
        centred, ones = self.weights(s, dov, mean)

        x, t = g.rows.accumulator(), g.rows.accumulator()
        keys = k_steps(g.rows.b, stage)
        warpgroup.fence()
        g.rows.issue(x, k_steps(centred), keys, commit=False)
        g.rows.issue(t, k_steps(ones), keys)
        if not c.early_inter:
            warpgroup.wait_group(0)
            inter = self.issue_inter(g, stage)
        warpgroup.wait_group(0)
        return SimpleNamespace(den=den, nd=nd, mean=mean, x=x, t=t, **inter)

    def issue_inter(self, g, stage):
        """Issue (5), (6) and q . sum k, the products with the state before the chunk, once it is there."""
        sync.wait(Barrier.STATE_FULL, g.group, 2 * WARPGROUP)
        y, z, dot = g.inter.accumulator(), g.normaliser.matrix.accumulator(), g.normaliser.dot.accumulator()
        warpgroup.fence()
        g.normaliser.issue_matrix(z, stage, g.group)
        g.normaliser.issue_sums(z, g.group)
        g.normaliser.issue_dot(dot, stage, g.group)
        g.inter.issue(y, k_steps(g.inter.a, stage), k_steps(g.inter.b, g.group))
        return {"y": y, "z": z, "dot": dot}

    def row_sums(self, g, at, s, dov):
        """den and nd of the chunk itself, complete in every lane of the quad. Leaves t / sqrt 2 in s and dov t / sqrt 2 in
        dov, 0 where j > i.

        With u = t / sqrt 2, A = u^2 + 1/2: den = sum u^2 + (i + 1) / 2 and nd = sum (u dov) u + sum dov / 2.
        """
        squares, weighted, plain = [Float32(0.0)] * 2, [Float32(0.0)] * 2, [Float32(0.0)] * 2
        root = at.scale * ROOT_HALF
        for eight in range(self.config.chunk // 8):
            for half in range(2):
                for c in range(2):
                    i = c + 2 * half + 4 * eight
                    keep = 8 * eight + 2 * g.quad_lane + c <= g.row + 8 * half
                    u = pick(keep, fma(s[i], root, ROOT_HALF), 0.0)
                    value = pick(keep, dov[i], 0.0)
                    plain[half] = plain[half] + value
                    squares[half] = fma(u, u, squares[half])
                    s[i], dov[i] = u, u * value
                    weighted[half] = fma(dov[i], u, weighted[half])
        counts = [0.5 * Float32(g.row + 8 * half + 1) for half in range(2)]
        den = [quad_sum(square) + count for square, count in zip(squares, counts, strict=True)]
        return den, [quad_sum(fma(p, 0.5, w)) for p, w in zip(plain, weighted, strict=True)]

    def weights(self, u, weighted, mean):
        """(dov - m) t and t, both over sqrt 2, as bf16 A operands."""
        (centred, centred_words), (ones, ones_words) = (register_operand(self.config.chunk // 16) for _ in range(2))
        for eight in range(self.config.chunk // 8):
            for half in range(2):
                i = 2 * half + 4 * eight
                pair = [fma(-mean[half], u[i + c], weighted[i + c]) for c in range(2)]
                centred_words[half + 2 * eight] = pack2(*pair)
                ones_words[half + 2 * eight] = pack2(u[i], u[i + 1])
        return centred, ones

    def token_adjoint(self, g, at, chunk, work, rows):
        """r, h and dq of the own entries of both rows."""
        return [self.finish_row(g, at, chunk, work, half, unpack(rows[half].words)) for half in range(2)]

    def finish_row(self, g, at, chunk, work, half, q):
        c, scale = self.config, at.scale
        own = own_entries(c.key_dim)
        grad = adjoint(work.y, half, q, g.quad_lane, g.lane, c.key_dim)
        linear = linear_entries(work.y, half, c.key_dim)
        columns = own_columns(half, c.key_dim)
        nd, den = constant_entry(work.y, half, g.quad_lane, c.key_dim), dot_value(work.dot, half)
        for i, e in enumerate(own):
            nd = fma(q[e] * scale, fma(grad[i], 0.5 * scale, linear[i]), nd)
            den = fma(q[e], work.z[columns[i]], den)
        den = work.den[half] + quad_sum(den) * (0.5 * scale) + (Float32(chunk * c.chunk) + DENOMINATOR_EPSILON)
        nd = work.nd[half] + quad_sum(nd)
        r = cute.arch.rcp_approx(den)
        h = -nd * r * r
        own_weight = fma(r, work.mean[half], h) * ROOT_TWO
        dq = []
        for i, j in enumerate(columns):
            bracket = fma(work.x[j], ROOT_TWO, fma(grad[i], scale, linear[i]))
            value = r * bracket + h * work.z[j] + own_weight * work.t[j]
            dq.append(value * scale)
        return r, h, dq

    @cute.jit
    def write_rows(self, outputs, g, at, chunk, results):
        """dq of rows before T; r and h of every row, so that the reverse scan loads finite numbers."""
        c = self.config
        for half in cutlass.range_constexpr(2):
            row = chunk * c.chunk + g.row + 8 * half
            r, h, dq = results[half]
            if g.quad_lane == 0:
                stg64(outputs.statistics[at.batch, at.head, row, None].iterator.toint(), r, h)
            if row < at.tokens:
                target = outputs.dq[at.batch, row, at.head, None].iterator.toint() + 4 * g.quad_lane
                for eight in cutlass.range_constexpr(c.key_dim // 8):
                    stg32(target + 16 * eight, pack2(dq[2 * eight], dq[2 * eight + 1]))
