"""The forward and its autograd without a GPU: the chunked reference, the operator, gradients, autocast, compilation,
checkpointing, and properties that need no oracle."""

import functools
import itertools
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from cases import contiguous_strides, equal
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import checkpoint as ckpt
from torch.utils._python_dispatch import TorchDispatchMode

from based_cute import accuracy, based_attention, based_backward, launcher, reference
from based_cute.kernels import config

FORWARD, BACKWARD = torch.ops.based.forward.default, torch.ops.based.backward.default
FP64 = torch.float64
SHAPE = (2, 70, 3, 8, 16)
EMPTY = [(0, 5, 2, 8, 4), (2, 0, 3, 8, 4), (2, 5, 0, 8, 4)]
both_backends = pytest.mark.parametrize("backend", ["auto", "torch"])


def inputs_of(shape=SHAPE, dtype=torch.bfloat16, seed=0):
    """q, k, v."""
    return accuracy.make_inputs(shape, "cpu", seed, dtype)[:3]


def leaves_of(*tensors):
    return [x.detach().requires_grad_() for x in tensors]


# ---------------------------------------------------------------------------------------------------------------------
# The chunked reference


@pytest.mark.parametrize("shape", [(2, 1, 2, 8, 16), (1, 2, 1, 3, 5), (1, 65, 3, 16, 8), (2, 200, 1, 5, 12)], ids=str)
@pytest.mark.parametrize("scale", [None, 0.0, -0.7])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_equals_the_definition(shape, scale, chunk):
    q, k, v = inputs_of(shape, FP64)
    o, r = reference.chunked_forward(q, k, v, scale, chunk=chunk, dtype=FP64)
    torch.testing.assert_close(o, reference.quadratic_forward(q, k, v, scale), rtol=1e-11, atol=1e-12)
    _, a = reference.causal_taylor(*(x.transpose(1, 2) for x in (q, k)), reference.default_scale(scale, shape[3]))
    torch.testing.assert_close(r, 1 / (a.sum(-1) + 1e-6), rtol=1e-11, atol=0)


@pytest.mark.parametrize("shape", [(2, 300, 2, 16, 64), (2, 300, 2, 8, 64), (1, 2, 4, 16, 64)], ids=str)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_yardstick_on_normal_inputs(shape, scale):
    q, k, v = inputs_of(shape)
    o, r = reference.chunked_forward(q, k, v, scale, round_operands=True)
    gold = accuracy.gold_output(q, k, v, scale)
    assert 1e-3 < accuracy.relative_error(o, gold) <= accuracy.OUTPUT_LIMIT
    assert torch.equal(o, o.bfloat16().float())
    exact = reference.chunked_forward(q, k, v, scale, dtype=FP64)[1]
    assert accuracy.relative_error(r, exact) <= 1e-5  # r is no operand: only the Gram matrix is rounded, to 16 bits


@pytest.mark.parametrize("amplitude", [3, 30, 300])
def test_yardstick_is_flat_in_amplitude(amplitude):
    q, k, v = (amplitude * x for x in inputs_of((1, 257, 2, 16, 64)))
    o, _ = reference.chunked_forward(q, k, v, round_operands=True)
    assert accuracy.relative_error(o, accuracy.gold_output(q, k, v)) <= accuracy.NORMAL_INPUT_LIMIT


def test_every_element_is_written(poisoned_memory):
    assert all(x.isfinite().all() for x in reference.chunked_forward(*inputs_of((2, 70, 2, 3, 5))))


# ---------------------------------------------------------------------------------------------------------------------
# The operator


def test_schema():
    assert str(FORWARD._schema) == "based::forward(Tensor q, Tensor k, Tensor v, float? scale=None) -> (Tensor o, Tensor r)"


def test_opcheck_in_every_layout(relayout):
    torch.library.opcheck(FORWARD, tuple(leaves_of(*(relayout(x) for x in inputs_of()))))


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
def test_opcheck_when_one_input_requires_a_gradient(needed):
    torch.library.opcheck(FORWARD, tuple(x.requires_grad_(n) for x, n in zip(inputs_of(), needed, strict=True)))


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_opcheck_with_scale(scale):
    torch.library.opcheck(FORWARD, tuple(leaves_of(*inputs_of())), {"scale": scale})


@pytest.mark.parametrize("shape", [*EMPTY, (1, 1, 1, 1, 1)], ids=str)
def test_opcheck_empty_and_smallest(shape):
    torch.library.opcheck(FORWARD, tuple(leaves_of(*inputs_of(shape))))


@pytest.mark.parametrize("dtype", launcher.DTYPES, ids=str)
@both_backends
def test_values_and_dtypes(dtype, backend):
    q, k, v = inputs_of(dtype=dtype)
    o = based_attention(q, k, v, backend=backend)
    rounding = 1e-15 if dtype == FP64 else max(1e-6, torch.finfo(dtype).eps)
    assert o.dtype == dtype and accuracy.relative_error(o, accuracy.gold_output(q, k, v)) <= rounding


@pytest.mark.parametrize("dtype", launcher.DTYPES, ids=str)
def test_row_normaliser(dtype):
    q, k, v = leaves_of(*inputs_of(dtype=dtype))
    o, r = FORWARD(q, k, v)
    assert r.shape == (2, 3, 70) and r.dtype == torch.float32
    assert accuracy.relative_error(r, reference.chunked_forward(q.detach(), k.detach(), v.detach(), dtype=FP64)[1]) <= 1e-6
    assert o.requires_grad and not r.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        r.sum().backward()


def test_layouts_agree_and_the_output_is_contiguous(relayout):
    views = [relayout(x) for x in inputs_of()]
    copies = [x.clone(memory_format=torch.contiguous_format) for x in views]
    o = based_attention(*views)
    assert torch.equal(o, based_attention(*copies)) and equal(views, copies)
    assert o.stride() == contiguous_strides(o)


@pytest.mark.parametrize("shape", [SHAPE, *EMPTY], ids=str)
@both_backends
def test_outputs_are_fresh_memory(shape, backend):
    inputs = inputs_of(shape)
    results = [based_attention(*inputs, backend=backend), *FORWARD(*inputs)]
    storages = [x.untyped_storage()._cdata for x in (*inputs, *results)]
    assert len(set(storages)) == len(storages)


def test_meta_and_fake_tensors():
    q, k, v = (x.to("meta").requires_grad_() for x in inputs_of())
    o = based_attention(q, k, v)
    gradients = torch.autograd.grad(o.sum(), (q, k, v))
    assert o.shape == v.shape and o.dtype == v.dtype and o.device.type == "meta"
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


def test_scale_none_and_zero_differ():
    q, k, v = inputs_of()
    assert torch.equal(based_attention(q, k, v), based_attention(q, k, v, 8**-0.5))
    o = based_attention(q, k, v, 0.0).double()
    mean = v.double().cumsum(1) / (torch.arange(1, 71) + 1e-6).view(1, -1, 1, 1)
    assert accuracy.relative_error(o, mean) <= 2e-3


@pytest.mark.parametrize("call", [based_attention, FORWARD], ids=["function", "operator"])
@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_scale_not_finite(scale, call):
    with pytest.raises(ValueError, match="based_attention: got scale=.*, need a finite number, or None"):
        call(*inputs_of(), scale)


REJECTIONS = {
    "no tensor": (lambda q, k, v: (q, k, v.tolist()), TypeError, "got v of type list, need a torch.Tensor"),
    "mixed dtypes": (lambda q, k, v: (q, k.float(), v), TypeError, r"k float32, v bfloat16, need one dtype; cast with"),
    "rank": (lambda q, k, v: (q, k, v[0]), ValueError, "got v of shape .*, need four dimensions"),
    "k length": (lambda q, k, v: (q, k[:, 1:], v), ValueError, r"need \(2, 70, 3, 8\) to go with q"),
    "layout": (lambda q, k, v: (q, k, v.transpose(1, 2)), ValueError, r"looks like \(B, H, T, D\): call v\.transpose"),
}


@pytest.mark.parametrize("case", REJECTIONS.values(), ids=REJECTIONS.keys())
def test_rejections(case):
    spoil, error, message = case
    with pytest.raises(error, match=f"^based_attention: .*{message}"):
        based_attention(*spoil(*inputs_of()))


def test_backends_that_cannot_run():
    with pytest.raises(ValueError, match=r"got backend='cuda', need one of \('auto', 'cute', 'torch'\)"):
        based_attention(*inputs_of(), backend="cuda")
    with pytest.raises(RuntimeError, match=r"based_attention\(backend='cute'\): got tensors on cpu, .* call backend='torch'"):
        based_attention(*inputs_of(), backend="cute")


def test_every_pair_of_the_backward_has_an_output_row():
    pairs = {scan: {(row.key_dim, row.value_dim) for row in config.ROWS if row.scan == scan} for scan in config.SCANS}
    assert len(set(map(frozenset, pairs.values()))) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("scale", [None, -0.4])
@both_backends
def test_gradcheck(length, scale, backend):
    leaves = leaves_of(*inputs_of((1, length, 2, 3, 2), FP64))
    assert torch.autograd.gradcheck(functools.partial(based_attention, scale=scale, backend=backend), leaves)


@pytest.mark.parametrize("dtype", launcher.DTYPES, ids=str)
@pytest.mark.parametrize("scale", [None, 0.0, -0.3])
@both_backends
def test_gradients_are_those_of_based_backward(dtype, scale, backend):
    inputs = accuracy.make_inputs(SHAPE, "cpu", dtype=dtype)
    _, *gradients = accuracy.train_step(*inputs, scale, backend)
    assert equal(gradients, based_backward(*inputs, scale))


def test_gradients_of_gradients_layouts(relayout):
    """The loss may hand over do in any layout: transposed by a later view, or one element behind everything."""
    q, k, v, do = accuracy.make_inputs(SHAPE, "cpu")
    q, k, v, do = (relayout(x) for x in (q, k, v, do))
    _, *gradients = accuracy.train_step(q, k, v, do)
    assert equal(gradients, based_backward(*(x.clone(memory_format=torch.contiguous_format) for x in (q, k, v, do))))


@pytest.mark.parametrize("loss", [torch.sum, torch.mean], ids=["sum", "mean"])
def test_gradient_of_a_reduction(loss):
    q, k, v = leaves_of(*inputs_of())
    o = based_attention(q, k, v)
    gradients = torch.autograd.grad(loss(o), (q, k, v))
    do = torch.ones_like(o) / (o.numel() if loss is torch.mean else 1)
    assert equal(gradients, based_backward(q, k, v, do))


SUBSETS = [needed for needed in itertools.product((True, False), repeat=3) if any(needed)]


@pytest.mark.parametrize("needed", SUBSETS, ids=str)
@both_backends
def test_only_what_requires_a_gradient_gets_one(needed, backend):
    *inputs, do = accuracy.make_inputs(SHAPE, "cpu")
    _, *full = accuracy.train_step(*inputs, do, backend=backend)
    leaves = [x.detach().requires_grad_(n) for x, n in zip(inputs, needed, strict=True)]
    based_attention(*leaves, backend=backend).backward(do)
    for leaf, n, expected in zip(leaves, needed, full, strict=True):
        assert torch.equal(leaf.grad, expected) if n else leaf.grad is None


@pytest.mark.parametrize("needed", SUBSETS, ids=str)
def test_the_formula_returns_none_for_the_rest(needed):
    *inputs, do = accuracy.make_inputs(SHAPE, "cpu")
    context = SimpleNamespace(saved_tensors=inputs, scale=None, needs_input_grad=(*needed, False, False))
    with torch.no_grad():
        gradients = launcher._Attention.backward(context, do, None), launcher._TorchPath.backward(context, do)
    assert all([x is not None for x in found[:4]] == [*needed, False] for found in gradients)


def test_no_gradient_of_the_output_gives_none():
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, _):
            return None

    leaves = leaves_of(*inputs_of())
    loss = Nothing.apply(based_attention(*leaves)).sum()
    assert torch.autograd.grad(loss, leaves, allow_unused=True) == (None, None, None)


def test_dispatch_modes_see_the_operators_and_nothing_else_of_a_step():
    """No zeros in place of r's gradient either: a fill is a launch of its own."""
    leaves, do = leaves_of(*inputs_of()), torch.ones(2, 70, 3, 16, dtype=torch.bfloat16)
    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Log():
        torch.autograd.grad(based_attention(*leaves), leaves, do)
    assert [op for op in seen if op != torch.ops.aten.detach.default] == [FORWARD, BACKWARD]


def test_no_graph_without_a_leaf():
    q, k, v = inputs_of()
    assert not based_attention(q, k, v).requires_grad
    with torch.no_grad():
        assert not based_attention(*leaves_of(q, k, v)).requires_grad
    with torch.inference_mode():
        assert torch.equal(based_attention(q, k, v), FORWARD(q, k, v)[0])


@pytest.mark.parametrize(
    ("backend", "message"), [("auto", "no autograd formula"), ("torch", r"got create_graph=True.*quadratic_forward")]
)
def test_double_backward_raises(backend, message):
    leaves = leaves_of(*inputs_of((1, 5, 1, 3, 2), FP64))
    o = based_attention(*leaves, backend=backend)
    with pytest.raises(RuntimeError, match=message):
        dq, _, _ = torch.autograd.grad(o.sum(), leaves, create_graph=True)
        (o.sum() + dq.square().sum()).backward()


@both_backends
def test_a_graph_can_be_kept(backend):
    leaves = leaves_of(*inputs_of())
    o = based_attention(*leaves, backend=backend)
    first = torch.autograd.grad(o.sum(), leaves, retain_graph=True)
    assert equal(first, torch.autograd.grad(o.sum(), leaves))


def test_func_transforms_are_refused_with_an_error():
    q, k, v = inputs_of((1, 5, 1, 3, 2), FP64)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: based_attention(x, k, v).sum())(q)


def test_an_input_changed_in_place_is_noticed():
    q, k, v = inputs_of()
    leaf = v.clone().requires_grad_()
    value = leaf * 1
    o = based_attention(q, k, value)
    value.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


# ---------------------------------------------------------------------------------------------------------------------
# Autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@both_backends
def test_autocast_casts_and_gradients_come_back(dtype, backend):
    q, k, v = inputs_of(dtype=torch.float32)
    leaves = leaves_of(q, k.to(dtype), v)
    with torch.autocast("cpu", dtype):
        o = based_attention(*leaves, backend=backend)
    assert torch.equal(o, based_attention(*(x.to(dtype) for x in leaves))) and o.dtype == dtype
    o.sum().backward()
    cast = leaves_of(*(x.to(dtype) for x in leaves))
    based_attention(*cast).sum().backward()
    for leaf, like in zip(leaves, cast, strict=True):
        assert leaf.grad.dtype == leaf.dtype and torch.equal(leaf.grad, like.grad.to(leaf.dtype))


def test_autocast_leaves_fp64_and_never_enters_the_operator():
    q, k, v = inputs_of(dtype=FP64)
    expected, fp32 = based_attention(q, k, v), FORWARD(q.float(), k.float(), v.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(based_attention(q, k, v), expected)
        assert equal(FORWARD(q.float(), k.float(), v.float()), fp32)
        assert not torch.equal(q.float()[:, :, 0] @ k.float()[:, :, 0].mT, 0 * q)  # autocast itself still works
        with pytest.raises(TypeError, match="need one dtype"):
            based_attention(q, k, v.float())


def test_gradient_scaling_is_undone():
    q, k, v = inputs_of()
    plain, scaled = leaves_of(q, k, v), leaves_of(q, k, v)
    based_attention(*plain).float().sum().backward()
    (2.0**16 * based_attention(*scaled).float().sum()).backward()
    assert all(torch.equal(2.0**16 * x.grad, y.grad) for x, y in zip(plain, scaled, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    yield
    torch._dynamo.reset()


def block(x, weight_q, weight_v, scale=None):
    """A user's block: projections of odd width, views, the operator, arithmetic on its result."""
    q, k = (x @ weight_q).unflatten(-1, (2, 16)).split(8, -1)
    v = (x @ weight_v).unflatten(-1, (2, 6))
    return based_attention(q, k, v, scale).flatten(-2) * 2


def block_leaves():
    return leaves_of(torch.randn(2, 20, 100), torch.randn(100, 32) / 10, torch.randn(100, 12) / 10)


def with_gradients(function, leaves):
    o = function(*leaves)
    return [o.detach(), *torch.autograd.grad(o.square().sum(), leaves)]


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_compiled_fullgraph_forward_and_backward(compiler, scale):
    if compiler == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    leaves, function = block_leaves(), functools.partial(block, scale=scale)
    compiled = with_gradients(torch.compile(function, fullgraph=True, backend=compiler), leaves)
    for x, expected in zip(compiled, with_gradients(function, leaves), strict=True):
        torch.testing.assert_close(x, expected)


def test_compiled_under_autocast():
    leaves = block_leaves()

    def function(*leaves):
        with torch.autocast("cpu", torch.bfloat16):
            return block(*leaves)

    compiled = with_gradients(torch.compile(function, fullgraph=True, backend="aot_eager"), leaves)
    expected = with_gradients(function, leaves)
    assert compiled[0].dtype == torch.bfloat16
    assert all(accuracy.relative_error(x, y) <= 1e-2 for x, y in zip(compiled, expected, strict=True))


def test_one_graph_for_all_lengths():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(based_attention, fullgraph=True, backend=counter, dynamic=True)
    for length in (128, 1000, 2048):
        leaves = leaves_of(*inputs_of((1, length, 1, 8, 4)))
        assert equal(with_gradients(compiled, leaves), with_gradients(based_attention, leaves))
    assert counter.frame_count == 1


def test_compiled_subset_of_gradients():
    q, k, v = inputs_of()
    leaf = v.requires_grad_()
    compiled = torch.compile(based_attention, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(based_attention(q, k, leaf).sum(), leaf)
    assert equal(torch.autograd.grad(compiled(q, k, leaf).sum(), leaf), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpointing


@pytest.mark.parametrize("reentrant", [True, False])
@both_backends
def test_checkpoint_is_bitwise_equal(reentrant, backend):
    leaves, function = leaves_of(*inputs_of()), functools.partial(based_attention, backend=backend)
    checkpointed = functools.partial(ckpt.checkpoint, function, use_reentrant=reentrant)
    (checkpointed(*leaves)).sum().backward()
    gradients = [x.grad for x in leaves]
    assert equal(gradients, torch.autograd.grad(function(*leaves).sum(), leaves))


@pytest.mark.parametrize(("policy", "runs"), [("MUST_SAVE", 1), ("PREFER_RECOMPUTE", 2)])
def test_selective_checkpointing_sees_the_operator(monkeypatch, policy, runs):
    calls, right = [], launcher._run_forward_reference
    monkeypatch.setattr(launcher, "_run_forward_reference", lambda *args: calls.append(0) or right(*args))

    def decide(context, op, *args, **kwargs):
        return getattr(ckpt.CheckpointPolicy, policy if op == FORWARD else "PREFER_RECOMPUTE")

    contexts = functools.partial(ckpt.create_selective_checkpoint_contexts, decide)
    leaves = leaves_of(*inputs_of())
    expected = torch.autograd.grad(based_attention(*leaves).square().sum(), leaves)
    calls.clear()
    o = ckpt.checkpoint(lambda *x: based_attention(*x).square(), *leaves, use_reentrant=False, context_fn=contexts)
    assert equal(torch.autograd.grad(o.sum(), leaves), expected) and len(calls) == runs


# ---------------------------------------------------------------------------------------------------------------------
# Properties that need no oracle

small = {
    "length": st.integers(1, 40),
    "key_dim": st.integers(1, 9),
    "value_dim": st.integers(1, 9),
    "chunk": st.integers(1, 17),
    "seed": st.integers(0, 1000),
}


def chunked(q, k, v, scale=None, **options):
    return reference.chunked_forward(q, k, v, scale, **options)[0]


@given(**small)
def test_constant_values_are_returned(length, key_dim, value_dim, chunk, seed):
    q, k, v = inputs_of((1, length, 2, key_dim, value_dim), FP64, seed)
    v = v[:, :1].expand_as(v)
    torch.testing.assert_close(chunked(q, k, v, chunk=chunk, dtype=FP64), v, rtol=2e-6, atol=0)


@given(**small)
def test_output_is_a_mean_of_values(length, key_dim, value_dim, chunk, seed):
    q, k, v = inputs_of((1, length, 2, key_dim, value_dim), FP64, seed)
    o = chunked(q, k, v, chunk=chunk, dtype=FP64)
    assert (o.abs() <= v.abs().cummax(1).values + 1e-12).all()


@given(**small)
def test_first_token_is_its_value(length, key_dim, value_dim, chunk, seed):
    """To the bit in bf16, with operands rounded as the kernel does."""
    q, k, v = inputs_of((1, length, 2, key_dim, value_dim), seed=seed)
    o = chunked(3 * q, k, v, chunk=chunk, round_operands=True)
    assert torch.equal(o[:, 0].bfloat16(), v[:, 0])


@given(exponent=st.integers(-20, 20), **small)
def test_linear_in_v_bitwise(exponent, length, key_dim, value_dim, chunk, seed):
    q, k, v = inputs_of((1, length, 2, key_dim, value_dim), seed=seed)
    scaled = chunked(q, k, 2.0**exponent * v, chunk=chunk)
    assert torch.equal(2.0**exponent * chunked(q, k, v, chunk=chunk), scaled)


@given(exponent=st.integers(-8, 8), **small)
def test_power_of_two_moves_between_q_and_scale_bitwise(exponent, length, key_dim, value_dim, chunk, seed):
    q, k, v = inputs_of((1, length, 2, key_dim, value_dim), seed=seed)
    moved = chunked(2.0**exponent * q, k, v, 0.25 * 2.0**-exponent, chunk=chunk)
    assert torch.equal(moved, chunked(q, k, v, 0.25, chunk=chunk))


@given(start=st.integers(1, 39), **small)
def test_later_tokens_change_nothing_before_them(start, length, key_dim, value_dim, chunk, seed):
    q, k, v = inputs_of((1, length, 2, key_dim, value_dim), FP64, seed)
    others = [torch.cat((x[:, :start], x[:, start:] + 1), 1) for x in (q, k, v)]
    changed = chunked(*others, chunk=chunk, dtype=FP64)
    assert torch.equal(changed[:, :start], chunked(q, k, v, chunk=chunk, dtype=FP64)[:, :start])


def test_heads_and_batches_are_independent():
    q, k, v = inputs_of((3, 70, 2, 4, 5), FP64)
    whole, solo = chunked(q, k, v, dtype=FP64), chunked(*(x[1:2, :, 1:] for x in (q, k, v)), dtype=FP64)
    torch.testing.assert_close(whole[1:2, :, 1:], solo, rtol=1e-13, atol=1e-14)
