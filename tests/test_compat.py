"""The functions of fla.ops.based: fla's signature, the definition's values, and sentences for what is not offered."""

import inspect

import pytest
import torch

from based_cute import accuracy, compat, reference

FLA_SIGNATURE = {"q": None, "k": None, "v": None, "scale": None, "use_norm": True}  # 0.6.0, with its defaults
NAMES = ["parallel_based", "fused_chunk_based"]


@pytest.fixture(params=NAMES)
def function(request):
    return getattr(compat, request.param)


@pytest.fixture
def inputs():
    return accuracy.make_inputs((2, 70, 3, 8, 16), "cpu", dtype=torch.float64)[:3]


def test_signature_starts_with_that_of_fla(function):
    parameters = inspect.signature(function).parameters
    assert list(parameters)[: len(FLA_SIGNATURE)] == list(FLA_SIGNATURE)
    assert [parameters[name].default for name in ("scale", "use_norm")] == [None, True]


@pytest.mark.parametrize("scale", [None, 0.0, 0.3])
def test_values_and_gradients(function, inputs, scale):
    inputs = [x.requires_grad_() for x in inputs]
    o, expected = function(*inputs, scale, True), reference.quadratic_forward(*inputs, scale)
    assert o.shape == inputs[2].shape
    assert accuracy.relative_error(o, expected) <= 1e-12
    do = torch.randn_like(o)
    for got, need in zip(torch.autograd.grad(o, inputs, do), torch.autograd.grad(expected, inputs, do), strict=True):
        assert accuracy.relative_error(got, need) <= 1e-12


def test_feature_dimensions_beyond_those_of_fla(function):
    q, k, v, _ = accuracy.make_inputs((1, 9, 2, 33, 5), "cpu", dtype=torch.float64)
    assert accuracy.relative_error(function(q, k, v), reference.quadratic_forward(q, k, v)) <= 1e-12


@pytest.mark.parametrize("options", [{"use_norm": False}, {"head_first": True}], ids=str)
def test_what_is_not_offered_names_what_to_call(function, inputs, options):
    (option, value), name = *options.items(), function.__name__
    need = {"use_norm": rf"need True; .* call fla\.ops\.based\.{name}", "head_first": rf"need tensors .*; call {name}\("}
    with pytest.raises(ValueError, match=rf"{name}: got {option}={value}, {need[option]}"):
        function(*inputs, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_equals_fla_on_the_card(name):
    theirs = getattr(pytest.importorskip("fla.ops.based"), name)
    assert list(inspect.signature(theirs).parameters) == list(FLA_SIGNATURE)
    q, k, v, do = accuracy.make_inputs((2, 512, 4, 16, 64), "cuda")
    inputs = [x.requires_grad_() for x in (q, k, v)]
    ours = getattr(compat, name)(*inputs)
    expected = theirs(*inputs)
    assert ours.shape == expected.shape and ours.dtype == expected.dtype
    assert accuracy.relative_error(ours, expected) <= 1e-2
    for got, need in zip(torch.autograd.grad(ours, inputs, do), torch.autograd.grad(expected, inputs, do), strict=True):
        assert accuracy.relative_error(got, need) <= accuracy.GATE
