"""DTensors through the operators, on a fake process group of two: placements, shapes, and the values of the local shard."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import based_cute
import based_cute.distributed  # noqa: F401, registers the rules


@pytest.fixture(scope="module")
def mesh():
    """Rank 0 of two; collectives of a fake group do nothing, so only values that need none are compared."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def inputs():
    return [torch.randn(2, 70, 4, d) for d in (8, 8, 16, 16)]


def run(q, k, v, do):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = based_cute.based_attention(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(2)], ids=str)
def test_independent_sequences_stay_where_they_are(mesh, placement):
    plain = inputs()
    expected = run(*plain)
    results = run(*(distribute_tensor(x, mesh, [placement]) for x in plain))
    for result, value in zip(results, expected, strict=True):
        assert result.placements == (placement,) and result.shape == value.shape
        local = value if placement == Replicate() else value.chunk(2, placement.dim)[0]
        torch.testing.assert_close(result.to_local(), local)


def test_row_normaliser_is_sharded_by_its_own_heads(mesh):
    q, k, v, _ = (distribute_tensor(x, mesh, [Shard(2)]) for x in inputs())
    _, r = torch.ops.based.forward(q, k, v)
    assert r.placements == (Shard(1),) and r.shape == (2, 4, 70) and r.to_local().shape == (2, 2, 70)


@pytest.mark.parametrize("placement", [Shard(1), Shard(3)], ids=str)
def test_tokens_and_channels_are_redistributed(mesh, placement):
    results = run(*(distribute_tensor(x, mesh, [placement]) for x in inputs()))
    for result, width in zip(results, (16, 8, 8, 16), strict=True):
        assert result.placements == (Replicate(),) and result.shape == (2, 70, 4, width)
