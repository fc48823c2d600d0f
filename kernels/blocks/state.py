"""The state between chunks: its bf16 copy in shared memory and the normaliser, kept as a Gram matrix.

The state S^T (V x F) stays in the accumulators of one warpgroup. The normaliser phi(q) . sum phi(k) needs only the count,
sum k and G = sum k k^T (K x K), which one more product per chunk accumulates beside the state: rows 0..15 of its A operand
are x^T (warp 0), rows 16..31 the weights themselves (warp 1), so that the accumulator's rows hold G and, 16 times, sum x.
Warps 2 and 3 repeat warp 0.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64

from .gemm import Product, k_steps, register_operand
from .ptx import (
    ONE_ZERO,
    ONES,
    float_of,
    ldg128_or_zeros,
    ldmatrix4_transposed,
    lds128,
    mul2,
    pack2,
    pick_word,
    stg128,
    stmatrix4,
    sts32,
    sts128,
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


def place_of(number: int, address, thread):
    """Where the `number`-th four registers of a state stand in memory: (registers / 4, 128 threads, 4) fp32."""
    return address + (16 * 128) * number + 16 * thread


def save_state(accumulators, address, thread):
    """The accumulators of 128 threads to fp32 at global `address`."""
    for number, values in enumerate(quadruples(accumulators)):
        stg128(place_of(number, address, Int64(thread)), *values)


def load_state(accumulators, address, thread, wanted):
    """What `save_state` stored, bit for bit, into accumulators of the same shapes; zeros where `wanted` is 0."""
    for acc, i, values in stored_state(accumulators, address, thread, wanted):
        for j in range(4):
            acc[i + j] = values[j]


def add_state(accumulators, address, thread):
    """What `save_state` stored, added to accumulators of the same shapes."""
    for acc, i, values in stored_state(accumulators, address, thread, Int32(1)):
        for j in range(4):
            acc[i + j] = acc[i + j] + values[j]


def stored_state(accumulators, address, thread, wanted):
    """(accumulator, index, four values from there on) of a state at global `address`, in the order of `quadruples`."""
    places = ((acc, i) for acc in accumulators for i in range(0, cute.size(acc), 4))
    for number, (acc, i) in enumerate(places):
        values = ldg128_or_zeros(place_of(number, address, Int64(thread)), wanted)
        yield acc, i, [float_of(value) for value in values]


def quadruples(accumulators):
    """The registers of several accumulators in order, four at a time."""
    return [[acc[i + j] for j in range(4)] for acc in accumulators for i in range(0, cute.size(acc), 4)]


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

    def clear(self, thread):
        """Zeros everywhere, by 128 threads; a barrier among them must follow."""
        for i in range(self.buffers * self.TILES * self.TILE // (16 * 128)):
            sts128(self.base + (thread + 128 * i) * 16, 0, 0, 0, 0)

    @cute.jit
    def publish(self, acc, factor, buf, thread):
        """factor * G from warp 0, the sums from four lanes of warp 1."""
        if thread // 32 == 0:
            self.write_matrix(acc, factor, buf, thread)
        if (thread >= 32) & (thread < 36):
            self.write_sums(acc, buf, thread % 32)

    def tile(self, kind, buf):
        return SwizzledTile(self.base + (kind + self.TILES * buf) * self.TILE, 16, 16)

    def write_matrix(self, acc, factor, buf, lane):
        pairs = [terms(acc[2 * i] * factor, acc[2 * i + 1] * factor, 2) for i in range(4)]
        for kind, words in zip((self.HIGH, self.LOW), zip(*pairs, strict=True), strict=True):
            stmatrix4(self.tile(kind, buf).chunk(lane % 16, lane // 16), *words)

    def write_sums(self, acc, buf, lane):
        """Lane l of the quad holds sums 2l, 2l + 1 and the same of the second eight."""
        columns, rows = self.tile(self.COLUMNS, buf), self.tile(self.ROWS, buf)
        for eight in range(2):
            words = terms(acc[4 * eight], acc[4 * eight + 1], 3)
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

    def __init__(self, rows, ones, gram):
        self.matrix, self.ones = Product(16, rows, gram), Product(16, ones, gram)
        self.dot = Product(8, rows, cute.local_tile(gram, (8, 16), (0, 0, None)))

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
