"""What one call from the host launches: the passes of a forward or a backward, one after the other on a stream.

A backward takes 5.6 us of the host as one kernel, 8.0 as two and more as two calls from Python (docs/performance.md).
"""

from types import SimpleNamespace

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .config import CHUNK, STATE_SUM, ScanConfig
from .forward_scan import ForwardScan
from .kernel import Kernel
from .output import OutputScan
from .reverse_scan import ReverseScan
from .scan import Problem
from .segment_state import ForwardState, OutputState, ReverseState, StateSum
from .sweep import Sweep
from .sweep_state import SweepState

PASSES = {
    "forward_scan": ForwardScan,
    "reverse_scan": ReverseScan,
    "output": OutputScan,
    "forward_state": ForwardState,
    "reverse_state": ReverseState,
    "output_state": OutputState,
    "sweep_state": SweepState,
    "sweep": Sweep,
}


class Launch:
    """The kernels of an operation, in order, each given by its rows. From `ctas` on a call's arguments are a schedule.Schedule,
    in its order; states and flags begin at the 32-bit words `states_at` and `flags_at` of the scratch."""

    def __init__(self, kernels: tuple[tuple[ScanConfig, ...], ...]):
        self.kernels = [StateSum(*rows) if rows[0].scan == STATE_SUM else kernel_of(rows) for rows in kernels]

    def run(self, tensors, scratch, scale, cut, stream):
        ctas, *ranges, runs, states_at, flags_at = cut
        batch, tokens, heads, _ = tensors.q.shape
        words = scratch.iterator.toint()
        addresses = words + 4 * states_at, words + 4 * flags_at
        problem = Problem(tokens, heads, batch * heads // runs, scale, ctas // runs, *ranges, runs, *addresses)
        for kernel in self.kernels:
            kernel.start(tensors, problem, stream)


def kernel_of(rows: tuple[ScanConfig, ...]) -> Kernel:
    return Kernel(*[PASSES[row.scan](row) for row in rows])


class Forward(Launch):
    """o (B, T, H, V) and r (B, H, T) fp32 from q, k and v."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        r: cute.Tensor,
        scratch: cute.Tensor,
        scale: Float32,
        ctas: Int32,
        chunks_per_cta: Int32,
        stride: Int32,
        hands_on: Int32,
        late_ctas: Int32,
        runs: Int32,
        states_at: Int64,
        flags_at: Int64,
        stream,
    ):
        cut = (ctas, chunks_per_cta, stride, hands_on, late_ctas, runs, states_at, flags_at)
        self.run(SimpleNamespace(q=q, k=k, v=v, o=o, r=r), scratch, scale, cut, stream)


class Backward(Launch):
    """dq, dk (B, T, H, K) and dv (B, T, H, V) from q, k, v and do. In the scratch r and h (B, H, T padded to chunks, 2), fp32,
    pass from the forward scan to the reverse scan, or states and normalisers from the first pass to the sweep."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        do: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        scratch: cute.Tensor,
        scale: Float32,
        ctas: Int32,
        chunks_per_cta: Int32,
        stride: Int32,
        hands_on: Int32,
        late_ctas: Int32,
        runs: Int32,
        states_at: Int64,
        flags_at: Int64,
        stream,
    ):
        cut = (ctas, chunks_per_cta, stride, hands_on, late_ctas, runs, states_at, flags_at)
        tensors = SimpleNamespace(q=q, k=k, v=v, do=do, dq=dq, dk=dk, dv=dv, statistics=statistics_in(scratch, q))
        self.run(tensors, scratch, scale, cut, stream)


def statistics_in(scratch, q):
    """The rows (r, h) of the tokens of q, fp32, at the beginning of the scratch."""
    batch, tokens, heads, _ = q.shape
    rows = Int64(cute.round_up(tokens, CHUNK))
    layout = cute.make_layout((batch, heads, cute.round_up(tokens, CHUNK), 2), stride=(2 * rows * heads, 2 * rows, 2, 1))
    return cute.make_tensor(cute.recast_ptr(scratch.iterator, dtype=Float32), layout)


OPERATIONS = {"forward": Forward, "backward": Backward}
