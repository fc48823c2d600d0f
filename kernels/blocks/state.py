"""The state between chunks: its bf16 copy in shared memory and the normaliser, kept as a Gram matrix.

The state S^T (V x F) stays in the accumulators of one warpgroup. The normaliser phi(q) . sum phi(k) needs only the count,
sum k and G = sum k k^T (K x K), which one more product per chunk accumulates beside the state: rows 0..15 of its A operand
are x^T (warp 0), rows 16..31 the weights themselves (warp 1), so that the accumulator's rows hold G and, 16 times, sum x.
Warps 2 and 3 repeat warp 0.
"""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.math import fma

from .gemm import Product, k_steps, register_operand
from .ptx import (
    ONE_ZERO,
    ONES,
    float_of,
    ldmatrix4_transposed,
    lds128,
    mul2,
    pack2,
    pick_word,
    stmatrix4,
    sts128,
    unpack2,
)
from .taylor import own_columns
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
    """The normaliser in shared memory, for each of two buffers: three (16, 16) bf16 tiles, G in two terms, high and low,
    and the sums in three, which are the first entries of row n of the third tile.

    Written as tiles, both reach the tokens by products: x high + x low, and a tile of ones against the third.
    """

    TILE = 2 * 16 * 16
    TILES = 3

    def __init__(self, gram, rows):
        """gram: (16, 16, TILES * buffers) shared tiles; rows: x tiles (chunk, 16, stage)."""
        self.base = gram.iterator.toint()
        self.update = Product(16, b=rows, b_transposed=True)

    @cute.jit
    def publish(self, acc, factor, buf, thread):
        """factor * G from warp 0, the sums from four lanes of warp 1."""
        if thread // 32 == 0:
            self.write_matrix(acc, factor, buf, thread)
        if (thread >= 32) & (thread < 36):
            self.write_sums(acc, buf, thread % 32)

    def tile(self, number):
        return SwizzledTile(self.base + number * self.TILE, 16, 16)

    def write_matrix(self, acc, factor, buf, lane):
        pairs = [split2(acc[2 * i] * factor, acc[2 * i + 1] * factor) for i in range(4)]
        for term, words in enumerate(zip(*pairs, strict=True)):
            stmatrix4(self.tile(term + self.TILES * buf).chunk(lane % 16, lane // 16), *words)

    def write_sums(self, acc, buf, lane):
        """Lane l of the quad holds sums 2l, 2l + 1 and the same of the second eight."""
        tile = self.tile(2 + self.TILES * buf)
        for i in range(4):
            row = 8 * (i // 2) + 2 * lane + i % 2
            sts128(tile.chunk(row, 0), *three_terms(acc[4 * (i // 2) + i % 2]), 0, 0)
            sts128(tile.chunk(row, 1), 0, 0, 0, 0)


def split2(a, b):
    """(high, low): two fp32 values as packed bf16 pairs, each value the sum of its two terms to 2^-17."""
    high = pack2(a, b)
    kept = unpack2(high)
    return high, pack2(a - kept[0], b - kept[1])


def three_terms(value):
    """An fp32 value as three bf16 terms in two words; the fourth half is 0."""
    first = unpack2(pack2(value, 0.0))[0]
    second = unpack2(pack2(value - first, 0.0))[0]
    return pack2(first, second), pack2(value - first - second, 0.0)


def write_ones(tile: SwizzledTile, thread, rows: int):
    """The (rows, 16) tile whose columns 0, 1, 2 are ones and the others zero, by 128 threads."""
    row, chunk = thread % rows, thread // rows
    first = [pick_word(chunk == 0, word, 0) for word in (ONES, ONE_ZERO)]
    sts128(tile.chunk(row, chunk), *first, 0, 0)


class NormaliserProducts:
    """What a token warpgroup takes from the normaliser: x G and the sums, 64 x 16 accumulators each."""

    def __init__(self, rows, ones, gram):
        self.matrix, self.sums = Product(16, rows, gram), Product(16, ones, gram)

    def issue(self, stage, buf):
        """Issue x G and the sums into accumulators of their own, returned; the group is left open."""
        matrix, sums = self.matrix.accumulator(), self.sums.accumulator()
        self.issue_matrix(matrix, stage, buf)
        self.issue_sums(sums, buf)
        return matrix, sums

    def issue_matrix(self, acc, stage, buf, *, accumulate: bool = False):
        """acc (+)= x G; the group is left open for more."""
        rows = k_steps(self.matrix.a, stage)
        for term in range(2):
            matrix = k_steps(self.matrix.b, term + Normaliser.TILES * buf)
            self.matrix.issue(acc, rows, matrix, accumulate=accumulate or term > 0, commit=False)

    def issue_sums(self, acc, buf, *, accumulate: bool = False):
        """acc (+)= the sums, in every row; the group is left open for more."""
        tile = k_steps(self.sums.b, 2 + Normaliser.TILES * buf)
        self.sums.issue(acc, k_steps(self.sums.a), tile, accumulate=accumulate, commit=False)


def normaliser_sum(matrix, sums, x: list, scale, half: int, key_dim: int):
    """scale x . (sums + (x G) / 2) over the own entries of row `half`: this lane's part of psi(x) . z less the count."""
    total = Float32(0.0)
    for value, column in zip(x, own_columns(half, key_dim), strict=True):
        total = fma(value * scale, fma(matrix[column], 0.5, sums[column]), total)
    return total
