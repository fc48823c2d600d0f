"""From tensors to a backend: validation, the operator torch.ops.based.backward, and the launch of the two scans.

Importing this file initialises no CUDA context and imports no DSL. B, T, H and scale are run-time values of a kernel;
only (K, V) selects one.
"""

import importlib.util
import math
import warnings
from collections.abc import Callable
from functools import cache
from numbers import Real

import torch
from torch import Tensor

from . import reference
from .kernels import config

BACKENDS = ("auto", "cute", "torch")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
CAPABILITY = (9, 0)  # sm_90a: the kernels use its WGMMA and TMA instructions
ALIGNMENT = 16  # bytes a TMA address must be a multiple of

Gradients = tuple[Tensor, Tensor, Tensor]


def based_backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float | None = None, *, backend: str = "auto"
) -> Gradients:
    """Gradients of causal Based (second-order Taylor) attention with respect to q, k and v.

    The forward, per batch and head, with s_ij = scale * q_i.k_j and j <= i (the diagonal included):

        A_ij = 1 + s_ij + s_ij^2 / 2      o_i = (sum_j A_ij v_j) / (sum_j A_ij + 1e-6)

    Args:
        q, k: (B, T, H, K) queries and keys, K the Taylor feature dimension.
        v, do: (B, T, H, V) values and the gradient of the loss with respect to o.
        scale: finite number that multiplies q.k; None means K ** -0.5.
        backend: "auto" picks the CuTe kernels where they run (bf16 on a GPU of compute capability 9.0, (K, V) in the
            table of kernels/config.py) and else the torch path, on a GPU with one warning per reason. "cute" insists on
            the kernels. "torch" takes the torch path: fp64 for fp64 inputs, fp32 arithmetic for the others.

    Any strides are accepted, and no input is written to. Under torch.compile use "auto", which is one opaque operator.

    Returns:
        dq, dk (B, T, H, K) and dv (B, T, H, V): new contiguous tensors of the inputs' dtype, which carry no autograd
        graph. (torch.ops.based.backward itself raises when differentiated, rather than lose the second order silently.)

    Raises:
        TypeError: an argument is no tensor, dtypes differ or are none of bf16, fp16, fp32 and fp64, scale is no number.
        ValueError: ranks, shapes or devices disagree, scale is not finite, or backend is unknown.
        RuntimeError: backend="cute" where the kernels cannot run, or their first use inside a CUDA graph capture.

    Source: Arora et al., "Simple linear attention language models balance the recall-throughput tradeoff", 2024,
    arXiv:2402.18668.
    """
    if backend not in BACKENDS:
        raise ValueError(f"based_backward: got backend={backend!r}, need one of {BACKENDS}")
    check_tensors(q, k, v, do)
    scale = _plain_scale(scale)
    with torch.no_grad():
        if backend == "auto":
            return torch.ops.based.backward(q, k, v, do, scale)
        if backend == "torch":
            return _run_reference(q, k, v, do, scale)
        _, reason = which_backend(q, q.shape[-1], v.shape[-1], q.dtype)
        if reason is not None:
            raise RuntimeError(f"based_backward(backend='cute'): {reason}; call backend='torch' or backend='auto'")
        return _run_kernels(q, k, v, do, scale)


def which_backend(
    where: Tensor | torch.device | str, key_dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[str, str | None]:
    """What backend="auto" runs: ("cute", None), or ("torch", reason) with one clause saying what the kernels lack.

    where: a tensor or a device. Asks the driver about the device only if it is a CUDA one.
    """
    device = where.device if isinstance(where, Tensor) else torch.device(where)
    reason = _device_reason(device) or _problem_reason(key_dim, value_dim, dtype) or _dsl_reason()
    return ("cute", None) if reason is None else ("torch", reason)


# ---------------------------------------------------------------------------------------------------------------------
# What the kernels lack


def _device_reason(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"got tensors on {device.type}, the kernels need a CUDA device of compute capability 9.0 (sm_90a)"
    capability = torch.cuda.get_device_capability(device)
    if capability == CAPABILITY:
        return None
    name = torch.cuda.get_device_name(device)
    return f"got {name} (compute capability {capability[0]}.{capability[1]}), the kernels need 9.0 (sm_90a)"


def _problem_reason(key_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
    if dtype != torch.bfloat16:
        return f"got {_dtype_name(dtype)}, the kernels need bfloat16"
    if any(config.find(scan, key_dim, value_dim) is None for scan in config.SCANS):
        return f"got (K, V) = ({key_dim}, {value_dim}), which is not in the kernels' table (kernels/config.py)"
    return None


@cache
def _dsl_reason() -> str | None:
    if importlib.util.find_spec("cutlass") is None:
        return "the package nvidia-cutlass-dsl, which the kernels need, is not installed"
    return None


@cache
def _warn_once(reason: str) -> None:
    """A cache entry per reason, so each is said once a process."""
    warnings.warn(f"based_backward takes the torch path: {reason}", RuntimeWarning, stacklevel=2)


# ---------------------------------------------------------------------------------------------------------------------
# Validation


def check_tensors(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> None:
    """Raise TypeError or ValueError unless the four tensors fit together; symbolic sizes are fine."""
    named = {"q": q, "k": k, "v": v, "do": do}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"based_backward: got {name} of type {type(x).__name__}, need a torch.Tensor")
    _check_dtypes(named)
    for name, x in named.items():
        if x.ndim != 4:
            need = "(B, T, H, K)" if name in ("q", "k") else "(B, T, H, V)"
            raise ValueError(f"based_backward: got {name} of shape {tuple(x.shape)}, need four dimensions {need}")
        if x.device != q.device:
            got = f"q on {q.device} and {name} on {x.device}"
            raise ValueError(f"based_backward: got {got}, need one device; call {name}.to(q.device)")
        if x.shape[-1] == 0:
            raise ValueError(f"based_backward: got {name} of shape {tuple(x.shape)}, need at least one channel")
    _check_shape("k", k, (*q.shape[:3], q.shape[3]), "q")
    _check_shape("v", v, (*q.shape[:3], v.shape[3]), "q")
    _check_shape("do", do, (*q.shape[:3], v.shape[3]), "v")


def _plain_scale(scale: float | None) -> float | None:
    """scale as the operator's schema takes it. Raises TypeError unless it is None or a real number."""
    if scale is None or isinstance(scale, (float, torch.SymFloat)):
        return scale
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(
            f"based_backward: got scale of type {type(scale).__name__}, need a float or None; call float(scale)"
        )
    return float(scale)


def _resolved_scale(scale: float | None, key_dim: int) -> float:
    """The number to multiply by. Raises ValueError unless finite: at run time, when a compiled scale has its value."""
    scale = reference.default_scale(scale, key_dim)
    if not math.isfinite(scale):
        raise ValueError(f"based_backward: got scale={scale}, need a finite number, or None for K ** -0.5")
    return scale


def _check_dtypes(named: dict[str, Tensor]) -> None:
    dtypes = {x.dtype for x in named.values()}
    got = ", ".join(f"{name} {_dtype_name(x.dtype)}" for name, x in named.items())
    if len(dtypes) > 1:
        raise TypeError(f"based_backward: got {got}, need one dtype; cast with .to(torch.bfloat16)")
    if not dtypes <= set(DTYPES):
        need = ", ".join(_dtype_name(dtype) for dtype in DTYPES)
        raise TypeError(f"based_backward: got {got}, need one of {need}; cast with .to(torch.bfloat16)")


def _check_shape(name: str, x: Tensor, need: tuple, like: str) -> None:
    if x.shape == need:
        return
    swapped = (x.shape[0], x.shape[2], x.shape[1], x.shape[3]) == need
    hint = f"; it looks like (B, H, T, D): call {name}.transpose(1, 2)" if swapped else ""
    raise ValueError(
        f"based_backward: got {name} of shape {tuple(x.shape)}, need {tuple(need)} to go with {like}; "
        f"tensors are (B, T, H, D){hint}"
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------------------------------------------------------------
# The operator. Its default implementation serves every device without kernels; all of them agree on the strides.


@torch.library.custom_op(
    "based::backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor do, float? scale=None) -> (Tensor, Tensor, Tensor)",
)
def _backward_op(q, k, v, do, scale=None):
    check_tensors(q, k, v, do)
    return _run_reference(q, k, v, do, scale)


@_backward_op.register_kernel("cuda")
def _backward_cuda(q, k, v, do, scale=None):
    check_tensors(q, k, v, do)
    _, reason = which_backend(q, q.shape[-1], v.shape[-1], q.dtype)
    if reason is None:
        return _run_kernels(q, k, v, do, scale)
    _warn_once(reason)
    return _run_reference(q, k, v, do, scale)


@_backward_op.register_fake
def _backward_fake(q, k, v, do, scale=None):
    check_tensors(q, k, v, do)
    return _empty_gradients(q, v)


def _empty_gradients(q: Tensor, v: Tensor) -> Gradients:
    """Contiguous whatever the inputs' strides: the layout rule of real and fake implementations alike."""
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(v.shape)


def _run_reference(q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float | None) -> Gradients:
    """The chunked scans of the reference; autocast, which would run their products in 16 bits, is off inside."""
    scale = _resolved_scale(scale, q.shape[-1])
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    with torch.autocast(q.device.type, enabled=False):
        gradients = reference.chunked_backward(q, k, v, do, scale, dtype=compute)
    return tuple(x.to(q.dtype) for x in gradients)


# ---------------------------------------------------------------------------------------------------------------------
# The kernels


_kernels: dict[config.ScanConfig, Callable] = {}


def _run_kernels(q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float | None) -> Gradients:
    """Both scans on the current stream of the tensors' device; only r and h (8 bytes a token) pass between them."""
    batch, length, heads, key_dim = q.shape
    scale = _resolved_scale(scale, key_dim)
    dq, dk, dv = _empty_gradients(q, v)
    if batch * length * heads == 0:
        return dq, dk, dv
    forward_row, reverse_row = (config.find(scan, key_dim, v.shape[-1]) for scan in config.SCANS)
    padded_length = math.ceil(length / forward_row.chunk) * forward_row.chunk
    with torch.cuda.device(q.device):
        q, k, v, do = (_kernel_operand(x) for x in (q, k, v, do))
        rh = q.new_empty((batch, heads, padded_length, 2), dtype=torch.float32)
        _kernel(forward_row)(q, k, v, do, dq, rh, scale)
        _kernel(reverse_row)(q, k, v, do, rh, dk, dv, scale)
    return dq, dk, dv


def _kernel(row: config.ScanConfig) -> Callable:
    """The compiled scan of one config row, loaded at its first use."""
    if row not in _kernels:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"based_backward: got its first call for (K, V) = ({row.key_dim}, {row.value_dim}) inside a CUDA graph "
                "capture, where no kernel can be compiled; call it once before the capture"
            )
        from .kernels import build  # imports the DSL, which the CPU path does without

        _kernels[row] = build.load(row)
    return _kernels[row]


def _kernel_operand(x: Tensor) -> Tensor:
    """x itself if packed and aligned as TMA needs it, else a copy that is.

    is_contiguous() is not enough: it ignores the strides of dimensions of size 1, which a slice leaves arbitrary.
    """
    packed = x.stride() == (x[0].numel(), x[0, 0].numel(), x.shape[3], 1)
    return x if packed and x.data_ptr() % ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)
