"""The torch path: gold against autograd, chunked scans against gold, the yardstick, properties that need no oracle, and
the error rule itself."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from based_cute import accuracy, reference

FP64 = torch.float64
# (B, T, H, K, V): one token, fewer than a chunk, about one, several with a ragged tail; K and V not powers of two
SMALL_SHAPES = [(2, 1, 2, 8, 16), (1, 2, 1, 3, 5), (2, 63, 2, 8, 7), (1, 65, 3, 16, 8), (2, 200, 1, 5, 12)]
shapes = pytest.mark.parametrize("shape", SMALL_SHAPES, ids=str)


def fp64_inputs(shape, seed=0):
    return accuracy.make_inputs(shape, "cpu", seed, FP64)


def assert_close(gradients, gold, floors=(0.0, 0.0, 0.0), limit=1e-12):
    assert max(accuracy.measure_errors(gradients, gold, floors)) <= limit


def autograd_gradients(q, k, v, do, scale=None):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(reference.quadratic_forward(*leaves, scale), leaves, do)


# ---------------------------------------------------------------------------------------------------------------------
# Gold


def test_forward_is_the_definition():
    q, k, v, _ = fp64_inputs((1, 3, 1, 2, 2))
    o = reference.quadratic_forward(q, k, v, 0.5)
    for i in range(3):
        s = [0.5 * torch.dot(q[0, i, 0], k[0, j, 0]) for j in range(i + 1)]
        a = [1 + x + x * x / 2 for x in s]
        expected = sum(weight * v[0, j, 0] for j, weight in enumerate(a)) / (sum(a) + 1e-6)
        torch.testing.assert_close(o[0, i, 0], expected)


@shapes
@pytest.mark.parametrize("scale", [None, 0.0, -0.7, 0.3])
def test_gold_equals_autograd(shape, scale):
    inputs = fp64_inputs(shape)
    floors = accuracy.cancellation_floors(*inputs, scale)
    assert_close(reference.quadratic_backward(*inputs, scale), autograd_gradients(*inputs, scale), floors)


def test_magnitude_bounds_the_gradients():
    inputs = fp64_inputs((2, 65, 2, 8, 7))
    gold, magnitude = reference.quadratic_backward(*inputs), reference.quadratic_magnitude(*inputs)
    assert all((x.abs() <= bound).all() for x, bound in zip(gold, magnitude, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Chunked scans


@shapes
@pytest.mark.parametrize("chunk", [5, 64, 1000])
def test_chunked_equals_gold(shape, chunk):
    inputs = fp64_inputs(shape)
    floors = accuracy.cancellation_floors(*inputs)
    gradients = reference.chunked_backward(*inputs, chunk=chunk, dtype=FP64)
    assert_close(gradients, reference.quadratic_backward(*inputs), floors)


@pytest.mark.parametrize("scale", [None, 0.0, -0.7, 0.3, 2])
def test_chunked_scale(scale):
    inputs = fp64_inputs((1, 100, 2, 8, 16))
    gradients = reference.chunked_backward(*inputs, scale, dtype=FP64)
    assert_close(gradients, reference.quadratic_backward(*inputs, scale))


def test_scale_none_is_inverse_root_of_key_dim():
    inputs = fp64_inputs((1, 70, 1, 5, 3))
    for x, y in zip(reference.chunked_backward(*inputs), reference.chunked_backward(*inputs, 5**-0.5), strict=True):
        assert torch.equal(x, y)


@shapes
def test_row_statistics(shape):
    q, k, v, do = fp64_inputs(shape)
    _, r, h = reference.forward_scan(q, k, v, do, dtype=FP64)
    _, a = reference.causal_taylor(q.transpose(1, 2), k.transpose(1, 2), q.shape[-1] ** -0.5)
    torch.testing.assert_close(r, 1 / (a.sum(-1) + 1e-6))
    nd = (a * (do.transpose(1, 2) @ v.transpose(1, 2).mT)).sum(-1)
    torch.testing.assert_close(h, -nd * r * r)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_chunked_in_fp32_from_any_dtype(dtype):
    inputs = accuracy.make_inputs((2, 130, 2, 8, 16), "cpu", dtype=dtype)
    assert_close(reference.chunked_backward(*inputs), reference.quadratic_backward(*inputs), limit=1e-6)


class _ChunkedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return reference.quadratic_forward(q, k, v)

    @staticmethod
    def backward(ctx, do):
        return reference.chunked_backward(*ctx.saved_tensors, do, chunk=2, dtype=FP64)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_gradcheck(length):
    leaves = [x.requires_grad_() for x in fp64_inputs((1, length, 2, 3, 2))[:3]]
    assert torch.autograd.gradcheck(_ChunkedGradient.apply, leaves)


@pytest.mark.parametrize("shape", [(0, 5, 2, 8, 4), (2, 0, 3, 8, 4), (2, 5, 0, 8, 4)], ids=str)
def test_empty(shape):
    inputs = fp64_inputs(shape)
    for gradients in (reference.chunked_backward(*inputs), reference.quadratic_backward(*inputs)):
        assert [x.shape for x in gradients] == [inputs[0].shape, inputs[1].shape, inputs[2].shape]


def test_every_element_is_written(poisoned_memory):
    gradients = reference.chunked_backward(*fp64_inputs((2, 70, 2, 3, 5)))
    assert all(x.isfinite().all() for x in gradients)


class _LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that any operator returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = (x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))
        self.elements = max(self.elements, *sizes, 0)
        return out


def test_memory_is_that_of_a_chunk():
    inputs = fp64_inputs((1, 1024, 1, 16, 8))
    with _LargestTensor() as largest:
        reference.chunked_backward(*inputs, chunk=32)
    assert largest.elements == inputs[0].numel()  # 153 features a token would be ten times as much


def test_overflow_above_the_diagonal_is_masked():
    q, k, v, do = (x.to(torch.float32) for x in fp64_inputs((1, 3, 1, 4, 4)))
    k[:, 2] = 1e30  # s^2 of rows 0 and 1 with key 2 is infinite, and masked
    dq, _, _ = reference.quadratic_backward(q, k, v, do, dtype=torch.float32)
    assert dq[:, :2].isfinite().all()


# ---------------------------------------------------------------------------------------------------------------------
# Features


@pytest.mark.parametrize("key_dim", [1, 5, 8, 16])
def test_packed_features_are_the_taylor_polynomial(key_dim):
    x, y = torch.randn(2, 7, key_dim, dtype=FP64)
    s = (x * y).sum(-1)
    weighted = reference.token_weights(key_dim, x) * reference.packed_features(x)
    torch.testing.assert_close((weighted * reference.packed_features(y)).sum(-1), 1 + s + s * s / 2)


def test_feature_degrees_carry_the_scale():
    x = torch.randn(7, 5, dtype=FP64)
    scaled = (-0.3) ** reference.feature_degrees(5, x)
    torch.testing.assert_close(scaled * reference.packed_features(x), reference.packed_features(-0.3 * x))


@pytest.mark.parametrize("key_dim", [1, 5, 8])
def test_adjoint_contraction_is_the_gradient_of_the_value(key_dim):
    q = torch.randn(7, key_dim, dtype=FP64, requires_grad=True)
    y = torch.randn(7, 1 + key_dim + key_dim * (key_dim + 1) // 2, dtype=FP64)
    scale = 0.4
    adjoint = reference.adjoint_contraction(y, q, scale)
    value = reference.taylor_value(y[:, :1], y[:, 1 : 1 + key_dim], adjoint, q, scale)
    weighted = reference.token_weights(key_dim, q) * reference.packed_features(scale * q)
    torch.testing.assert_close(value, (weighted * y).sum(-1, keepdim=True))
    (gradient,) = torch.autograd.grad(value.sum(), q)
    torch.testing.assert_close(gradient, scale * adjoint)


# ---------------------------------------------------------------------------------------------------------------------
# Yardstick


@pytest.mark.parametrize("shape", [(2, 300, 2, 16, 64), (2, 300, 2, 8, 64), (1, 2, 4, 16, 64)], ids=str)
def test_yardstick_on_normal_inputs(shape):
    inputs = accuracy.make_inputs(shape, "cpu")
    errors = accuracy.measure_errors(
        reference.chunked_backward(*inputs, round_operands=True), accuracy.gold_gradients(*inputs)
    )
    assert all(1e-3 < error <= accuracy.NORMAL_INPUT_LIMIT for error in errors)


@pytest.mark.parametrize("amplitude", [3, 30, 300])
def test_yardstick_is_flat_in_amplitude(amplitude):
    inputs = [amplitude * x for x in accuracy.make_inputs((1, 257, 2, 16, 64), "cpu")]
    gradients = reference.chunked_backward(*inputs, round_operands=True)
    assert max(accuracy.measure_errors(gradients, accuracy.gold_gradients(*inputs))) <= accuracy.NORMAL_INPUT_LIMIT


def test_yardstick_outputs_are_bf16_values():
    inputs = accuracy.make_inputs((1, 70, 1, 8, 8), "cpu")
    gradients = reference.chunked_backward(*inputs, round_operands=True)
    assert all(x.dtype == torch.float32 and torch.equal(x, x.bfloat16().float()) for x in gradients)


def test_two_term_operand_keeps_sixteen_bits():
    x = torch.randn(1000)
    precision = reference.Precision(round_operands=True)
    assert ((precision.two_term_operand(x) - x).abs() <= 2.0**-16 * x.abs()).all()
    assert torch.equal(precision.operand(x), x.bfloat16().float())
    assert torch.equal(reference.Precision().two_term_operand(x), x)


# ---------------------------------------------------------------------------------------------------------------------
# Properties that need no oracle

small = {
    "length": st.integers(1, 40),
    "key_dim": st.integers(1, 9),
    "value_dim": st.integers(1, 9),
    "chunk": st.integers(1, 17),
    "seed": st.integers(0, 1000),
}


@given(**small)
def test_gradients_of_constant_values_vanish(length, key_dim, value_dim, chunk, seed):
    q, k, v, do = fp64_inputs((1, length, 2, key_dim, value_dim), seed)
    v = v[:, :1].expand_as(v)
    dq, dk, _ = reference.chunked_backward(q, k, v, do, chunk=chunk, dtype=FP64)
    dq_terms, dk_terms, _ = reference.quadratic_magnitude(q, k, v, do)
    assert dq.norm() <= 2e-6 * dq_terms.norm()  # what the 1e-6 of a normaliser of at least 1/2 leaves
    assert dk.norm() <= 2e-6 * dk_terms.norm()


@given(**small)
def test_scale_zero_is_a_running_mean(length, key_dim, value_dim, chunk, seed):
    q, k, v, do = fp64_inputs((1, length, 2, key_dim, value_dim), seed)
    dq, dk, dv = reference.chunked_backward(q, k, v, do, 0.0, chunk=chunk, dtype=FP64)
    per_row = do / (torch.arange(1, length + 1, dtype=FP64) + 1e-6).view(1, -1, 1, 1)
    torch.testing.assert_close(dv, per_row.flip(1).cumsum(1).flip(1))
    assert not dq.any() and not dk.any()


@given(exponent=st.integers(-20, 20), **small)
def test_linear_in_do_bitwise(exponent, length, key_dim, value_dim, chunk, seed):
    q, k, v, do = accuracy.make_inputs((1, length, 2, key_dim, value_dim), "cpu", seed)
    once = reference.chunked_backward(q, k, v, do, chunk=chunk)
    scaled = reference.chunked_backward(q, k, v, 2.0**exponent * do, chunk=chunk)
    assert all(torch.equal(2.0**exponent * x, y) for x, y in zip(once, scaled, strict=True))


@given(exponent=st.integers(-8, 8), **small)
def test_power_of_two_moves_between_q_and_scale_bitwise(exponent, length, key_dim, value_dim, chunk, seed):
    q, k, v, do = accuracy.make_inputs((1, length, 2, key_dim, value_dim), "cpu", seed)
    dq, dk, dv = reference.chunked_backward(q, k, v, do, 0.25, chunk=chunk)
    moved = reference.chunked_backward(2.0**exponent * q, k, v, do, 0.25 * 2.0**-exponent, chunk=chunk)
    assert torch.equal(moved[0], 2.0**-exponent * dq) and torch.equal(moved[1], dk) and torch.equal(moved[2], dv)


@given(row=st.integers(0, 39), **small)
def test_causality_is_exact(row, length, key_dim, value_dim, chunk, seed):
    q, k, v, do = fp64_inputs((1, length, 2, key_dim, value_dim), seed)
    row = row % length
    only_row = torch.zeros_like(do)
    only_row[:, row] = do[:, row]
    dq, dk, dv = reference.chunked_backward(q, k, v, only_row, chunk=chunk, dtype=FP64)
    assert not dk[:, row + 1 :].any() and not dv[:, row + 1 :].any()
    assert not dq[:, :row].any() and not dq[:, row + 1 :].any()


def test_heads_and_batches_are_independent():
    inputs = fp64_inputs((3, 70, 2, 4, 5))
    whole = reference.chunked_backward(*inputs, dtype=FP64)
    solo = reference.chunked_backward(*(x[1:2, :, 1:] for x in inputs), dtype=FP64)
    assert_close([x[1:2, :, 1:] for x in whole], solo, limit=1e-14)


# ---------------------------------------------------------------------------------------------------------------------
# The error rule


def test_relative_error():
    gold = torch.tensor([3.0, 4.0])
    assert accuracy.relative_error(gold, gold) == 0.0
    assert accuracy.relative_error(torch.tensor([3.0, 4.5]), gold) == pytest.approx(0.1)
    assert accuracy.relative_error(torch.tensor([3.0, 4.5]), gold, floor=50.0) == pytest.approx(0.01)
    assert accuracy.relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert accuracy.relative_error(torch.ones(2), torch.zeros(2)) == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_relative_error_never_passes_what_is_not_finite(bad):
    good, spoilt = torch.ones(2), torch.tensor([1.0, bad])
    for x, gold in ((spoilt, good), (good, spoilt), (spoilt, spoilt)):
        assert accuracy.relative_error(x, gold) == math.inf


def test_relative_error_does_not_broadcast():
    with pytest.raises(ValueError, match="need one shape"):
        accuracy.relative_error(torch.ones(2), torch.ones(1))


def test_failure_reason_names_the_gradient():
    good = (2e-3, 2e-3, 2e-3)
    assert accuracy.failure_reason(good, good) == ""
    assert accuracy.failure_reason((2e-3, 3.6e-3, 2e-3), good).startswith("dk: got relative error 3.60e-03, need at")
    assert accuracy.failure_reason((2e-3, 2e-3, 3e-3), (2e-3, 2e-3, 1e-3)).startswith("dv: ")  # twice the yardstick
    assert accuracy.failure_reason((1e-3, 1e-3, 1e-3), (0.0, 0.0, 0.0)) == ""  # below one rounding of the output
    assert accuracy.failure_reason((math.inf,) * 3, (math.inf,) * 3).count("got relative error inf") == 3


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 16, 64), (2, 3, 1, 8, 64), (1, 1000, 2, 12, 40), accuracy.CORRECTNESS_SHAPES[0]], ids=str
)
def test_check_shape_passes_the_torch_path(shape):
    lines = []
    result = accuracy.check_shape(shape, "auto", "cpu", progress=lines.append)
    assert result.passed and result.reason == "" and result.backend == "torch" and len(lines) == 3


@pytest.mark.parametrize("fault", [1.01, math.nan])
def test_check_shape_fails_a_wrong_gradient(monkeypatch, fault):
    def spoilt(q, k, v, do, backend):
        dq, dk, dv = (x.bfloat16() for x in reference.chunked_backward(q, k, v, do))
        return dq, dk * fault, dv

    monkeypatch.setattr(accuracy.launcher, "based_backward", spoilt)
    result = accuracy.check_shape((1, 100, 1, 8, 16), "torch", "cpu")
    assert not result.passed and result.reason == "dk: autograd and based_backward differ"


@pytest.mark.parametrize("fault", [1.01, math.nan])
def test_check_shape_fails_a_wrong_output(monkeypatch, fault):
    def spoilt(q, k, v, scale):
        o, r = reference.chunked_forward(q, k, v, scale)
        return (o * fault).bfloat16(), r

    monkeypatch.setattr(accuracy.launcher, "_run_forward_reference", spoilt)
    result = accuracy.check_shape((1, 100, 1, 8, 16), "torch", "cpu")
    assert not result.passed and result.reason.startswith("o: got relative error")


def test_no_floor_is_reached_on_normal_inputs():
    for length in (2, 65, 512):
        inputs = accuracy.make_inputs((1, length, 2, 16, 64), "cpu")
        gold, floors = accuracy.gold_gradients(*inputs), accuracy.cancellation_floors(*inputs)
        assert all(x.norm().item() > 10 * floor for x, floor in zip(gold, floors, strict=True))


def test_inputs_are_reproducible():
    first, again, other = (accuracy.make_inputs((1, 4, 2, 3, 5), "cpu", seed) for seed in (0, 0, 1))
    assert [tuple(x.shape) for x in first] == [(1, 4, 2, 3)] * 2 + [(1, 4, 2, 5)] * 2
    assert all(torch.equal(x, y) and not torch.equal(x, z) for x, y, z in zip(first, again, other, strict=True))
    assert all(x.dtype == torch.bfloat16 for x in first)
