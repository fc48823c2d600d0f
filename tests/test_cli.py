"""The command line: exit codes, JSON, and the arithmetic of a benchmark record. Only the last test needs a GPU."""

import contextlib
import functools
import json
import math
import os
import re
import subprocess
import sys
import time

import pytest
import torch
from click.testing import CliRunner

from based_cute import accuracy, bench, cli, launcher
from based_cute.kernels.config import ROWS
from based_cute.kernels.features import feature_count

SMALL = "1,65,1,8,64"  # two chunks, one of them a single token
CARD = bench.Card(copy_rate=4.25e12, matmul_rate=793e12)  # what the budget tables of the H200 were computed with


def invoke(*arguments: str):
    return CliRunner().invoke(cli.main, arguments)


# ---------------------------------------------------------------------------------------------------------------------
# check


def test_check_passes_and_names_the_path():
    result = invoke("check", SMALL, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "torch path on cpu" in result.output
    assert "1 passed, 0 failed" in result.output


def test_check_without_shapes_takes_the_correctness_shapes(monkeypatch):
    monkeypatch.setattr(accuracy, "check_shape", fake_check())
    result = invoke("check", "--json", "-")
    assert [tuple(record["shape"]) for record in json.loads(result.stdout)] == list(accuracy.CORRECTNESS_SHAPES)


def test_check_json_holds_the_errors_and_their_origin():
    result = invoke("check", SMALL, "--device", "cpu", "--json", "-")
    (record,) = json.loads(result.stdout)
    assert record["shape"] == [1, 65, 1, 8, 64] and record["passed"] and record["backend"] == "torch"
    assert record["of"] == ["o", "dq", "dk", "dv"]
    assert len(record["err"]) == len(record["yardstick"]) == 4
    assert all(0 < error <= accuracy.NORMAL_INPUT_LIMIT for error in record["err"])
    assert record["torch"] == torch.__version__ and re.fullmatch("[0-9a-f]{64}", record["sources_sha256"])
    assert "passed" in result.stderr  # the table makes way


def test_check_json_goes_to_a_file(tmp_path):
    path = tmp_path / "new" / "check.json"
    assert invoke("check", SMALL, "--device", "cpu", "--json", str(path)).exit_code == 0
    assert json.loads(path.read_text())[0]["op"] == "check"


def test_check_fails_on_a_wrong_gradient(monkeypatch):
    monkeypatch.setattr(launcher, "_run_reference", spoiled_reference(lambda dv: dv * 1.01))
    result = invoke("check", SMALL, "--device", "cpu", "--backend", "torch")
    assert result.exit_code == 1
    assert "FAILED" in result.output and "dv: got relative error" in result.output


def test_check_fails_on_nan_and_writes_valid_json(monkeypatch):
    monkeypatch.setattr(launcher, "_run_reference", spoiled_reference(lambda dv: dv * math.nan))
    result = invoke("check", SMALL, "--device", "cpu", "--backend", "torch", "--json", "-")
    assert result.exit_code == 1
    (record,) = json.loads(result.stdout, parse_constant=pytest.fail)
    assert record["err"][3] is None and not record["passed"]


@pytest.mark.parametrize("text", ["1,2,3", "1,64,1,8,x", "1,64,1,8,0", "1,64,1,8,64,2", "1x64x1x8x64"])
def test_a_bad_shape_is_a_usage_error(text):
    result = invoke("check", text)
    assert result.exit_code == 2
    assert f"got '{text}'" in result.output and "need five positive integers" in result.output


def test_cute_where_the_kernels_cannot_run_is_one_sentence(monkeypatch):
    monkeypatch.setattr(launcher, "which_backend", lambda *where: ("torch", "the reason"))
    result = invoke("check", SMALL, "--device", "cpu", "--backend", "cute")
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == "Error: --backend cute: the reason; use --backend torch or auto"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_device_cuda_without_cuda_is_one_sentence():
    result = invoke("check", SMALL, "--device", "cuda")
    assert result.exit_code == 1 and "use --device cpu" in result.output


def test_module_runs_as_a_command():
    run = subprocess.run([sys.executable, "-m", "based_cute", "--help"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("Usage: based-cute")


def spoiled_reference(spoil):
    """`launcher._run_reference` with its dv changed."""
    right = launcher._run_reference

    def wrong(*arguments):
        dq, dk, dv = right(*arguments)
        return dq, dk, spoil(dv)

    return wrong


def fake_check(passed: bool = True):
    """`accuracy.check_shape` that computes nothing."""

    def check_shape(shape, backend, device, seed=0, progress=None):
        reason = "" if passed else "dq: off"
        return accuracy.CheckResult(shape, "torch", (1e-3, 1e-3, 1e-3, 2e-3), (1e-3,) * 4, passed, reason)

    return check_shape


# ---------------------------------------------------------------------------------------------------------------------
# bench: arithmetic

BUDGET = {  # shape: canonical TFLOP, ms of the bytes, ms of the FLOPs, at the rates of CARD
    (4, 8192, 32, 16, 128): (0.332, 0.367, 0.339),
    (6, 8192, 24, 16, 128): (0.373, 0.413, 0.381),
    (4, 8192, 24, 16, 128): (0.249, 0.275, 0.254),
    (8, 4096, 16, 16, 128): (0.166, 0.184, 0.169),
    (4, 8192, 32, 16, 64): (0.168, 0.209, 0.176),
    (6, 4096, 32, 16, 128): (0.249, 0.275, 0.254),
    (4, 8192, 32, 8, 128): (0.115, 0.274, 0.142),
    (8, 8192, 32, 8, 128): (0.230, 0.549, 0.284),
}


@pytest.mark.parametrize("shape", BUDGET)
def test_canonical_flops_and_floor_agree_with_the_budget(shape):
    batch, length, heads, key_dim, value_dim = shape
    canonical, by_bytes, by_flops = BUDGET[shape]
    assert bench.canonical_flops(shape) / 1e12 == pytest.approx(canonical, abs=6e-4)
    assert CARD.floor_ms(shape) == pytest.approx(by_bytes, abs=1.5e-3)
    # The budget counts the terms quadratic in the chunk up to 2.5 % lower; bytes decide every floor anyway.
    flops_ms = 1e3 * batch * length * heads * bench.flops_per_token(key_dim, value_dim) / CARD.matmul_rate
    assert flops_ms == pytest.approx(by_flops, rel=0.03) and flops_ms < by_bytes


def test_forward_and_training_floors():
    shape = (4, 8192, 32, 16, 128)
    assert CARD.floor_ms(shape, "forward") == pytest.approx(0.142, abs=5e-4)
    assert CARD.floor_ms(shape, "train") == pytest.approx(CARD.floor_ms(shape, "forward") + CARD.floor_ms(shape))
    assert bench.canonical_flops(shape, "train") == 3 * bench.canonical_flops(shape, "forward")
    assert bench.bytes_per_token(16, 128, "forward") == 2 * (16 + 16 + 128 + 128)


def test_bytes_per_token():
    # K = 16, V = 128: 2 x 576 in, 16 of r and h, 320 out; K = 8: 272 of k and v, 9 of normalisers, 544 in, 288 out
    assert bench.bytes_per_token(16, 128) == 1152 + 16 + 320
    assert bench.bytes_per_token(8, 128) == 272 + 9 + 544 + 288


@pytest.mark.parametrize("key_dim", [8, 16])
def test_flops_count_the_features_that_the_kernels_have(key_dim):
    per_value = (bench.flops_per_token(key_dim, 128) - bench.flops_per_token(key_dim, 64)) / 64
    states, products = {8: (6, 2), 16: (5, 3)}[key_dim]  # of the features, and quadratic in the chunk
    assert per_value == 2 * states * feature_count(key_dim) + 2 * products * bench.CHUNK


def test_a_card_with_slow_products_is_bound_by_flops():
    slow = bench.Card(copy_rate=1e15, matmul_rate=1e12)
    assert slow.floor_ms((1, 1, 1, 16, 128)) == pytest.approx(1e-9 * bench.flops_per_token(16, 128))


@pytest.mark.parametrize("shape", [(1, 512, 4, 16, 128), (4, 8192, 32, 16, 128), (1, 1, 1, 8, 64)])
def test_input_sets_outgrow_the_l2(shape):
    l2_bytes = 60 << 20
    batch, length, heads, key_dim, value_dim = shape
    count = bench.input_sets(shape, l2_bytes)
    assert count >= 2 and count * 4 * batch * length * heads * (key_dim + value_dim) > 3 * l2_bytes


# ---------------------------------------------------------------------------------------------------------------------
# bench: records


class FakeEvent:
    """torch.cuda.Event on the host's clock."""

    def __init__(self, enable_timing):
        self.seconds = None

    def record(self):
        self.seconds = time.perf_counter()

    def elapsed_time(self, stop):
        return 1e3 * (stop.seconds - self.seconds)


@pytest.fixture
def host_bench(monkeypatch):
    """A Bench whose card is the CPU: real calls and records, times of no meaning."""

    def one_set(shape, device, seed):
        return [accuracy.make_inputs(shape, device, seed)]

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bench, "rotated_inputs", one_set)
    monkeypatch.setattr(bench, "HOST_CALLS", 2)
    return bench.Bench(torch.device("cpu"), CARD, sustained=1e-3)


@pytest.mark.parametrize(("op", "quantities"), [("forward", 1), ("backward", 3), ("train", 4)])
def test_timed_record(host_bench, op, quantities):
    shape = (1, 65, 1, 8, 64)
    record = host_bench.timed(shape, op, host_bench.checked(shape))
    expected = {"shape", "op", "ms", "ms_min", "tflops", "floor_ms", "err", "device", "torch", "dsl"}
    assert expected | {"sources_sha256"} <= set(record)
    assert ("sustained_ms" in record) == (op == "backward")
    assert record["shape"] == list(shape) and record["op"] == op and record["backend"] == "torch"
    assert 0 < record["ms_min"] <= record["ms"] and len(record["err"]) == quantities
    assert record["tflops"] == pytest.approx(bench.canonical_flops(shape, op) / record["ms"] / 1e9)


def test_a_red_shape_is_not_timed(host_bench, monkeypatch):
    monkeypatch.setattr(accuracy, "check_shape", fake_check(passed=False))
    monkeypatch.setattr(bench, "time_calls", lambda *arguments: pytest.fail("timed a red shape"))
    (outcome,) = host_bench.records([(1, 65, 1, 8, 64)], bench.OPS, baselines=True)
    assert isinstance(outcome, bench.RedCheck) and "dq: off" in str(outcome)


def test_host_time_is_recorded_once_per_pair(host_bench, monkeypatch):
    monkeypatch.setattr(accuracy, "check_shape", fake_check())
    shapes = [(1, 1, 1, 8, 64), (1, 2, 1, 8, 64)]
    records = list(host_bench.records(shapes, ["forward", "train"], baselines=False))
    assert [record["op"] for record in records] == ["forward", "train"] * 2 + ["host_call"] * 2
    assert [record["timed"] for record in records[-2:]] == ["forward", "train"]
    assert records[-1]["shape"] == [1, 64, 1, 8, 64] and 0 < records[-1]["us"] <= records[-1]["us_median"]


def test_host_time_is_the_fastest_burst_of_all_cores(monkeypatch):
    bound = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: bound.append(cores), raising=False)
    monkeypatch.setattr(bench, "burst_microseconds", lambda call, inputs: 9.0 + len(bound))
    assert bench.host_microseconds(max, (1, 2)) == (10.0, 11.0)
    assert bound == [{0}, {1}, {2}, {0, 1, 2}]
    monkeypatch.delattr(os, "sched_setaffinity")
    assert bench.host_microseconds(max, (1, 2)) == (13.0, 13.0)  # of bursts on the core that it is on


def test_autograd_baseline_computes_the_same_gradients(host_bench):
    record = host_bench.baseline((2, 130, 2, 8, 64), "autograd, fp32 chunks")
    assert "reason" not in record and max(record["err"]) < 2e-3


def test_a_baseline_that_raises_is_a_sentence(host_bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.ops", None)
    record = host_bench.baseline((1, 64, 1, 8, 64), "fla parallel_based")
    assert "ms" not in record and record["reason"].startswith("ModuleNotFoundError")
    assert "no time (ModuleNotFoundError" in bench.notes([record])[0]


def test_a_baseline_with_nan_is_a_sentence(host_bench, monkeypatch):
    poisoned = functools.partial(bench.backward_of, lambda q, k, v: v * q.sum() * k.sum() * math.nan)
    monkeypatch.setitem(bench.BASELINES["backward"], "poisoned", bench.Baseline(poisoned))
    record = host_bench.baseline((1, 64, 1, 8, 64), "poisoned")
    assert "reason" in record and "not finite" in record["reason"]


@pytest.mark.parametrize("op", ["forward", "train"])
def test_baselines_time_the_same_function(host_bench, monkeypatch, op):
    time_of = {"forward": bench.forward_of, "train": bench.train_of}[op]
    monkeypatch.setitem(
        bench.BASELINES[op], "fp32", bench.Baseline(functools.partial(time_of, bench.chunked_forward))
    )
    record = host_bench.baseline((2, 130, 2, 8, 64), "fp32", op)
    assert "reason" not in record and max(record["err"]) < 2e-3
    assert len(record["err"]) == {"forward": 1, "train": 3}[op] and record["timed"] == op


@pytest.mark.parametrize("op", ["forward", "train"])
def test_softmax_baseline_has_a_time_and_no_error(host_bench, monkeypatch, op):
    monkeypatch.setattr(bench, "sdpa_kernel", lambda backend: contextlib.nullcontext())  # cuDNN is not on the CPU
    record = host_bench.baseline((1, 70, 2, 8, 64), bench.SOFTMAX, op)
    assert record["ms"] > 0 and not {"err", "tflops", "reason"} & set(record)
    assert bench.notes([record])[0].endswith(" ms.")


def test_bench_command_writes_what_it_measured_and_fails_on_red(host_bench, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cli, "torch_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(bench, "measure_card", lambda device: CARD)
    path = tmp_path / "record.json"
    assert invoke("bench", "1,65,1,8,64", "--op", "backward", "--json", str(path)).exit_code == 0
    assert [record["op"] for record in json.loads(path.read_text())] == ["backward", "host_call"]
    assert invoke("bench", "1,65,1,8,64", "--json", str(path)).exit_code == 0
    assert [record["op"] for record in json.loads(path.read_text())] == [*bench.OPS, *["host_call"] * 3]
    monkeypatch.setattr(accuracy, "check_shape", fake_check(passed=False))
    result = invoke("bench", "1,65,1,8,64", "--json", "-")
    assert result.exit_code == 1 and json.loads(result.stdout) == [] and "not timed" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_bench_without_cuda_says_so():
    result = invoke("bench")
    assert result.exit_code == 1
    assert "got no CUDA device" in result.output and "based-cute check" in result.output


# ---------------------------------------------------------------------------------------------------------------------
# bench: text

RECORD = {
    "shape": [4, 8192, 32, 16, 128], "op": "backward", "ms": 0.5, "ms_min": 0.49, "sustained_ms": 0.6, "tflops": 663.6,
    "floor_ms": 0.25, "err": [1e-3, 2e-3, 3e-3], "copy_tb_s": 4.25, "matmul_tflops": 793.0,
    "device": "a card", "torch": "2", "dsl": "4", "sources_sha256": "ab" * 32,
}  # fmt: skip
HOST = {"shape": [1, 64, 1, 16, 128], "op": "host_call", "timed": "backward", "us": 14.26, "us_median": 21.4}


def test_markdown_of_a_json_file(tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps([RECORD, {**RECORD, "op": "train", "err": [1e-3] * 4}, HOST]))
    lines = invoke("bench", "--from-json", str(path), "--markdown").output.splitlines()
    assert lines[0] == "**Backward**" and lines[2].endswith("| of floor | error dq / dk / dv |")
    assert lines[3] == "| --- | ---: | ---: | ---: | ---: | ---: | --- |"
    assert lines[4] == "| 4, 8192, 32, 16, 128 | 0.500 | 0.600 | 664 | 0.250 | 50 % | 1.00e-3 / 2.00e-3 / 3.00e-3 |"
    assert lines[6] == "**Forward and backward through autograd**" and lines[8].endswith("| error o / dq / dk / dv |")
    assert lines[12].startswith("- a card, torch 2, CuTe DSL 4, kernels abababababab;") and "4.25 TB/s" in lines[12]
    host = "- Host time of one call (backward) at (1, 64, 1, 16, 128): 14.3 us in the fastest burst, 21 in the median one."
    assert lines[13] == host


def test_table_of_a_json_file(tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps([RECORD]))
    assert "4, 8192, 32, 16, 128" in invoke("bench", "--from-json", str(path)).output


# ---------------------------------------------------------------------------------------------------------------------
# info


def test_info_json_lists_every_row():
    result = invoke("info", "--json", "-")
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert {"based-cute", "torch", "cuda", "nvidia-cutlass-dsl", "apache-tvm-ffi"} == set(report["versions"])
    assert [row["name"] for row in report["rows"]] == [row.name for row in ROWS]
    assert all(row["registers"] and row["shared_memory"] for row in report["rows"])
    assert re.fullmatch("[0-9a-f]{64}", report["sources_sha256"]) and report["routes"]


def test_info_shows_what_its_json_holds():
    report, shown = json.loads(invoke("info", "--json", "-").stdout), invoke("info").output
    assert report["sources_sha256"] in shown and report["versions"]["nvidia-cutlass-dsl"] in shown
    assert all(f"{row['scan']} K={row['key_dim']} V={row['value_dim']}" in shown for row in report["rows"])


# ---------------------------------------------------------------------------------------------------------------------
# On the card


@pytest.mark.gpu
def test_bench_on_the_card():
    result = invoke("bench", "1,512,4,16,128", "--sustained", "0.01", "--json", "-")
    assert result.exit_code == 0, result.output
    *timed, _, _, host = json.loads(result.stdout)
    assert [record["op"] for record in timed] == list(bench.OPS)
    for record in timed:
        assert record["backend"] == "cute" and record["ms"] > record["floor_ms"] > 0
    assert timed[bench.OPS.index("backward")]["sustained_ms"] > 0
    assert host["us"] > 0
