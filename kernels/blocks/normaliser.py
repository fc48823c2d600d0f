"""The normaliser phi(q) . sum phi(k) of the state, kept as a Gram matrix.

It needs only the count, sum k and G = sum k k^T (K x K), which one more product per chunk accumulates beside the state: its A
operand is 64 columns of the features, some of which are the row's entries and one the constant, so that rows of the accumulator
hold G and the sums; nobody asks for the others.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass.cute.math import fma
from cutlass.cute.nvgpu import warpgroup

from .gemm import Product, k_steps, register_operand
from .ptx import (
    ONE_ZERO,
    ONES,
    bits_of,
    float_of,
    ldmatrix4_transposed,
    lds32,
    lds128,
    mma_16x8x16,
    mul2,
    pack2,
    pick,
    pick_word,
    stg128,
    stmatrix4,
    sts32,
    sts128,
    unpack2,
)
from .state import place_of
from .taylor import quad_sum
from .tiles import SwizzledTile, columns_of, side_by_side


def gram_columns(phi, key_dim: int):
    """64 columns of the feature tiles, among them the row's entries and the constant: their product with the rows is G and the
    sums, and the rest of it is nobody's. At K = 16 the last; at K = 8 the first, and 16 behind them of whatever follows."""
    return columns_of(phi, 96 if key_dim == 16 else 0, 64)


def gram_step(tile: SwizzledTile, step, lane, statistics=None):
    """x^T, the weighted x^T and the weights of 16 tokens, from 16 step on, as words of an A operand of one k-step."""
    entries = ldmatrix4_transposed(tile.chunk(16 * step + lane % 8 + 8 * (lane // 16), (lane // 8) % 2))
    if statistics is None:
        return entries, entries, [ONES] * 4
    weights = []
    for eight in range(2):
        _, h0, _, h1 = lds128(statistics + (16 * step + 8 * eight + 2 * (lane % 4)) * 8)
        weights += [pack2(float_of(h0), float_of(h1))] * 2
    return entries, [mul2(x, weight) for x, weight in zip(entries, weights, strict=True)], weights


def gram_of_eight(tile: SwizzledTile, statistics, lane, tokens: int) -> list:
    """The normaliser of a chunk's rows for K = 8, by one warp without WGMMA: two values of G a lane, in the order of an
    accumulator, then two of the sums. Columns 0 to 7 of the transposed rows are the entries; the weights stand where 8 to 15
    would be."""
    total = [Float32(0.0)] * 4
    for step in range(tokens // 16):
        entries, weighted, weights = gram_step(tile, step, lane, statistics)
        total = mma_16x8x16((weighted[0], weights[1], weighted[2], weights[3]), (entries[0], entries[2]), total)
    return total


class SumOfGrams:
    """The normaliser of many chunks, which nobody asks for in between: each warp of a warpgroup sums that of its own 16 tokens
    of a chunk.

    G takes one k-step: the x^T of the four warps, one below the other, times the x of their tokens, side by side, has the G of
    each warp in the blocks on its diagonal. Four k-steps of 16 columns take four times as long, as a k-step of WGMMA takes 33
    cycles whether it has 16 columns or 64. The sums, two entries a lane, are ordinary additions.
    """

    def __init__(self, rows):
        """rows: (64, 16, stages) shared tiles."""
        self.update = Product(64, b=side_by_side(rows, 4), b_transposed=True)
        self.acc, self.sums = self.update.accumulator(), cute.make_rmem_tensor(2, Float32)
        self.acc.fill(0.0)
        self.sums.fill(0.0)

    def add(self, tile: SwizzledTile, stage, thread, statistics=None):
        """Absorb the chunk in `stage`; the product stays in flight."""
        entries, weighted, weights = gram_step(tile, thread // 32, thread % 32, statistics)
        operand, words = register_operand(1)
        for i in range(4):
            words[i] = weighted[i]
        warpgroup.fence()
        self.update.issue(self.acc, k_steps(operand), k_steps(self.update.b, stage), accumulate=True)
        for i in range(4):
            for x, weight in zip(unpack2(entries[i]), unpack2(weights[i]), strict=True):
                self.sums[i % 2] = fma(x, weight, self.sums[i % 2])

    def stash(self, address, warp, lane):
        """To shared memory: G as (warps, 2, 32 lanes, 4) fp32, then the sums as (warps, 16), of 8 warps."""
        at = warp % 4
        for i in range(2):
            words = []
            for j in range(4 * i, 4 * i + 4):
                blocks = [bits_of(self.acc[8 * block + j]) for block in range(4)]
                words.append(pick_word(at < 2, pick_word(at == 0, *blocks[:2]), pick_word(at == 2, *blocks[2:])))
            sts128(stashed_gram(address, warp, i, lane), *words)
        for half in range(2):
            total = quad_sum(self.sums[half])
            sts32(stashed_sum(address, warp, lane // 4 + 8 * half), bits_of(total))


def stashed_gram(address, warp, i, lane):
    return address + 16 * (lane + 32 * (i + 2 * warp))


def stashed_sum(address, warp, entry):
    return address + 8 * 2 * 32 * 16 + 4 * (entry + 16 * warp)


@cute.jit
def save_grams(address, target, thread, factor, key_dim: int):
    """What 8 warps have stashed, added up, as `save_state` stores the accumulator of the normaliser's product, by 128 threads,
    where `Normaliser.publish` looks for it: factor * G, and elsewhere the sums."""
    warp, lane = thread // 32, thread % 32
    for i in cutlass.range_constexpr(2):
        matrix, sums = (cute.make_rmem_tensor(4, Float32) for _ in range(2))
        matrix.fill(0.0)
        sums.fill(0.0)
        for other in cutlass.range_constexpr(8):
            pair = [lds32(stashed_sum(address, other, 8 * i + 2 * (lane % 4) + c)) for c in range(2)]
            add_words(sums, pair * 2)
            add_words(matrix, lds128(stashed_gram(address, other, i, lane)))
        for j in range(4):
            matrix[j] = matrix[j] * factor
        if cutlass.const_expr(key_dim == 16):
            words = [pick(warp == 3, matrix[j], sums[j]) for j in range(4)]
        else:
            words = [sums[0], sums[1], matrix[0], matrix[1]]
        stg128(place_of(i, target, Int64(thread)), *words)


def add_words(total, words):
    for j in range(4):
        total[j] = total[j] + float_of(words[j])


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


def write_ones(tile: SwizzledTile, thread, rows: int):
    """The (rows, 16) tile whose columns 0, 1, 2 are ones and the others zero, by 2 * rows threads."""
    row, chunk = thread % rows, thread // rows
    first = [pick_word(chunk == 0, word, 0) for word in (ONES, ONE_ZERO)]
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
        """acc (64 x 16) += the sums, in every row."""
        tile = k_steps(self.ones.b, Normaliser.COLUMNS + Normaliser.TILES * buf)
        self.ones.issue(acc, k_steps(self.ones.a), tile, accumulate=True, commit=False)

    def issue_dot(self, acc, stage, buf):
        """acc (64 x 8) = x . sums, in three terms that stand in columns 0 to 2; the others are zero."""
        tile = k_steps(self.dot.b, Normaliser.ROWS + Normaliser.TILES * buf)
        self.dot.issue(acc, k_steps(self.dot.a, stage), tile, commit=False)


def dot_value(acc, half: int):
    """This lane's part of x . sums for row `half` of the accumulator of `issue_dot`; the quad's sum is the value."""
    return acc[2 * half] + acc[2 * half + 1]
