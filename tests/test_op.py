"""The operator and its front door without a GPU: schema, layouts, compilation, messages, backend choice, and the launch
of the two scans against stand-ins that compute what the kernels compute."""

import contextlib
import importlib.util
import math
import os
import shutil
import subprocess
import sys
import warnings
import weakref

import numpy as np
import pytest
import torch
from cases import contiguous_strides, equal, handed_on, launch_on_cpu, launched, plan_of
from conftest import LAYOUTS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import based_bwd
import based_cute
from based_cute import accuracy, based_backward, launcher, reference
from based_cute.kernels import config
from based_cute.kernels.schedule import HandsOn

OP, FORWARD = torch.ops.based.backward.default, torch.ops.based.forward.default
SHAPE = (2, 70, 3, 8, 16)


@pytest.fixture
def inputs():
    return accuracy.make_inputs(SHAPE, "cpu")


# ---------------------------------------------------------------------------------------------------------------------
# The package


def test_public_names():
    assert based_cute.__all__ == ["based_attention", "based_backward"]
    assert based_bwd.based_backward is based_cute.based_backward
    assert isinstance(based_cute.__version__, str) and based_cute.__version__


IMPORT_ALONE = """
import sys
{before}
import based_cute, torch
q = torch.randn(1, 5, 1, 8)
v = torch.randn(1, 5, 1, 4)
gradients = based_cute.based_backward(q, q, v, v)
assert all(x.isfinite().all() for x in gradients)
assert not torch.cuda.is_initialized()
assert sys.modules.get("cutlass") is None, "the DSL was imported"
"""


WITHOUT_DSL = "sys.modules.update(cutlass=None, fcntl=None)"


@pytest.mark.parametrize("before", ["", WITHOUT_DSL], ids=["plain", "without the DSL"])
def test_import_and_cpu_path_need_neither_cuda_nor_the_dsl(before):
    path = os.pathsep.join(entry for entry in sys.path if entry)
    script = IMPORT_ALONE.format(before=before)
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


# ---------------------------------------------------------------------------------------------------------------------
# The operator


def test_schema():
    schema = "based::backward(Tensor q, Tensor k, Tensor v, Tensor do, float? scale=None) -> (Tensor, Tensor, Tensor)"
    assert str(OP._schema) == schema


def test_opcheck_in_every_layout(inputs, relayout):
    torch.library.opcheck(OP, tuple(relayout(x) for x in inputs))


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_opcheck_with_scale(inputs, scale):
    torch.library.opcheck(OP, inputs, {"scale": scale})


@pytest.mark.parametrize("shape", [(0, 5, 2, 8, 4), (2, 0, 3, 8, 4), (2, 5, 0, 8, 4), (1, 1, 1, 1, 1)], ids=str)
def test_opcheck_empty_and_smallest(shape):
    torch.library.opcheck(OP, accuracy.make_inputs(shape, "cpu"))


def test_layouts_agree_and_outputs_are_contiguous(inputs, relayout):
    views = [relayout(x) for x in inputs]
    copies = [x.clone(memory_format=torch.contiguous_format) for x in views]
    gradients = based_backward(*views)
    assert equal(gradients, based_backward(*copies))
    assert all(x.stride() == contiguous_strides(x) for x in gradients)
    assert equal(views, copies)  # and nothing was written to the inputs


@pytest.mark.parametrize("shape", [SHAPE, (0, 5, 2, 8, 4), (2, 0, 3, 8, 4)], ids=str)
def test_outputs_are_fresh_memory(shape):
    inputs = accuracy.make_inputs(shape, "cpu")
    gradients = based_backward(*inputs)
    storages = [x.untyped_storage()._cdata for x in (*inputs, *gradients)]
    assert len(set(storages)) == len(storages)


@pytest.mark.parametrize("dtype", launcher.DTYPES, ids=str)
def test_cpu_values_and_dtypes(dtype):
    inputs = accuracy.make_inputs(SHAPE, "cpu", dtype=dtype)
    gradients = based_backward(*inputs)
    rounding = 1e-15 if dtype == torch.float64 else max(1e-6, torch.finfo(dtype).eps)
    assert max(accuracy.measure_errors(gradients, accuracy.gold_gradients(*inputs))) <= rounding
    assert all(x.dtype == dtype for x in gradients)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_gradients_carry_no_graph(inputs, backend):
    leaves = [x.requires_grad_() for x in inputs]
    assert not any(x.requires_grad for x in based_backward(*leaves, backend=backend))


def test_differentiating_the_operator_raises(inputs):
    dq, _, _ = OP(*(x.requires_grad_() for x in inputs))
    with pytest.raises(RuntimeError, match="no autograd formula"):
        dq.sum().backward()


def test_meta_and_fake_tensors():
    inputs = [x.to("meta") for x in accuracy.make_inputs(SHAPE, "cpu")]
    gradients = based_backward(*inputs)
    with FakeTensorMode():
        fake = based_backward(*(torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in inputs))
    for x, y, like in zip(gradients, fake, inputs, strict=False):
        assert x.shape == y.shape == like.shape and x.dtype == y.dtype == like.dtype
        assert (x.device.type, y.device.type) == ("meta", "cuda")


# ---------------------------------------------------------------------------------------------------------------------
# Scale


def test_scale_none_and_zero_differ(inputs):
    assert equal(based_backward(*inputs), based_backward(*inputs, 8**-0.5))
    dq, dk, _ = based_backward(*inputs, 0.0)
    assert not dq.any() and not dk.any()


@pytest.mark.parametrize("scale", [2, np.float32(0.5), np.float64(0.5), -1.5])
def test_scale_may_be_any_real_number(inputs, scale):
    assert equal(based_backward(*inputs, scale), based_backward(*inputs, float(scale)))


@pytest.mark.parametrize("scale", [True, "0.5", torch.tensor(0.5), 1j], ids=["bool", "str", "tensor", "complex"])
def test_scale_of_another_type(inputs, scale):
    with pytest.raises(TypeError, match="got scale of type .*, need a float or None; call float"):
        based_backward(*inputs, scale)


@pytest.mark.parametrize("call", [based_backward, OP], ids=["function", "operator"])
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_scale_not_finite(inputs, scale, call):
    with pytest.raises(ValueError, match="need a finite number, or None"):
        call(*inputs, scale)


# ---------------------------------------------------------------------------------------------------------------------
# Rejections: what was got, what is needed, what to call instead


def swap(x):
    return x.transpose(1, 2)


REJECTIONS = {
    "no tensor": (lambda q, k, v, do: (q, k, v, do.tolist()), TypeError, "got do of type list, need a torch.Tensor"),
    "mixed dtypes": (
        lambda q, k, v, do: (q, k, v, do.float()),
        TypeError,
        r"q bfloat16, k bfloat16, v bfloat16, do float32, need one dtype; cast with \.to\(torch\.bfloat16\)",
    ),
    "integers": (
        lambda *xs: tuple(x.long() for x in xs),
        TypeError,
        r"need one of bfloat16, float16, float32, float64; cast with \.to\(torch\.bfloat16\)",
    ),
    "rank": (lambda q, k, v, do: (q[0], k, v, do), ValueError, r"got q of shape \(70, 3, 8\), need four dimensions"),
    "devices": (
        lambda q, k, v, do: (q, k.to("meta"), v, do),
        ValueError,
        r"got q on cpu and k on meta, need one device; call k\.to\(q\.device\)",
    ),
    "no channels": (lambda q, k, v, do: (q[..., :0], k[..., :0], v, do), ValueError, "need at least one channel"),
    "k length": (
        lambda q, k, v, do: (q, k[:, 1:], v, do),
        ValueError,
        r"got k of shape \(2, 69, 3, 8\), need \(2, 70, 3, 8\) to go with q",
    ),
    "k channels": (lambda q, k, v, do: (q, k[..., 1:], v, do), ValueError, r"need \(2, 70, 3, 8\) to go with q"),
    "v heads": (lambda q, k, v, do: (q, k, v[:, :, 1:], do), ValueError, r"got v .* need \(2, 70, 3, 16\)"),
    "do channels": (lambda q, k, v, do: (q, k, v, do[..., 1:]), ValueError, r"need \(2, 70, 3, 16\) to go with v"),
    "layout": (
        lambda q, k, v, do: (q, k, swap(v), do),
        ValueError,
        r"tensors are \(B, T, H, D\); it looks like \(B, H, T, D\): call v\.transpose\(1, 2\)",
    ),
}


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("case", REJECTIONS.values(), ids=REJECTIONS.keys())
def test_rejections(inputs, case, backend):
    spoil, error, message = case
    with pytest.raises(error, match=f"^based_backward: .*{message}"):
        based_backward(*spoil(*inputs), backend=backend)


def test_operator_and_fake_check_as_the_function_does(inputs):
    q, k, v, do = inputs
    for device in ("cpu", "meta"):
        with pytest.raises(ValueError, match="to go with v"):
            OP(*(x.to(device) for x in (q, k, v, do[..., 1:])))


def test_unknown_backend(inputs):
    with pytest.raises(ValueError, match=r"got backend='cuda', need one of \('auto', 'cute', 'torch'\)"):
        based_backward(*inputs, backend="cuda")


# ---------------------------------------------------------------------------------------------------------------------
# Choice of backend


@pytest.fixture
def device_of(monkeypatch):
    """Pretend that every CUDA device has a capability."""

    def pretend(capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Test Card")
        monkeypatch.setattr(launcher, "_dsl_reason", lambda: None)

    return pretend


@pytest.mark.parametrize("row", config.ROWS, ids=lambda row: row.name)
def test_kernels_run_every_row_on_sm_90(device_of, row):
    device_of((9, 0))
    assert launcher.which_backend("cuda", row.key_dim, row.value_dim, torch.bfloat16) == ("cute", None)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (10, 0), (12, 1)])
def test_other_devices_take_the_torch_path(device_of, capability):
    device_of(capability)
    backend, reason = launcher.which_backend(torch.device("cuda", 0), 16, 128, torch.bfloat16)
    version = "{}.{}".format(*capability)
    assert backend == "torch"
    assert reason == f"got Test Card (compute capability {version}), the kernels need 9.0 (sm_90a)"


def test_other_problems_take_the_torch_path(device_of):
    device_of((9, 0))
    for dtype in (torch.float16, torch.float32, torch.float64):
        _, reason = launcher.which_backend("cuda", 16, 128, dtype)
        assert reason == f"got {str(dtype)[6:]}, the kernels need bfloat16"
    for dims in ((16, 32), (4, 64), (32, 128)):
        _, reason = launcher.which_backend("cuda", *dims, torch.bfloat16)
        assert reason.startswith(f"got (K, V) = {dims}, which is not in the kernels' table")


def test_missing_dsl_takes_the_torch_path(device_of, monkeypatch):
    reason_of_package = launcher._dsl_reason.__wrapped__
    device_of((9, 0))
    monkeypatch.setattr(launcher, "_dsl_reason", reason_of_package)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    backend, reason = launcher.which_backend("cuda", 16, 128, torch.bfloat16)
    assert backend == "torch" and "nvidia-cutlass-dsl" in reason


def test_cute_is_an_error_where_it_cannot_run(inputs):
    message = r"got tensors on cpu, the kernels need a CUDA device .* call backend='torch' or backend='auto'"
    with pytest.raises(RuntimeError, match=message):
        based_backward(*inputs, backend="cute")


@pytest.fixture
def forget_warnings():
    launcher._warn_once.cache_clear()
    yield
    launcher._warn_once.cache_clear()


def test_one_warning_per_reason(inputs, monkeypatch, forget_warnings):
    for reason in ("first", "second"):
        monkeypatch.setattr(launcher, "which_backend", lambda *args, reason=reason: ("torch", reason))
        launcher._plan.cache_clear()
        with pytest.warns(RuntimeWarning, match=f"takes the torch path: {reason}"):
            gradients = launcher._backward_cuda(*inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert equal(gradients, launcher._backward_cuda(*inputs))
            launcher._plan.cache_clear()
            launcher._backward_cuda(*inputs)


def test_cpu_tensors_give_no_warning(inputs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        based_backward(*inputs)


# ---------------------------------------------------------------------------------------------------------------------
# The launch, with stand-ins for the compiled scans


def check_call(
    operation, inputs, outputs, scratch, ctas, chunks_per_cta, stride, hands_on, late_ctas, runs, states_at, flags_at
):
    """What every operation asks of its other arguments: packed outputs, ranges that cover the tape, and a scratch with room for
    (r, h) of every token of every chunk, a state of every CTA that leaves one, and the flags, lowered; or for a sweep its
    checkpoints and normalisers."""
    for x in (*outputs, scratch):
        assert x.stride() == contiguous_strides(x) and x.data_ptr() % 16 == 0
    batch, length, heads, _ = inputs[0].shape
    chunks = math.ceil(length / config.CHUNK)
    scratch = scratch.view(torch.float32)
    if operation.way == "swept":
        assert (ctas, runs, chunks_per_cta, stride) == (batch * heads, 1, chunks, chunks)
        assert (late_ctas, hands_on) == (0, HandsOn.NOTHING)
        checkpoints = math.ceil(chunks / config.CHECKPOINT) * operation.value_dim * 48
        assert (states_at, flags_at) == (0, batch * heads * checkpoints)
        assert scratch.numel() == flags_at + batch * heads * chunks * config.NORMALISER_WORDS
        return
    assert states_at == (2 * config.CHUNK * chunks * batch * heads if operation.kind == "backward" else 0)
    assert batch * heads % runs == 0 and ctas - late_ctas == runs * math.ceil(batch * heads // runs * stride / chunks_per_cta)
    assert late_ctas in (0, batch * heads) and (chunks > stride if late_ctas else chunks <= stride)
    slots, flags = flags_at - states_at, scratch.numel() - flags_at
    if hands_on in (HandsOn.STATE, HandsOn.SUMS):
        assert slots == (late_ctas or ctas) * config.state_size(operation.key_dim, operation.value_dim)
    assert (operation.way == "summed") == (hands_on == HandsOn.SUMS) == (chunks_per_cta < chunks or late_ctas > 0)
    if hands_on == HandsOn.STATE:
        assert chunks <= min(stride, chunks_per_cta) and flags == ctas and not scratch[flags_at:].any()
    if hands_on == HandsOn.NOTHING:
        assert stride == chunks == chunks_per_cta
        assert operation.way == config.uncut_way(operation.kind, operation.key_dim, operation.value_dim)


def stand_in(operation):
    """What build.load(operation) returns, computed by the reference, with the kernels' contract asserted."""

    def refuse(*tensors):
        """As compiled functions do."""
        sizes = tensors[0].shape[:3]
        for x, width in zip(tensors, (*[operation.key_dim] * 2, *[operation.value_dim] * 2), strict=False):
            *rows, channels = x.stride()
            readable = channels == 1 and all(stride % 8 == 0 for stride in rows) and x.data_ptr() % 16 == 0
            if not readable or x.shape != (*sizes, width) or x.dtype != torch.bfloat16:
                raise ValueError("Mismatched Tensor")

    def forward(q, k, v, o, r, scratch, scale, *cut):
        refuse(q, k, v)
        check_call(operation, (q, k, v), (o, r), scratch, *cut)
        assert r.shape == (q.shape[0], q.shape[2], q.shape[1]) and r.dtype == torch.float32
        for x, y in zip((o, r), reference.chunked_forward(q, k, v, scale, chunk=config.CHUNK), strict=True):
            x.copy_(y)

    def backward(q, k, v, do, dq, dk, dv, scratch, scale, *cut):
        refuse(q, k, v, do)
        check_call(operation, (q, k, v, do), (dq, dk, dv), scratch, *cut)
        for x, y in zip((dq, dk, dv), reference.chunked_backward(q, k, v, do, scale, chunk=config.CHUNK), strict=True):
            x.copy_(y)

    return {"forward": forward, "backward": backward}[operation.kind]


@pytest.fixture
def stand_ins(monkeypatch):
    launch_on_cpu(monkeypatch, stand_in)


@pytest.mark.parametrize("scale", [None, 0.0, -0.3])
@pytest.mark.parametrize("length", [1, 64, 65, 130])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(8, 64), (16, 128)])
def test_launch_equals_reference(stand_ins, poisoned_memory, key_dim, value_dim, length, scale):
    inputs = accuracy.make_inputs((2, length, 3, key_dim, value_dim), "cpu")
    assert equal(launched("backward", inputs, scale), OP(*inputs, scale))
    assert equal(launched("forward", inputs[:3], scale), FORWARD(*inputs[:3], scale))


@pytest.mark.parametrize(
    ("length", "processors", "hands_on"),
    [
        (700, 6, HandsOn.NOTHING),
        (700, 5, HandsOn.STATE),
        (1500, 60, HandsOn.SUMS),
        (2001, 13, HandsOn.SUMS),
        (6000, 8, HandsOn.SUMS),
        (700, 3, HandsOn.NOTHING),
    ],
)
def test_launch_cuts_sequences(stand_ins, monkeypatch, length, processors, hands_on):
    inputs = accuracy.make_inputs((2, length, 3, 16, 64), "cpu")
    monkeypatch.setattr(launcher, "_processors", lambda device: processors)
    assert equal(launched("backward", inputs), OP(*inputs))
    assert handed_on("backward", inputs) == hands_on
    assert equal(launched("forward", inputs[:3]), FORWARD(*inputs[:3]))
    assert handed_on("forward", inputs) == hands_on


@pytest.mark.parametrize("length", [1, 65, 70, 130])
@pytest.mark.parametrize("scale", [None, -0.3])
def test_launch_hands_over_operands_as_kernels_take_them(stand_ins, poisoned_memory, relayout, length, scale):
    views = tuple(relayout(x) for x in accuracy.make_inputs((2, length, 3, 8, 64), "cpu"))
    assert equal(launched("backward", views, scale), OP(*views, scale))
    assert equal(launched("forward", views[:3], scale), FORWARD(*views[:3], scale))


@pytest.mark.parametrize("shape", [(0, 5, 2, 8, 64), (2, 0, 3, 8, 64), (2, 5, 0, 8, 64)], ids=str)
def test_launch_of_nothing(stand_ins, shape):
    inputs = accuracy.make_inputs(shape, "cpu")
    gradients = launcher._backward_cuda(*inputs)
    assert [x.shape for x in gradients] == [x.shape for x in inputs[:3]]
    assert [x.stride() for x in gradients] == [contiguous_strides(x) for x in inputs[:3]]
    assert equal(launcher._forward_cuda(*inputs[:3]), FORWARD(*inputs[:3]))
    for run, tensors in ((launcher._backward_cuda, inputs), (launcher._forward_cuda, inputs[:3])):
        with pytest.raises(ValueError, match="got scale=inf, need a finite number"):
            run(*tensors, math.inf)


@pytest.mark.parametrize("which", [0, 1, 2, 3])
@pytest.mark.parametrize(("change", "error"), [(torch.Tensor.float, TypeError), (lambda x: x[:, 1:], ValueError)])
def test_launch_of_misfits(stand_ins, which, change, error):
    """What compiled functions refuse is told as everywhere else."""
    inputs = list(accuracy.make_inputs((2, 70, 3, 8, 64), "cpu"))
    inputs[which] = change(inputs[which])
    calls = [(OP, launcher._backward_cuda, inputs)]
    if which < 3:
        calls.append((FORWARD, launcher._forward_cuda, inputs[:3]))
    for function, run, tensors in calls:
        with pytest.raises(error) as expected:
            function(*tensors)
        with pytest.raises(error) as found:
            run(*tensors)
        assert str(found.value) == str(expected.value)


@pytest.mark.parametrize(
    ("layout", "copied"),
    [
        ("packed", False),
        ("heads first", False),
        ("tokens first", False),
        ("sliced", False),
        ("strided channels", True),
        ("expanded", True),
        ("shared by heads", False),
        ("misaligned", True),
        ("one head", False),
    ],
)
def test_operands_are_copied_only_when_needed(layout, copied):
    x = LAYOUTS[layout](torch.zeros(2, 3, 4, 8, dtype=torch.bfloat16))
    y = launcher._readable(x)
    assert (y is not x) == copied and y.data_ptr() % 16 == 0 and torch.equal(x, y)


@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_the_stride_of_a_dimension_of_size_one_is_in_the_descriptor_too(dimension):
    strides = [64, 16, 8, 1]
    strides[dimension] = 3
    x = torch.zeros(200, dtype=torch.bfloat16).as_strided([1, 1, 1, 8], strides)
    assert launcher._readable(x).stride() == (8, 8, 8, 1)


def test_another_device_becomes_current_only_when_it_is_not(stand_ins, monkeypatch):
    current, entered = [0], []

    @contextlib.contextmanager
    def device(chosen):
        entered.append(chosen)
        current.append(chosen)
        yield
        current.pop()

    inputs = accuracy.make_inputs((1, 70, 2, 16, 64), "cpu")
    plan = plan_of("backward", inputs)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    for index in (0, 1, 0):
        assert equal(plan._replace(device=index).run(inputs, None), OP(*inputs))
    assert entered == [1]


@pytest.mark.parametrize("call", [FORWARD, OP, based_cute.based_attention, based_backward])
def test_forward_derivatives_are_refused(inputs, call):
    arguments = inputs if call in (OP, based_backward) else inputs[:3]
    with torch.autograd.forward_ad.dual_level():
        call(*arguments)  # which have none
        dual = torch.autograd.forward_ad.make_dual(arguments[1], torch.ones_like(arguments[1]))
        with pytest.raises(RuntimeError, match=r"got a forward derivative .* call based_cute.reference.quadratic_forward"):
            call(arguments[0], dual, *arguments[2:])


@pytest.mark.parametrize("kind", config.OPERATIONS)
def test_first_use_inside_a_capture_is_refused(monkeypatch, kind):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    launcher._operation.cache_clear()
    message = rf"first call of based_{kind}_16_64 inside a CUDA graph capture.*call it once with this shape before"
    with pytest.raises(RuntimeError, match=message):
        launcher._operation(config.Operation(kind, 16, 64))


@pytest.mark.parametrize("call", [based_backward, OP], ids=["function", "operator"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_dispatch_modes_see_one_operator(inputs, call, needs_grad):
    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Log():
        call(*(x.requires_grad_(needs_grad) for x in inputs))
    assert [op for op in seen if op.namespace == "based"] == [OP]


class Subclass(torch.Tensor):
    """Any; this one sees calls by __torch_function__ alone."""


class EveryFunction(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class EveryOperator(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def inside(context):
    """A way of asking about tensors in a context."""

    def ask(asked, x):
        with context():
            asked(x)

    return ask


ORDINARY = {
    "a tensor": lambda asked, x: asked(x),
    "a view": lambda asked, x: asked(x.requires_grad_().transpose(1, 2)),
    "no_grad": inside(torch.no_grad),
    "inference_mode": inside(torch.inference_mode),
    "an inference tensor": lambda asked, x: asked(inference_tensor(x)),
    "autocast": inside(lambda: torch.autocast("cpu", torch.bfloat16)),
}
SEEN = {
    "a function mode": inside(EveryFunction),
    "a default device": inside(lambda: torch.device("cpu")),
    "a dispatch mode": inside(EveryOperator),
    "a fake mode": inside(FakeTensorMode),
    "a profiler": inside(lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])),
    "vmap": lambda asked, x: torch.vmap(lambda y: asked(y) or y)(x),
    "grad": lambda asked, x: torch.func.grad(lambda y: asked(y) or y.sum())(x.float()),
    "functionalize": lambda asked, x: torch.func.functionalize(lambda y: asked(y) or y)(x),
    "a trace": lambda asked, x: torch.jit.trace(lambda y: asked(y) or 2 * y, x, check_trace=False),
    "jvp": lambda asked, x: torch.func.jvp(lambda y: asked(y) or y, (x,), (x,)),
    "forward derivatives": inside(torch.autograd.forward_ad.dual_level),
    "a parameter": lambda asked, x: asked(torch.nn.Parameter(x)),
    "a subclass": lambda asked, x: asked(x.as_subclass(Subclass)),
    "a fake tensor": lambda asked, x: asked(FakeTensorMode().from_tensor(x)),
    "a negated view": lambda asked, x: asked(torch._neg_view(x)),
    "zeros without memory": lambda asked, x: asked(torch._efficientzerotensor(x.shape, dtype=x.dtype)),
}


def inference_tensor(x):
    with torch.inference_mode():
        return x.clone()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("known", [False, True], ids=["first", "behind an ordinary one"])
@pytest.mark.parametrize("case", [*ORDINARY, *SEEN])
def test_only_ordinary_calls_go_past_the_dispatcher(monkeypatch, inputs, case, known):
    monkeypatch.setattr(launcher, "_plan", lambda *kind: "a plan")
    monkeypatch.setattr(launcher, "_last_plain", {})
    q, k, v, do = inputs
    if known:
        assert launcher._plan_past_dispatcher("backward", *inputs) == "a plan" and "backward" in launcher._last_plain
    found = []
    (ORDINARY | SEEN)[case](lambda x: found.append(launcher._plan_past_dispatcher("backward", q, x, v, do)), k)
    assert found and set(found) == {"a plan" if case in ORDINARY else None}


def test_one_tensor_in_two_places_goes_past_the_dispatcher(monkeypatch, inputs):
    monkeypatch.setattr(launcher, "_plan", lambda *kind: "a plan")
    q, _, v, _ = inputs
    assert [launcher._plan_past_dispatcher("backward", q, q, v, v) for _ in range(2)] == ["a plan"] * 2


def test_asking_keeps_no_tensor_alive(monkeypatch):
    monkeypatch.setattr(launcher, "_plan", lambda *kind: "a plan")
    tensors = list(accuracy.make_inputs((1, 5, 2, 8, 64), "cpu"))
    alive = [weakref.ref(x) for x in tensors]
    assert launcher._plan_past_dispatcher("backward", *tensors) == "a plan"
    tensors.clear()
    assert [x() for x in alive] == [None] * 4


def test_tensors_like_the_last_plain_ones_are_not_asked_again(monkeypatch, inputs):
    """Whatever their sizes and strides, as long as the thread has no other keys."""
    monkeypatch.setattr(launcher, "_plan", lambda *kind: "a plan")
    monkeypatch.setattr(launcher, "_last_plain", {})
    assert launcher._plan_past_dispatcher("backward", *inputs) == "a plan"
    asked = []
    monkeypatch.setattr(launcher, "_plain", lambda *tensors: asked.append(tensors))
    assert launcher._plan_past_dispatcher("backward", *(x[:, :5].transpose(1, 2) for x in inputs)) == "a plan" and not asked
    assert launcher._plan_past_dispatcher("backward", *(x.double() for x in inputs)) is None and len(asked) == 1


@pytest.mark.parametrize("backend", ["auto", "cute"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_past_the_dispatcher_results_and_gradients_are_the_same(monkeypatch, backend, scale):
    kinds = []

    def counted(operation):
        function = stand_in(operation)
        return lambda *arguments: kinds.append(operation.kind) or function(*arguments)

    launch_on_cpu(monkeypatch, counted)
    q, k, v, do = inputs = accuracy.make_inputs((2, 70, 3, 16, 64), "cpu")
    assert equal(based_backward(*inputs, scale, backend=backend), OP(*inputs, scale))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = based_cute.based_attention(*leaves, scale, backend=backend)
    assert torch.equal(o, FORWARD(q, k, v, scale)[0])
    assert equal(torch.autograd.grad(o, leaves, do), OP(*inputs, scale))
    with torch.no_grad():
        assert not based_cute.based_attention(*leaves, scale, backend=backend).requires_grad
    assert kinds == ["backward", "forward", "backward", "forward"]
    with EveryOperator():
        based_backward(*inputs, scale)
    assert len(kinds) == 4


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    yield
    torch._dynamo.reset()


def from_hidden(x, weight_q, weight_v, scale):
    """A user's block: projections of odd width, views, the operator, arithmetic on its result."""
    q, k = (x @ weight_q).unflatten(-1, (2, 16)).split(8, -1)
    v = (x @ weight_v).unflatten(-1, (2, 6))
    return [2 * y for y in based_backward(q, k, v, v.sigmoid(), scale)]


@pytest.mark.parametrize(("backend", "scale"), [("aot_eager", None), ("aot_eager", 0.3), ("inductor", 0.3)])
def test_compiled_fullgraph_equals_eager(backend, scale):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    x, weight_q, weight_v = torch.randn(2, 20, 100), torch.randn(100, 32) / 10, torch.randn(100, 12) / 10
    compiled = torch.compile(from_hidden, fullgraph=True, backend=backend)(x, weight_q, weight_v, scale)
    for y, expected in zip(compiled, from_hidden(x, weight_q, weight_v, scale), strict=True):
        torch.testing.assert_close(y, expected)
        assert y.stride() == expected.stride()


def compile_counting(function):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter), counter


def test_one_graph_for_all_lengths():
    compiled, counter = compile_counting(based_backward)
    for length in (1, 2, 64, 65, 128, 300):
        inputs = accuracy.make_inputs((2, length, 2, 8, 4), "cpu")
        assert equal(compiled(*inputs), based_backward(*inputs))
    assert counter.frame_count <= 2  # the first length, then a symbolic one


def test_one_graph_for_all_batch_sizes():
    compiled, counter = compile_counting(based_backward)
    for batch in (1, 2, 3, 5, 0):
        inputs = accuracy.make_inputs((batch, 6, 2, 8, 4), "cpu")
        assert equal(compiled(*inputs), based_backward(*inputs))
    assert counter.frame_count <= 3  # 0 and 1 are always graphs of their own


def test_compiled_scale_is_checked_when_it_runs(inputs):
    compiled, _ = compile_counting(based_backward)
    for scale in (0.1, 0.2, -0.7):  # from the second one on, dynamo traces a symbolic float
        assert equal(compiled(*inputs, scale), based_backward(*inputs, scale))
    with pytest.raises(ValueError, match="need a finite number"):
        compiled(*inputs, math.inf)


def test_inference_mode_and_autocast(inputs):
    expected = based_backward(*inputs)
    with torch.inference_mode(), torch.autocast("cpu", torch.float16):
        assert equal(based_backward(*inputs), expected)
        assert equal(based_backward(*inputs, backend="torch"), expected)
