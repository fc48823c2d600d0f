"""Based attention and its backward in torch: the O(T^2) gold, and the chunked scans of the kernels for any device and shape.

One layout throughout, (B, T, H, D); inside a stage tensors are (B, H, tokens, D), so that a product over tokens or
channels is a plain matmul. With t = 1 + s and s = scale * q.k, causal with the diagonal:

    A = 1 + s + s^2/2 = (t^2 + 1)/2      den = sum_j A + 1e-6      o = (sum_j A v_j) / den
    r = 1/den      nd = sum_j A (do.v)   h = -nd r^2               dA = r (do.v) + h      ds = dA t

Between chunks A is a dot product of packed Taylor features: the constant 1, x, and x_a x_b for a <= b. A state always
holds unweighted features; the other side, the token's, carries the weight 1/2 of a square.

fp32 products follow torch.get_float32_matmul_precision(), "highest" by default; nothing here changes global state.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-6  # added to the row sum of A, and part of the function that is differentiated


def default_scale(scale: float | None, key_dim: int) -> float:
    """The scale asked for, or key_dim ** -0.5."""
    return key_dim**-0.5 if scale is None else float(scale)


def causal_taylor(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """t = 1 + scale q.k and A = (t^2 + 1)/2, (..., queries, keys), zero where the key is later than the query."""
    t = 1 + scale * (q @ k.mT)
    return t.tril(), ((t * t + 1) / 2).tril()  # tril sets zeros, so an overflow above the diagonal cannot leak a NaN


# ---------------------------------------------------------------------------------------------------------------------
# O(T^2): gold


def quadratic_forward(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """The forward whose gradient this package computes, by the definition and in the dtype of its inputs.

    q, k: (B, T, H, K); v: (B, T, H, V). Returns o (B, T, H, V). Differentiable by autograd. O(T^2) time and memory.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    _, a = causal_taylor(q, k, default_scale(scale, q.shape[-1]))
    return (a @ v / (a.sum(-1, keepdim=True) + EPSILON)).transpose(1, 2)


def quadratic_backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float | None = None, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """The gold: gradients by the closed form, every step in `dtype`. O(T^2) time and memory.

    q, k: (B, T, H, K); v, do: (B, T, H, V). Returns dq, dk (B, T, H, K) and dv (B, T, H, V) in `dtype`.
    """
    q, k, v, do = _heads_first(q, k, v, do, dtype)
    scale = default_scale(scale, q.shape[-1])
    t, a, dov, r, h = _quadratic_rows(q, k, v, do, scale)
    ds = scale * (r * dov + h) * t
    return _tokens_first(ds @ k, ds.mT @ q, (a * r).mT @ do)


def quadratic_magnitude(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float | None = None, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """The same sums with each term's absolute value: what rounding errors are proportional to when the terms cancel.

    Shapes as in `quadratic_backward`. dq and dk cancel wherever do_i.v_j hardly depends on j: entirely at T = 1.
    """
    q, k, v, do = _heads_first(q, k, v, do, dtype)
    scale = default_scale(scale, q.shape[-1])
    t, a, dov, r, h = _quadratic_rows(q, k, v, do, scale)
    ds = (scale * t).abs() * (r * dov.abs() + h.abs())
    return _tokens_first(ds @ k.abs(), ds.mT @ q.abs(), (a * r).mT @ do.abs())


def _quadratic_rows(q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float) -> tuple[Tensor, ...]:
    """t, A and do.v, (B, H, T, T); r and h, (B, H, T, 1)."""
    t, a = causal_taylor(q, k, scale)
    dov = do @ v.mT
    r = 1 / (a.sum(-1, keepdim=True) + EPSILON)
    return t, a, dov, r, -(a * dov).sum(-1, keepdim=True) * r * r


def _heads_first(q: Tensor, k: Tensor, v: Tensor, do: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(x.to(dtype).transpose(1, 2) for x in (q, k, v, do))


def _tokens_first(*gradients: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2).contiguous() for x in gradients)


# ---------------------------------------------------------------------------------------------------------------------
# O(T): the stages of the kernels


@dataclass(frozen=True)
class Precision:
    """dtype of every sum and state; with round_operands, bf16 exactly where the kernels round an MMA operand."""

    dtype: torch.dtype = torch.float32
    round_operands: bool = False

    def operand(self, x: Tensor) -> Tensor:
        """x as the kernels' products see it: rounded once to bf16, or untouched."""
        return x.to(torch.bfloat16).to(x.dtype) if self.round_operands else x

    def two_term_operand(self, x: Tensor) -> Tensor:
        """x as a sum of two bf16 terms: 16 bits of a Gram matrix keep the normaliser's error well below the others."""
        high = self.operand(x)
        return high + self.operand(x - high)

    def chunk(self, x: Tensor, tokens: slice) -> Tensor:
        """Tokens of a (B, T, H, D) tensor as (B, H, tokens, D)."""
        return x[:, tokens].transpose(1, 2).to(self.dtype)


def packed_features(x: Tensor) -> Tensor:
    """(..., K) -> (..., 1 + K + K(K+1)/2): the constant 1, x, and the products x_a x_b for a <= b."""
    a, b = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    return torch.cat((torch.ones_like(x[..., :1]), x, x[..., a] * x[..., b]), -1)


def feature_degrees(key_dim: int, like: Tensor) -> Tensor:
    """Degree 0, 1 or 2 of each packed feature: the power of scale that goes with it."""
    constant, linear = like.new_zeros(1), like.new_ones(key_dim)
    return torch.cat((constant, linear, like.new_full((key_dim * (key_dim + 1) // 2,), 2)))


def token_weights(key_dim: int, like: Tensor) -> Tensor:
    """1 for each packed feature but 1/2 for a square, so that phi(x).(weights phi(y)) = 1 + x.y + (x.y)^2 / 2."""
    a, b = torch.triu_indices(key_dim, key_dim, device=like.device)
    return torch.cat((like.new_ones(1 + key_dim), torch.where(a == b, 0.5, 1.0).to(like)))


def adjoint_contraction(y: Tensor, x: Tensor, quadratic_scale: float) -> Tensor:
    """Gradient with respect to x of (weights phi(x)).y: y_linear + quadratic_scale * (y_quadratic as K x K) x.

    y: (..., 1 + K + K(K+1)/2) packed, x: (..., K). Returns (..., K).
    """
    key_dim = x.shape[-1]
    a, b = torch.triu_indices(key_dim, key_dim, device=x.device)
    packed_index = torch.empty(key_dim, key_dim, dtype=torch.long, device=x.device)
    packed_index[a, b] = packed_index[b, a] = torch.arange(1 + key_dim, y.shape[-1], device=x.device)
    square = y[..., packed_index]  # the weight 1/2 of a square meets the factor 2 of its derivative
    return y[..., 1 : 1 + key_dim] + quadratic_scale * (square * x.unsqueeze(-2)).sum(-1)


def taylor_value(constant: Tensor | int, linear: Tensor, adjoint: Tensor, q: Tensor, scale: float) -> Tensor:
    """y_0 + scale q.y_linear + scale^2/2 q.(y_quadratic q), (..., 1), from adjoint = y_linear + scale y_quadratic q."""
    return constant + scale / 2 * (q * (linear + adjoint)).sum(-1, keepdim=True)


def forward_scan(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float | None = None, *,
    chunk: int = 64, dtype: torch.dtype = torch.float32, round_operands: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Chunks in order: dq (B, T, H, K), and per token r = 1/den and h = -nd r^2, (B, H, T), all in `dtype`.

    q, k: (B, T, H, K); v, do: (B, T, H, V). The running state is S = sum phi(k) v^T, the count, sum k and sum k k^T.
    """
    (batch, length, heads, key_dim), value_dim = q.shape, v.shape[-1]
    scale, precision = default_scale(scale, key_dim), Precision(dtype, round_operands)
    dq = q.new_empty(q.shape, dtype=dtype)
    r, h = q.new_empty((2, batch, heads, length), dtype=dtype)
    state = _zero_state(q, value_dim, dtype)
    for start in range(0, length, chunk):
        tokens = slice(start, min(start + chunk, length))
        operands = tuple(precision.chunk(x, tokens) for x in (q, k, v, do))
        chunk_dq, chunk_r, chunk_h = _forward_chunk(operands, state, start, scale, precision)
        dq[:, tokens] = precision.operand(chunk_dq).transpose(1, 2)
        r[..., tokens], h[..., tokens] = chunk_r.squeeze(-1), chunk_h.squeeze(-1)
        _add_keys(state, operands[1], operands[2], precision)
    return dq, r, h


def reverse_scan(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, r: Tensor, h: Tensor, scale: float | None = None, *,
    chunk: int = 64, dtype: torch.dtype = torch.float32, round_operands: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Chunks in reverse order: dk (B, T, H, K) and dv (B, T, H, V), both in `dtype`.

    q, k: (B, T, H, K); v, do: (B, T, H, V); r, h: (B, H, T) of `forward_scan`. The running state is
    dS = sum r phi(q) do^T (phi with its powers of scale), sum h q and sum h q q^T.
    """
    length, scale, precision = q.shape[1], default_scale(scale, q.shape[-1]), Precision(dtype, round_operands)
    dk, dv = k.new_empty(k.shape, dtype=dtype), v.new_empty(v.shape, dtype=dtype)
    state = _zero_state(q, v.shape[-1], dtype)
    for start in reversed(range(0, length, chunk)):
        tokens = slice(start, min(start + chunk, length))
        operands = tuple(precision.chunk(x, tokens) for x in (q, k, v, do))
        rows = r[..., tokens].unsqueeze(-1), h[..., tokens].unsqueeze(-1)
        chunk_dk, chunk_dv = _reverse_chunk(operands, rows, state, scale, precision)
        dk[:, tokens] = precision.operand(chunk_dk).transpose(1, 2)
        dv[:, tokens] = precision.operand(chunk_dv).transpose(1, 2)
        _add_queries(state, operands[0], operands[3], rows, scale, precision)
    return dk, dv


def chunked_backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float | None = None, *,
    chunk: int = 64, dtype: torch.dtype = torch.float32, round_operands: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients in O(T) time and O(chunk) memory, staged as the kernels are; any device, K, V, T and float dtype.

    q, k: (B, T, H, K); v, do: (B, T, H, V). Returns dq, dk (B, T, H, K) and dv (B, T, H, V) in `dtype`. With
    round_operands the result is the yardstick: bf16 where the kernels round (operands, copies of states, outputs), and
    `dtype` in every sum.
    """
    options = {"chunk": chunk, "dtype": dtype, "round_operands": round_operands}
    dq, r, h = forward_scan(q, k, v, do, scale, **options)
    return dq, *reverse_scan(q, k, v, do, r, h, scale, **options)


def chunked_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, *,
    chunk: int = 64, dtype: torch.dtype = torch.float32, round_operands: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output o (B, T, H, V) and r = 1/den (B, H, T), in O(T) time and O(chunk) memory, staged as the kernel is.

    q, k: (B, T, H, K); v: (B, T, H, V). Both results are in `dtype`, for any device, K, V, T and float dtype; not for
    autograd, whose graph would hold every chunk. round_operands makes it the yardstick, as in `chunked_backward`.
    """
    (batch, length, heads, key_dim), value_dim = q.shape, v.shape[-1]
    scale, precision = default_scale(scale, key_dim), Precision(dtype, round_operands)
    o, r = v.new_empty(v.shape, dtype=dtype), q.new_empty((batch, heads, length), dtype=dtype)
    state = _zero_state(q, value_dim, dtype)
    for start in range(0, length, chunk):
        tokens = slice(start, min(start + chunk, length))
        operands = tuple(precision.chunk(x, tokens) for x in (q, k, v))
        chunk_o, chunk_r = _output_chunk(operands, state, start, scale, precision)
        o[:, tokens] = precision.operand(chunk_o).transpose(1, 2)
        r[..., tokens] = chunk_r.squeeze(-1)
        _add_keys(state, operands[1], operands[2], precision, scale)
    return o, r


@dataclass
class _State:
    """What a scan carries from chunk to chunk, added to in place.

    features: (B, H, P, V), P = 1 + K + K(K+1)/2 packed; total: (B, H, 1, K) and gram: (B, H, K, K) for the normaliser.
    """

    features: Tensor
    total: Tensor
    gram: Tensor


def _zero_state(q: Tensor, value_dim: int, dtype: torch.dtype) -> _State:
    batch, _, heads, key_dim = q.shape
    packed = 1 + key_dim + key_dim * (key_dim + 1) // 2
    shapes = (packed, value_dim), (1, key_dim), (key_dim, key_dim)
    return _State(*(q.new_zeros((batch, heads, *shape), dtype=dtype) for shape in shapes))


def _forward_chunk(
    operands: tuple[Tensor, ...], state: _State, count: int, scale: float, precision: Precision
) -> tuple[Tensor, Tensor, Tensor]:
    """dq (B, H, C, K), r and h (B, H, C, 1) of one chunk, given the state of the `count` keys before it."""
    q, k, v, do = operands
    t, a = causal_taylor(q, k, scale)
    dov = do @ v.mT
    den, nd = a.sum(-1, keepdim=True), (a * dov).sum(-1, keepdim=True)
    # Any number per row may move from the r to the h bracket. This one takes out of do.v what the two brackets would
    # cancel, before the rounding to an operand: exactly at T = 1, and wherever v hardly varies.
    centre = nd / den
    value_sum = precision.operand((dov - centre) * t) @ k
    norm_sum = precision.operand(t) @ k

    y = do @ precision.operand(state.features).mT
    y_adjoint = adjoint_contraction(y, q, scale)
    norm_adjoint = state.total + scale * (q @ precision.two_term_operand(state.gram))
    den = den + taylor_value(count, state.total, norm_adjoint, q, scale) + EPSILON
    nd = nd + taylor_value(y[..., :1], y[..., 1 : 1 + q.shape[-1]], y_adjoint, q, scale)

    r = 1 / den
    h = -nd * r * r
    dq = scale * (r * (value_sum + y_adjoint) + h * norm_adjoint + (h + r * centre) * norm_sum)
    return dq, r, h


def _output_chunk(
    operands: tuple[Tensor, ...], state: _State, count: int, scale: float, precision: Precision
) -> tuple[Tensor, Tensor]:
    """o (B, H, C, V) and r (B, H, C, 1) of one chunk, given the state of the `count` keys before it, with phi(scale k).

    o is divided by the sum of the rounded A: a mean of v to within fp32, whose error is then smaller, none at T = 1.
    """
    q, k, v = operands
    _, a = causal_taylor(q, k, scale)
    rounded = precision.operand(a)
    norm_adjoint = state.total + scale * (q @ precision.two_term_operand(state.gram))
    behind = taylor_value(count, state.total, norm_adjoint, q, scale) + EPSILON
    token_features = precision.operand(packed_features(q)) * token_weights(q.shape[-1], q)
    weighted = rounded @ v + token_features @ precision.operand(state.features)
    return weighted / (rounded.sum(-1, keepdim=True) + behind), 1 / (a.sum(-1, keepdim=True) + behind)


def _reverse_chunk(
    operands: tuple[Tensor, ...], rows: tuple[Tensor, Tensor], state: _State, scale: float, precision: Precision
) -> tuple[Tensor, Tensor]:
    """dk (B, H, C, K) and dv (B, H, C, V) of one chunk, given the state of the queries after it; r, h: (B, H, C, 1)."""
    q, k, v, do = operands
    r, h = rows
    t, a = causal_taylor(q, k, scale)
    ds = precision.operand((r * (do @ v.mT) + h) * t)
    d_state = precision.operand(state.features)
    token_features = precision.operand(packed_features(k)) * token_weights(k.shape[-1], k)
    dv = precision.operand(a * r).mT @ do + token_features @ d_state
    w_adjoint = adjoint_contraction(v @ d_state.mT, k, 1.0)
    norm_adjoint = state.total + scale * (k @ precision.two_term_operand(state.gram))
    return scale * (ds.mT @ q) + w_adjoint + scale * norm_adjoint, dv


def _add_keys(state: _State, k: Tensor, v: Tensor, precision: Precision, scale: float = 1.0) -> None:
    """S += phi(scale k)^T v, and the sums of k and k k^T."""
    powers = scale ** feature_degrees(k.shape[-1], k)
    state.features += precision.operand(packed_features(k) * powers).mT @ v
    state.total += k.sum(-2, keepdim=True)
    state.gram += k.mT @ k


def _add_queries(
    state: _State, q: Tensor, do: Tensor, rows: tuple[Tensor, Tensor], scale: float, precision: Precision
) -> None:
    """dS += (r phi(q))^T do with phi's powers of scale, and the sums of h q and h q q^T."""
    r, h = rows
    powers = scale ** feature_degrees(q.shape[-1], q)
    state.features += precision.operand(packed_features(q) * powers * r).mT @ do
    weighted = precision.operand(h * q)
    state.total += weighted.sum(-2, keepdim=True)
    state.gram += weighted.mT @ q
