"""The project's one error rule, and the shapes it is applied to: shared by the tests and the command line.

Gold is fp64: the O(T^2) closed form where it is cheap, else the chunked scans. The yardstick is the same maths in
torch, with bf16 rounding exactly where the kernels round and fp32 everywhere else. On standard normal inputs the output
and each gradient must be within their limit of the gold and within YARDSTICK_FACTOR times the yardstick's own error.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import launcher, reference

GRADIENTS = ("dq", "dk", "dv")
QUANTITIES = ("o", *GRADIENTS)  # what a check measures
GATE = 2e-2  # relative error that any input must stay within
NORMAL_INPUT_LIMIT = 3.5e-3  # what a calibrated bf16 pipeline gives on standard normal inputs
OUTPUT_LIMIT = 2.5e-3  # the same for o, of which rounding the result alone is 1.7e-3
YARDSTICK_FACTOR = 2.0
OUTPUT_ROUNDING = 2.0**-9  # half a bf16 ulp: no two bf16 results are told apart below this, however small the yardstick
CANCELLATION = 2.0**-8  # a gradient smaller than this part of its terms' absolute values is measured against those

QUADRATIC_LIMIT = 512  # longest T whose gold is the O(T^2) closed form

Shape = tuple[int, int, int, int, int]  # (B, T, H, K, V)
Errors = tuple[float, ...]  # in the order of QUANTITIES, or of GRADIENTS where it says so

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
    (1, 131072, 8, 16, 128),
    (1, 2048, 16, 16, 128),
    (2, 2048, 8, 16, 128),
    (1, 4096, 16, 8, 128),
)


@dataclass(frozen=True)
class CheckResult:
    """One shape through one backend. errors and yardstick are those of QUANTITIES; reason is "" on a pass."""

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


def gold_output(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """fp64 o of inputs of any dtype, by the same two ways."""
    if q.shape[1] <= QUADRATIC_LIMIT:
        return reference.quadratic_forward(*(x.to(torch.float64) for x in (q, k, v)), scale)
    return reference.chunked_forward(q, k, v, scale, dtype=torch.float64)[0]


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


def measure_errors(results: tuple[Tensor, ...], gold: tuple[Tensor, ...], floors: tuple[float, ...] | None = None) -> Errors:
    """Relative error of each result, with its floor if there are any."""
    floors = floors or (0.0,) * len(gold)
    return tuple(relative_error(x, y, floor) for x, y, floor in zip(results, gold, floors, strict=True))


def failure_reason(errors: Errors, yardstick: Errors, names: tuple[str, ...] = GRADIENTS) -> str:
    """Which of `names` break the rule, and by how much; "" if all keep it."""
    faults = []
    for name, error, reachable in zip(names, errors, yardstick, strict=True):
        limit = OUTPUT_LIMIT if name == "o" else NORMAL_INPUT_LIMIT
        allowed = min(limit, max(YARDSTICK_FACTOR * reachable, OUTPUT_ROUNDING))
        if error > allowed:
            faults.append(f"{name}: got relative error {error:.2e}, need at most {allowed:.2e}")
    return "; ".join(faults)


def train_step(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, dq, dk and dv as training gets them: the forward, and its gradients through autograd."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = launcher.based_attention(*leaves, scale, backend=backend)
    return o.detach(), *torch.autograd.grad(o, leaves, do)


def check_shape(
    shape: Shape,
    backend: str = "auto",
    device: torch.device | str = "cuda",
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> CheckResult:
    """Run one backend on standard normal bf16 inputs of shape (B, T, H, K, V) and hold it to the error rule.

    o and the gradients are those of autograd; `based_backward` must give the same gradients to the bit. `progress` is called
    with one line before each stage. Raises what `based_attention` raises if `backend` cannot run.
    """
    say = progress or (lambda line: None)
    inputs = make_inputs(shape, device, seed)
    ran = launcher.which_backend(inputs[0], shape[3], shape[4], inputs[0].dtype)[0] if backend == "auto" else backend
    say(f"{shape}: forward and backward on {device} through {ran}")
    results = train_step(*inputs, backend=backend)
    faults = disagreements(results[1:], launcher.based_backward(*inputs, backend=backend))
    say(f"{shape}: fp64 gold")
    gold = gold_output(*inputs[:3]), *gold_gradients(*inputs)
    floors = 0.0, *cancellation_floors(*inputs)
    errors = measure_errors(results, gold, floors)
    del results
    say(f"{shape}: bf16 yardstick")
    yardstick = measure_errors(yardstick_results(*inputs), gold, floors)
    reason = "; ".join(filter(None, (failure_reason(errors, yardstick, QUANTITIES), *faults)))
    return CheckResult(tuple(shape), ran, errors, yardstick, not reason, reason)


def yardstick_results(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, dq, dk and dv with bf16 rounding where the kernels round, in fp32 tensors."""
    o, _ = reference.chunked_forward(q, k, v, round_operands=True)
    return o, *reference.chunked_backward(q, k, v, do, round_operands=True)


def disagreements(gradients: tuple[Tensor, ...], raw: tuple[Tensor, ...]) -> list[str]:
    """A sentence for each gradient through autograd that is not, bit for bit, that of `based_backward`."""
    triples = zip(GRADIENTS, gradients, raw, strict=True)
    different = [name for name, x, y in triples if not torch.allclose(x, y, rtol=0.0, atol=0.0, equal_nan=True)]
    return [f"{name}: autograd and based_backward differ" for name in different]
