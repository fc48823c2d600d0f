"""Sharding rules, so that DTensors pass through the operators: importing this module registers them.

Every (batch, head) is a sequence of its own, so inputs replicated, or sharded over B (`Shard(0)`) or H (`Shard(2)`), stay as
they are and need no communication. Sharded over T or channels they are redistributed first, as DTensor does by itself: the
scans run along T, and every product sums over channels. A module of its own, because torch.distributed.tensor takes seconds
to import.
"""

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

BATCH, HEADS = 0, 2  # dimensions of (B, T, H, D) whose slices are independent
R_HEADS = 1  # H in the row normaliser, (B, H, T)


def _placements() -> list:
    return [Replicate(), Shard(BATCH), Shard(HEADS)]


@register_sharding(torch.ops.based.forward.default)
def _forward_sharding(q, k, v, scale=None):
    """(o, r) <- (q, k, v, scale)."""
    of_r = {Shard(HEADS): Shard(R_HEADS)}
    return [([p, of_r.get(p, p)], [p, p, p, None]) for p in _placements()]


@register_sharding(torch.ops.based.backward.default)
def _backward_sharding(q, k, v, do, scale=None):
    """(dq, dk, dv) <- (q, k, v, do, scale)."""
    return [([p] * 3, [p] * 4 + [None]) for p in _placements()]
