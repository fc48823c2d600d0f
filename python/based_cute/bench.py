"""Timing of the forward, the backward and both through autograd ("train") on a CUDA card, beside the floors that the same
card sets in the same run.

One method for our own calls, for the baselines and for the card's own rates:

* CUDA events around every call and no synchronisation in between; the median and the minimum of 30 calls after half a
  second's rest and warm-up.
* L2-cold inputs. Calls rotate through input sets, at least two and together more than three times the L2, so that
  nothing of a set is left in the cache when its turn comes again. Flushing the cache between calls would do too, but it
  leaves dirty lines whose write-back then falls into the timed call.
* A shape is timed only after its output and gradients passed `accuracy.check_shape` on the same card.

Floors count what the passes must move and multiply (docs/performance.md); TFLOP/s are canonical, from the shape alone.
"""

import functools
import importlib.metadata
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import accuracy, reference
from .accuracy import Shape
from .kernels.build import sources_sha256
from .kernels.config import NORMALISER_WORDS, uncut_way
from .launcher import based_attention, based_backward

CHUNK = 64  # the chunk that both the canonical FLOPs and the floor's chunk-quadratic products are counted with
CALLS = 30
WARM_UP = 3
REST = 0.5  # seconds before a burst: the card throttles on power, and a check or a sustained run has just loaded it
HOST_CALLS = 100  # two launches each at most: below the depth of the launch queue, so the host never waits for the card
HOST_BURSTS = 10  # on each CPU core
L2_MULTIPLE = 3
COPY_BYTES = 4 << 30
MATMUL_SIZE = 8192

OPS = ("forward", "backward", "train")  # train: forward and backward through autograd
SOFTMAX_HEAD_DIM = 128  # of the softmax attention that a training step is compared with

DSL = "nvidia-cutlass-dsl"  # the distribution whose version a record carries

Record = dict[str, object]


class RedCheck(RuntimeError):
    """The gradients of a shape failed their check, so it has no time."""


def canonical_flops(shape: Shape, op: str = "backward") -> int:
    """The FLOPs that TFLOP/s are quoted in: a forward with chunk 64 and the full 1 + K + K^2 features; twice that, W, for the
    backward, and thrice for both."""
    batch, length, heads, key_dim, value_dim = shape
    terms = 1 + key_dim + key_dim**2
    forward = batch * heads * length * (4 * terms * value_dim + 2 * CHUNK * (key_dim + value_dim))
    return {"forward": 1, "backward": 2, "train": 3}[op] * forward


def bytes_per_token(key_dim: int, value_dim: int, op: str = "backward") -> int:
    """Global-memory bytes that an op must move per token: bf16 tensors, and in fp32 what a backward's kernels pass on."""
    output = 2 * (2 * key_dim + 2 * value_dim)  # q, k, v in, o out
    inputs = 2 * (2 * key_dim + 2 * value_dim)  # q, k, v, do
    gradients = 2 * (2 * key_dim + value_dim)  # dq, dk, dv
    if uncut_way("backward", key_dim, value_dim) == "swept":
        # k and v by the first pass, the normaliser before each chunk, all inputs by the sweep
        backward = 2 * (key_dim + value_dim) + 2 * 4 * NORMALISER_WORDS // CHUNK + inputs + gradients
    else:
        # all inputs by each scan, r and h from one to the other
        backward = 2 * inputs + 2 * 2 * 4 + gradients
    return {"forward": output, "backward": backward, "train": output + backward}[op]


def flops_per_token(key_dim: int, value_dim: int, op: str = "backward") -> int:
    """Tensor-core FLOPs of an op per token, with the packed symmetric features padded to a k-step of 16."""
    distinct = 1 + key_dim + key_dim * (key_dim + 1) // 2
    features = -(-distinct // 16) * 16  # 160 for K = 16, 48 for K = 8
    state, keys, values = 2 * features * value_dim, 2 * CHUNK * key_dim, 2 * CHUNK * value_dim  # FLOPs of one product each
    output = 2 * state + keys + values  # S update, psi(q) S; s; A v
    if uncut_way("backward", key_dim, value_dim) == "swept":
        # S update in both passes, Y, W, phi(k) dS, dS update; s, ds k, ds^T q; dA, A^T do
        backward = 6 * state + 3 * keys + 2 * values
    else:
        # Y, S update, W, phi(k) dS, dS update; s, s^T, ds k, ds^T q; dA, dA^T, A^T do
        backward = 5 * state + 4 * keys + 3 * values
    return {"forward": output, "backward": backward, "train": output + backward}[op]


@dataclass(frozen=True)
class Card:
    """The rates that a CUDA device reached in this run: bytes/s of a copy (read plus written), FLOP/s of a product."""

    copy_rate: float
    matmul_rate: float

    def floor_ms(self, shape: Shape, op: str = "backward") -> float:
        """The time below which an op cannot go on this card: the larger of its byte and its FLOP bound."""
        batch, length, heads, key_dim, value_dim = shape
        by_bytes = bytes_per_token(key_dim, value_dim, op) / self.copy_rate
        by_flops = flops_per_token(key_dim, value_dim, op) / self.matmul_rate
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


def host_microseconds(call: Callable, inputs: tuple) -> tuple[float, float]:
    """Host time of one call: dispatch, checks, allocation and launches, without waiting for the card. In the fastest of bursts
    on every CPU core that the process may use, which is what the code takes, and in the median one: a virtual core shares a
    physical one, where a busy neighbour makes the same calls take twice as long."""
    for _ in range(WARM_UP):
        call(*inputs)
    bursts = [burst_microseconds(call, inputs) for _ in on_every_core() for _ in range(HOST_BURSTS)]
    return min(bursts), statistics.median(bursts)


def on_every_core() -> Iterator[None]:
    """Once for each CPU core that the process may use, with this thread bound to it; once where threads cannot be bound, as on
    macOS and Windows."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    try:
        for core in sorted(cores):
            os.sched_setaffinity(0, {core})
            yield
    finally:
        os.sched_setaffinity(0, cores)


def burst_microseconds(call: Callable, inputs: tuple) -> float:
    """Of a call, in one burst."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(HOST_CALLS):
        call(*inputs)
    microseconds = 1e6 * (time.perf_counter() - begin) / HOST_CALLS
    torch.cuda.synchronize()
    return microseconds


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

    def checked(self, shape: Shape) -> accuracy.CheckResult:
        """The check of a shape, without which nothing is timed. Raises RedCheck when it fails."""
        result = accuracy.check_shape(shape, self.backend, self.device, seed=self.seed)
        if not result.passed:
            raise RedCheck(f"{shape}: {result.reason}; not timed. See `based-cute check {','.join(map(str, shape))}`")
        return result

    def timed(self, shape: Shape, op: str, result: accuracy.CheckResult) -> Record:
        """Time one op of a shape whose check, `result`, is green."""
        call, arguments = own_call(op, self.backend)
        inputs = [inputs[:arguments] for inputs in rotated_inputs(shape, self.device, self.seed)]
        torch.cuda.synchronize()
        time.sleep(REST)
        times = time_calls(call, inputs)
        burst = statistics.median(times)
        measured = {
            "ms": burst,
            "ms_min": min(times),
            "tflops": canonical_flops(shape, op) / (1e9 * burst),
            "floor_ms": self.card.floor_ms(shape, op),
            "err": list(result.errors[QUANTITIES_OF[op]]),
            "backend": result.backend,
            "copy_tb_s": 1e-12 * self.card.copy_rate,
            "matmul_tflops": 1e-12 * self.card.matmul_rate,
        }
        if self.sustained and op == "backward":
            measured["sustained_ms"] = sustained_ms(call, inputs, self.sustained, burst)
        return self.record(shape, op, **measured)

    def host_call(self, key_dim: int, value_dim: int, op: str) -> Record:
        """Host microseconds of one call at (1, 64, 1, K, V), where the card has next to nothing to do."""
        shape = (1, 64, 1, key_dim, value_dim)
        call, arguments = own_call(op, self.backend)
        inputs = accuracy.make_inputs(shape, self.device, self.seed)[:arguments]
        fastest, median = host_microseconds(call, inputs)
        return self.record(shape, "host_call", timed=op, us=fastest, us_median=median)

    def baseline(self, shape: Shape, system: str, op: str = "backward") -> Record:
        """Time an op of another system. What it raises is recorded as a sentence, never as a number."""
        try:
            baseline = BASELINES[op][system]
            call, inputs = baseline.prepare(shape, self)
            ms = statistics.median(time_calls(call, inputs))
            measured = {"ms": ms}
            if baseline.same_function:
                measured["tflops"] = canonical_flops(shape, op) / (1e9 * ms)
                measured["err"] = self.baseline_errors(shape, op, call(*inputs[0]))
        except Exception as error:  # foreign code: a missing package, a compile error and a full memory all end here
            measured = {"reason": f"{type(error).__name__}: {error}".splitlines()[0]}
        return self.record(shape, "baseline", timed=op, system=system, **measured)

    def baseline_errors(self, shape: Shape, op: str, results: object) -> list[float]:
        """Errors of a baseline's results on the first input set. Raises ArithmeticError unless all are finite."""
        q, k, v, do = accuracy.make_inputs(shape, self.device, self.seed)
        results = results if isinstance(results, tuple) else (results,)
        gold = (accuracy.gold_output(q, k, v),) if op == "forward" else accuracy.gold_gradients(q, k, v, do)
        errors = accuracy.measure_errors(results, gold)
        if not all(map(math.isfinite, errors)):
            raise ArithmeticError("its results are not finite")
        return list(errors)

    def records(self, shapes: Sequence[Shape], ops: Sequence[str], baselines: bool) -> Iterator[Record | RedCheck]:
        """Everything asked for, one at a time; a red shape yields its RedCheck and no record."""
        green: dict[tuple[int, int], None] = {}  # the (K, V) that passed, once each and in order
        for shape in shapes:
            try:
                result = self.checked(shape)
            except RedCheck as red:
                yield red
                continue
            green[shape[3:]] = None
            for op in ops:
                yield self.timed(shape, op, result)
                for system in BASELINES[op] if baselines else ():
                    yield self.baseline(shape, system, op)
        for key_dim, value_dim in green:
            for op in ops:
                yield self.host_call(key_dim, value_dim, op)


QUANTITIES_OF = {"forward": slice(0, 1), "backward": slice(1, None), "train": slice(None)}  # of accuracy.QUANTITIES


def own_call(op: str, backend: str) -> tuple[Callable, int]:
    """What is timed for an op, and how many of (q, k, v, do) it takes."""
    call, arguments = {"forward": (based_attention, 3), "backward": (based_backward, 4), "train": (accuracy.train_step, 4)}[op]
    return functools.partial(call, backend=backend), arguments


# ---------------------------------------------------------------------------------------------------------------------
# Baselines

Prepared = tuple[Callable, list[tuple]]  # a call and its input sets


@dataclass(frozen=True)
class Baseline:
    """Another system: `prepare(shape, bench)` readies the calls; what computes another function has a time alone."""

    prepare: Callable[[Shape, Bench], Prepared]
    same_function: bool = True


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


def forward_of(forward: Callable, shape: Shape, bench: Bench) -> Prepared:
    """Time `forward` alone."""
    return forward, [inputs[:3] for inputs in rotated_inputs(shape, bench.device, bench.seed)]


def backward_of(forward: Callable, shape: Shape, bench: Bench) -> Prepared:
    """Time the backward of `forward` alone: one graph per input set, kept from call to call."""

    def graph(q, k, v, do):
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o = forward(*leaves)
        return o, leaves, do.to(o.dtype)

    call = functools.partial(torch.autograd.grad, retain_graph=True)
    return call, [graph(*inputs) for inputs in rotated_inputs(shape, bench.device, bench.seed)]


def train_of(forward: Callable, shape: Shape, bench: Bench) -> Prepared:
    """Time `forward` and its backward together."""

    def call(q, k, v, do):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = forward(*leaves)
        return torch.autograd.grad(o, leaves, do.to(o.dtype))

    return call, rotated_inputs(shape, bench.device, bench.seed)


def fla(time_of: Callable, name: str) -> Baseline:
    """A Triton kernel of flash-linear-attention (the extra `bench`), on bf16 in the same layout."""

    def prepare(shape: Shape, bench: Bench) -> Prepared:
        from fla.ops import based as fla_based  # an optional package, and slow to import

        return time_of(getattr(fla_based, name), shape, bench)

    return Baseline(prepare)


def softmax(time_of: Callable) -> Baseline:
    """Causal softmax attention by cuDNN at head dimension 128, with the same B, T and H: what a model would run instead."""

    def forward(q, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)

    def prepare(shape: Shape, bench: Bench) -> Prepared:
        return time_of(forward, (*shape[:3], SOFTMAX_HEAD_DIM, SOFTMAX_HEAD_DIM), bench)

    return Baseline(prepare, same_function=False)


def torch_backward(shape: Shape, bench: Bench) -> Prepared:
    """This package's own torch path."""
    return functools.partial(based_backward, backend="torch"), rotated_inputs(shape, bench.device, bench.seed)


SOFTMAX = f"softmax attention (SDPA, cuDNN, head dim {SOFTMAX_HEAD_DIM})"
BASELINES: dict[str, dict[str, Baseline]] = {
    "forward": {"fla parallel_based": fla(forward_of, "parallel_based"), SOFTMAX: softmax(forward_of)},
    "backward": {
        "fla parallel_based": fla(backward_of, "parallel_based"),
        "fla fused_chunk_based": fla(backward_of, "fused_chunk_based"),
        "autograd, fp32 chunks": Baseline(functools.partial(backward_of, chunked_forward)),
        "torch path": Baseline(torch_backward),
    },
    "train": {
        "fla parallel_based": fla(train_of, "parallel_based"),
        "fla fused_chunk_based": fla(train_of, "fused_chunk_based"),
        SOFTMAX: softmax(train_of),
    },
}


# ---------------------------------------------------------------------------------------------------------------------
# From records to text

HEADER = ("B, T, H, K, V", "ms", "sustained ms", "TFLOP/s", "floor ms", "of floor", "error {}")
TITLES = {"forward": "Forward", "backward": "Backward", "train": "Forward and backward through autograd"}


def shape_text(shape: Sequence[int]) -> str:
    """A shape for a table cell."""
    return ", ".join(map(str, shape))


def error_text(errors: Sequence[float]) -> str:
    """Errors for a table cell."""
    return " / ".join(f"{1e3 * error:.2f}e-3" for error in errors)


def header(op: str) -> tuple[str, ...]:
    """The column heads of an op's table."""
    return *HEADER[:-1], HEADER[-1].format(" / ".join(accuracy.QUANTITIES[QUANTITIES_OF[op]]))


def ops_of(records: Sequence[Record]) -> list[str]:
    """The ops that have records, in the order of OPS."""
    return [op for op in OPS if any(record["op"] == op for record in records)]


def table_rows(records: Sequence[Record], op: str) -> list[tuple[str, ...]]:
    """The rows of an op's table."""
    return [table_row(record) for record in records if record["op"] == op]


def table_row(record: Record) -> tuple[str, ...]:
    """The cells of one timed record under its header."""
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
    """What stands under the tables: the machine and its own rates, host time per call, one sentence per baseline."""
    sentences = {"host_call": host_sentence, "baseline": baseline_sentence}
    timed = [record for record in records if record["op"] in OPS]
    machine = [machine_sentence(record) for record in timed[:1]]
    return machine + [sentences[record["op"]](record) for record in records if record["op"] in sentences]


def machine_sentence(record: Record) -> str:
    """Where a timed record was measured, and the rates behind its floor."""
    versions = f"torch {record['torch']}, CuTe DSL {record['dsl']}, kernels {record['sources_sha256'][:12]}"
    rates = f"{record['copy_tb_s']:.2f} TB/s copy and {record['matmul_tflops']:.0f} TFLOP/s product"
    return f"{record['device']}, {versions}; floors from its own {rates}."


def host_sentence(record: Record) -> str:
    """One "host_call" record; older ones have a mean alone."""
    median = f" in the fastest burst, {record['us_median']:.0f} in the median one" if "us_median" in record else ""
    return f"Host time of one call ({record['timed']}) at ({shape_text(record['shape'])}): {record['us']:.1f} us{median}."


def baseline_sentence(record: Record) -> str:
    """One "baseline" record."""
    subject = f"{record['system']}, {record['timed']} at ({shape_text(record['shape'])})"
    if "reason" in record:
        return f"{subject}: no time ({record['reason']})."
    rest = f", {record['tflops']:.3g} TFLOP/s, errors {error_text(record['err'])}" if "err" in record else ""
    return f"{subject}: {record['ms']:.3g} ms{rest}."


def markdown(records: Sequence[Record]) -> str:
    """The tables of README.md, one per op, from the records of a JSON file."""
    lines = []
    for op in ops_of(records):
        rows = [header(op), ("---", *("---:",) * (len(HEADER) - 2), "---"), *table_rows(records, op)]
        lines += [f"**{TITLES[op]}**", "", *(f"| {' | '.join(row)} |" for row in rows), ""]
    return "\n".join([*lines, *(f"- {note}" for note in notes(records))])
