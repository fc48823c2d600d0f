"""The state S^T (V x F) between chunks, in the accumulators of one warpgroup: its bf16 copy in shared memory, and what is kept
of it in global memory."""

import cutlass.cute as cute
from cutlass import Int64

from .ptx import float_of, ldg128_or_zeros, pack2, stg128
from .tiles import SwizzledTile, store_words


def publish_state(acc, tile: SwizzledTile, first: int, thread, features: int):
    """The accumulator of 64 rows of S^T, rounded to bf16, into rows first.. of the (V, F) tile.

    torch: tile[first:first + 64].copy_(S.T[first:first + 64].to(torch.bfloat16)).
    """
    words = [pack2(acc[2 * i], acc[2 * i + 1]) for i in range(features // 4)]
    store_words(tile.at(first * tile.width), 16 * (thread // 32), thread % 32, words)


def place_of(number: int, address, thread):
    """Where the `number`-th four registers of a state stand in memory: (registers / 4, 128 threads, 4) fp32."""
    return address + (16 * 128) * number + 16 * thread


def save_state(accumulators, address, thread):
    """The accumulators of 128 threads to fp32 at global `address`."""
    for number, values in enumerate(quadruples(accumulators)):
        stg128(place_of(number, address, Int64(thread)), *values)


def load_state(accumulators, address, thread, wanted):
    """What `save_state` stored, bit for bit, into accumulators of the same shapes; zeros where `wanted` is 0."""
    number = 0
    for acc in accumulators:
        for i in range(0, cute.size(acc), 4):
            values = ldg128_or_zeros(place_of(number, address, Int64(thread)), wanted)
            for j in range(4):
                acc[i + j] = float_of(values[j])
            number += 1


def quadruples(accumulators):
    """The registers of several accumulators in order, four at a time."""
    return [[acc[i + j] for j in range(4)] for acc in accumulators for i in range(0, cute.size(acc), 4)]
