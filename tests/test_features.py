"""The kernels' own index maths, without a GPU: feature order, swizzled addresses, and the register code of blocks/taylor.py
run on numpy lanes in place of threads. pycute, the layout algebra of the nvidia-cutlass wheel, is the independent oracle for
layouts; the formula 1 + s + s^2/2 is the one for features."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from based_cute.kernels import config, features

pycute = pytest.importorskip("pycute", reason="the nvidia-cutlass wheel, which the test extra names, is not installed")
Layout, Swizzle = pycute.Layout, pycute.Swizzle

KEY_DIMS = (8, 16)
LANES = np.arange(4)  # a quad: the four lanes that share an accumulator row


def feature_row(x: np.ndarray, key_dim: int) -> np.ndarray:
    """phi(x), unweighted, straight from the column table."""
    return np.array([0.0 if f is None else np.prod([x[a] for a in f]) for f in features.feature_order(key_dim)])


@pytest.mark.parametrize("key_dim", KEY_DIMS)
def test_features_give_the_taylor_polynomial(key_dim):
    x, y = np.random.default_rng(0).standard_normal((2, key_dim))
    s = x @ y
    weights = np.array(features.feature_weights(key_dim))
    assert (weights * feature_row(x, key_dim)) @ feature_row(y, key_dim) == pytest.approx(1 + s + s * s / 2, rel=1e-14)


@pytest.mark.parametrize("key_dim", KEY_DIMS)
def test_every_feature_stands_once(key_dim):
    order = features.feature_order(key_dim)
    named = [tuple(sorted(f)) for f in order if f is not None]
    pairs = list(itertools.combinations_with_replacement(range(key_dim), 2))
    assert sorted(named) == sorted([(), *((a,) for a in range(key_dim)), *pairs])
    assert len(order) == features.feature_count(key_dim) == {8: 48, 16: 160}[key_dim]
    assert order.count(None) == key_dim // 2 - 1


def test_other_key_dims_are_refused():
    with pytest.raises(ValueError, match="got key_dim=12, need 8 or 16"):
        features.feature_slots(12)


@pytest.mark.parametrize("n", (16, 48, 64, 160))
def test_accumulator_coordinates(n):
    """Flat index c + 2 half + 4 eight of thread t is row 16 warp + lane/4 + 8 half, column 8 eight + 2 (lane % 4) + c: the
    C layout of a 64 x N WGMMA, (thread, value) -> row + 64 column."""
    layout = Layout(((4, 8, 4), (2, 2, n // 8)), ((128, 1, 16), (64, 8, 512)))
    for thread, c, half, eight in itertools.product(range(128), range(2), range(2), range(n // 8)):
        row, column = 16 * (thread // 32) + thread % 32 // 4 + 8 * half, 8 * eight + 2 * (thread % 4) + c
        assert layout(thread, c + 2 * half + 4 * eight) == row + 64 * column


@pytest.mark.parametrize("columns, swizzle", [(16, Swizzle(1, 4, 3)), (48, Swizzle(1, 4, 3)), (64, Swizzle(3, 4, 3))])
def test_swizzled_addresses(columns, swizzle):
    check_swizzled_addresses(columns, swizzle)


@pytest.mark.parametrize("columns, swizzle", [(160, Swizzle(2, 4, 3)), (128, Swizzle(3, 4, 3))])
def test_swizzled_addresses_of_several_panels(columns, swizzle):
    check_swizzled_addresses(columns, swizzle)


def check_swizzled_addresses(columns, swizzle, rows=64):
    """SwizzledTile against the byte layout of the tile: panels of one swizzle width, rows packed, then the swizzle."""
    tiles = pytest.importorskip("based_cute.kernels.blocks.tiles")
    width = tiles.swizzle_bytes(columns)
    tile = tiles.SwizzledTile(0, rows, columns)
    layout = Layout((rows, (width // 16, 2 * columns // width)), (width, (16, rows * width)))  # (row, chunk) -> byte
    for row, panel, inner in itertools.product(range(rows), range(2 * columns // width), range(width // 16)):
        assert tile.chunk(row, inner, panel) == swizzle(layout(row, (inner, panel)))


# ---- blocks/taylor.py on numpy ----


class Pair:
    """A packed word per lane: (low, high)."""

    def __init__(self, low, high):
        self.both = (np.broadcast_to(np.asarray(low, float), 4), np.broadcast_to(np.asarray(high, float), 4))


CONSTANTS = {0x3F803F80: (1, 1), 0x3F003F00: (0.5, 0.5), 0x3F80: (1, 0), 0: (0, 0)}


def as_pair(word) -> Pair:
    return word if isinstance(word, Pair) else Pair(*CONSTANTS[word])


def pick_word(condition, a, b):
    a, b = as_pair(a), as_pair(b)
    return Pair(*(np.where(condition, x, y) for x, y in zip(a.both, b.both, strict=True)))


@pytest.fixture
def taylor(monkeypatch):
    """blocks.taylor with its instructions replaced by numpy ones: exact products, the quad as an array axis."""
    module = pytest.importorskip("based_cute.kernels.blocks.taylor")
    arch = SimpleNamespace(shuffle_sync=lambda value, source: np.broadcast_to(value, 4)[source])
    fma = lambda a, b, c: a * b + c  # noqa: E731
    monkeypatch.setattr(module, "cute", SimpleNamespace(arch=arch, math=SimpleNamespace(fma=fma)))
    multiply = lambda a, b: Pair(*(x * y for x, y in zip(as_pair(a).both, as_pair(b).both, strict=True)))  # noqa: E731
    for name, replacement in {
        "mul2": multiply,
        "straddle": lambda a, b: Pair(as_pair(a).both[1], as_pair(b).both[0]),
        "pick": np.where,
        "pick_word": pick_word,
    }.items():
        monkeypatch.setattr(module, name, replacement)
    return module


def rotated(x: np.ndarray, j: int) -> np.ndarray:
    """Entry j of x as the lanes of a quad see it."""
    return np.array([x[(2 * lane + j) % len(x)] for lane in LANES])


@pytest.mark.parametrize("key_dim", KEY_DIMS)
def test_psi_words_are_the_weighted_features(taylor, key_dim):
    x = np.random.default_rng(1).standard_normal(key_dim)
    row = taylor.PackedRow([Pair(rotated(x, j), rotated(x, j + 1)) for j in range(0, key_dim, 2)])
    words = taylor.psi_words(row, LANES, key_dim)
    expected = np.array(features.feature_weights(key_dim)) * feature_row(x, key_dim)
    for number, word in enumerate(words):
        for c in (0, 1):
            np.testing.assert_allclose(as_pair(word).both[c], expected[8 * number + 2 * LANES + c], rtol=1e-15)


@pytest.mark.parametrize("key_dim", KEY_DIMS)
def test_adjoint_is_the_gradient_of_the_products(taylor, key_dim):
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal(key_dim), rng.standard_normal(features.feature_count(key_dim))
    expected = np.zeros(key_dim)
    for f, weight, value in zip(features.feature_order(key_dim), features.feature_weights(key_dim), y, strict=True):
        if f is not None and len(f) == 2:
            expected[f[0]] += weight * value * x[f[1]]
            expected[f[1]] += weight * value * x[f[0]]
    for half in (0, 1):
        acc = {c + 2 * half + 4 * n: y[8 * n + 2 * LANES + c] for n in range(len(y) // 8) for c in (0, 1)}
        entries = [rotated(x, j) for j in range(key_dim)]
        got = taylor.adjoint(acc, half, entries, LANES, LANES, key_dim)
        for e, value in zip(taylor.own_entries(key_dim), got, strict=True):
            np.testing.assert_allclose(value, rotated(expected, e), rtol=1e-13)


@pytest.mark.parametrize("key_dim", KEY_DIMS)
def test_linear_and_constant_columns(taylor, key_dim):
    order = features.feature_order(key_dim)
    y = np.arange(float(len(order)))
    acc = {c + 4 * n: y[8 * n + 2 * LANES + c] for n in range(len(y) // 8) for c in (0, 1)}
    linear = taylor.linear_entries(acc, 0, key_dim)
    for e, value in zip(taylor.own_entries(key_dim), linear, strict=True):
        np.testing.assert_array_equal(value, [order.index(((2 * lane + e) % key_dim,)) for lane in LANES])
    assert taylor.constant_entry(acc, 0, LANES, key_dim).sum() == order.index(())


@pytest.mark.parametrize("key_dim", KEY_DIMS)
def test_feature_tile_written_by_the_state_warpgroup(taylor, monkeypatch, key_dim):
    """write_features: both parts of every row between them write every column once, with phi's values."""
    tokens = 64
    x = np.random.default_rng(3).standard_normal((tokens, key_dim))

    class Tile:
        chunks = {8: 2, 16: 4}[key_dim]

        def chunk(self, row, inner, panel=0):
            return row, panel * self.chunks + inner

    written = {}

    def store(address, *words):
        assert address not in written
        written[address] = [float(v[0]) for word in words for v in as_pair(word).both]

    def load(address):
        row, chunk = address
        return [Pair(x[row, 8 * chunk + j], x[row, 8 * chunk + j + 1]) for j in range(0, 8, 2)]

    monkeypatch.setattr(taylor, "lds128", load)
    monkeypatch.setattr(taylor, "sts128", store)
    for row in range(tokens):
        for part in range(2):
            taylor.write_features(Tile(), Tile(), row, part, key_dim, taylor.ExactProducts)
    assert len(written) == tokens * features.feature_count(key_dim) // 8
    for (row, chunk), values in written.items():
        np.testing.assert_allclose(values, feature_row(x[row], key_dim)[8 * chunk : 8 * chunk + 8], rtol=1e-15)


# ---- the table of rows ----


def test_rows_fit_the_card_and_have_distinct_names():
    assert len({row.name for row in config.ROWS}) == len(config.ROWS)
    for row in config.ROWS:
        assert row.registers <= config.REGISTER_FILE and row.shared_memory <= config.SHARED_MEMORY_LIMIT
        assert row.allowed_spill <= 64 and row.origin
        assert config.find(row.scan, row.key_dim, row.value_dim) == row
    assert config.find("forward_scan", 16, 96) is None


@pytest.mark.parametrize("field, value", [("stages", 9), ("token_registers", 232), ("scan", "sideways")])
def test_impossible_rows_are_refused(field, value):
    fields = {"scan": "forward_scan", "key_dim": 16, "value_dim": 128, field: value}
    with pytest.raises(ValueError):
        config.ScanConfig(**fields)
