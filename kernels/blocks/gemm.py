"""The warpgroup products: one constructor by operand source and majors, one way to issue them."""

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from .tiles import transposed

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


def accumulator(tiled_mma, shape):
    """An fp32 accumulator of `shape` (M, N): lane l of warp w holds rows 16w + l/4 (+8), columns 2(l%4) + {0, 1} of each
    eight; flat index c + 2 * (row half) + 4 * (eight) inside one M = 64 block."""
    return cute.make_rmem_tensor(tiled_mma.partition_shape_C(shape), Float32)


def register_operand(k_steps: int):
    """An empty bf16 A operand of 64 x 16 * k_steps, with its 32-bit view: word (row half) + 2 * (eight) + 4 * (k-step)."""
    fragment = cute.make_rmem_tensor(((2, 2, 2), 1, k_steps), BFloat16)
    return fragment, cute.recast_tensor(fragment, Int32)


class Product:
    """D (M x N) = A B with bf16 operands and fp32 accumulation by one warpgroup, 64 x N x 16 at a time.

    `a` and `b` are shared tiles as stored, `a` None for an operand in registers. `a_transposed` means A = a^T (the product
    contracts over a's rows), `b_transposed` that B = b (N along b's columns), since WGMMA's B is stored (N, K): what a
    K-major B would be is b^T.
    """

    def __init__(self, n: int, a=None, b=None, *, a_transposed=False, b_transposed=False):
        source = warpgroup.OperandSource.RMEM if a is None else warpgroup.OperandSource.SMEM
        majors = [MN_MAJOR if flag else K_MAJOR for flag in (a_transposed, b_transposed)]
        self.mma = hopper.make_trivial_tiled_mma(BFloat16, BFloat16, *majors, Float32, (1, 1, 1), (64, n), a_source=source)
        self.n = n
        thread = self.mma.get_slice(0)
        if a is not None:
            self.a = thread.make_fragment_A(thread.partition_A(transposed(a) if a_transposed else a))
        self.b = thread.make_fragment_B(thread.partition_B(transposed(b) if b_transposed else b))

    def accumulator(self, m: int = 64):
        return accumulator(self.mma, (m, self.n))

    def issue(self, acc, a: list, b: list, *, accumulate: bool = False, commit: bool = True):
        """Issue acc (+)= sum of a_k b_k over lists of k-steps; nothing is waited for."""
        atom = cute.make_mma_atom(self.mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, accumulate)
        for a_k, b_k in zip(a, b, strict=True):
            cute.gemm(atom, acc, a_k, b_k, acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        if commit:
            warpgroup.commit_group()


def k_steps(operand, index=None) -> list:
    """The 16-wide k-steps of an operand, of its buffer `index` where it has several."""
    if index is not None:
        operand = operand[None, None, None, index]
    return [operand[None, None, k] for k in range(cute.size(operand.shape[2]))]
