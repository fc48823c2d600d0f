"""Shared-memory tiles: their layouts, their addresses, and the TMA copies that fill and drain them."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from .ptx import stmatrix4

# Cache policies of TMA loads: fractional L2 policies as createpolicy makes them (CUTLASS, TMA::CacheHintSm90).
EVICT_NORMAL, EVICT_LAST = 0x1000000000000000, 0x14F0000000000000
CHUNK_BYTES = 16  # the unit the swizzles move: 8 bf16
STORED = (16, 64)  # rows and columns of one TMA store: a warp stores its own rows, and so needs no barrier


def swizzle_bytes(columns: int) -> int:
    """Width of the widest swizzle that divides a bf16 row: 128, 64 or 32 bytes."""
    return next(width for width in (128, 64, 32) if (2 * columns) % width == 0)


def smem_layout(shape, buffers: int | None = None):
    """Row-major (rows, columns[, buffers]) bf16 tile, swizzled so that WGMMA reads it along either mode.

    Panels of one swizzle width stand one after the other, each with all rows: the address of (row, column) is the panel's
    base plus row * width, with the 16-byte chunk index XORed by the row's phase (see SwizzledTile).
    """
    kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, BFloat16, shape[1])
    atom = warpgroup.make_smem_layout_atom(kind, BFloat16)
    full, order = (shape, (0, 1)) if buffers is None else ((*shape, buffers), (0, 1, 2))
    return cute.tile_to_shape(atom, full, order=order)


def columns_of(tile, first: int, count: int):
    """`count` columns from `first` on of a (rows, columns, buffers) tile of `smem_layout`, whole panels."""
    rows, columns, buffers = (cute.size(tile.shape[mode]) for mode in range(3))
    kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, BFloat16, columns)
    outer = cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, BFloat16), (rows, count), order=(0, 1)).outer
    layout = cute.make_layout((*outer.shape, buffers), stride=(*outer.stride, rows * columns))
    return cute.make_tensor(tile.iterator + rows * first, layout)


def statistics_layout(chunk: int, stages: int):
    """(r, h) pairs of a chunk, fp32, for each stage."""
    return cute.make_layout((2 * chunk, stages))


def transposed(tensor):
    """The same shared memory with its first two modes exchanged: what is K-major one way is MN-major the other."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 0, *range(2, cute.rank(tensor))]))


class SwizzledTile:
    """Addresses of 16-byte chunks in a tile of `smem_layout`, for accesses whose width and order are chosen by hand."""

    def __init__(self, base, rows: int, columns: int):
        self.base, self.rows, self.columns, self.width = base, rows, columns, swizzle_bytes(columns)

    @property
    def chunks(self) -> int:
        """16-byte chunks in one row of one panel."""
        return self.width // CHUNK_BYTES

    def phase(self, row):
        """What the swizzle XORs into the chunk index of `row`: three, two or one of the row's bits."""
        return {128: row & 7, 64: (row >> 1) & 3, 32: (row >> 2) & 1}[self.width]

    def chunk(self, row, inner, panel=0):
        """Shared address of chunk `inner` (< chunks) of `row` in `panel`; a compile-time panel is an immediate."""
        return self.base + row * self.width + ((inner ^ self.phase(row)) << 4) + panel * (self.rows * self.width)

    def at(self, offset):
        """The tile `offset` bytes further on."""
        return SwizzledTile(self.base + offset, self.rows, self.columns)

    def buffer(self, number):
        """The tile in buffer `number` of those that `smem_layout` puts behind one another."""
        return self.at(number * (2 * self.rows * self.columns))


def store_words(tile: SwizzledTile, first, lane, words):
    """Sixteen rows of a tile, from row `first` on, by one warp: `words` are packed pairs in accumulator order, those of row
    half h and eight columns e at h + 2 e."""
    row, right = first + lane % 16, lane // 16
    per_panel = tile.chunks // 2
    for n in range(len(words) // 4):
        stmatrix4(tile.chunk(row, 2 * (n % per_panel) + right, n // per_panel), *words[4 * n : 4 * n + 4])


def token_view(tensor):
    """(B, T, H, D) in global memory as (T, D, H, B): the tile's modes first."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 3, 2, 0]))


class TmaTensor(NamedTuple):
    """A TMA descriptor and the coordinate tensor that goes with it."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


def tma_load(tensor, layout, tile) -> TmaTensor:
    """Global (B, T, H, D) to shared tiles of `tile` (tokens, D); rows past T and columns past D arrive as zeros."""
    op = cpasync.CopyBulkTensorTileG2SOp()
    return TmaTensor(*cpasync.make_tiled_tma_atom(op, token_view(tensor), cute.select(layout, mode=[0, 1]), tile))


def tma_store(tensor, layout, tile) -> TmaTensor:
    """Shared tiles of `tile` to global (B, T, H, D); rows past T are dropped."""
    op = cpasync.CopyBulkTensorTileS2GOp()
    return TmaTensor(*cpasync.make_tiled_tma_atom(op, token_view(tensor), layout, tile))


def tma_partition(source: TmaTensor, smem, tile, head, batch):
    """(shared [.., buffer], global [.., token chunk]) sides of the copies of one head."""
    g = cute.local_tile(source.tensor[None, None, head, batch], tile, (None, 0))
    return cpasync.tma_partition(source.atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(g, 0, 2))


@cute.jit
def store_warp_rows(sink: TmaTensor, staged, places, block, inside, head, batch):
    """By one warp, sixteen rows of one head from shared tiles to global ones: `places` are the index of each 64 columns in the
    (16, 64) blocks of `staged`, `block` the global number of the rows; the copies form a group of their own, empty where the
    rows are not `inside`."""
    target = cute.local_tile(sink.tensor[None, None, head, batch], STORED, (None, None))
    source, target = cpasync.tma_partition(
        sink.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(cute.flat_divide(staged, STORED), 0, 2),
        cute.group_modes(target, 0, 2),
    )
    if inside:
        for panel in cutlass.range_constexpr(len(places)):
            cute.copy(sink.atom, source[(None, *places[panel])], target[None, block, panel])
    cute.arch.cp_async_bulk_commit_group()


def tma_load_statistics(tensor, layout, chunk: int) -> TmaTensor:
    """(r, h) of (B, H, T, 2) fp32, contiguous, to shared rows of 2 * chunk values."""
    batch, heads, tokens, values = tensor.shape
    flat = cute.make_layout((tokens * values, heads, batch), stride=(1, tensor.stride[1], tensor.stride[0]))
    op, rows = cpasync.CopyBulkTensorTileG2SOp(), cute.make_tensor(tensor.iterator, flat)
    return TmaTensor(*cpasync.make_tiled_tma_atom(op, rows, cute.select(layout, mode=[0]), (2 * chunk,)))


def tma_partition_statistics(source: TmaTensor, smem, chunk: int, head, batch):
    """(shared [.., stage], global [.., token chunk]) sides of the copies of one head's (r, h)."""
    g = cute.local_tile(source.tensor[None, head, batch], (2 * chunk,), (None,))
    return cpasync.tma_partition(source.atom, 0, cute.make_layout(1), smem, g)
