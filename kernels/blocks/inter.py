"""psi(x) S: what a chunk's tokens take from the state behind them, psi built in registers beside the product."""

from cutlass.cute.nvgpu import warpgroup

from .gemm import Product, k_steps, register_operand
from .taylor import psi_words

PSI_STEPS = 4  # k-steps of psi built at a time; two builds (32 registers) are in flight beside the accumulators


def add_inter(product: Product, acc, rows: list, quad_lane, key_dim: int, buf):
    """acc (64 x V) += psi(x) S of buffer `buf`, x the rotated rows of this lane's two tokens; the last group stays in flight,
    and whatever was issued but not committed goes with the first.

    torch: acc += (weights * phi(x)).to(torch.bfloat16) @ S. A few k-steps at a time, so that psi never takes more than
    2 * 4 * PSI_STEPS registers.
    """
    state = k_steps(product.b, buf)
    for first in range(0, len(state), PSI_STEPS):
        part = state[first : first + PSI_STEPS]
        psi, words = register_operand(len(part))
        for half, row in enumerate(rows):
            slots = psi_words(row, quad_lane, key_dim)
            for number in range(2 * len(part)):
                words[half + 2 * number] = slots[2 * first + number]
        warpgroup.fence()
        product.issue(acc, k_steps(psi), part, accumulate=True)
        warpgroup.wait_group(1)
