"""The functions of `fla.ops.based`, so that a program written for flash-linear-attention 0.6.0 changes one import:

    from based_cute.compat import parallel_based  # was: from fla.ops.based import parallel_based

Names, argument order, layout and defaults are fla's, and so is the function computed. Both names run `based_attention`;
in fla they are an O(T^2) and an O(T) kernel. Any K and V are accepted, where fla stops at K = 128 and K = 16.
"""

from torch import Tensor

from .launcher import based_attention


def parallel_based(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, use_norm: bool = True, head_first: bool = False
) -> Tensor:
    """Causal, normalised Based attention with the signature of `fla.ops.based.parallel_based`; differentiable.

    Args:
        q, k: (B, T, H, K) queries and keys.
        v: (B, T, H, V) values.
        scale: multiplies q.k; None means K ** -0.5.
        use_norm: True. fla also returns the numerator alone.
        head_first: False. fla before 0.6.0 also took (B, H, T, D).

    Returns:
        o, (B, T, H, V), in the dtype of the inputs, or that of autocast.

    Raises:
        ValueError: use_norm is false or head_first is true; and what `based_attention` raises.
    """
    return _based(q, k, v, scale, use_norm, head_first, "parallel_based")


def fused_chunk_based(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, use_norm: bool = True, head_first: bool = False
) -> Tensor:
    """The same function with the signature of `fla.ops.based.fused_chunk_based`; see `parallel_based`."""
    return _based(q, k, v, scale, use_norm, head_first, "fused_chunk_based")


def _based(q: Tensor, k: Tensor, v: Tensor, scale: float | None, use_norm: bool, head_first: bool, name: str) -> Tensor:
    if not use_norm:
        raise ValueError(f"{name}: got use_norm={use_norm}, need True; for the numerator alone call fla.ops.based.{name}")
    if head_first:
        raise ValueError(
            f"{name}: got head_first={head_first}, need tensors (B, T, H, D); "
            f"call {name}(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)"
        )
    return based_attention(q, k, v, scale)
