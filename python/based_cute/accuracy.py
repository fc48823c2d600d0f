"""The project's one error rule, and the shapes it is applied to: shared by the tests and the command line.

Gold is fp64: the O(T^2) closed form where it is cheap, else the chunked scans. The yardstick is the same maths in
torch, with bf16 rounding exactly where the kernels round and fp32 everywhere else. On standard normal inputs each
gradient must be within NORMAL_INPUT_LIMIT of the gold and within YARDSTICK_FACTOR times the yardstick's own error.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import launcher, reference

GRADIENTS = ("dq", "dk", "dv")
GATE = 2e-2  # relative error that any input must stay within
NORMAL_INPUT_LIMIT = 3.5e-3  # what a calibrated bf16 pipeline gives on standard normal inputs
YARDSTICK_FACTOR = 2.0
OUTPUT_ROUNDING = 2.0**-9  # half a bf16 ulp: no two bf16 results are told apart below this, however small the yardstick
CANCELLATION = 2.0**-8  # a gradient smaller than this part of its terms' absolute values is measured against those

QUADRATIC_LIMIT = 512  # longest T whose gold is the O(T^2) closed form

Shape = tuple[int, int, int, int, int]  # (B, T, H, K, V)
Errors = tuple[float, float, float]  # of dq, dk, dv, in the order of GRADIENTS

CORRECTNESS_SHAPES = ((1, 512, 4, 16, 128), (2, 1024, 8, 8, 64), (1, 1024, 6, 16, 64), (2, 256, 4, 16, 128))
SPEED_SHAPES = (
    (4, 8192, 24, 16, 128),
    (8, 4096, 16, 16, 128),
    (4, 8192, 32, 16, 64),
    (6, 4096, 32, 16, 128),
    (4, 8192, 32, 8, 128),
    (4, 8192, 32, 16, 128),
    (8, 4096, 32, 16, 128),
    (8, 8192, 16, 16, 128),
    (6, 8192, 24, 16, 128),
    (8, 8192, 32, 8, 128),
)


@dataclass(frozen=True)
class CheckResult:
    """One shape through one backend. errors and yardstick are those of dq, dk, dv; reason is "" on a pass."""

    shape: Shape
    backend: str  # the one that ran: "cute" or "torch"
    errors: Errors
    yardstick: Errors
    passed: bool
    reason: str


def relative_error(x: Tensor, gold: Tensor, floor: float = 0.0) -> float:
    """|x - gold| / max(|gold|, floor) in the Frobenius norm and fp64; infinity if x or gold holds a NaN or an infinity.

    x, gold: one shape, else ValueError. `floor` is for a gold that is the rest of a cancellation (see
    `cancellation_floors`); without one, a gold of zeros is met by zeros alone.
    """
    if x.shape != gold.shape:
        raise ValueError(f"relative_error: got shapes {tuple(x.shape)} and {tuple(gold.shape)}, need one shape")
    gold = gold.to(torch.float64)
    difference = torch.linalg.vector_norm(x.to(torch.float64) - gold).item()
    if difference == 0.0:
        return 0.0
    denominator = max(torch.linalg.vector_norm(gold).item(), floor)
    error = difference / denominator if denominator > 0.0 else math.inf
    return error if math.isfinite(error) else math.inf


def make_inputs(
    shape: Shape, device: torch.device | str, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Standard normal q, k (B, T, H, K) and v, do (B, T, H, V), drawn on `device` from `seed`."""
    batch, length, heads, key_dim, value_dim = shape
    generator = torch.Generator(device).manual_seed(seed)

    def draw(width: int) -> Tensor:
        return torch.randn(batch, length, heads, width, device=device, generator=generator).to(dtype)

    return draw(key_dim), draw(key_dim), draw(value_dim), draw(value_dim)


def gold_gradients(q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float | None = None) -> tuple[Tensor, ...]:
    """fp64 dq, dk, dv of inputs of any dtype: closed form up to QUADRATIC_LIMIT tokens, chunked scans beyond."""
    if q.shape[1] <= QUADRATIC_LIMIT:
        return reference.quadratic_backward(q, k, v, do, scale)
    return reference.chunked_backward(q, k, v, do, scale, dtype=torch.float64)


def cancellation_floors(q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float | None = None) -> tuple[float, ...]:
    """Smallest norms that dq, dk and dv are measured against: CANCELLATION times those of their terms' absolute values.

    At T = 1 dq and dk vanish but for the 1e-6 of the normaliser, and a quotient of two rounding errors would decide. On
    normal inputs of 2 to 512 tokens a gradient keeps 1/20 or more of its terms and no floor is reached; beyond, none is
    computed.
    """
    if q.shape[1] > QUADRATIC_LIMIT:
        return 0.0, 0.0, 0.0
    magnitudes = reference.quadratic_magnitude(q, k, v, do, scale)
    return tuple(CANCELLATION * torch.linalg.vector_norm(x).item() for x in magnitudes)


def measure_errors(
    gradients: tuple[Tensor, ...], gold: tuple[Tensor, ...], floors: tuple[float, ...] = (0.0, 0.0, 0.0)
) -> Errors:
    """Relative errors of dq, dk, dv."""
    return tuple(relative_error(x, y, floor) for x, y, floor in zip(gradients, gold, floors, strict=True))


def failure_reason(errors: Errors, yardstick: Errors) -> str:
    """Which gradients break the rule, and by how much; "" if all keep it."""
    faults = []
    for name, error, reachable in zip(GRADIENTS, errors, yardstick, strict=True):
        allowed = min(NORMAL_INPUT_LIMIT, max(YARDSTICK_FACTOR * reachable, OUTPUT_ROUNDING))
        if error > allowed:
            faults.append(f"{name}: got relative error {error:.2e}, need at most {allowed:.2e}")
    return "; ".join(faults)


def check_shape(
    shape: Shape,
    backend: str = "auto",
    device: torch.device | str = "cuda",
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> CheckResult:
    """Run one backend on standard normal bf16 inputs of shape (B, T, H, K, V) and hold it to the error rule.

    `progress` is called with one line before each stage. Raises what `based_backward` raises if `backend` cannot run.
    """
    say = progress or (lambda line: None)
    inputs = make_inputs(shape, device, seed)
    ran = launcher.which_backend(inputs[0], shape[3], shape[4], inputs[0].dtype)[0] if backend == "auto" else backend
    say(f"{shape}: backward on {device} through {ran}")
    gradients = launcher.based_backward(*inputs, backend=backend)
    say(f"{shape}: fp64 gold")
    gold, floors = gold_gradients(*inputs), cancellation_floors(*inputs)
    errors = measure_errors(gradients, gold, floors)
    del gradients
    say(f"{shape}: bf16 yardstick")
    yardstick = measure_errors(reference.chunked_backward(*inputs, round_operands=True), gold, floors)
    reason = failure_reason(errors, yardstick)
    return CheckResult(tuple(shape), ran, errors, yardstick, not reason, reason)
