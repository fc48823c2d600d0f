"""The kernels on a GPU of compute capability 9.0: every row of the table at every kind of length, and what surrounds
them (layouts, streams, graphs, devices, memory).

Lengths are chosen around the chunk of 64: one token, a few, one short of a chunk, a chunk, one more, two chunks and
their neighbours, many with a ragged tail.
"""

import gc
import weakref

import pytest
import torch
from cases import Guards, cut_by, every_row, scans, uncut

from based_cute import accuracy, based_backward, launcher, reference

pytestmark = pytest.mark.gpu

LENGTHS = (1, 2, 7, 63, 64, 65, 127, 128, 129, 1000)


def kernels(*inputs, scale=None):
    return based_backward(*inputs, scale, backend="cute")


def inputs_of(length, key_dim, value_dim, batch=2, heads=3, seed=0):
    return accuracy.make_inputs((batch, length, heads, key_dim, value_dim), "cuda", seed)


def assert_equal(gradients, others):
    for name, x, y in zip(accuracy.GRADIENTS, gradients, others, strict=True):
        assert torch.equal(x, y), name


def assert_accurate(gradients, inputs, scale=None, limit=accuracy.NORMAL_INPUT_LIMIT):
    gold, floors = accuracy.gold_gradients(*inputs, scale), accuracy.cancellation_floors(*inputs, scale)
    assert max(accuracy.measure_errors(gradients, gold, floors)) <= limit


# ---------------------------------------------------------------------------------------------------------------------
# Accuracy


@every_row
@pytest.mark.parametrize("length", LENGTHS)
def test_every_row_at_every_length(key_dim, value_dim, length):
    batch, heads = (16, 16) if length < 16 else (2, 3)  # short lengths: enough rows for the norm of an error to be a mean
    result = accuracy.check_shape((batch, length, heads, key_dim, value_dim), "cute", "cuda")
    assert result.passed, result


@pytest.mark.parametrize("shape", accuracy.CORRECTNESS_SHAPES + accuracy.SPEED_SHAPES, ids=str)
def test_shapes_that_matter(shape):
    result = accuracy.check_shape(shape, "auto", "cuda")
    assert result.passed and result.backend == "cute", result


@pytest.mark.parametrize("length", [65_537, 70_001])
def test_long_sequence(length):
    result = accuracy.check_shape((1, length, 1, 16, 128), "cute", "cuda")
    assert result.passed, result


@every_row
@pytest.mark.parametrize("scale", [None, 0.0, -0.3, 0.3, 1])
def test_scale(key_dim, value_dim, scale):
    inputs = inputs_of(200, key_dim, value_dim)
    assert_accurate(kernels(*inputs, scale=scale), inputs, scale)


@every_row
@pytest.mark.parametrize("length", [1, 130])
@pytest.mark.parametrize("amplitude", [1, 3, 30])
def test_amplitude(key_dim, value_dim, length, amplitude):
    inputs = [amplitude * x for x in inputs_of(length, key_dim, value_dim)]
    assert_accurate(kernels(*inputs), inputs, limit=accuracy.GATE)


@every_row
def test_scale_zero_is_a_running_mean(key_dim, value_dim):
    q, k, v, do = inputs_of(130, key_dim, value_dim)
    dq, dk, dv = kernels(q, k, v, do, scale=0.0)
    per_row = do.double() / torch.arange(1, 131, device="cuda").view(1, -1, 1, 1)
    expected = per_row.flip(1).cumsum(1).flip(1)
    assert accuracy.relative_error(dv, expected) <= accuracy.NORMAL_INPUT_LIMIT
    assert not dq.any() and not dk.any()


@every_row
def test_single_value_channel(key_dim, value_dim):
    """Work that is dropped for part of the channels shows when only the last one holds anything."""
    q, k, v, do = inputs_of(130, key_dim, value_dim)
    v, do = v.clone(), do.clone()
    v[..., :-1] = do[..., :-1] = 0
    gradients = kernels(q, k, v, do)
    assert_accurate(gradients, (q, k, v, do))
    assert not gradients[2][..., :-1].any()


# ---------------------------------------------------------------------------------------------------------------------
# Bits that must not change


@every_row
def test_twenty_runs_are_bitwise_equal(key_dim, value_dim):
    inputs = inputs_of(1000, key_dim, value_dim)
    first = kernels(*inputs)
    noise = torch.randn(2048, 2048, device="cuda")
    neighbour = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(neighbour):
            noise @ noise
        assert_equal(kernels(*inputs), first)


@every_row
@pytest.mark.parametrize("length", [1, 65, 1000])
def test_every_element_is_written(poisoned_memory, key_dim, value_dim, length):
    inputs = inputs_of(length, key_dim, value_dim)
    gradients = kernels(*inputs)
    assert all(x.isfinite().all() for x in gradients)
    assert_accurate(gradients, inputs)


@every_row
@pytest.mark.parametrize("length", [1, 63, 65])
def test_nothing_is_read_past_the_inputs(key_dim, value_dim, length):
    inputs = inputs_of(length, key_dim, value_dim)
    padding = 256 * value_dim

    def between_nans(x):
        flat = torch.full((x.numel() + 2 * padding,), torch.nan, dtype=x.dtype, device=x.device)
        inner = flat[padding : padding + x.numel()].view(x.shape)
        return inner.copy_(x)

    assert_equal(kernels(*(between_nans(x) for x in inputs)), kernels(*inputs))


@every_row
@pytest.mark.parametrize("length", [1, 65])
def test_nothing_is_written_past_the_outputs(monkeypatch, key_dim, value_dim, length):
    inputs = inputs_of(length, key_dim, value_dim)
    guards, allocate = Guards(256 * value_dim), launcher._empty_strided
    expected = kernels(*inputs)
    with monkeypatch.context() as patched:
        patched.setattr(launcher, "_empty_strided", lambda *layout: guards.like(allocate(*layout)))
        found = kernels(*inputs)
    assert_equal(found, expected)
    guards.assert_intact(4)  # dq, dk, dv and the scratch


def test_layouts_are_bitwise_equal(relayout):
    views = [relayout(x) for x in inputs_of(130, 16, 64)]
    copies = [x.clone(memory_format=torch.contiguous_format) for x in views]
    gradients = kernels(*views)
    assert_equal(gradients, kernels(*copies))
    assert_equal(gradients, based_backward(*views))
    assert all(x.is_contiguous() for x in gradients)
    assert all(torch.equal(x, y) for x, y in zip(views, copies, strict=True)), "an input was written to"


@every_row
@pytest.mark.parametrize("row", [0, 1, 62, 63, 64, 65, 100, 129])
def test_causality_is_exact(key_dim, value_dim, row):
    q, k, v, do = inputs_of(130, key_dim, value_dim)
    only_row = torch.zeros_like(do)
    only_row[:, row] = do[:, row]
    dq, dk, dv = kernels(q, k, v, only_row)
    assert not dk[:, row + 1 :].any() and not dv[:, row + 1 :].any()
    assert not dq[:, :row].any() and not dq[:, row + 1 :].any()


@every_row
def test_later_tokens_do_not_reach_dq(monkeypatch, key_dim, value_dim):
    """To the bit in the scans; a sweep (K = 8) subtracts them again, but from the first chunk's state, which is none."""
    q, k, v, do = inputs_of(200, key_dim, value_dim)

    def two_dq(start):
        others = [torch.cat((x[:, :start], x[:, start:] + 1), 1) for x in (q, k, v, do)]
        return [kernels(*inputs)[0][:, :start] for inputs in (others, (q, k, v, do))]

    for rule, exact in ((scans(key_dim, value_dim), (1, 63, 64, 100)), (uncut, (1, 63, 64))):
        cut_by(monkeypatch, rule)
        assert all(torch.equal(*two_dq(start)) for start in exact)
    found, expected = two_dq(100)
    assert accuracy.relative_error(found, expected.double()) <= 1e-3


@every_row
def test_heads_and_batches_are_independent(key_dim, value_dim):
    inputs = inputs_of(200, key_dim, value_dim, batch=3, heads=5)
    whole = kernels(*inputs)
    for b, h in ((0, 0), (1, 3), (2, 4)):
        solo = kernels(*(x[b : b + 1, :, h : h + 1] for x in inputs))
        assert_equal([x[b : b + 1, :, h : h + 1] for x in whole], solo)


@every_row
@pytest.mark.parametrize("exponent", [-6, 5])
def test_linear_in_do_bitwise(key_dim, value_dim, exponent):
    q, k, v, do = inputs_of(200, key_dim, value_dim)
    scaled = kernels(q, k, v, 2.0**exponent * do)
    assert_equal(scaled, [2.0**exponent * x for x in kernels(q, k, v, do)])


def test_more_than_two_to_the_31_elements(monkeypatch):
    """65 copies of one batch, v of 2.2e9 elements: the first and the last must equal the batch alone, uncut as they are."""
    inputs = accuracy.make_inputs((1, 8192, 32, 16, 128), "cuda")
    cut_by(monkeypatch, uncut)
    solo = kernels(*inputs)
    many = kernels(*(x.expand(65, *x.shape[1:]) for x in inputs))
    assert many[2].numel() > 2**31
    for b in (0, 64):
        assert_equal([x[b : b + 1] for x in many], solo)


# ---------------------------------------------------------------------------------------------------------------------
# Backends


@pytest.mark.parametrize("shape", [(0, 5, 2, 16, 64), (2, 0, 3, 16, 64), (2, 5, 0, 16, 64)], ids=str)
@pytest.mark.parametrize("backend", launcher.BACKENDS)
def test_empty(shape, backend):
    inputs = accuracy.make_inputs(shape, "cuda")
    gradients = based_backward(*inputs, backend=backend)
    assert [x.shape for x in gradients] == [x.shape for x in inputs[:3]]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 100, 2, 8, 32), torch.bfloat16), ((1, 100, 2, 16, 64), torch.float16), ((1, 100, 2, 16, 64), torch.float32)],
    ids=str,
)
def test_what_the_table_lacks(shape, dtype):
    inputs = accuracy.make_inputs(shape, "cuda", dtype=dtype)
    launcher._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="takes the torch path"):
        gradients = based_backward(*inputs)
    assert_accurate(gradients, inputs)
    with pytest.raises(RuntimeError, match="call backend='torch' or backend='auto'"):
        kernels(*inputs)


def test_torch_path_agrees():
    inputs = inputs_of(300, 16, 128)
    assert_accurate(based_backward(*inputs, backend="torch"), inputs)
    assert reference.chunked_backward(*inputs)[0].device.type == "cuda"


def test_mixed_devices():
    q, k, v, do = inputs_of(5, 16, 64)
    with pytest.raises(ValueError, match=r"need one device; call v\.to\(q\.device\)"):
        based_backward(q, k, v.cpu(), do)


def test_opcheck():
    torch.library.opcheck(torch.ops.based.backward.default, inputs_of(70, 16, 64))


# ---------------------------------------------------------------------------------------------------------------------
# Streams, graphs, devices, memory


def test_side_stream():
    inputs = inputs_of(500, 16, 128)
    expected = kernels(*inputs)  # also loads the kernels, whose compilation would hide a race
    stream = torch.cuda.Stream()
    for _ in range(20):
        late = [torch.zeros_like(x) for x in inputs]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)  # clock ticks, about a millisecond
            for x, y in zip(late, inputs, strict=True):
                x.copy_(y)
            gradients = kernels(*late)
        torch.cuda.current_stream().wait_stream(stream)
        assert_equal(gradients, expected)


@every_row
def test_cuda_graph(key_dim, value_dim):
    static = inputs_of(130, key_dim, value_dim, seed=0)
    kernels(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = kernels(*static)
    for seed in (1, 2):
        new = inputs_of(130, key_dim, value_dim, seed=seed)
        for x, y in zip(static, new, strict=True):
            x.copy_(y)
        graph.replay()
        assert_equal(gradients, kernels(*new))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_fullgraph_equals_eager(backend):
    def function(q, k, v, do):
        return [2 * x for x in based_backward(q, k, v + 1, do)]

    inputs = inputs_of(130, 16, 64)
    assert_equal(torch.compile(function, fullgraph=True, backend=backend)(*inputs), function(*inputs))
    torch._dynamo.reset()


def test_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    inputs = inputs_of(200, 16, 128)
    expected = kernels(*inputs)
    before = torch.cuda.memory_allocated(0)
    gradients = kernels(*(x.to("cuda:1") for x in inputs))
    assert torch.cuda.current_device() == 0 and torch.cuda.memory_allocated(0) == before
    assert_equal([x.to("cuda:0") for x in gradients], expected)


def test_memory_is_flat():
    def call(length):
        inputs = inputs_of(length, 16, 128)
        kernels(*inputs)
        return weakref.ref(inputs[0])

    call(64)
    before = torch.cuda.memory_allocated()
    references = [call(length) for length in range(1, 101)]
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    assert not any(reference() for reference in references)


def test_peak_memory_is_inputs_outputs_and_eight_bytes_a_token():
    shape = (4, 8192, 32, 16, 128)  # a sequence an SM, so that no state is stored (test_schedule.py has the others)
    inputs = accuracy.make_inputs(shape, "cuda")
    kernels(*inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = kernels(*inputs)
    outputs = sum(x.numel() * x.element_size() for x in gradients)
    assert torch.cuda.max_memory_allocated() - before <= outputs + 8 * 4 * 8192 * 32 + (1 << 20)
