"""The compiled kernels on the PTX machine, launched by the launcher itself on CPU tensors: every row computes what the fp64
reference says, whatever the length and however the sequences are cut, and writes nothing else."""

import functools
import math

import pytest
import torch
from cases import (
    chained,
    cut_by,
    equal,
    every_row,
    handed_on,
    launch_on_cpu,
    launched,
    parted,
    scans,
    summed,
    uncut,
    with_two_key_sizes,
)

from based_cute import accuracy, launcher
from based_cute.kernels import config
from based_cute.kernels.schedule import HandsOn, Schedule

pytest.importorskip("cutlass", reason="the DSL has no wheel for this platform")

import compiled  # noqa: E402  (it imports nothing of the DSL, but compiles with it)
from compiled import emulated, without  # noqa: E402


@pytest.fixture(params=[False, True], ids=["early", "late"])
def machine(request, monkeypatch, poisoned_memory):
    """The launcher on CPU tensors, with kernels that run on the machine, asynchronous work done as early or as late as it may
    be, and outputs full of NaN."""
    launch_on_cpu(monkeypatch, functools.partial(emulated, late=request.param))


def results(inputs, scale=None):
    """o, r and the three gradients."""
    return *launched("forward", inputs[:3], scale), *launched("backward", inputs, scale)


def assert_accurate(found, inputs, scale=None):
    q, k, v, do = inputs
    o, _, *gradients = found
    floors = accuracy.cancellation_floors(*inputs, scale)
    assert max(accuracy.measure_errors((o,), (accuracy.gold_output(q, k, v, scale),))) <= accuracy.OUTPUT_LIMIT
    gold = accuracy.gold_gradients(*inputs, scale)
    assert max(accuracy.measure_errors(tuple(gradients), gold, floors)) <= accuracy.NORMAL_INPUT_LIMIT


@every_row
@pytest.mark.parametrize("length", [1, 63, 64, 65, 129, 300])
def test_every_row_at_every_kind_of_length(machine, monkeypatch, key_dim, value_dim, length):
    cut_by(monkeypatch, uncut)
    batch, heads = (4, 16) if length == 1 else (1, 2)  # rows enough for the norm of an error to be a mean
    inputs = accuracy.make_inputs((batch, length, heads, key_dim, value_dim), "cpu")
    assert_accurate(results(inputs), inputs)


@every_row
@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
def test_scale(machine, monkeypatch, key_dim, value_dim, scale):
    cut_by(monkeypatch, uncut)
    inputs = accuracy.make_inputs((1, 130, 1, key_dim, value_dim), "cpu")
    found = results(inputs, scale)
    if scale == 0:
        assert not found[2].any() and not found[3].any()  # dq and dk
    else:
        assert_accurate(found, inputs, scale)


@every_row
@pytest.mark.parametrize(("share", "runs"), [(1.3, 1), (2.5, 1), (9.0, 1), (1.3, 2)])
def test_chained_scans_are_bitwise_equal(machine, monkeypatch, key_dim, value_dim, share, runs):
    inputs = accuracy.make_inputs((2, 200, 2, key_dim, value_dim), "cpu")
    cut_by(monkeypatch, uncut)
    forward = launched("forward", inputs[:3])
    cut_by(monkeypatch, scans(key_dim, value_dim))
    expected = *forward, *launched("backward", inputs)
    cut_by(monkeypatch, chained(share, runs))
    assert equal(results(inputs), expected)


RINGS = max(config.find(scan, 8, value_dim).stages for scan in config.SWEEP for value_dim in (64, 128))


@pytest.mark.parametrize(
    ("value_dim", "length"),
    [
        (64, 64 * (RINGS + 2) - 5),  # both passes come round their stages, and the first its feature tiles
        (128, 64 * (RINGS + 2) - 5),
        (64, 64 * config.CHECKPOINT + 100),  # one state in the middle of the sequence, one at its end
    ],
)
def test_sweep_of_many_chunks(machine, monkeypatch, value_dim, length):
    cut_by(monkeypatch, uncut)
    inputs = accuracy.make_inputs((1, length, 1, 8, value_dim), "cpu")
    gradients = launched("backward", inputs)
    assert max(accuracy.measure_errors(gradients, accuracy.gold_gradients(*inputs))) <= accuracy.NORMAL_INPUT_LIMIT


@every_row
@pytest.mark.parametrize(
    "rule",
    [summed(1), summed(4), summed(2, 2), summed(3, 1), parted(1, 2), parted(2, 2)],
    ids=["each", "fours", "pairs in runs", "one run", "first", "first two"],
)
def test_summed_scans_are_accurate(machine, monkeypatch, key_dim, value_dim, rule):
    inputs = accuracy.make_inputs((1, 310, 4, key_dim, value_dim), "cpu")
    cut_by(monkeypatch, rule)
    assert_accurate(results(inputs), inputs)


@pytest.mark.parametrize(("sequences", "ranges"), [(3, 3), (2, 9), (1, 40), (1, 132)])
def test_states_are_added_up_along_each_sequence(poisoned_memory, sequences, ranges):
    """In one group of threads of a block, in several, in 16 twice over; nobody asks for what ends a sequence."""
    row = config.find("state_sum", 8, 64)
    states = torch.randn(sequences, ranges, config.state_size(8, 64), generator=torch.Generator().manual_seed(0))
    found = states.clone()
    compiled.run_sum(row, found, sequences, summed(5)(sequences, 5 * ranges))
    torch.testing.assert_close(found[:, :-1], states[:, :-1].double().cumsum(1).float(), rtol=1e-5, atol=1e-5)
    assert equal((found[:, -1],), (states[:, -1],))


@pytest.mark.parametrize(("heads", "length"), [(1, 1500), (3, 900)])
def test_the_rule_of_a_small_card(machine, monkeypatch, heads, length):
    """Nothing forced but the number of SMs: one sequence on 8, three on 2."""
    monkeypatch.setattr(launcher, "_processors", lambda device: 8 if heads == 1 else 2)
    inputs = accuracy.make_inputs((1, length, heads, 16, 64), "cpu")
    assert_accurate(results(inputs), inputs)
    assert handed_on("backward", inputs) == (HandsOn.SUMS if heads == 1 else HandsOn.STATE)


@every_row
def test_causality_is_exact(machine, monkeypatch, key_dim, value_dim):
    cut_by(monkeypatch, uncut)
    q, k, v, do = accuracy.make_inputs((1, 130, 1, key_dim, value_dim), "cpu")
    only_row = torch.zeros_like(do)
    only_row[:, 65] = do[:, 65]
    dq, dk, dv = launched("backward", (q, k, v, only_row))
    assert not dk[:, 66:].any() and not dv[:, 66:].any()
    assert not dq[:, :65].any() and not dq[:, 66:].any()


@every_row
def test_what_is_no_number_reaches_nothing_in_the_chunks_before_it(machine, monkeypatch, key_dim, value_dim):
    """o and, of the scans, dq of a chunk come from the chunks up to it, to the bit."""
    cut_by(monkeypatch, scans(key_dim, value_dim))
    inputs = accuracy.make_inputs((1, 200, 1, key_dim, value_dim), "cpu")
    expected = results(inputs)
    for x in inputs:
        x[:, 128:] = math.nan
    found = results(inputs)
    assert equal((found[0][:, :128], found[2][:, :128]), (expected[0][:, :128], expected[2][:, :128]))
    assert found[0][:, 128:].isnan().all() and found[2][:, 128:].isnan().all()


@pytest.mark.parametrize("value_dim", [64, 128])
def test_later_tokens_reach_dq_of_a_sweep_in_its_last_bits_only(machine, monkeypatch, value_dim):
    """Their part of the state is subtracted again, in fp32; in the first chunk, before which nothing stands, not even that."""
    cut_by(monkeypatch, uncut)
    inputs = accuracy.make_inputs((1, 300, 1, 8, value_dim), "cpu")
    expected = results(inputs)[2]
    for x in inputs:
        x[:, 128:] += 1
    found = results(inputs)[2]
    assert equal(found[:, :64], expected[:, :64])
    assert accuracy.relative_error(found[:, 64:128], expected[:, 64:128].double()) <= 1e-3
    assert not equal(found[:, 128:], expected[:, 128:])


@every_row
@pytest.mark.parametrize("early", [1e-3, 1e3])
def test_errors_hold_where_key_sizes_change(machine, monkeypatch, key_dim, value_dim, early):
    """The second half's keys 1000 times larger than the first's, or smaller; also of the first tokens alone."""
    cut_by(monkeypatch, uncut)
    inputs = with_two_key_sizes(accuracy.make_inputs((1, 300, 2, key_dim, value_dim), "cpu"), early)
    gradients, gold = launched("backward", inputs), accuracy.gold_gradients(*inputs)
    for rows in (slice(None), slice(64)):
        found, expected = (tuple(x[:, rows] for x in tensors) for tensors in (gradients, gold))
        assert max(accuracy.measure_errors(found, expected)) <= accuracy.NORMAL_INPUT_LIMIT


# ---------------------------------------------------------------------------------------------------------------------
# What the machine would see


def run_output(length, late):
    """The output pass alone at (1, length, 1, 16, 64): the error of its o."""
    chunks = -(-length // config.CHUNK)
    q, k, v, _ = accuracy.make_inputs((1, length, 1, 16, 64), "cpu")
    o, r = launcher._empty_outputs(q, v)
    output = emulated(config.Operation("forward", 16, 64), late=late)
    cut = Schedule(1, chunks, chunks, HandsOn.NOTHING)
    output(q, k, v, o, r, torch.empty(2, dtype=torch.bfloat16), 0.25, *cut, 0, 0)
    return accuracy.relative_error(o, accuracy.gold_output(q, k, v))


@pytest.mark.parametrize(
    ("name", "late", "seen"),
    [
        ("nothing", True, False),
        ("wgmma.mma_async", False, True),  # a product that is missing
        ("stmatrix", False, True),  # a part of o that is not handed over
        ("wgmma.wait_group", False, False),  # done at once, a product needs no wait ...
        ("wgmma.wait_group", True, True),  # ... and done late it does
    ],
)
def test_faults_show(monkeypatch, poisoned_memory, name, late, seen):
    intact = compiled.compiled_program
    if name != "nothing":
        monkeypatch.setattr(compiled, "compiled_program", lambda *rows: without(intact(*rows), name))
    assert (not run_output(200, late) <= accuracy.OUTPUT_LIMIT) == seen


@pytest.mark.parametrize("key_dim", [8, 16])
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_a_warp_that_does_not_meet_the_others_between_two_passes_shows(monkeypatch, late, key_dim):
    """The loading warp without its barrier."""
    intact = compiled.compiled_program
    monkeypatch.setattr(compiled, "compiled_program", lambda *rows: without(intact(*rows), "bar.sync", 1))
    launch_on_cpu(monkeypatch, functools.partial(emulated, late=late))
    cut_by(monkeypatch, uncut)
    with pytest.raises(AssertionError):
        launched("backward", accuracy.make_inputs((1, 130, 1, key_dim, 64), "cpu"))


@pytest.mark.parametrize(
    ("which", "said"),
    [(0, "a bulk copy that does not wait"), (1, "the next kernel is let start before")],
    ids=["the warp that loads", "the one that lets the next kernel start"],
)
def test_a_pass_that_does_not_wait_for_the_kernel_before_shows(monkeypatch, poisoned_memory, which, said):
    intact, wait = compiled.compiled_program, "griddepcontrol.wait"
    monkeypatch.setattr(compiled, "compiled_program", lambda *rows: without(intact(*rows), wait, which))
    assert run_output(64, late=False) <= accuracy.OUTPUT_LIMIT
    with pytest.raises(AssertionError, match=said):
        run_output(64, late=True)
