"""What several test files share: the (K, V) of the table, equality, rules that cut sequences as told, and guarded memory."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from based_cute import launcher
from based_cute.kernels import config
from based_cute.kernels.schedule import HandsOn, Schedule

DIMS = sorted({(row.key_dim, row.value_dim) for row in config.ROWS})
every_row = pytest.mark.parametrize(("key_dim", "value_dim"), DIMS)


def equal(tensors, others) -> bool:
    """Bitwise, one by one."""
    return all(torch.equal(x, y) for x, y in zip(tensors, others, strict=True))


def contiguous_strides(x: Tensor) -> tuple[int, ...]:
    return torch.empty(x.shape, device="meta").stride()


def with_two_key_sizes(inputs: tuple[Tensor, ...], early: float) -> tuple[Tensor, ...]:
    """The inputs with the first half's keys made smaller by `early` < 1, or the second half's by `early` > 1."""
    q, k, *others = inputs
    half = k.shape[1] // 2
    return q, torch.cat((k[:, :half] * min(early, 1), k[:, half:] / max(early, 1)), 1), *others


Rule = Callable[..., Schedule]  # stands in for schedule.schedule


def cut_by(monkeypatch: pytest.MonkeyPatch, rule: Rule) -> None:
    """Sequences are cut by `rule` from here on."""
    monkeypatch.setattr(launcher, "schedule", rule)
    launcher._plan.cache_clear()


def plan_of(kind: str, inputs: tuple[Tensor, ...]):
    """The launcher's plan of a "forward" or "backward" of q, k, v and what else there is."""
    q, _, v, *_ = inputs
    return launcher._plan(kind, q.shape, v.shape, q.dtype, q.device)


def launched(kind: str, inputs: tuple[Tensor, ...], scale: float | None = None) -> tuple[Tensor, ...]:
    """o and r of q, k, v, or dq, dk, dv of q, k, v, do, as the launcher's plan computes them."""
    return plan_of(kind, inputs).run(inputs, scale)


def handed_on(kind: str, inputs: tuple[Tensor, ...]) -> HandsOn:
    """What CTAs hand on in that plan."""
    *cut, _, _ = plan_of(kind, inputs).cut
    return HandsOn(Schedule(*cut).hands_on)


def launch_on_cpu(monkeypatch: pytest.MonkeyPatch, operation: Callable) -> None:
    """The launcher plans for CPU tensors as for an H200, and `operation` gives it functions in the place of compiled ones."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of the CPU
    monkeypatch.setattr(launcher, "_processors", lambda device: 132)
    monkeypatch.setattr(launcher, "which_backend", lambda *kind: ("cute", None))
    monkeypatch.setattr(launcher, "_operation", operation)
    monkeypatch.setattr(launcher, "_empty_strided", lambda *layout: torch.empty_strided(*layout[:2], dtype=layout[2]))


def uncut(sequences: int, chunks: int, *_) -> Schedule:
    return Schedule(sequences, chunks, chunks, HandsOn.NOTHING)


def scans(key_dim: int, value_dim: int) -> Rule:
    """Whole sequences, by scans: where the table has a sweep, `uncut` would take that."""
    return uncut if config.uncut_way("backward", key_dim, value_dim) == "whole" else chained(1.0)


def in_runs(sequences: int, chunks: int, per_cta: int, hands_on: HandsOn, runs: int) -> Schedule:
    assert sequences % runs == 0
    ctas = math.ceil(sequences // runs * chunks / per_cta)
    return Schedule(runs * ctas, per_cta, chunks, hands_on, runs=runs)


def chained(share: float, runs: int = 1) -> Rule:
    """A CTA takes that many sequences' worth of chunks, at least 1.0."""
    return lambda sequences, chunks, *_: in_runs(sequences, chunks, math.ceil(share * chunks), HandsOn.STATE, runs)


def summed(per_cta: int, runs: int | None = None) -> Rule:
    """Ranges of `per_cta` chunks of one sequence, or of the sequences of a run."""
    return lambda sequences, chunks, *_: in_runs(sequences, chunks, per_cta, HandsOn.SUMS, runs or sequences)


def parted(first: int, several: int) -> Rule:
    """A CTA takes what follows the first chunks of one sequence, or the first chunks of `several`."""

    def rule(sequences, chunks, *_):
        return Schedule(sequences + math.ceil(sequences / several), several * first, first, HandsOn.SUMS, sequences)

    return rule


class Guards:
    """Allocates tensors between guards of `padding` elements."""

    SENTINEL = 7.0

    def __init__(self, padding: int) -> None:
        self.padding, self.guards = padding, []

    def like(self, x: Tensor) -> Tensor:
        flat = torch.full((x.numel() + 2 * self.padding,), self.SENTINEL, dtype=x.dtype, device=x.device)
        self.guards += (flat[: self.padding], flat[self.padding + x.numel() :])
        return flat[self.padding : self.padding + x.numel()].view(x.shape)

    def assert_intact(self, tensors: int) -> None:
        """Around that many tensors, which is all that were allocated."""
        assert len(self.guards) == 2 * tensors and all((guard == self.SENTINEL).all() for guard in self.guards)
