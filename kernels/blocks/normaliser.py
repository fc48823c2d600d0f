"""The normaliser phi(q) . sum phi(k) of the state, kept as a Gram matrix.

It needs only the count, sum k and G = sum k k^T (K x K), which one more product per chunk accumulates beside the state: its A
operand is 64 columns of the features, some of which are the row's entries and one the constant, so that rows of the accumulator
hold G and the sums; nobody asks for the others.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from .gemm import Product, k_steps
from .ptx import (
    ONES,
    float_of,
    ldmatrix4_transposed,
    lds128,
    mma_16x8x16,
    mul2,
    pack2,
    pick_word,
    stmatrix4,
    sts32,
    sts128,
    unpack2,
)
from .tiles import SwizzledTile, columns_of


def gram_columns(phi, key_dim: int):
    """64 columns of the feature tiles, among them the row's entries and the constant: their product with the rows is G and the
    sums, and the rest of it is nobody's. At K = 16 the last; at K = 8 the first, and 16 behind them of whatever follows."""
    return columns_of(phi, 96 if key_dim == 16 else 0, 64)


def gram_of_eight(tile: SwizzledTile, statistics, lane, tokens: int) -> list:
    """The normaliser of a chunk's rows for K = 8, by one warp without WGMMA: two values of G a lane, in the order of an
    accumulator, then two of the sums. Rows have weights h, or 1 without statistics. Entries 0 to 7 of the transposed rows are
    those of the A operand; the weights stand where 8 to 15 would be."""
    total = [Float32(0.0)] * 4
    for first in range(0, tokens, 16):
        low, _, high, _ = ldmatrix4_transposed(tile.chunk(first + lane % 8 + 8 * (lane // 16), (lane // 8) % 2))
        operand = low, ONES, high, ONES
        if statistics is not None:
            h = [weights_of_pair(statistics + (first + eight + 2 * (lane % 4)) * 8) for eight in (0, 8)]
            operand = mul2(low, h[0]), h[0], mul2(high, h[1]), h[1]
        total = mma_16x8x16(operand, (low, high), total)
    return total


def weights_of_pair(statistics):
    """h of two tokens as a packed pair."""
    _, h0, _, h1 = lds128(statistics)
    return pack2(float_of(h0), float_of(h1))


class Normaliser:
    """The normaliser in shared memory: for each of `buffers` buffers four (16, 16) bf16 tiles.

    HIGH, LOW   G in two terms
    COLUMNS     sum n in three terms, the first entries of row n: tokens get the sums by a product with a tile of ones
    ROWS        the sums in three terms, rows 0 to 2, the others zero: tokens get x . sums by a product with their x

    Everything reaches the tokens through products, as the state does; nothing is read back by ordinary loads.
    """

    HIGH, LOW, COLUMNS, ROWS = range(4)
    TILES = 4
    TILE = 2 * 16 * 16

    def __init__(self, gram):
        """gram: (16, 16, TILES * buffers) shared tiles."""
        self.base, self.buffers = gram.iterator.toint(), cute.size(gram.shape[2]) // self.TILES

    def clear(self, thread, threads=128):
        """Zeros everywhere, by that many threads; a barrier among them must follow."""
        for i in range(self.buffers * self.TILES * self.TILE // (16 * threads)):
            sts128(self.base + (thread + threads * i) * 16, 0, 0, 0, 0)

    @cute.jit
    def publish(self, acc, factor, buf, thread, key_dim: int):
        """factor * G and the sums from the product with `gram_columns`: at K = 16 G is rows 48 to 63, and the sums row 40; at
        K = 8 rows 40 to 47, and row 36."""
        warp, lane = thread // 32, thread % 32
        if cutlass.const_expr(key_dim == 16):
            if warp == 3:
                self.write_matrix(acc, factor, buf, lane)
            if (warp == 2) & (lane < 4):
                for eight in range(2):
                    self.write_eight((acc[4 * eight + 2], acc[4 * eight + 3]), eight, buf, lane)
        elif warp == 2:
            self.write_small(acc[2], acc[3], factor, buf, lane)
            if lane // 4 == 4:
                self.write_eight((acc[0], acc[1]), 0, buf, lane % 4)

    @cute.jit
    def publish_small(self, matrix, sums, factor, buf, lane):
        """K = 8, by one warp: factor * G from two values a lane, in the order of an accumulator; the sums from four lanes."""
        self.write_small(*matrix, factor, buf, lane)
        if lane < 4:
            self.write_eight(sums, 0, buf, lane)

    def write_small(self, a, b, factor, buf, lane):
        for kind, word in zip((self.HIGH, self.LOW), terms(a * factor, b * factor, 2), strict=True):
            sts32(self.tile(kind, buf).chunk(lane // 4, 0) + 4 * (lane % 4), word)

    def tile(self, kind, buf):
        return SwizzledTile(self.base + (kind + self.TILES * buf) * self.TILE, 16, 16)

    def write_matrix(self, acc, factor, buf, lane):
        pairs = [terms(acc[2 * i] * factor, acc[2 * i + 1] * factor, 2) for i in range(4)]
        for kind, words in zip((self.HIGH, self.LOW), zip(*pairs, strict=True), strict=True):
            stmatrix4(self.tile(kind, buf).chunk(lane % 16, lane // 16), *words)

    def write_eight(self, pair, eight: int, buf, lane):
        """Sums 2 lane, 2 lane + 1 of one eight."""
        columns, rows = self.tile(self.COLUMNS, buf), self.tile(self.ROWS, buf)
        words = terms(*pair, 3)
        for term, word in enumerate(words):
            sts32(rows.chunk(term, eight) + 4 * lane, word)
        for values, n in zip(zip(*(unpack2(word) for word in words), strict=True), (0, 1), strict=True):
            row = 8 * eight + 2 * lane + n
            sts128(columns.chunk(row, 0), pack2(values[0], values[1]), pack2(values[2], 0.0), 0, 0)


def terms(a, b, count: int) -> list:
    """Two fp32 values as sums of `count` bf16 terms, each term a packed pair: exact to 2^-9 to the power of count."""
    words = []
    for _ in range(count):
        words.append(pack2(a, b))
        kept = unpack2(words[-1])
        a, b = a - kept[0], b - kept[1]
    return words


def write_ones(tile: SwizzledTile, thread, rows: int, times: float):
    """The (rows, 16) tile whose columns 0, 1, 2 are `times` 1 and the others zero, by 2 * rows threads."""
    row, chunk = thread % rows, thread // rows
    first = [pick_word(chunk == 0, word, 0) for word in (pack2(times, times), pack2(times, 0.0))]
    sts128(tile.chunk(row, chunk), *first, 0, 0)


class NormaliserProducts:
    """What a token warpgroup takes from the normaliser, as products that leave their group open for more."""

    def __init__(self, rows, ones, gram, columns: int = 16):
        """columns: of the results, 8 or 16."""
        eight = cute.local_tile(gram, (8, 16), (0, 0, None))
        wanted = gram if columns == 16 else eight
        self.matrix, self.ones = Product(columns, rows, wanted), Product(columns, ones, wanted)
        self.dot = Product(8, rows, eight)

    def issue_matrix(self, acc, stage, buf, *, accumulate: bool = False):
        """acc (64 x 16) (+)= x G."""
        rows = k_steps(self.matrix.a, stage)
        for kind in (Normaliser.HIGH, Normaliser.LOW):
            matrix = k_steps(self.matrix.b, kind + Normaliser.TILES * buf)
            self.matrix.issue(acc, rows, matrix, accumulate=accumulate or kind > 0, commit=False)

    def issue_sums(self, acc, buf):
        """acc (64 x 16) += the sums, in every row, as often as the tile of ones says."""
        tile = k_steps(self.ones.b, Normaliser.COLUMNS + Normaliser.TILES * buf)
        self.ones.issue(acc, k_steps(self.ones.a), tile, accumulate=True, commit=False)

    def issue_dot(self, acc, stage, buf):
        """acc (64 x 8) = x . sums, in three terms that stand in columns 0 to 2; the others are zero."""
        tile = k_steps(self.dot.b, Normaliser.ROWS + Normaliser.TILES * buf)
        self.dot.issue(acc, k_steps(self.dot.a, stage), tile, commit=False)


def dot_value(acc, half: int):
    """This lane's part of x . sums for row `half` of the accumulator of `issue_dot`; the quad's sum is the value."""
    return acc[2 * half] + acc[2 * half + 1]
