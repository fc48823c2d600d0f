"""The order of the packed Taylor features, as plain Python: one table that kernels and tests share.

`1 + s + s^2/2` with `s = x.y` is a dot product of features: the constant 1, the K entries of x, and the K(K+1)/2 distinct
products x_a x_b, where a square x_a^2 carries the weight 1/2 on one of the two sides. Products are laid out along cyclic
diagonals: diagonal d holds x_a x_{(a+d) mod K} for every a. Then every slot of eight columns is an elementwise product of
eight consecutive entries of x with eight consecutive (rotated) entries of x, which a thread that holds x rotated to its own
first column forms from registers with compile-time indices.

    K = 16: diagonals 0..7 (two slots each), the half diagonal 8 beside the constant, x itself: 20 slots, F = 160
    K =  8: diagonals 0..3 (one slot each),  the half diagonal 4 beside the constant, x itself:  6 slots, F =  48
"""

from typing import NamedTuple

SLOT = 8  # columns of one slot: the N = 8 granule of a WGMMA accumulator and 16 bytes of bf16


class Slot(NamedTuple):
    """Eight columns c = 0..7 of the feature row of x.

    kind "product":  x_{first+c} * x_{first+c+shift}, every c
    kind "half":     the same for c < products (shift = K/2 repeats itself after K/2 columns); for K = 8 column 4 is the
                     constant 1; the columns behind it are zero
    kind "constant": column 0 is the constant 1, the others are zero
    kind "linear":   x_{first+c}
    """

    kind: str
    first: int
    shift: int = 0
    products: int = 0


def feature_slots(key_dim: int) -> tuple[Slot, ...]:
    """The slots of one feature row, left to right, for key_dim 8 or 16."""
    if key_dim not in (8, 16):
        raise ValueError(f"feature_slots: got key_dim={key_dim}, need 8 or 16")
    firsts = range(0, key_dim, SLOT)
    slots = [Slot("product", first, shift, SLOT) for shift in range(key_dim // 2) for first in firsts]
    slots.append(Slot("half", 0, key_dim // 2, key_dim // 2))
    if key_dim == 16:
        slots.append(Slot("constant", 0))
    slots.extend(Slot("linear", first) for first in firsts)
    return tuple(slots)


def feature_order(key_dim: int) -> list[tuple[int, ...] | None]:
    """Per column the indices whose entries are multiplied: (a, b), (a,), () for the constant, None for a zero column."""
    columns: list[tuple[int, ...] | None] = []
    for slot in feature_slots(key_dim):
        for c in range(SLOT):
            a = slot.first + c
            if slot.kind == "linear":
                columns.append((a,))
            elif slot.kind != "constant" and c < slot.products:
                columns.append((a % key_dim, (a + slot.shift) % key_dim))
            else:
                columns.append(() if c == slot.products else None)
    return columns


def feature_weights(key_dim: int) -> list[float]:
    """Weight of each column on the token side: 1/2 for a square, 1 otherwise, 0 for a zero column."""
    return [0.0 if f is None else 0.5 if len(f) == 2 and f[0] == f[1] else 1.0 for f in feature_order(key_dim)]


def feature_count(key_dim: int) -> int:
    """F, the padded length of a feature row: 160 for key_dim 16, 48 for key_dim 8."""
    return SLOT * len(feature_slots(key_dim))
