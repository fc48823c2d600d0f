"""The layer: fla's parameters, the Based paper's formula, decoding against the parallel form, and a module's other duties."""

import concurrent.futures
import copy
import inspect
import io
import math
import multiprocessing
import pickle

import pytest
import torch
from torch import nn

from based_cute import accuracy
from based_cute.nn import BasedLinearAttention, BasedState

FLA_SIGNATURE = ("hidden_size", "feature_dim", "num_key_value_heads", "num_heads", "feature_name", "eps", "causal", "mode")
GROUPS = [(4, 4), (4, 2), (4, 1)]  # (num_heads, num_key_value_heads)


def make_layer(feature_dim=8, num_key_value_heads=None, num_heads=4, hidden_size=32, dtype=torch.float64, **options):
    return BasedLinearAttention(hidden_size, feature_dim, num_key_value_heads, num_heads, **options).to(dtype)


def hidden_states(length=20, batch=2, hidden_size=32, dtype=torch.float64):
    return 2 * torch.randn(batch, length, hidden_size, dtype=dtype)


def taylor_features(x):
    """The feature map of the Based paper's code: 1, x / d^(1/4), and the whole outer product / sqrt(2 d)."""
    dim = x.shape[-1]
    outer = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)
    return torch.cat((torch.ones_like(x[..., :1]), x / dim**0.25, outer / math.sqrt(2 * dim)), -1)


def paper_layer(layer, x, eps):
    """The Based paper's layer, in prefix sums over materialised features, with `layer`'s weights."""
    q = taylor_features(layer.q_proj(x).unflatten(-1, (layer.num_heads, layer.feature_dim)))
    k = taylor_features(layer.k_proj(x).unflatten(-1, (layer.num_heads, layer.feature_dim)))
    v = layer.v_proj(x).unflatten(-1, (layer.num_heads, layer.head_dim))
    numerator = torch.einsum("bthp,bthpv->bthv", q, (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(1))
    denominator = (q * k.cumsum(1)).sum(-1, keepdim=True)
    return layer.o_proj((numerator / (denominator + eps)).flatten(-2))


def gradients_of(layer, x):
    loss = (layer(x) * torch.linspace(-1, 1, layer.hidden_size, dtype=x.dtype, device=x.device)).sum()
    return torch.autograd.grad(loss, (x, *layer.parameters()))


def decode(layer, x, state):
    return torch.stack([layer.step(x[:, token], state) for token in range(x.shape[1])], 1)


# ---------------------------------------------------------------------------------------------------------------------
# As a drop-in for fla's layer


def test_arguments_start_with_those_of_fla():
    names = tuple(inspect.signature(BasedLinearAttention).parameters)
    assert names == (*FLA_SIGNATURE, "backend")


def test_default_constructor_runs_forward_and_backward():
    layer = BasedLinearAttention(768)
    x = torch.randn(2, 33, 768, requires_grad=True)
    y = layer(x)
    y.square().mean().backward()
    assert y.shape == x.shape
    assert all(p.isfinite().all() and p.abs().max() > 0 for p in (x.grad, *(p.grad for p in layer.parameters())))


@pytest.mark.parametrize(
    "hidden_size, feature_dim, heads, kv_heads, shapes",
    [
        (768, 16, 12, 12, [(192, 768), (192, 768), (768, 768), (768, 768)]),
        (256, 8, 2, 2, [(16, 256), (16, 256), (256, 256), (256, 256)]),
        (100, 16, 3, 3, [(48, 100), (48, 100), (99, 100), (100, 99)]),  # fla rounds the head dimension down
        (64, 16, 8, 2, [(128, 64), (32, 64), (16, 64), (64, 64)]),
    ],
)
def test_state_dict_has_the_names_and_shapes_of_fla(hidden_size, feature_dim, heads, kv_heads, shapes):
    state = BasedLinearAttention(hidden_size, feature_dim, kv_heads, heads).state_dict()
    names = ["q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"]
    assert list(state) == names
    assert [tuple(x.shape) for x in state.values()] == shapes


@pytest.mark.parametrize("feature_dim", [8, 16, 5])
@pytest.mark.parametrize("eps, tolerance", [(1e-6, 1e-12), (1e-12, 2e-6)], ids=["operator's eps", "paper's eps"])
def test_forward_and_gradients_equal_the_formula_of_the_paper(feature_dim, eps, tolerance):
    layer, x = make_layer(feature_dim), hidden_states().requires_grad_()
    expected = paper_layer(layer, x, eps)
    assert accuracy.relative_error(layer(x), expected) <= tolerance
    weight = torch.linspace(-1, 1, layer.hidden_size, dtype=x.dtype)
    gold = torch.autograd.grad((expected * weight).sum(), (x, *layer.parameters()))
    for got, need in zip(gradients_of(layer, x), gold, strict=True):
        assert accuracy.relative_error(got, need) <= tolerance


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_shared_heads_equal_repeated_weights(kv_heads):
    shared, full = make_layer(num_key_value_heads=kv_heads), make_layer()
    weights = shared.state_dict()
    for name in ("k_proj.weight", "v_proj.weight"):
        heads = weights[name].unflatten(0, (kv_heads, -1))
        weights[name] = heads.repeat_interleave(4 // kv_heads, 0).flatten(0, 1)
    full.load_state_dict(weights)
    x = hidden_states()
    assert accuracy.relative_error(shared(x), full(x)) <= 1e-12


@pytest.mark.parametrize("mode", ["parallel", "chunk", "fused_chunk"])
def test_modes_are_one_function(mode):
    layer, other = make_layer(), make_layer(mode=mode, eps=0.0)
    other.load_state_dict(layer.state_dict())
    x = hidden_states()
    assert torch.equal(layer(x), other(x))


def test_no_token_sees_a_later_one():
    layer, x = make_layer(), hidden_states()
    changed = x.clone()
    changed[:, 11] += 1
    before, after = layer(x), layer(changed)
    assert torch.equal(before[:, :11], after[:, :11]) and not torch.equal(before[:, 11], after[:, 11])


@pytest.mark.parametrize("batch, length", [(0, 5), (2, 0)])
def test_empty_inputs(batch, length):
    layer = make_layer()
    x = hidden_states(length, batch).requires_grad_()
    assert layer(x).shape == x.shape
    assert all(g.abs().sum() == 0 for g in gradients_of(layer, x))


# ---------------------------------------------------------------------------------------------------------------------
# Decoding


@pytest.mark.parametrize("feature_dim", [8, 16, 5])
@pytest.mark.parametrize("heads, kv_heads", GROUPS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-6)], ids=str)
def test_step_equals_the_parallel_form_at_every_prefix(feature_dim, heads, kv_heads, dtype, tolerance):
    layer, x = make_layer(feature_dim, kv_heads, heads, dtype=dtype), hidden_states(70, dtype=dtype)
    decoded = decode(layer, x, layer.init_state(2, dtype=dtype))
    for length in (1, 2, 3, 17, 63, 64, 65, 70):
        parallel = layer(x[:, :length])[:, -1]
        assert accuracy.relative_error(decoded[:, length - 1], parallel) <= tolerance


@pytest.mark.parametrize("length", [0, 1, 63, 64, 100])
@pytest.mark.parametrize("heads, kv_heads", GROUPS)
def test_step_goes_on_after_a_prompt(heads, kv_heads, length, monkeypatch):
    monkeypatch.setattr("based_cute.nn.PREFILL_CHUNK", 48)
    layer, x = make_layer(num_heads=heads, num_key_value_heads=kv_heads), hidden_states(length + 5)
    y, state = layer.prefill(x[:, :length])
    whole = layer(x)
    assert accuracy.relative_error(torch.cat((y, decode(layer, x[:, length:], state)), 1), whole) <= 1e-12


def test_state_is_fp32_of_constant_size_and_changed_in_place():
    layer = make_layer(16, 2, dtype=torch.bfloat16)
    state = layer.init_state(3)
    features, normaliser = state.features, state.normaliser
    assert features.shape == (3, 2, 153, 8) and normaliser.shape == (3, 2, 153, 1)
    y = layer.step(hidden_states(1, 3, dtype=torch.bfloat16)[:, 0], state)
    assert y.dtype == torch.bfloat16 and not y.requires_grad
    assert state.features is features and state.normaliser is normaliser
    assert features.dtype == normaliser.dtype == torch.float32
    assert torch.equal(normaliser[:, :, 0], torch.ones(3, 2, 1))  # the constant feature counts tokens


def test_reset_forgets_everything():
    layer, x = make_layer(), hidden_states(9)
    state = layer.init_state(2, dtype=torch.float64)
    first = decode(layer, x, state)
    assert not torch.equal(decode(layer, x, state), first)
    state.reset()
    assert torch.equal(decode(layer, x, state), first)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))], ids=["deepcopy", "pickle"])
def test_a_copied_state_decodes_on_its_own(copier):
    layer, x = make_layer(), hidden_states(9)
    _, state = layer.prefill(x[:, :4])
    other = copier(state)
    assert isinstance(other, BasedState)
    expected = decode(layer, x[:, 4:], state)
    assert torch.equal(decode(layer, x[:, 4:], other), expected)


def test_many_like_tokens_do_not_drift():
    """fp32 sums of 20,000 equal tokens: the output stays the value of one."""
    layer = make_layer(dtype=torch.float32)
    x = hidden_states(1, dtype=torch.float32).expand(2, 20_000, 32)
    y, state = layer.prefill(x)
    alone = layer(x[:, :1])[:, 0]
    assert accuracy.relative_error(layer.step(x[:, 0], state), alone) <= 1e-4
    assert accuracy.relative_error(y[:, -1], alone) <= 1e-4


# ---------------------------------------------------------------------------------------------------------------------
# As a module


def copied_through_a_file(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIERS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": copied_through_a_file,
}


@pytest.mark.parametrize("copier", COPIERS.values(), ids=COPIERS.keys())
def test_copies_compute_the_same_and_own_their_weights(copier):
    layer, x = make_layer(num_key_value_heads=2), hidden_states()
    before = layer(x)
    other = copier(layer)
    assert torch.equal(other(x), before)
    nn.init.zeros_(other.o_proj.weight)
    assert torch.equal(layer(x), before)


def test_spawned_worker():
    layer, x = make_layer(), hidden_states()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        y, state = pool.submit(layer.prefill, x).result()
    expected, expected_state = layer.prefill(x)
    assert torch.equal(y, expected) and torch.equal(state.features, expected_state.features)


def test_autocast():
    layer, x = make_layer(16, dtype=torch.float32), hidden_states(40, dtype=torch.float32).requires_grad_()
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        state = layer.init_state(2)
        decoded = decode(layer, x, state)
    assert y.dtype == decoded.dtype == torch.bfloat16
    assert state.features.dtype == torch.float32
    assert accuracy.relative_error(y, expected) <= 1e-2
    assert accuracy.relative_error(decoded, expected) <= 1e-2
    y.float().sum().backward()
    assert x.grad.dtype == layer.q_proj.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_compiles_as_one_graph_and_equals_eager(kv_heads):
    layer, x = make_layer(num_key_value_heads=kv_heads), hidden_states().requires_grad_()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))
    for got, need in zip(gradients_of(compiled, x), gradients_of(layer, x), strict=True):
        assert torch.equal(got, need)


def test_compiled_under_autocast_equals_eager():
    layer, x = make_layer(dtype=torch.float32), hidden_states(dtype=torch.float32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(x), layer(x))


def test_lengths_share_a_compiled_graph():
    layer, graphs = make_layer(), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, backend=count, fullgraph=True)
    for length in (1, 2, 64, 65, 128):
        compiled(hidden_states(length))
    assert len(graphs) <= 3  # a length of 1 is always special to dynamo; then one fixed length, then any


def test_step_compiles_as_one_graph():
    layer, x = make_layer(), hidden_states(6)
    expected = decode(layer, x, layer.init_state(2, dtype=torch.float64))
    step = torch.compile(layer.step, backend="aot_eager", fullgraph=True)
    state = layer.init_state(2, dtype=torch.float64)
    decoded = torch.stack([step(x[:, token], state) for token in range(6)], 1)
    assert accuracy.relative_error(decoded, expected) <= 1e-12


# ---------------------------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize(
    "options, message",
    [
        ({"causal": False}, r"got causal=False, need True; for causal=False call fla\.layers"),
        ({"feature_name": "relu"}, "got feature_name='relu', need 'taylor_exp'"),
        ({"eps": 1e-3}, r"got eps=0\.001, need one in \[0, 1e-06\]"),
        ({"eps": -1.0}, r"got eps=-1\.0"),
        ({"mode": "scan"}, "got mode='scan', need one of"),
        ({"backend": "triton"}, "got backend='triton', need one of"),
        ({"num_heads": 4, "num_key_value_heads": 3}, "got num_key_value_heads=3, need a divisor of num_heads=4; leave it out"),
        ({"num_heads": 2, "num_key_value_heads": 4}, "need a divisor of num_heads=2"),
        ({"num_heads": 128}, "got hidden_size=32, need at least num_heads=128"),
        ({"feature_dim": 0}, "got feature_dim=0, need a positive integer"),
        ({"num_heads": 2.0}, r"got num_heads=2\.0, need a positive integer"),
        ({"num_heads": True}, "got num_heads=True, need a positive integer"),
    ],
)
def test_constructor_says_what_is_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        BasedLinearAttention(32, **{"num_heads": 4, **options})


def test_inputs_of_the_wrong_shape_name_the_method_to_call():
    layer = make_layer()
    state = layer.init_state(2)
    with pytest.raises(ValueError, match=r"got an input of shape \(2, 32\), need \(B, T, 32\); .* call step\(x, state\)"):
        layer(torch.zeros(2, 32))
    with pytest.raises(ValueError, match=r"got an input of shape \(2, 5, 31\), need \(B, T, 32\)"):
        layer.prefill(torch.zeros(2, 5, 31))
    with pytest.raises(ValueError, match=r"got an input of shape \(2, 5, 32\), need \(B, 32\); .* call forward"):
        layer.step(torch.zeros(2, 5, 32), state)


# ---------------------------------------------------------------------------------------------------------------------
# On the card


@pytest.mark.gpu
@pytest.mark.parametrize("hidden_size, heads", [(512, 8), (512, 4)], ids=["V=64", "V=128"])
@pytest.mark.parametrize("feature_dim", [8, 16])
def test_kernels_under_autocast_equal_the_torch_path(feature_dim, hidden_size, heads):
    layer = BasedLinearAttention(hidden_size, feature_dim, num_heads=heads, backend="cute").cuda()
    other = BasedLinearAttention(hidden_size, feature_dim, num_heads=heads, backend="torch").cuda()
    other.load_state_dict(layer.state_dict())
    x = torch.randn(2, 300, hidden_size, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        assert accuracy.relative_error(layer(x), other(x)) <= 5e-3
        for got, need in zip(gradients_of(layer, x), gradients_of(other, x), strict=True):
            assert accuracy.relative_error(got, need) <= 1e-2


@pytest.mark.gpu
def test_step_on_the_card_equals_the_kernels_at_every_prefix():
    layer = BasedLinearAttention(512, num_heads=8, backend="cute").cuda()
    x = torch.randn(2, 130, 512, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        decoded, parallel = decode(layer, x, layer.init_state(2)), layer(x)
    for token in (0, 1, 62, 63, 64, 127, 128, 129):
        assert accuracy.relative_error(decoded[:, token], parallel[:, token]) <= 1e-2


@pytest.mark.gpu
def test_weights_and_outputs_of_fla():
    layers = pytest.importorskip("fla.layers")
    theirs = layers.BasedLinearAttention(512, 16, 8, 8).cuda()
    ours = BasedLinearAttention(512, 16, 8, 8).cuda()
    ours.load_state_dict(theirs.state_dict())
    assert tuple(inspect.signature(layers.BasedLinearAttention).parameters) == FLA_SIGNATURE
    x = torch.randn(2, 256, 512, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        assert accuracy.relative_error(ours(x), theirs(x)) <= 2e-2
