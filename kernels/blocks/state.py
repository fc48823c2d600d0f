"""The state between chunks: its bf16 copy in shared memory and the normaliser, kept as a Gram matrix.

The state S^T (V x F) stays in the accumulators of one warpgroup. The normaliser phi(q) . sum phi(k) needs only the count,
sum k and G = sum k k^T (K x K), which one more product per chunk accumulates beside the state: rows 0..15 of its A operand
are x^T (warp 0), rows 16..31 the weights themselves (warp 1), so that the accumulator's rows hold G and, 16 times, sum x.
Warps 2 and 3 repeat warp 0.
"""

import cutlass.cute as cute

from .gemm import Product, k_steps, register_operand
from .ptx import (
    ONES,
    float_of,
    ldmatrix4_transposed,
    lds64,
    lds128,
    mul2,
    pack2,
    pick_word,
    stmatrix4,
    sts64,
    unpack2,
)
from .tiles import SwizzledTile


def publish_state(acc, tile: SwizzledTile, first: int, thread, features: int):
    """The accumulator of 64 rows of S^T, rounded to bf16, into rows first.. of the (V, F) tile.

    torch: tile[first:first + 64].copy_(S.T[first:first + 64].to(torch.bfloat16)).
    """
    lane = thread % 32
    row, right = (thread // 32) * 16 + lane % 16, lane // 16
    per_panel = tile.chunks // 2
    for n in range(features // 16):
        words = [pack2(acc[8 * n + 2 * i], acc[8 * n + 2 * i + 1]) for i in range(4)]
        address = tile.chunk(row, 2 * (n % per_panel) + right, n // per_panel)
        stmatrix4(address + first * tile.width, *words)


def gram_operand(tile: SwizzledTile, thread, tokens: int, statistics=None):
    """The A operand (x^T; weights) of the normaliser's product over the rows of the tile; the weights are 1, or the h of
    the (r, h) rows at `statistics`, as bf16."""
    lane, sums = thread % 32, thread // 32 == 1
    fragment, words = register_operand(tokens // 16)
    for step in range(tokens // 16):
        entries = ldmatrix4_transposed(tile.chunk(16 * step + lane % 8 + 8 * (lane // 16), (lane // 8) % 2))
        for eight in range(2):
            weights = ONES
            if statistics is not None:
                _, h0, _, h1 = lds128(statistics + (16 * step + 8 * eight + 2 * (lane % 4)) * 8)
                weights = pack2(float_of(h0), float_of(h1))
            for half in range(2):
                x = entries[half + 2 * eight]
                weighted = x if statistics is None else mul2(x, weights)
                words[half + 2 * eight + 4 * step] = pick_word(sums, weights, weighted)
    return fragment


class Normaliser:
    """The Gram matrix in two bf16 terms (16, 16) and the sums (16 fp32), for each of two buffers."""

    TERM = 2 * 16 * 16
    SUMS = 4 * 16

    def __init__(self, gram, sums, rows):
        """gram: (16, 16, 4) shared tile, term + 2 * buffer; sums: address of fp32 sums; rows: x tiles (chunk, 16, stage)."""
        self.base, self.sums = gram.iterator.toint(), sums
        self.update = Product(16, b=rows, b_transposed=True)

    @cute.jit
    def publish(self, acc, factor, buf, thread):
        """factor * G as high and low terms from warp 0; the sums from warp 1."""
        lane = thread % 32
        if thread // 32 == 0:
            tile = SwizzledTile(self.base + buf * (2 * self.TERM), 16, 16)
            values = [acc[i] * factor for i in range(8)]
            high = [pack2(values[2 * i], values[2 * i + 1]) for i in range(4)]
            rest = [value - kept for value, kept in zip(values, [v for word in high for v in unpack2(word)])]
            low = [pack2(rest[2 * i], rest[2 * i + 1]) for i in range(4)]
            stmatrix4(tile.chunk(lane % 16, lane // 16), *high)
            stmatrix4(tile.at(self.TERM).chunk(lane % 16, lane // 16), *low)
        if (thread >= 32) & (thread < 36):
            target = self.sums + buf * self.SUMS + lane * 8
            sts64(target, acc[0], acc[1])
            sts64(target + 32, acc[4], acc[5])

    def load_sums(self, buf, quad_lane, key_dim: int) -> list:
        """The sums of the own entries."""
        source = self.sums + buf * self.SUMS + quad_lane * 8
        return [float_of(word) for first in range(0, key_dim, 8) for word in lds64(source + first * 4)]


def issue_gram(product: Product, acc, rows: list, buf, *, accumulate: bool, commit: bool):
    """acc (+)= x (high + low) of the published Gram matrix in buffer `buf`."""
    for term in range(2):
        matrix = k_steps(product.b, term + 2 * buf)
        product.issue(acc, rows, matrix, accumulate=accumulate or term > 0, commit=commit and term == 1)
