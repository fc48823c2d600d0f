"""Timing of the backward on a CUDA card, beside the floors that the same card sets in the same run.

One method for our backward, for the baselines and for the card's own rates:

* CUDA events around every call and no synchronisation in between; the median and the minimum of 30 calls after warm-up.
* L2-cold inputs. Calls rotate through input sets, at least two and together more than three times the L2, so that
  nothing of a set is left in the cache when its turn comes again. Flushing the cache between calls would do too, but it
  leaves dirty lines whose write-back then falls into the timed call.
* A shape is timed only after its gradients passed `accuracy.check_shape` on the same card.

Floors count what two scans must move and multiply (docs/performance.md); TFLOP/s are canonical, from the shape alone.
"""

import functools
import importlib.metadata
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from . import accuracy, reference
from .accuracy import Shape
from .kernels.build import sources_sha256
from .launcher import based_backward

CHUNK = 64  # the chunk that both the canonical FLOPs and the floor's chunk-quadratic products are counted with
CALLS = 30
WARM_UP = 3
HOST_CALLS = 200  # two launches each: below the depth of the launch queue, so the host never waits for the card
L2_MULTIPLE = 3
COPY_BYTES = 4 << 30
MATMUL_SIZE = 8192

DSL = "nvidia-cutlass-dsl"  # the distribution whose version a record carries

Record = dict[str, object]


class RedCheck(RuntimeError):
    """The gradients of a shape failed their check, so it has no time."""


def canonical_flops(shape: Shape) -> int:
    """W, the FLOPs that TFLOP/s are quoted in: twice a forward with chunk 64 and the full 1 + K + K^2 features."""
    batch, length, heads, key_dim, value_dim = shape
    terms = 1 + key_dim + key_dim**2
    return 2 * batch * heads * length * (4 * terms * value_dim + 2 * CHUNK * (key_dim + value_dim))


def bytes_per_token(key_dim: int, value_dim: int) -> int:
    """Global-memory bytes that two scans move per token: bf16 tensors, and r and h in fp32 between the scans."""
    inputs = 2 * (2 * key_dim + 2 * value_dim)  # q, k, v, do, read by each of the two scans
    row_terms = 2 * 4  # r and h, written by the forward scan and read by the reverse scan
    gradients = 2 * (2 * key_dim + value_dim)  # dq, dk, dv
    return 2 * inputs + 2 * row_terms + gradients


def flops_per_token(key_dim: int, value_dim: int) -> int:
    """Tensor-core FLOPs of two scans per token, with the packed symmetric features padded to a k-step of 16."""
    distinct = 1 + key_dim + key_dim * (key_dim + 1) // 2
    features = -(-distinct // 16) * 16  # 160 for K = 16, 48 for K = 8
    state = 5 * 2 * features * value_dim  # Y, S update; W, phi(k) dS, dS update
    scores = 2 * 2 * CHUNK * key_dim  # s, s^T
    score_gradients = 2 * 2 * CHUNK * value_dim  # dA in the forward scan, dA^T in the reverse scan
    local_dv = 2 * CHUNK * value_dim  # A^T do
    local_dq_dk = 2 * 2 * CHUNK * key_dim  # ds k, ds^T q
    return state + scores + score_gradients + local_dv + local_dq_dk


@dataclass(frozen=True)
class Card:
    """The rates that a CUDA device reached in this run: bytes/s of a copy (read plus written), FLOP/s of a product."""

    copy_rate: float
    matmul_rate: float

    def floor_ms(self, shape: Shape) -> float:
        """The time below which two scans cannot go on this card: the larger of its byte and its FLOP bound."""
        batch, length, heads, key_dim, value_dim = shape
        by_bytes = bytes_per_token(key_dim, value_dim) / self.copy_rate
        by_flops = flops_per_token(key_dim, value_dim) / self.matmul_rate
        return 1e3 * batch * length * heads * max(by_bytes, by_flops)


def measure_card(device: torch.device) -> Card:
    """Time a 4 GiB device copy and an 8192^3 bf16 product of random matrices (zeros draw less power and run faster)."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    copy_ms = statistics.median(time_calls(torch.empty_like(source).copy_, [(source,)]))
    factors = tuple(torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    matmul_ms = statistics.median(time_calls(torch.matmul, [factors]))
    return Card(
        copy_rate=2 * COPY_BYTES / (1e-3 * copy_ms),
        matmul_rate=2 * MATMUL_SIZE**3 / (1e-3 * matmul_ms),
    )


def input_sets(shape: Shape, l2_bytes: int) -> int:
    """How many input sets of `shape` calls must rotate through to find the L2 cold."""
    batch, length, heads, key_dim, value_dim = shape
    set_bytes = 2 * batch * length * heads * (2 * key_dim + 2 * value_dim)
    return max(2, L2_MULTIPLE * l2_bytes // set_bytes + 1)


def rotated_inputs(shape: Shape, device: torch.device, seed: int) -> list[tuple[torch.Tensor, ...]]:
    """Enough sets of (q, k, v, do) that the next one is never in the L2."""
    count = input_sets(shape, torch.cuda.get_device_properties(device).L2_cache_size)
    return [accuracy.make_inputs(shape, device, seed + index) for index in range(count)]


def time_calls(call: Callable, inputs: Sequence[tuple], calls: int = CALLS) -> list[float]:
    """Milliseconds of each of `calls` calls `call(*inputs[i])`, back to back, i cycling through the input sets."""
    for index in range(WARM_UP):
        call(*inputs[index % len(inputs)])
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(calls)]
    torch.cuda.synchronize()
    for index, (start, stop) in enumerate(events, WARM_UP):
        start.record()
        call(*inputs[index % len(inputs)])
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in events]


def sustained_ms(call: Callable, inputs: Sequence[tuple], seconds: float, burst_ms: float) -> float:
    """Mean milliseconds of a call in a run of about `seconds` without a pause, where the card meets its power limit."""
    calls = max(CALLS, round(1e3 * seconds / burst_ms))
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for index in range(calls):
        call(*inputs[index % len(inputs)])
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / calls


def host_microseconds(call: Callable, inputs: tuple) -> float:
    """Host time of one call: dispatch, checks, allocation and launches, without waiting for the card."""
    for _ in range(WARM_UP):
        call(*inputs)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(HOST_CALLS):
        call(*inputs)
    elapsed = time.perf_counter() - begin
    torch.cuda.synchronize()
    return 1e6 * elapsed / HOST_CALLS


def version_of(distribution: str) -> str:
    """The installed version of a distribution, read without importing it, or "not installed"."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def device_name(device: torch.device) -> str:
    """What a person calls the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def provenance(device: torch.device) -> Record:
    """Where a record comes from: the device, the versions, and the fingerprint of kernels/."""
    versions = {"torch": torch.__version__, "dsl": version_of(DSL)}
    return {"device": device_name(device), **versions, "sources_sha256": sources_sha256()}


@dataclass(frozen=True)
class Bench:
    """One run on one card: what all its records have in common, and how each kind is made."""

    device: torch.device
    card: Card
    backend: str = "auto"
    seed: int = 0
    sustained: float = 0.0

    def record(self, shape: Shape, op: str, **measured: object) -> Record:
        """A record of the JSON file: the shape, what was measured, and where it came from."""
        return {"shape": list(shape), "op": op, **measured, **provenance(self.device)}

    def backward(self, shape: Shape) -> Record:
        """Check `shape`, then time it. Raises RedCheck, without a time, when the check fails."""
        result = accuracy.check_shape(shape, self.backend, self.device, seed=self.seed)
        if not result.passed:
            raise RedCheck(f"{shape}: {result.reason}; not timed. See `based-cute check {','.join(map(str, shape))}`")
        call = functools.partial(based_backward, backend=self.backend)
        inputs = rotated_inputs(shape, self.device, self.seed)
        times = time_calls(call, inputs)
        burst = statistics.median(times)
        measured = {
            "ms": burst,
            "ms_min": min(times),
            "tflops": canonical_flops(shape) / (1e9 * burst),
            "floor_ms": self.card.floor_ms(shape),
            "err": list(result.errors),
            "backend": result.backend,
            "copy_tb_s": 1e-12 * self.card.copy_rate,
            "matmul_tflops": 1e-12 * self.card.matmul_rate,
        }
        if self.sustained:
            measured["sustained_ms"] = sustained_ms(call, inputs, self.sustained, burst)
        return self.record(shape, "backward", **measured)

    def host_call(self, key_dim: int, value_dim: int) -> Record:
        """Host microseconds of one call at (1, 64, 1, K, V), where the card has next to nothing to do."""
        shape = (1, 64, 1, key_dim, value_dim)
        call = functools.partial(based_backward, backend=self.backend)
        inputs = accuracy.make_inputs(shape, self.device, self.seed)
        return self.record(shape, "host_call", us=host_microseconds(call, inputs))

    def baseline(self, shape: Shape, system: str) -> Record:
        """Time the backward of another system. What it raises is recorded as a sentence, never as a number."""
        try:
            call, inputs = BASELINES[system](shape, self)
            ms = statistics.median(time_calls(call, inputs))
            gold = accuracy.gold_gradients(*accuracy.make_inputs(shape, self.device, self.seed))
            errors = accuracy.measure_errors(call(*inputs[0]), gold)
            if not all(map(math.isfinite, errors)):
                raise ArithmeticError("its gradients are not finite")
            measured = {"ms": ms, "tflops": canonical_flops(shape) / (1e9 * ms), "err": list(errors)}
        except Exception as error:  # foreign code: a missing package, a compile error and a full memory all end here
            measured = {"reason": f"{type(error).__name__}: {error}".splitlines()[0]}
        return self.record(shape, "baseline", system=system, **measured)

    def records(self, shapes: Sequence[Shape], baselines: bool) -> Iterator[Record | RedCheck]:
        """Everything asked for, one at a time; a red shape yields its RedCheck and no record."""
        green: dict[tuple[int, int], None] = {}  # the (K, V) that passed, once each and in order
        for shape in shapes:
            try:
                yield self.backward(shape)
            except RedCheck as red:
                yield red
                continue
            green[shape[3:]] = None
            for system in BASELINES if baselines else ():
                yield self.baseline(shape, system)
        for key_dim, value_dim in green:
            yield self.host_call(key_dim, value_dim)


def chunked_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The forward in fp32, chunk by chunk, for autograd to differentiate: the specification the kernels replace."""
    scale = reference.default_scale(None, q.shape[-1])
    weights = reference.token_weights(q.shape[-1], q.float())
    state = norm = 0
    outputs = []
    for q_c, k_c, v_c in zip(*(x.float().transpose(1, 2).split(CHUNK, 2) for x in (q, k, v)), strict=True):
        _, a = reference.causal_taylor(q_c, k_c, scale)
        phi_q, phi_k = weights * reference.packed_features(scale * q_c), reference.packed_features(k_c)
        den = a.sum(-1, keepdim=True) + (phi_q * norm).sum(-1, keepdim=True) + reference.EPSILON
        outputs.append((a @ v_c + (phi_q @ state if outputs else 0)) / den)
        state, norm = state + phi_k.mT @ v_c, norm + phi_k.sum(-2, keepdim=True)
    return torch.cat(outputs, 2).transpose(1, 2)


def backward_of(forward: Callable, shape: Shape, bench: Bench) -> tuple[Callable, list[tuple]]:
    """(call, inputs) that time the backward of `forward` alone: one graph per input set, kept from call to call."""

    def graph(q, k, v, do):
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o = forward(*leaves)
        return o, leaves, do.to(o.dtype)

    call = functools.partial(torch.autograd.grad, retain_graph=True)
    return call, [graph(*inputs) for inputs in rotated_inputs(shape, bench.device, bench.seed)]


def fla_backward(name: str, shape: Shape, bench: Bench) -> tuple[Callable, list[tuple]]:
    """The backward of a Triton kernel of flash-linear-attention (the extra `bench`), on bf16 in the same layout."""
    from fla.ops import based as fla_based  # an optional package, and slow to import

    return backward_of(getattr(fla_based, name), shape, bench)


def torch_backward(shape: Shape, bench: Bench) -> tuple[Callable, list[tuple]]:
    """This package's own torch path."""
    return functools.partial(based_backward, backend="torch"), rotated_inputs(shape, bench.device, bench.seed)


BASELINES: dict[str, Callable[[Shape, Bench], tuple[Callable, list[tuple]]]] = {
    "fla parallel_based": functools.partial(fla_backward, "parallel_based"),
    "fla fused_chunk_based": functools.partial(fla_backward, "fused_chunk_based"),
    "autograd, fp32 chunks": functools.partial(backward_of, chunked_forward),
    "torch path": torch_backward,
}


# ---------------------------------------------------------------------------------------------------------------------
# From records to text

HEADER = ("B, T, H, K, V", "ms", "sustained ms", "TFLOP/s", "floor ms", "of floor", "error dq / dk / dv")


def shape_text(shape: Sequence[int]) -> str:
    """A shape for a table cell."""
    return ", ".join(map(str, shape))


def error_text(errors: Sequence[float]) -> str:
    """The errors of dq, dk and dv for a table cell."""
    return " / ".join(f"{1e3 * error:.2f}e-3" for error in errors)


def table_row(record: Record) -> tuple[str, ...]:
    """The cells of one "backward" record under HEADER."""
    return (
        shape_text(record["shape"]),
        f"{record['ms']:.3f}",
        f"{record['sustained_ms']:.3f}" if "sustained_ms" in record else "",
        f"{record['tflops']:.0f}",
        f"{record['floor_ms']:.3f}",
        f"{100 * record['floor_ms'] / record['ms']:.0f} %",
        error_text(record["err"]),
    )


def notes(records: Sequence[Record]) -> list[str]:
    """What stands under the table: the machine and its own rates, host time per call, one sentence per baseline."""
    sentences = {"host_call": host_sentence, "baseline": baseline_sentence}
    backward = [record for record in records if record["op"] == "backward"]
    machine = [machine_sentence(record) for record in backward[:1]]
    return machine + [sentences[record["op"]](record) for record in records if record["op"] in sentences]


def machine_sentence(record: Record) -> str:
    """Where a "backward" record was measured, and the rates behind its floor."""
    versions = f"torch {record['torch']}, CuTe DSL {record['dsl']}, kernels {record['sources_sha256'][:12]}"
    rates = f"{record['copy_tb_s']:.2f} TB/s copy and {record['matmul_tflops']:.0f} TFLOP/s product"
    return f"{record['device']}, {versions}; floors from its own {rates}."


def host_sentence(record: Record) -> str:
    """One "host_call" record."""
    return f"Host time of one call at ({shape_text(record['shape'])}): {record['us']:.0f} us."


def baseline_sentence(record: Record) -> str:
    """One "baseline" record."""
    subject = f"{record['system']} at ({shape_text(record['shape'])})"
    if "reason" in record:
        return f"{subject}: no time ({record['reason']})."
    return f"{subject}: {record['ms']:.3g} ms, {record['tflops']:.3g} TFLOP/s, errors {error_text(record['err'])}."


def markdown(records: Sequence[Record]) -> str:
    """The table of README.md, from the records of a JSON file."""
    rows = [HEADER, ("---", *("---:",) * (len(HEADER) - 2), "---")]
    rows += [table_row(record) for record in records if record["op"] == "backward"]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes(records))])
