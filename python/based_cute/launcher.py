"""From tensors to a backend: validation, the operators torch.ops.based.forward and .backward, and the launch of kernels.

Importing this file initialises no CUDA context and imports no DSL. B, T, H and scale are run-time values of a kernel;
only (K, V) selects one.
"""

import importlib.util
import math
import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from numbers import Real
from types import NoneType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import reference
from .kernels import config
from .kernels.schedule import HandsOn, Schedule, schedule

BACKENDS = ("auto", "cute", "torch")
KERNEL_BACKENDS = ("auto", "cute")
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
    if torch._C._is_any_autocast_enabled():
        q, k, v = _autocast(caller, q, k, v)
    if backend in KERNEL_BACKENDS and type(scale) in (float, NoneType):
        if plan := _plan_past_dispatcher("forward", q, k, v):
            return _differentiable_forward(q, k, v, scale, plan)[0]
    _check_backend(caller, backend)
    _check_types(caller, q, k, v)
    scale = _plain_scale(caller, scale)
    if backend != "auto":  # the operator checks what it is given
        check_tensors(caller, q, k, v)
    if backend == "torch":
        return _TorchPath.apply(q, k, v, scale)
    if backend == "cute":
        _insist_on_kernels(caller, q, v)
    return _forward(q, k, v, scale)[0]


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

    Any strides are accepted, and no input is written to. Under torch.compile use "auto", which is one opaque operator; it
    does not support torch.func.grad. Results are the same to the bit from call to call. At K = 8 the kernels may subtract
    later tokens' part of a state again (kernels/sweep.py): up to 4096 of them then reach dq in its last bits.

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
    if backend in KERNEL_BACKENDS and type(scale) in (float, NoneType):
        if plan := _plan_past_dispatcher("backward", q, k, v, do):
            return plan.run((q, k, v, do), scale)
    caller = "based_backward"
    _check_backend(caller, backend)
    _check_types(caller, q, k, v, do)
    scale = _plain_scale(caller, scale)
    if backend != "auto":  # the operator checks what it is given
        check_tensors(caller, q, k, v, do)
    if backend == "cute":
        _insist_on_kernels(caller, q, v)
    run = _run_reference if backend == "torch" else _backward
    with torch.no_grad():
        return run(q, k, v, do, scale)


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


def _warn_of_torch_path(q: Tensor, v: Tensor) -> None:
    _, reason = which_backend(q, q.shape[-1], v.shape[-1], q.dtype)
    if reason is not None:
        _warn_once(reason)


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
    if not _fit_together(q, k, v, v if do is None else do):
        _explain_misfit(caller, {"q": q, "k": k, "v": v} | ({} if do is None else {"do": do}))


def _fit_together(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> bool:
    """What every call asks, as one condition: a tenth of the time that it takes to tell the misfits apart."""
    keys, values = q.shape, v.shape
    return (
        len(keys) == len(values) == 4
        and keys == k.shape
        and values == do.shape
        and keys[:3] == values[:3]
        and keys[3] > 0
        and values[3] > 0
        and q.dtype == k.dtype == v.dtype == do.dtype
        and q.dtype in DTYPES
        and q.device == k.device == v.device == do.device
    )


def _explain_misfit(caller: str, named: dict[str, Tensor]) -> None:
    """Raise for the first thing that does not fit."""
    _check_dtypes(caller, named)
    q, v = named["q"], named["v"]
    for name, x in named.items():
        if x.ndim != 4:
            need = "(B, T, H, K)" if name in ("q", "k") else "(B, T, H, V)"
            raise ValueError(f"{caller}: got {name} of shape {tuple(x.shape)}, need four dimensions {need}")
        if x.device != q.device:
            got = f"q on {q.device} and {name} on {x.device}"
            raise ValueError(f"{caller}: got {got}, need one device; call {name}.to(q.device)")
        if x.shape[-1] == 0:
            raise ValueError(f"{caller}: got {name} of shape {tuple(x.shape)}, need at least one channel")
    for name, width, like in (("k", q.shape[3], "q"), ("v", v.shape[3], "q"), ("do", v.shape[3], "v")):
        if name in named:
            _check_shape(caller, name, named[name], (*q.shape[:3], width), like)


def _plain_scale(caller: str, scale: float | None) -> float | None:
    """scale as the operators' schema takes it. Raises TypeError unless it is None or a real number."""
    if scale is None or isinstance(scale, (float, torch.SymFloat)):
        return scale
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(f"{caller}: got scale of type {type(scale).__name__}, need a float or None; call float(scale)")
    return float(scale)


def _check_finite(caller: str, scale: float | None) -> None:
    """Raise ValueError unless it is, or None: at run time, when a compiled scale has its value."""
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"{caller}: got scale={scale}, need a finite number, or None for K ** -0.5")


def _autocast(caller: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The tensors as autocast wants them on q's device: fp64 stays, as in torch's own rules. Custom operators have none."""
    _check_types(caller, q, k, v)
    kind = q.device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    eligible = (x.is_floating_point() and x.dtype != torch.float64 for x in (q, k, v))
    return tuple(x.to(dtype) if cast else x for x, cast in zip((q, k, v), eligible, strict=True))


def _check_types(caller: str, *tensors: Tensor) -> None:
    """tensors: q, k, v and perhaps do. The operators need no such check: the dispatcher makes it."""
    for name, x in zip(("q", "k", "v", "do"), tensors, strict=False):
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
#
# Registered key by key: the same functions behind torch.library.custom_op take 4 us a call and 25 us a training step more,
# behind register_autograd 2 and 15 (stand-ins for the kernels, one CPU core).

_library = torch.library.Library("based", "DEF")  # kept alive: the operators go with it
_library.define(
    "forward(Tensor q, Tensor k, Tensor v, float? scale=None) -> (Tensor o, Tensor r)", tags=(torch.Tag.pt2_compliant_tag,)
)
_library.define(
    "backward(Tensor q, Tensor k, Tensor v, Tensor do, float? scale=None) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_forward, _backward = torch.ops.based.forward.default, torch.ops.based.backward.default

# What an operator's own autograd kernel calls it under: at::AutoDispatchBelowAutograd, which has no public name in Python.
_below_autograd = torch._C._AutoDispatchBelowAutograd


def _forward_default(q, k, v, scale=None):
    """o (B, T, H, V) in the inputs' dtype and r = 1/den (B, H, T) in fp32, which is not differentiable."""
    check_tensors("based_attention", q, k, v)
    return _run_forward_reference(q, k, v, scale)


def _forward_cuda(q, k, v, scale=None):
    if plan := _plan("forward", q.shape, v.shape, q.dtype, q.device):
        return plan.run((q, k, v), scale)
    check_tensors("based_attention", q, k, v)
    _warn_of_torch_path(q, v)
    return _run_forward_reference(q, k, v, scale)


def _forward_fake(q, k, v, scale=None):
    check_tensors("based_attention", q, k, v)
    return _empty_outputs(q, v)


def _differentiable_forward(q, k, v, scale=None, plan=None):
    """based::forward with its formula, by the kernels' plan if there is one and by the dispatcher if not."""
    _refuse_tangents("based::forward", q, k, v)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(q, k, v, scale, plan)
    return _forward_below_autograd(q, k, v, scale, plan)


def _forward_below_autograd(q, k, v, scale, plan):
    if plan:
        return plan.run((q, k, v), scale)
    with _below_autograd():
        return _forward(q, k, v, scale)


class _Attention(torch.autograd.Function):
    """The formula of based::forward."""

    @staticmethod
    def forward(ctx, q, k, v, scale, plan):
        o, r = _forward_below_autograd(q, k, v, scale, plan)
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        ctx.mark_non_differentiable(r)
        ctx.set_materialize_grads(False)  # else every backward fills a gradient of r with zeros
        return o, r

    @staticmethod
    def backward(ctx, do, _):
        if do is None:
            return None, None, None, None, None
        q, k, v = ctx.saved_tensors  # under autograd: a checkpoint runs the forward again here
        return *_asked_for(ctx, _gradients(q, k, v, do, ctx.scale)), None, None


def _gradients(q, k, v, do, scale):
    """based::backward, recorded where a graph of the backward is asked for."""
    if torch.is_grad_enabled():
        return _backward(q, k, v, do, scale)
    if plan := _plan_past_dispatcher("backward", q, k, v, do):
        return plan.run((q, k, v, do), scale)
    with _below_autograd():
        return _backward(q, k, v, do, scale)


def _backward_default(q, k, v, do, scale=None):
    check_tensors("based_backward", q, k, v, do)
    return _run_reference(q, k, v, do, scale)


def _backward_cuda(q, k, v, do, scale=None):
    if plan := _plan("backward", q.shape, v.shape, q.dtype, q.device):
        return plan.run((q, k, v, do), scale)
    check_tensors("based_backward", q, k, v, do)
    _warn_of_torch_path(q, v)
    return _run_reference(q, k, v, do, scale)


def _backward_fake(q, k, v, do, scale=None):
    check_tensors("based_backward", q, k, v, do)
    return _empty_gradients(q, v)


def _backward_autograd(q, k, v, do, scale=None):
    _refuse_tangents("based::backward", q, k, v, do)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or do.requires_grad):
        return _Gradients.apply(q, k, v, do, scale)
    with _below_autograd():
        return _backward(q, k, v, do, scale)


class _Gradients(torch.autograd.Function):
    """based::backward under create_graph=True: without a formula, which must not be lost in silence."""

    @staticmethod
    def forward(ctx, *args):
        with _below_autograd():
            return _backward(*args)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "based::backward: got a derivative of the gradients to compute, and has no autograd formula; "
            "for a second derivative call based_cute.reference.quadratic_forward"
        )


def _refuse_tangents(operator: str, *tensors: Tensor) -> None:
    """Forward derivatives, which nobody would miss if they were dropped here."""
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(
            f"{operator}: got a forward derivative to compute (torch.autograd.forward_ad), and has no formula for one; "
            "call based_cute.reference.quadratic_forward"
        )


def _register(name: str, default: Callable, cuda: Callable, fake: Callable, autograd: Callable) -> None:
    """register_kernel keeps dynamo, where an eager call falls to it, from unrolling the reference's loop over chunks. It takes
    1 us, which the kernels save: dynamo would only break its graph at them."""
    torch.library.register_kernel(f"based::{name}", None, default, lib=_library)
    torch.library.register_fake(f"based::{name}", fake, lib=_library)
    _library.impl(name, cuda, "CUDA")
    _library.impl(name, autograd, "Autograd")


_register("forward", _forward_default, _forward_cuda, _forward_fake, _differentiable_forward)
_register("backward", _backward_default, _backward_cuda, _backward_fake, _backward_autograd)


# Found once: as attributes of torch they take 0.4 us of a call.
_dynamo_is_compiling = torch.compiler.is_dynamo_compiling
_function_modes = torch._C._is_torch_function_mode_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_profiler_enabled = torch.autograd._profiler_enabled
_thread_keys = torch._C._dispatch_tls_local_include_set
_TensorGuards = torch._C._dynamo.guards.TensorGuards

# Bits of the keys that not every thread has.
_KEY = torch._C.DispatchKey
_OTHER_KEYS = ~sum(torch._C.DispatchKeySet(key).raw_repr() for key in (_KEY.ADInplaceOrView, _KEY.BackendSelect))

_last_plain: dict[str, Callable] = {}  # by kind: whether tensors are like the last that were found plain, in threads alike


def _plan_past_dispatcher(kind: str, *tensors: Tensor) -> "_Plan | None":
    """The kernels' plan, if the dispatcher would only find them, or autograd before them: no subclass, wrapper, mode, trace,
    forward derivative or profiler wants to see the operator. Asking takes 1.5 us, the dispatcher 8.

    tensors: q, k, v and for a "backward" do, or whatever stands in their place."""
    if _dynamo_is_compiling() or _function_modes() or _profiler_enabled() or forward_ad._current_level >= 0:
        return None
    if _dispatch_modes():  # guards do not see a fake one
        return None
    check = _last_plain.get(kind)
    if check is None or not check(*tensors):
        if not _plain(*tensors):
            return None
        _last_plain[kind] = _alike(*tensors)
    q, _, v, *_ = tensors
    return _plan(kind, q.shape, v.shape, q.dtype, q.device)


def _plain(*tensors: Tensor) -> bool:
    """Whether the dispatcher has nothing to do for these tensors in this thread."""
    if any(type(x) is not Tensor for x in tensors) or _thread_keys().raw_repr() & _OTHER_KEYS:
        return False
    return not any(x.is_neg() or x._is_zerotensor() for x in tensors)


def _alike(*tensors: Tensor) -> Callable:
    """Whether other tensors, in the thread that they come in, are plain if these are in this one: dynamo's guards compare all
    keys in one call, in a fifth of the time. They want each tensor to be another: a call that gives one twice is not."""
    anything = [[None] * x.ndim for x in tensors]
    return _TensorGuards(*tensors, dynamic_dims_sizes=anything, dynamic_dims_strides=anything).check


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
    """o and r, contiguous whatever the inputs' strides: the layout rule of real and fake implementations alike."""
    return v.new_empty(v.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


def _empty_gradients(q: Tensor, v: Tensor) -> Gradients:
    """Contiguous too."""
    return q.new_empty(q.shape), q.new_empty(q.shape), v.new_empty(v.shape)


def _run_forward_reference(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """The reference's chunked forward; autocast, which would run its products in 16 bits, is off inside."""
    _check_finite("based_attention", scale)
    with torch.autocast(q.device.type, enabled=False):
        o, r = reference.chunked_forward(q, k, v, scale, dtype=_compute_dtype(q))
    return o.to(q.dtype), r.to(torch.float32)


def _run_reference(q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float | None) -> Gradients:
    """The reference's chunked scans, without autocast too."""
    _check_finite("based_backward", scale)
    with torch.autocast(q.device.type, enabled=False):
        gradients = reference.chunked_backward(q, k, v, do, scale, dtype=_compute_dtype(q))
    return tuple(x.to(q.dtype) for x in gradients)


def _compute_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


# ---------------------------------------------------------------------------------------------------------------------
# The kernels


# What inductor's programs allocate with: (size, stride, dtype), on the current device. It takes 1.1 us, torch.empty_like 2.0.
_empty_strided = torch._C._dynamo.guards._empty_strided_cuda

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class _Plan(NamedTuple):
    """What tensors of one kind take: the compiled operation, the outputs, how the sequences are cut (its arguments from `ctas`
    on), and the scratch, in words of 4 bytes: r and h of every token in a backward, where sequences are cut one state
    (86 KB at K = 16, V = 128) for each SM, and at most two flags for each; in a sweep 288 bytes for each chunk, and one state
    (24 KB at V = 128) for each 4096 tokens or part of them."""

    caller: str
    device: int
    scale: float  # unless one is given
    made: tuple[Layout, ...]  # the outputs, then the scratch, as bf16: so compiled functions know one dtype but for r
    launch: Callable
    cut: tuple[int, ...]
    lowered: int  # flags, the last words of the scratch, that have to be zero

    def run(self, tensors: tuple[Tensor, ...], scale: float | None) -> tuple[Tensor, ...]:
        """The outputs, on the current stream of the tensors' device. Raises as `check_tensors` does, and ValueError for a scale
        that is not finite.

        The compiled function asks all that the checks ask, in less time, and how rows lie in memory: first it is called."""
        if torch.cuda.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.run(tensors, scale)
        if scale is None:
            scale = self.scale
        else:
            _check_finite(self.caller, scale)
        *outputs, scratch = [_empty_strided(*layout) for layout in self.made]
        if self.lowered:
            scratch[-2 * self.lowered :].zero_()
        try:
            self.launch(*tensors, *outputs, scratch, scale, *self.cut)
        except (TypeError, ValueError):
            check_tensors(self.caller, *tensors)
            self.launch(*[_readable(x) for x in tensors], *outputs, scratch, scale, *self.cut)
        return tuple(outputs)


@lru_cache(maxsize=4096)
def _plan(kind: str, keys: torch.Size, values: torch.Size, dtype: torch.dtype, device: torch.device) -> _Plan | None:
    """The plan of a "forward" or a "backward" for q of shape `keys` and v of shape `values`; None where there is nothing to
    launch, or kernels lack something."""
    if len(keys) != 4 or len(values) != 4 or 0 in keys:
        return None
    batch, length, heads, key_dim = keys
    value_dim = values[3]
    if which_backend(device, key_dim, value_dim, dtype)[0] != "cute":
        return None
    sequences, chunks = batch * heads, -(-length // config.CHUNK)
    cut = schedule(sequences, chunks, _processors(device), config.work(kind, key_dim, value_dim))
    way = _way(kind, cut, key_dim, value_dim)
    if way == "swept":
        states_at, lowered = 0, 0
        flags_at, normalisers = config.sweep_sizes(sequences, chunks, key_dim, value_dim)
        words = flags_at + normalisers
    else:
        states_at = 2 * config.CHUNK * sequences * chunks if kind == "backward" else 0
        flags_at = states_at + cut.slots * config.state_size(key_dim, value_dim)
        words, lowered = max(flags_at + cut.flags, 1), cut.flags if cut.hands_on == HandsOn.STATE else 0
    return _Plan(
        caller={"forward": "based_attention", "backward": "based_backward"}[kind],
        device=device.index,
        scale=reference.default_scale(None, key_dim),
        made=(*_outputs(kind, keys, values), ((2 * words,), (1,), torch.bfloat16)),
        launch=_operation(config.Operation(kind, key_dim, value_dim, way)),
        cut=(*cut._replace(hands_on=int(cut.hands_on)), states_at, flags_at),
        lowered=lowered,
    )


def _outputs(kind: str, keys: torch.Size, values: torch.Size) -> tuple[Layout, ...]:
    """Those of `_empty_outputs` or `_empty_gradients`."""
    q, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in (keys, values))
    outputs = _empty_outputs(q, v) if kind == "forward" else _empty_gradients(q, v)
    return tuple((tuple(x.shape), x.stride(), x.dtype) for x in outputs)


def _way(kind: str, cut: Schedule, key_dim: int, value_dim: int) -> str:
    """Which passes run, and in which kernels."""
    if cut.hands_on == HandsOn.NOTHING:
        return config.uncut_way(kind, key_dim, value_dim)
    return "summed" if cut.hands_on == HandsOn.SUMS else "scans"


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _operation(operation: config.Operation) -> Callable:
    """The compiled operation, loaded at its first use."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"based_cute: got its first call of {operation.name} inside a CUDA graph capture, where no kernel can be "
            "compiled; call it once with this shape before the capture"
        )
    from .kernels import build  # imports the DSL, which the CPU path does without

    return build.load(operation)


def _readable(x: Tensor) -> Tensor:
    """x itself where TMA can read it, else a packed copy. Strides count in dimensions of size 1 too."""
    *rows, channels = x.stride()
    fits = channels == 1 and all(2 * stride % ALIGNMENT == 0 for stride in rows) and x.data_ptr() % ALIGNMENT == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)
