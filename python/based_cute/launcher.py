"""From tensors to a backend: validation, the operators torch.ops.based.forward and .backward, and the launch of kernels.

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


def based_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, *, backend: str = "auto") -> Tensor:
    """Causal Based (second-order Taylor) attention, differentiable once with respect to q, k and v.

    Per batch and head, with s_ij = scale * q_i.k_j and j <= i (the diagonal included):

        A_ij = 1 + s_ij + s_ij^2 / 2      o_i = (sum_j A_ij v_j) / (sum_j A_ij + 1e-6)

    Args:
        q, k: (B, T, H, K) queries and keys, K the Taylor feature dimension.
        v: (B, T, H, V) values.
        scale: finite number that multiplies q.k; None means K ** -0.5.
        backend: "auto" picks the CuTe kernels where they run (bf16 on a GPU of compute capability 9.0, (K, V) in the
            table of kernels/config.py) and else the torch path, on a GPU with one warning per reason. "cute" insists on
            the kernels. "torch" takes the torch path: fp64 for fp64 inputs, fp32 arithmetic for the others.

    Any strides are accepted. Under autocast q, k and v (but fp64) are cast to its dtype, and their gradients come back in
    their own; outside it mixed dtypes are an error. Under torch.compile use "auto", which is one opaque operator; it does
    not support torch.func transforms.

    Returns:
        o (B, T, H, V): a new contiguous tensor of the (cast) inputs' dtype. Its backward is `based_backward`; a backward
        of that raises, rather than lose the second order silently.

    Raises:
        TypeError: an argument is no tensor, dtypes differ or are none of bf16, fp16, fp32 and fp64, scale is no number.
        ValueError: ranks, shapes or devices disagree, scale is not finite, or backend is unknown.
        RuntimeError: backend="cute" where the kernels cannot run, or their first use inside a CUDA graph capture.

    Source: Arora et al., "Simple linear attention language models balance the recall-throughput tradeoff", 2024,
    arXiv:2402.18668.
    """
    caller = "based_attention"
    _check_backend(caller, backend)
    q, k, v = _autocast(caller, q=q, k=k, v=v)
    check_tensors(caller, q, k, v)
    scale = _plain_scale(caller, scale)
    if backend == "torch":
        return _TorchPath.apply(q, k, v, scale)
    if backend == "cute":
        _insist_on_kernels(caller, q, v)
    return torch.ops.based.forward(q, k, v, scale)[0]


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
    caller = "based_backward"
    _check_backend(caller, backend)
    check_tensors(caller, q, k, v, do)
    scale = _plain_scale(caller, scale)
    with torch.no_grad():
        if backend == "auto":
            return torch.ops.based.backward(q, k, v, do, scale)
        if backend == "torch":
            return _run_reference(q, k, v, do, scale)
        _insist_on_kernels(caller, q, v)
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


def _insist_on_kernels(caller: str, q: Tensor, v: Tensor) -> None:
    """Raise RuntimeError where backend="cute" cannot run."""
    _, reason = which_backend(q, q.shape[-1], v.shape[-1], q.dtype)
    if reason is not None:
        raise RuntimeError(f"{caller}(backend='cute'): {reason}; call backend='torch' or backend='auto'")


@cache
def _warn_once(reason: str) -> None:
    """A cache entry per reason, so each is said once a process."""
    warnings.warn(f"based_cute takes the torch path: {reason}", RuntimeWarning, stacklevel=2)


# ---------------------------------------------------------------------------------------------------------------------
# Validation


def _check_backend(caller: str, backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"{caller}: got backend={backend!r}, need one of {BACKENDS}")


def check_tensors(caller: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor | None = None) -> None:
    """Raise TypeError or ValueError, in the name of `caller`, unless the tensors fit together; symbolic sizes are fine."""
    named = {"q": q, "k": k, "v": v} | ({} if do is None else {"do": do})
    _check_types(caller, named)
    _check_dtypes(caller, named)
    for name, x in named.items():
        if x.ndim != 4:
            need = "(B, T, H, K)" if name in ("q", "k") else "(B, T, H, V)"
            raise ValueError(f"{caller}: got {name} of shape {tuple(x.shape)}, need four dimensions {need}")
        if x.device != q.device:
            got = f"q on {q.device} and {name} on {x.device}"
            raise ValueError(f"{caller}: got {got}, need one device; call {name}.to(q.device)")
        if x.shape[-1] == 0:
            raise ValueError(f"{caller}: got {name} of shape {tuple(x.shape)}, need at least one channel")
    _check_shape(caller, "k", k, (*q.shape[:3], q.shape[3]), "q")
    _check_shape(caller, "v", v, (*q.shape[:3], v.shape[3]), "q")
    if do is not None:
        _check_shape(caller, "do", do, (*q.shape[:3], v.shape[3]), "v")


def _plain_scale(caller: str, scale: float | None) -> float | None:
    """scale as the operators' schema takes it. Raises TypeError unless it is None or a real number."""
    if scale is None or isinstance(scale, (float, torch.SymFloat)):
        return scale
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(f"{caller}: got scale of type {type(scale).__name__}, need a float or None; call float(scale)")
    return float(scale)


def _resolved_scale(caller: str, scale: float | None, key_dim: int) -> float:
    """The number to multiply by. Raises ValueError unless finite: at run time, when a compiled scale has its value."""
    scale = reference.default_scale(scale, key_dim)
    if not math.isfinite(scale):
        raise ValueError(f"{caller}: got scale={scale}, need a finite number, or None for K ** -0.5")
    return scale


def _autocast(caller: str, **named: Tensor) -> tuple[Tensor, ...]:
    """The tensors as autocast wants them on q's device: fp64 stays, as in torch's own rules. Custom operators have none."""
    _check_types(caller, named)
    kind = named["q"].device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tuple(named.values())
    dtype = torch.get_autocast_dtype(kind)
    eligible = (x.is_floating_point() and x.dtype != torch.float64 for x in named.values())
    return tuple(x.to(dtype) if cast else x for x, cast in zip(named.values(), eligible, strict=True))


def _check_types(caller: str, named: dict[str, Tensor]) -> None:
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{caller}: got {name} of type {type(x).__name__}, need a torch.Tensor")


def _check_dtypes(caller: str, named: dict[str, Tensor]) -> None:
    dtypes = {x.dtype for x in named.values()}
    got = ", ".join(f"{name} {_dtype_name(x.dtype)}" for name, x in named.items())
    if len(dtypes) > 1:
        raise TypeError(f"{caller}: got {got}, need one dtype; cast with .to(torch.bfloat16)")
    if not dtypes <= set(DTYPES):
        need = ", ".join(_dtype_name(dtype) for dtype in DTYPES)
        raise TypeError(f"{caller}: got {got}, need one of {need}; cast with .to(torch.bfloat16)")


def _check_shape(caller: str, name: str, x: Tensor, need: tuple, like: str) -> None:
    if x.shape == need:
        return
    swapped = (x.shape[0], x.shape[2], x.shape[1], x.shape[3]) == need
    hint = f"; it looks like (B, H, T, D): call {name}.transpose(1, 2)" if swapped else ""
    raise ValueError(
        f"{caller}: got {name} of shape {tuple(x.shape)}, need {tuple(need)} to go with {like}; "
        f"tensors are (B, T, H, D){hint}"
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------------------------------------------------------------
# The operators. Their default implementations serve every device without kernels; all of them agree on the strides.


@torch.library.custom_op(
    "based::forward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, float? scale=None) -> (Tensor o, Tensor r)",
)
def _forward_op(q, k, v, scale=None):
    """o (B, T, H, V) in the inputs' dtype and r = 1/den (B, H, T) in fp32, which is not differentiable."""
    check_tensors("based::forward", q, k, v)
    return _run_forward_reference(q, k, v, scale)


@_forward_op.register_kernel("cuda")
def _forward_cuda(q, k, v, scale=None):
    check_tensors("based::forward", q, k, v)
    if _kernels_serve(q, v):
        return _run_forward_kernel(q, k, v, scale)
    return _run_forward_reference(q, k, v, scale)


@_forward_op.register_fake
def _forward_fake(q, k, v, scale=None):
    check_tensors("based::forward", q, k, v)
    return _empty_outputs(q, v)


def _save_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])
    ctx.scale = inputs[3]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, do, _):
    gradients = torch.ops.based.backward(*ctx.saved_tensors, do, ctx.scale)
    return *_asked_for(ctx, gradients), None


_forward_op.register_autograd(_differentiate, setup_context=_save_inputs)


@torch.library.custom_op(
    "based::backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor do, float? scale=None) -> (Tensor, Tensor, Tensor)",
)
def _backward_op(q, k, v, do, scale=None):
    check_tensors("based_backward", q, k, v, do)
    return _run_reference(q, k, v, do, scale)


@_backward_op.register_kernel("cuda")
def _backward_cuda(q, k, v, do, scale=None):
    check_tensors("based_backward", q, k, v, do)
    if _kernels_serve(q, v):
        return _run_kernels(q, k, v, do, scale)
    return _run_reference(q, k, v, do, scale)


@_backward_op.register_fake
def _backward_fake(q, k, v, do, scale=None):
    check_tensors("based_backward", q, k, v, do)
    return _empty_gradients(q, v)


def _kernels_serve(q: Tensor, v: Tensor) -> bool:
    """Whether the kernels run; says once a process why not."""
    _, reason = which_backend(q, q.shape[-1], v.shape[-1], q.dtype)
    if reason is not None:
        _warn_once(reason)
    return reason is None


def _asked_for(ctx, gradients: Gradients) -> tuple[Tensor | None, ...]:
    """None for an input that requires no gradient: both scans run whatever is asked for, since each feeds the other."""
    return tuple(x if needed else None for x, needed in zip(gradients, ctx.needs_input_grad, strict=False))


class _TorchPath(torch.autograd.Function):
    """based_attention(backend="torch"), on any device: the operators would pick the kernels where they run."""

    @staticmethod
    def forward(ctx, q, k, v, scale):
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        return _run_forward_reference(q, k, v, scale)[0]

    @staticmethod
    def backward(ctx, do):
        if torch.is_grad_enabled():  # else second-order terms through q, k and v would be lost in silence
            raise RuntimeError(
                "based_attention(backend='torch'): got create_graph=True, need a first derivative; "
                "for a second one call based_cute.reference.quadratic_forward"
            )
        return *_asked_for(ctx, _run_reference(*ctx.saved_tensors, do, ctx.scale)), None


def _empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """o and r, contiguous whatever the inputs' strides."""
    batch, length, heads, _ = q.shape
    return v.new_empty(v.shape), q.new_empty((batch, heads, length), dtype=torch.float32)


def _empty_gradients(q: Tensor, v: Tensor) -> Gradients:
    """Contiguous whatever the inputs' strides: the layout rule of real and fake implementations alike."""
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(v.shape)


def _run_forward_reference(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """The reference's chunked forward; autocast, which would run its products in 16 bits, is off inside."""
    scale = _resolved_scale("based_attention", scale, q.shape[-1])
    with torch.autocast(q.device.type, enabled=False):
        o, r = reference.chunked_forward(q, k, v, scale, dtype=_compute_dtype(q))
    return o.to(q.dtype), r.to(torch.float32)


def _run_reference(q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float | None) -> Gradients:
    """The reference's chunked scans, without autocast too."""
    scale = _resolved_scale("based_backward", scale, q.shape[-1])
    with torch.autocast(q.device.type, enabled=False):
        gradients = reference.chunked_backward(q, k, v, do, scale, dtype=_compute_dtype(q))
    return tuple(x.to(q.dtype) for x in gradients)


def _compute_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


# ---------------------------------------------------------------------------------------------------------------------
# The kernels


_kernels: dict[config.ScanConfig, Callable] = {}


def _run_forward_kernel(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """The output pass on the current stream of the tensors' device."""
    scale = _resolved_scale("based_attention", scale, q.shape[-1])
    o, r = _empty_outputs(q, v)
    if r.numel() == 0:
        return o, r
    row = config.find("output", q.shape[-1], v.shape[-1])
    with torch.cuda.device(q.device):
        q, k, v = (_kernel_operand(x) for x in (q, k, v))
        _kernel(row)(q, k, v, o, r, scale)
    return o, r


def _run_kernels(q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float | None) -> Gradients:
    """Both scans on the current stream of the tensors' device; only r and h (8 bytes a token) pass between them."""
    batch, length, heads, key_dim = q.shape
    scale = _resolved_scale("based_backward", scale, key_dim)
    dq, dk, dv = _empty_gradients(q, v)
    if batch * length * heads == 0:
        return dq, dk, dv
    forward_row, reverse_row = (config.find(scan, key_dim, v.shape[-1]) for scan in ("forward_scan", "reverse_scan"))
    padded_length = math.ceil(length / forward_row.chunk) * forward_row.chunk
    with torch.cuda.device(q.device):
        q, k, v, do = (_kernel_operand(x) for x in (q, k, v, do))
        rh = q.new_empty((batch, heads, padded_length, 2), dtype=torch.float32)
        _kernel(forward_row)(q, k, v, do, dq, rh, scale)
        _kernel(reverse_row)(q, k, v, do, rh, dk, dv, scale)
    return dq, dk, dv


def _kernel(row: config.ScanConfig) -> Callable:
    """The compiled kernel of one config row, loaded at its first use."""
    if row not in _kernels:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"based_cute: got its first call of {row.scan} for (K, V) = ({row.key_dim}, {row.value_dim}) inside a CUDA "
                "graph capture, where no kernel can be compiled; call it once before the capture"
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
