"""Based linear attention as a layer: four projections around `based_attention`, and its recurrent form for decoding.

The constructor and the parameters' names and shapes are those of `fla.layers.BasedLinearAttention` (flash-linear-attention
0.6.0), so a state_dict of one loads into the other and both compute the same function: features of q.k / sqrt(feature_dim),
which is also the feature map of the Based paper's own code. What differs:

* fla before 0.6.0 splits q and k into heads of the *value* dimension, so that its default arguments fail in the forward,
  and its default mode leaves out the factor feature_dim ** -0.5. Here, as in fla 0.6.0, heads of q and k are feature_dim
  wide and the factor is there. Weights trained with the older layer load, but mean another function.
* fla has one key-value head per query head. Here several query heads may share one (grouped-query attention).
* `eps` and `mode` choose among fla's code paths. Here one operator serves all modes and adds 1e-6 to the normaliser.
* `causal=False`, which fla runs as an O(T) memory torch formula, raises.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import launcher, reference

MODES = ("parallel", "chunk", "fused_chunk")
FLA_LAYER = "fla.layers.BasedLinearAttention"
PREFILL_CHUNK = 1024  # tokens whose features exist at once in `prefill`: 1024 x 153 fp32 numbers a head at feature_dim 16


@dataclass
class BasedState:
    """Sums over the tokens that a layer has seen, of a size that does not grow with their number.

    features: (B, H, P, V), the sum of phi(k) v^T; normaliser: (B, H, P, 1), the sum of phi(k). H counts key-value heads,
    V is the head dimension and phi the P = 1 + K + K(K+1)/2 packed features of `reference.packed_features`, K the
    feature_dim. `BasedLinearAttention.step` adds to both tensors in place.
    """

    features: Tensor
    normaliser: Tensor

    def reset(self) -> None:
        """Forget all tokens, keeping the memory."""
        self.features.zero_()
        self.normaliser.zero_()


class BasedLinearAttention(nn.Module):
    """Causal second-order Taylor linear attention, a drop-in for `fla.layers.BasedLinearAttention`.

    Args:
        hidden_size: channels of the input and the output.
        feature_dim: width K of a query and a key head; 8 and 16 have kernels, any other takes the torch path.
        num_key_value_heads: heads of k and v, a divisor of num_heads; None means num_heads. Query head h reads
            key-value head h // (num_heads / num_key_value_heads).
        num_heads: query heads. A value head is V = hidden_size // num_heads wide; 64 and 128 have kernels.
        feature_name: "taylor_exp", the only feature map.
        eps: for fla's signature. The operator adds 1e-6 to a normaliser of at least 1/2, so any eps in [0, 1e-6] means
            the same to within 2e-6 relative.
        causal: True, for fla's signature.
        mode: "parallel", "chunk" or "fused_chunk", which are one path here.
        backend: "auto", "cute" or "torch", as `based_attention` takes it.

    Parameters: q_proj (num_heads K, hidden_size), k_proj (num_key_value_heads K, hidden_size),
    v_proj (num_key_value_heads V, hidden_size), o_proj (hidden_size, num_heads V), none with a bias.

    Raises:
        ValueError: a size is not a positive integer, head counts do not divide, or an argument asks for what the operator
            does not compute; the message says what to use instead.
    """

    def __init__(
        self,
        hidden_size: int,
        feature_dim: int = 16,
        num_key_value_heads: int | None = None,
        num_heads: int = 12,
        feature_name: str = "taylor_exp",
        eps: float = 1e-12,
        causal: bool = True,
        mode: str = "parallel",
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        num_key_value_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        _check_sizes(hidden_size, feature_dim, num_key_value_heads, num_heads)
        _check_choices(feature_name, eps, causal, mode, backend)
        self.hidden_size = hidden_size
        self.feature_dim = feature_dim
        self.num_key_value_heads = num_key_value_heads
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.backend = backend
        self.q_proj = nn.Linear(hidden_size, num_heads * feature_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_key_value_heads * feature_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The layer over whole sequences: (B, T, hidden_size) -> (B, T, hidden_size), differentiable, O(T)."""
        self._check_input(hidden_states, ("B", "T"), "for one token of each sequence call step(x, state)")
        return self._attend(*self._project(hidden_states))

    def init_state(
        self, batch: int, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> BasedState:
        """The state before the first token of `batch` sequences, on `device` (None: that of the parameters).

        dtype: torch.float32, or torch.float64 for tests; 16 bits would lose tokens once the sums are large.
        """
        device = self.q_proj.weight.device if device is None else device
        packed = 1 + self.feature_dim + self.feature_dim * (self.feature_dim + 1) // 2
        rows = (batch, self.num_key_value_heads, packed)
        features = torch.zeros(*rows, self.head_dim, device=device, dtype=dtype)
        return BasedState(features, torch.zeros(*rows, 1, device=device, dtype=dtype))

    @torch.no_grad()
    def step(self, x: Tensor, state: BasedState) -> Tensor:
        """The output for one more token of each sequence: (B, hidden_size) -> (B, hidden_size).

        Adds the token to `state` in place, in time that does not depend on the tokens before it. Equal to the last row
        of `forward` over all of them. Decoding only: no gradient flows, and the state's arithmetic is never in 16 bits.
        """
        self._check_input(x, ("B",), "for whole sequences call forward(hidden_states) or prefill(hidden_states)")
        q, k, v = (y.unsqueeze(2).to(state.features.dtype) for y in self._project(x))
        with torch.autocast(x.device.type, enabled=False):
            _add_tokens(state, k, v)
            o = _read(state, q.unflatten(1, (self.num_key_value_heads, -1)).squeeze(3))
        return self.o_proj(o.flatten(1).to(x.dtype))

    @torch.no_grad()
    def prefill(self, hidden_states: Tensor) -> tuple[Tensor, BasedState]:
        """`forward` over a prompt (B, T, hidden_size), and the state with which `step` goes on after it."""
        self._check_input(hidden_states, ("B", "T"), "for one token of each sequence call step(x, state)")
        q, k, v = self._project(hidden_states)
        dtype = torch.promote_types(k.dtype, torch.float32)
        state = self.init_state(hidden_states.shape[0], hidden_states.device, dtype)
        with torch.autocast(hidden_states.device.type, enabled=False):
            for chunk_k, chunk_v in zip(k.split(PREFILL_CHUNK, 1), v.split(PREFILL_CHUNK, 1), strict=True):
                _add_tokens(state, chunk_k.transpose(1, 2).to(dtype), chunk_v.transpose(1, 2).to(dtype))
        return self._attend(q, k, v), state

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (..., num_heads, K), k (..., num_key_value_heads, K) and v (..., num_key_value_heads, V) of x (..., hidden)."""
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.feature_dim))
        k = self.k_proj(x).unflatten(-1, (self.num_key_value_heads, self.feature_dim))
        v = self.v_proj(x).unflatten(-1, (self.num_key_value_heads, self.head_dim))
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = self.num_heads // self.num_key_value_heads
        if group > 1:  # the operator has one head count; autograd adds up the gradients of the copies
            k, v = (x.repeat_interleave(group, 2) for x in (k, v))
        o = launcher.based_attention(q, k, v, backend=self.backend)
        return self.o_proj(o.flatten(-2))

    def _check_input(self, x: Tensor, dims: tuple[str, ...], instead: str) -> None:
        if x.ndim != len(dims) + 1 or x.shape[-1] != self.hidden_size:
            need = ", ".join((*dims, str(self.hidden_size)))
            raise ValueError(f"BasedLinearAttention: got an input of shape {tuple(x.shape)}, need ({need}); {instead}")


def _add_tokens(state: BasedState, k: Tensor, v: Tensor) -> None:
    """state += phi(k)^T [v, 1] for k (B, H, tokens, K) and v (B, H, tokens, V)."""
    features = reference.packed_features(k).mT
    state.features += features @ v
    state.normaliser += features.sum(-1, keepdim=True)


def _read(state: BasedState, q: Tensor) -> Tensor:
    """(B, H, group, V) for the queries (B, H, group, K) that share a key-value head."""
    key_dim = q.shape[-1]
    scaled = reference.default_scale(None, key_dim) * q
    features = reference.packed_features(scaled) * reference.token_weights(key_dim, q)
    return features @ state.features / (features @ state.normaliser + reference.EPSILON)


def _check_sizes(hidden_size: int, feature_dim: int, num_key_value_heads: int, num_heads: int) -> None:
    sizes = {
        "hidden_size": hidden_size,
        "feature_dim": feature_dim,
        "num_heads": num_heads,
        "num_key_value_heads": num_key_value_heads,
    }
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"BasedLinearAttention: got {name}={size!r}, need a positive integer")
    if num_heads % num_key_value_heads:
        raise ValueError(
            f"BasedLinearAttention: got num_key_value_heads={num_key_value_heads}, need a divisor of num_heads={num_heads}; "
            "leave it out for one key-value head per query head"
        )
    if hidden_size < num_heads:
        raise ValueError(
            f"BasedLinearAttention: got hidden_size={hidden_size}, need at least num_heads={num_heads}, one channel a head"
        )


def _check_choices(feature_name: str, eps: float, causal: bool, mode: str, backend: str) -> None:
    if not causal:
        raise ValueError(f"BasedLinearAttention: got causal={causal}, need True; for causal=False call {FLA_LAYER}")
    if feature_name != "taylor_exp":
        raise ValueError(
            f"BasedLinearAttention: got feature_name={feature_name!r}, need 'taylor_exp'; "
            "for other feature maps call fla.layers.LinearAttention"
        )
    if not 0 <= eps <= reference.EPSILON:
        raise ValueError(
            f"BasedLinearAttention: got eps={eps}, need one in [0, {reference.EPSILON}], which all act as "
            f"{reference.EPSILON}; for another normaliser call {FLA_LAYER}.forward_reference"
        )
    if mode not in MODES:
        raise ValueError(f"BasedLinearAttention: got mode={mode!r}, need one of {MODES}, which all run the same operator")
    if backend not in launcher.BACKENDS:
        raise ValueError(f"BasedLinearAttention: got backend={backend!r}, need one of {launcher.BACKENDS}")
