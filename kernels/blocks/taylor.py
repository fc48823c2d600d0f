"""The Taylor features in registers: building feature rows, and the adjoint of the feature map.

Two sides: the state sums unweighted features phi(x) of the tokens behind it; a token meets it with psi(x) = w phi(x), w = 1/2
on the squares. The order of the columns is that of `features.feature_slots`. On the token side a lane of a quad (the four
lanes that share an accumulator row) works with the row rotated so that entry 0 is its first column, 2 * quad_lane: all
indices below are then compile-time numbers. `own` entries are those whose columns the lane holds in an accumulator.
"""

import cutlass.cute as cute
from cutlass import Float32

from ..features import SLOT, feature_slots
from .ptx import (
    HALVES,
    ONE_ZERO,
    SIGNS,
    bits_of,
    float_of,
    fma2,
    lds32,
    lds128,
    mul2,
    pack2,
    pick,
    pick_word,
    recompute,
    stg32,
    straddle,
    sts128,
    unpack2,
)


class PackedRow:
    """Entries of one row as packed bf16 pairs; indices wrap round."""

    def __init__(self, words):
        self.words, self.straddling = words, {}

    def pair(self, j: int):
        """(x_j, x_{j+1})."""
        n = len(self.words)
        i = (j // 2) % n
        if j % 2 == 0:
            return self.words[i]
        if i not in self.straddling:
            self.straddling[i] = straddle(self.words[i], self.words[(i + 1) % n])
        return self.straddling[i]


def own_entries(key_dim: int) -> list[int]:
    """Rotated indices of the entries a lane owns: two of every eight."""
    return [first + c for first in range(0, key_dim, SLOT) for c in (0, 1)]


def load_rotated(tile, row, quad_lane, key_dim: int) -> PackedRow:
    """Row `row` of a (tokens, 16) tile, rotated by 2 * quad_lane entries."""
    words, quad_lane = key_dim // 2, recompute(quad_lane)
    base, flip = tile.base + row * tile.width, tile.phase(row) << 2
    return PackedRow([lds32(base + ((((quad_lane + j) & (words - 1)) ^ flip) << 2)) for j in range(words)])


def own_columns(half: int, key_dim: int) -> list[int]:
    """Indices of the own entries in row `half` of a 64 x 16 accumulator."""
    return [c + 2 * half + 4 * eight for eight in range(key_dim // SLOT) for c in (0, 1)]


def store_own(row, quad_lane, entries: list):
    """The own entries of one row in global memory, K bf16."""
    target = row.iterator.toint() + 4 * quad_lane
    for eight in range(len(entries) // 2):
        stg32(target + 16 * eight, pack2(entries[2 * eight], entries[2 * eight + 1]))


def psi_words(row: PackedRow, quad_lane, key_dim: int) -> list:
    """psi(x) of one row as words of an A operand, one per slot: the columns 2 * quad_lane + {0, 1} of each.

    torch: weights * torch.stack([x[:, a] * x[:, b] ...], 1), columns in feature order.
    """
    words = []
    for slot in feature_slots(key_dim):
        if slot.kind == "linear":
            words.append(row.pair(slot.first))
        elif slot.kind == "constant":
            words.append(pick_word(quad_lane == 0, ONE_ZERO, 0))
        else:
            product = mul2(row.pair(slot.first), row.pair(slot.first + slot.shift))
            if slot.shift == 0:
                product = mul2(product, HALVES)
            elif slot.products < SLOT:  # K = 8: columns 0..3 are products, 4 is the constant
                product = pick_word(quad_lane < 2, product, pick_word(quad_lane == 2, ONE_ZERO, 0))
            words.append(product)
    return words


def scaled_phi_words(row: PackedRow, quad_lane, key_dim: int, scale, weight) -> list:
    """weight * phi(scale x) of one row for K = 8, as words like those of `psi_words`."""
    x = ScaledProducts([row.pair(0)], row.words, scale, weight)
    half = pick_word(quad_lane < 2, x.product(0, key_dim // 2), pick_word(quad_lane == 2, x.one, 0))
    return [*(x.product(0, shift) for shift in range(key_dim // 2)), half, x.entry(0)]


# ---- the adjoint ----


def adjoint(acc, half: int, x: list, quad_lane, lane, key_dim: int) -> list:
    """Gradient of psi(x) . y with respect to x through the products alone, for the own entries, given accumulator row
    `half` of y and the rotated fp32 entries x. Each product gives to both its entries; what belongs to another lane of the
    quad goes there by shuffle.

    torch: sum over products (a, b) of w_ab y_ab (e_a x_b + e_b x_a).
    """
    own = own_entries(key_dim)
    grad: dict[int, Float32] = {}

    def add(index, weight, value):
        index %= key_dim
        grad[index] = cute.math.fma(weight, value, grad[index]) if index in grad else weight * value

    for number, slot in enumerate(feature_slots(key_dim)):
        if slot.shift == 0 and slot.kind != "product":
            continue
        for c in (0, 1):
            y = acc[c + 2 * half + 4 * number]
            if slot.products < SLOT:
                y = pick(quad_lane < 2, y, 0.0)
            a, b = slot.first + c, (slot.first + c + slot.shift) % key_dim
            add(a, y, x[b])
            if slot.shift != 0:  # d(x_a^2 / 2) = x_a, given once
                add(b, y, x[a])
    return gather_own(grad, own, quad_lane, lane, key_dim)


def gather_own(grad: dict, own: list, quad_lane, lane, key_dim: int) -> list:
    """Sum over the quad what its lanes hold for this lane's own entries.

    Entry e of lane t + d is entry 2d + e of lane t; past the last lane it wraps to 2d - 8 + e, which for K = 16 exchanges
    the two eights.
    """
    total = [grad[e] for e in own]
    for d in (1, 2, 3):
        if 2 * d not in grad:
            continue
        source = (lane & ~3) | ((lane - d) & 3)
        wraps = quad_lane >= 4 - d
        for i, e in enumerate(own):
            here, there = grad[(2 * d + e) % key_dim], grad[(2 * d + e + SLOT) % key_dim]
            value = here if there is here else pick(wraps, there, here)
            total[i] = total[i] + cute.arch.shuffle_sync(value, source)
    return total


def linear_columns(key_dim: int) -> list[int]:
    """Accumulator indices (row half 0) of the linear features: the own entries, in order."""
    numbers = [n for n, slot in enumerate(feature_slots(key_dim)) if slot.kind == "linear"]
    return [c + 4 * n for n in numbers for c in (0, 1)]


def linear_entries(acc, half: int, key_dim: int) -> list:
    """The linear features' columns of accumulator row `half`, for the own entries."""
    return [acc[column + 2 * half] for column in linear_columns(key_dim)]


def constant_entry(acc, half: int, quad_lane, key_dim: int):
    """The constant feature's column in the one lane of the quad that holds it, 0 in the others."""
    number, column = (17, 0) if key_dim == 16 else (4, 4)
    return pick(quad_lane == column // 2, acc[2 * half + 4 * number], 0.0)


def quad_sum(value):
    """Sum over the four lanes of a quad, in all of them."""
    for offset in (1, 2):
        value = value + cute.arch.shuffle_sync_bfly(value, offset=offset)
    return value


# ---- the state side: one thread writes half the features of one token to shared memory ----


class ExactProducts:
    """phi(x) from bf16 entries: every product is rounded once."""

    def __init__(self, left, right):
        self.left, self.right = PackedRow(left), PackedRow(right)
        self.one = ONE_ZERO

    def product(self, i, j):
        return mul2(self.left.pair(i), self.right.pair(j))

    def entry(self, j):
        return self.left.pair(j)


class Factor:
    """An fp32 factor as the sum of two bf16 terms, each twice in a packed pair: it is that sum but for 2^-17 of it."""

    def __init__(self, value):
        self.high = pack2(value, value)
        rest = value - unpack2(self.high)[0]
        self.low = pack2(rest, rest)

    def times(self, pair):
        """The products with both of a packed pair, each rounded once: one packed multiply and one packed fma, against two fp32
        multiplies, two instructions that unpack and a conversion."""
        return fma2(pair, self.high, mul2(pair, self.low))

    def terms(self, pair):
        """The products with both as sums of two bf16 terms."""
        high = mul2(pair, self.high)
        rest = fma2(pair, self.high, mul2(pair, self.high ^ SIGNS))  # what the rounding to `high` left, exactly
        return high, fma2(pair, self.low, rest)


class ScaledProducts:
    """weight * phi(scale x), scale and weight in fp32: each feature is one rounding of the product to bf16, and 2^-17 of it.

    The factor weight scale^2 x_a is split in two bf16 terms; lo x_b + hi x_b is one packed multiply and one packed fma a pair.
    """

    def __init__(self, left, right, scale, weight):
        self.left, self.right = left, PackedRow(right)
        self.linear, square = Factor(weight * scale), Factor(weight * scale * scale)
        self.high, self.low = zip(*(square.terms(pair) for pair in left[: SLOT // 2]), strict=True)
        self.one = pack2(weight, 0.0)

    def product(self, i, j):
        pair = self.right.pair(j)
        return fma2(self.high[i // 2], pair, mul2(self.low[i // 2], pair))

    def entry(self, j):
        return self.linear.times(self.left[j // 2])


class PowerProducts(ExactProducts):
    """phi(scale x) where `scales_exactly`: a bf16 entry times scale^2 is a bf16 value, and a product of two is rounded once."""

    def __init__(self, left, right, scale):
        square = pack2(scale * scale, scale * scale)
        super().__init__([mul2(word, square) for word in left], right)
        self.linear, self.entries = Factor(scale), left

    def entry(self, j):
        return self.linear.times(self.entries[j // 2])


def scales_exactly(scale):
    """Whether scale^2 is a power of two but for 2^-17, as it is of the default scale at every K of the table."""
    return ((bits_of(scale * scale) + 0x40) & 0x7FFF80) == 0


def write_features(source, target, row, part, key_dim: int, products):
    """Part 0 or 1 of phi of one row of a (tokens, 16) tile into the (tokens, F) tile `target`.

    The two share a token by columns where a diagonal has two slots (K = 16: `side`, each sees its eight as entries 0..7),
    else by diagonals (K = 8: `turn`, turned by K/4 entries the second half has the same compile-time shifts as the first).
    `products(left, right)` makes products of packed words. Returns the words of the row's eight entries on the thread's side.
    """
    sides = key_dim // SLOT
    side, turn = (part, 0) if sides == 2 else (0, part)
    shifts = key_dim // 2 // (2 // sides)
    words = [word for eight in range(sides) for word in lds128(source.chunk(row, (side + eight) % sides))]
    n = len(words)
    turned = words if sides == 2 else [pick_word(turn == 1, words[(i + shifts // 2) % n], words[i]) for i in range(n)]
    x = products(words, turned)

    def write(number, slot):  # of the slots with the same first entry
        per_panel = target.chunks // sides
        sts128(target.chunk(row, (number % per_panel) * sides + side, number // per_panel), *slot)

    def write_diagonals(first):  # those of an odd distance take words that straddle two of the row's
        for shift in range(first, shifts, 2):
            write(turn * shifts + shift, [x.product(a, a + shift) for a in range(0, SLOT, 2)])

    write_diagonals(0)
    linear = [x.entry(a) for a in range(0, SLOT, 2)]
    half = _half_slot(x if sides == 2 else products(words, words), side, key_dim)
    if sides == 2:
        write(key_dim // 2, half)
        write(key_dim // 2 + 1, linear)
    else:
        write(key_dim // 2 + turn, [pick_word(turn == 0, h, e) for h, e in zip(half, linear, strict=True)])
    write_diagonals(1)
    return words[: SLOT // 2]


def _half_slot(x, side, key_dim: int) -> list:
    """The half diagonal and the constant: in one slot for K = 8, in the slots of the two sides for K = 16."""
    products = [x.product(a, a + key_dim // 2) for a in range(0, key_dim // 2, 2)]
    constant = [x.one, 0, 0, 0]
    if key_dim == SLOT:
        return products + constant[:2]
    return [pick_word(side == 0, p, c) for p, c in zip(products, constant, strict=True)]


def row_statistics(address, row):
    """(r, h) of row `row`, fp32 pairs."""
    return [float_of(lds32(address + row * 8)), float_of(lds32(address + row * 8 + 4))]
