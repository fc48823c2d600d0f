"""Shared by all tests: seeds, the gpu marker, poisoned memory, and the layouts an input may arrive in."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from based_cute import launcher

settings.register_profile("project", deadline=None, derandomize=True, max_examples=20)
settings.load_profile("project")

torch.set_num_threads(1)  # the products are tiny: on a loaded two-core machine more threads take three times as long


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests, with the reason, where the kernels cannot run for want of an sm_90 device."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        return
    skip = pytest.mark.skip(reason="needs a CUDA device of compute capability 9.0 (sm_90)")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _forget_plans() -> Iterator[None]:
    """What a test has put in the place of kernels, cards and rules must not serve the next one."""
    yield
    launcher._plan.cache_clear()


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every torch.empty and new_empty is full of NaN, and what the launcher allocates: an element that nobody wrote, or is read
    too early, shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch fills uninitialised memory only in this mode
    assert torch.utils.deterministic.fill_uninitialized_memory
    allocate = launcher._empty_strided
    monkeypatch.setattr(launcher, "_empty_strided", lambda *layout: allocate(*layout).fill_(torch.nan))
    yield
    torch.use_deterministic_algorithms(False)


def _packed(x: Tensor) -> Tensor:
    return x


def _heads_first(x: Tensor) -> Tensor:
    """(B, T, H, D) as a view of (B, H, T, D) memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _tokens_first(x: Tensor) -> Tensor:
    """(B, T, H, D) as a view of (T, B, H, D) memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _sliced(x: Tensor) -> Tensor:
    """Part of wider rows, as q is of a fused qkv."""
    return torch.cat((x, x + 1), -1)[..., : x.shape[-1]]


def _strided_channels(x: Tensor) -> Tensor:
    return torch.stack((x, x + 1), -1)[..., 0]


def _expanded(x: Tensor) -> Tensor:
    """One element behind everything: what the gradient of a sum looks like."""
    return x[:1, :1, :1, :1].expand(x.shape)


def _shared_by_heads(x: Tensor) -> Tensor:
    """One head for all, as in multi-query attention."""
    return x[:, :, :1].expand(x.shape)


def _misaligned(x: Tensor) -> Tensor:
    """Packed, but one element past an aligned address."""
    flat = torch.cat((x.new_zeros(1), x.flatten()))
    return flat[1:].view(x.shape)


def _one_head(x: Tensor) -> Tensor:
    """One token of one head out of many: is_contiguous() holds, though the strides are those of the whole."""
    return x[:1, :1, :1]


LAYOUTS = {
    "packed": _packed,
    "heads first": _heads_first,
    "tokens first": _tokens_first,
    "sliced": _sliced,
    "strided channels": _strided_channels,
    "expanded": _expanded,
    "shared by heads": _shared_by_heads,
    "misaligned": _misaligned,
    "one head": _one_head,
}


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS.keys())
def relayout(request: pytest.FixtureRequest) -> Callable[[Tensor], Tensor]:
    """A view of a tensor's values (of some of them, for "expanded", "shared by heads" and "one head") in each layout."""
    return request.param
