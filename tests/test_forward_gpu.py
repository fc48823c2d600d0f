"""The output kernel and its autograd on a GPU of compute capability 9.0: every row of the table at every kind of length, and
what surrounds it (layouts, compilation, CUDA graphs, streams, memory).

Lengths are chosen around the chunk of 64, as in test_gpu.py.
"""

import functools
import weakref

import pytest
import torch
from cases import Guards, cut_by, every_row, launched, uncut
from torch.utils.checkpoint import checkpoint

from based_cute import accuracy, based_attention, based_backward, launcher, reference

pytestmark = pytest.mark.gpu

LENGTHS = (1, 2, 7, 63, 64, 65, 127, 128, 129, 1000)

kernel = functools.partial(based_attention, backend="cute")
forward = torch.ops.based.forward


def inputs_of(length, key_dim, value_dim, batch=2, heads=3, seed=0):
    """q, k, v, do."""
    return accuracy.make_inputs((batch, length, heads, key_dim, value_dim), "cuda", seed)


def leaves_of(*tensors):
    return [x.detach().requires_grad_() for x in tensors]


def step(q, k, v, do, function=kernel):
    """o and the gradients through autograd."""
    leaves = leaves_of(q, k, v)
    o = function(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def assert_equal(results, others):
    for i, (x, y) in enumerate(zip(results, others, strict=True)):
        assert torch.equal(x, y), i


def assert_accurate(o, q, k, v, scale=None, limit=accuracy.OUTPUT_LIMIT):
    assert accuracy.relative_error(o, accuracy.gold_output(q, k, v, scale)) <= limit


# ---------------------------------------------------------------------------------------------------------------------
# Accuracy (shapes that matter and every length are checked with their gradients in test_gpu.py, by accuracy.check_shape)


@every_row
@pytest.mark.parametrize("length", LENGTHS)
def test_output_and_normaliser_at_every_length(poisoned_memory, key_dim, value_dim, length):
    batch, heads = (16, 16) if length < 16 else (2, 3)  # short lengths: enough rows for the norm of an error to be a mean
    q, k, v, _ = inputs_of(length, key_dim, value_dim, batch, heads)
    o, r = forward(q, k, v)
    assert_accurate(o, q, k, v)
    gold = reference.chunked_forward(q, k, v, dtype=torch.float64)[1]
    assert r.shape == gold.shape and accuracy.relative_error(r, gold) <= 1e-5


@every_row
def test_first_token_is_its_value_to_the_bit(key_dim, value_dim):
    q, k, v, _ = inputs_of(65, key_dim, value_dim, batch=8, heads=16)
    assert torch.equal(kernel(q, k, v)[:, 0], v[:, 0])


@every_row
def test_constant_values_are_returned(key_dim, value_dim):
    q, k, v, _ = inputs_of(1000, key_dim, value_dim)
    v = v[:, :1].expand_as(v)
    assert accuracy.relative_error(kernel(q, k, v), v) <= accuracy.OUTPUT_ROUNDING


@pytest.mark.parametrize("length", [65_537, 70_001])
def test_long_sequence(length):
    q, k, v, _ = inputs_of(length, 16, 128, batch=1, heads=1)
    o, gold = kernel(q, k, v), accuracy.gold_output(q, k, v)
    assert accuracy.relative_error(o, gold) <= accuracy.OUTPUT_LIMIT
    assert accuracy.relative_error(o[:, -130:], gold[:, -130:]) <= accuracy.OUTPUT_LIMIT


@every_row
@pytest.mark.parametrize("scale", [None, 0.0, -0.3, 0.3, 1])
def test_scale(key_dim, value_dim, scale):
    q, k, v, _ = inputs_of(200, key_dim, value_dim)
    assert_accurate(kernel(q, k, v, scale), q, k, v, scale)


@every_row
@pytest.mark.parametrize("length", [1, 130])
@pytest.mark.parametrize("amplitude", [1, 3, 30, 300])
def test_amplitude(key_dim, value_dim, length, amplitude):
    q, k, v = (amplitude * x for x in inputs_of(length, key_dim, value_dim)[:3])
    assert_accurate(kernel(q, k, v), q, k, v, limit=accuracy.NORMAL_INPUT_LIMIT)


@every_row
def test_single_value_channel(key_dim, value_dim):
    q, k, v, _ = inputs_of(130, key_dim, value_dim)
    v = v.clone()
    v[..., :-1] = 0
    o = kernel(q, k, v)
    assert_accurate(o, q, k, v)
    assert not o[..., :-1].any()


# ---------------------------------------------------------------------------------------------------------------------
# Bits that must not change


@every_row
def test_twenty_runs_are_bitwise_equal(key_dim, value_dim):
    q, k, v, _ = inputs_of(1000, key_dim, value_dim)
    first = forward(q, k, v)
    noise = torch.randn(2048, 2048, device="cuda")
    neighbour = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(neighbour):
            noise @ noise
        assert_equal(forward(q, k, v), first)


@every_row
@pytest.mark.parametrize("length", [1, 63, 65])
def test_nothing_is_read_past_the_inputs(key_dim, value_dim, length):
    inputs = inputs_of(length, key_dim, value_dim)[:3]
    padding = 256 * value_dim

    def between_nans(x):
        flat = torch.full((x.numel() + 2 * padding,), torch.nan, dtype=x.dtype, device=x.device)
        return flat[padding : padding + x.numel()].view(x.shape).copy_(x)

    assert_equal(forward(*(between_nans(x) for x in inputs)), forward(*inputs))


@every_row
@pytest.mark.parametrize("length", [1, 17, 65, 127])
def test_nothing_is_written_past_the_outputs(monkeypatch, key_dim, value_dim, length):
    inputs = inputs_of(length, key_dim, value_dim)[:3]
    guards, allocate = Guards(256 * value_dim), launcher._empty_strided
    expected = forward(*inputs)
    monkeypatch.setattr(launcher, "_empty_strided", lambda *layout: guards.like(allocate(*layout)))
    assert_equal(launched("forward", inputs), expected)
    guards.assert_intact(3)  # o, r and the scratch


def test_layouts_are_bitwise_equal(relayout):
    views = [relayout(x) for x in inputs_of(130, 16, 64)]
    copies = [x.clone(memory_format=torch.contiguous_format) for x in views]
    results = step(*views)
    assert_equal(results, step(*copies))
    assert results[0].is_contiguous()
    assert_equal(views, copies)  # and nothing was written to the inputs


@every_row
def test_later_tokens_change_nothing_before_them(key_dim, value_dim):
    q, k, v, _ = inputs_of(200, key_dim, value_dim)
    o = kernel(q, k, v)
    for start in (1, 63, 64, 65, 100, 128):
        others = [torch.cat((x[:, :start], x[:, start:] + 1), 1) for x in (q, k, v)]
        assert torch.equal(kernel(*others)[:, :start], o[:, :start])


@every_row
def test_heads_and_batches_are_independent(key_dim, value_dim):
    q, k, v, _ = inputs_of(200, key_dim, value_dim, batch=3, heads=5)
    whole = kernel(q, k, v)
    for b, h in ((0, 0), (1, 3), (2, 4)):
        solo = kernel(*(x[b : b + 1, :, h : h + 1] for x in (q, k, v)))
        assert torch.equal(whole[b : b + 1, :, h : h + 1], solo)


@every_row
@pytest.mark.parametrize("exponent", [-6, 5])
def test_linear_in_v_bitwise(key_dim, value_dim, exponent):
    q, k, v, _ = inputs_of(200, key_dim, value_dim)
    assert torch.equal(kernel(q, k, 2.0**exponent * v), 2.0**exponent * kernel(q, k, v))


@every_row
def test_power_of_two_moves_between_q_and_scale_bitwise(key_dim, value_dim):
    q, k, v, _ = inputs_of(200, key_dim, value_dim)
    assert torch.equal(kernel(4 * q, k, v, 0.0625), kernel(q, k, v, 0.25))


def test_more_than_two_to_the_31_elements(monkeypatch):
    cut_by(monkeypatch, uncut)
    q, k, v, _ = accuracy.make_inputs((1, 8192, 32, 16, 128), "cuda")
    solo = kernel(q, k, v)
    many = kernel(*(x.expand(65, *x.shape[1:]) for x in (q, k, v)))
    assert many.numel() > 2**31
    for b in (0, 64):
        assert torch.equal(many[b : b + 1], solo)


# ---------------------------------------------------------------------------------------------------------------------
# Autograd, autocast, compilation


@every_row
@pytest.mark.parametrize("length", [1, 65, 300])
def test_gradients_are_those_of_based_backward(key_dim, value_dim, length):
    q, k, v, do = inputs_of(length, key_dim, value_dim)
    assert_equal(step(q, k, v, do)[1:], based_backward(q, k, v, do, backend="cute"))
    leaves = leaves_of(q, k, v)
    summed = torch.autograd.grad(kernel(*leaves).sum(), leaves)
    assert_equal(summed, based_backward(q, k, v, torch.ones_like(v), backend="cute"))


def test_opcheck():
    torch.library.opcheck(forward.default, tuple(leaves_of(*inputs_of(70, 16, 64)[:3])))


def test_autocast():
    q, k, v, do = inputs_of(130, 16, 128)
    leaves = leaves_of(q.float(), k, v.float())
    with torch.autocast("cuda", torch.bfloat16):
        o = kernel(*leaves)
    o.backward(do)
    expected = step(q, k, v, do)
    assert_equal([o, *(x.grad.bfloat16() for x in leaves)], expected)
    assert [x.grad.dtype for x in leaves] == [torch.float32, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_fullgraph_equals_eager(compiler):
    def function(q, k, v):
        return 2 * based_attention(q, k, v + 1)

    inputs = inputs_of(130, 16, 64)
    compiled = torch.compile(function, fullgraph=True, backend=compiler)
    assert_equal(step(*inputs, function=compiled), step(*inputs, function=function))
    torch._dynamo.reset()


def test_reduce_overhead():
    """CUDA graphs by torch.compile: the kernels are loaded before it captures."""
    inputs = inputs_of(128, 16, 128)
    expected = step(*inputs)
    compiled = torch.compile(based_attention, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        assert_equal([x.clone() for x in step(*inputs, function=compiled)], expected)
    torch._dynamo.reset()


@every_row
def test_cuda_graph(key_dim, value_dim):
    static = inputs_of(130, key_dim, value_dim, seed=0)
    step(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(*static)
    for seed in (1, 2):
        for x, y in zip(static, inputs_of(130, key_dim, value_dim, seed=seed), strict=True):
            x.copy_(y)
        graph.replay()
        assert_equal(results, step(*static))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_is_bitwise_equal(reentrant):
    inputs = inputs_of(130, 16, 128)
    leaves = leaves_of(*inputs[:3])
    o = checkpoint(kernel, *leaves, use_reentrant=reentrant)
    o.backward(inputs[3])
    assert_equal([o, *(x.grad for x in leaves)], step(*inputs))


# ---------------------------------------------------------------------------------------------------------------------
# Backends, streams, memory


@pytest.mark.parametrize("shape", [(0, 5, 2, 16, 64), (2, 0, 3, 16, 64), (2, 5, 0, 16, 64)], ids=str)
@pytest.mark.parametrize("backend", launcher.BACKENDS)
def test_empty(shape, backend):
    q, k, v, do = accuracy.make_inputs(shape, "cuda")
    results = step(q, k, v, do, functools.partial(based_attention, backend=backend))
    assert [x.shape for x in results] == [v.shape, q.shape, k.shape, v.shape]


def test_what_the_table_lacks():
    inputs = accuracy.make_inputs((1, 100, 2, 8, 32), "cuda")
    launcher._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="takes the torch path"):
        results = step(*inputs, function=based_attention)
    assert_accurate(results[0], *inputs[:3])
    with pytest.raises(RuntimeError, match="call backend='torch' or backend='auto'"):
        kernel(*inputs[:3])


def test_torch_path_agrees():
    q, k, v, do = inputs_of(300, 16, 128)
    results = step(q, k, v, do, functools.partial(based_attention, backend="torch"))
    assert_accurate(results[0], q, k, v)
    assert_equal(results[1:], based_backward(q, k, v, do, backend="torch"))


def test_side_stream_and_backward_from_another():
    inputs = inputs_of(500, 16, 128)
    expected = step(*inputs)
    stream = torch.cuda.Stream()
    for _ in range(20):
        late = [torch.zeros_like(x) for x in inputs]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)  # clock ticks, about a millisecond
            for x, y in zip(late, inputs, strict=True):
                x.copy_(y)
            leaves = leaves_of(*late[:3])
            o = kernel(*leaves)
        torch.cuda.current_stream().wait_stream(stream)
        assert_equal([o, *torch.autograd.grad(o, leaves, late[3])], expected)


def test_training_memory_is_inputs_and_outputs():
    """Between forward and backward only q, k and v are kept, and o where its own user keeps it."""
    q, k, v, do = accuracy.make_inputs((2, 4096, 8, 16, 128), "cuda")
    leaves = leaves_of(q, k, v)
    step(q, k, v, do)
    before = torch.cuda.memory_allocated()
    o = kernel(*leaves)
    row_terms = 4 * 2 * 4096 * 8
    assert torch.cuda.memory_allocated() - before <= o.numel() * o.element_size() + row_terms + (1 << 20)
    reference_to_o = weakref.ref(o)
    kept = torch.autograd.grad(o, leaves, do)
    del o
    assert reference_to_o() is None and len(kept) == 3
