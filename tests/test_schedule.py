"""How the chunks are dealt to CTAs: every chunk once, states that are there in time, and on a GPU the same results."""

import functools
import math

import pytest
import torch
from cases import chained, cut_by, equal, every_row, parted, scans, summed, uncut, with_two_key_sizes
from hypothesis import given
from hypothesis import strategies as st

from based_cute import accuracy, based_backward
from based_cute.kernels import config
from based_cute.kernels.schedule import HandsOn, Schedule, piece, range_of, schedule
from based_cute.launcher import based_attention


def pieces_of(plan: Schedule, sequences: int, chunks: int):
    """(cta, number, sequence, step, count, position) of every piece, as the kernels cut the tape."""
    for cta in range(plan.ctas):
        run, of_run = divmod(cta, plan.ctas_of_a_run)
        tape = sequences // plan.runs, chunks, plan.stride
        *words, count = range_of(of_run, *tape, plan.chunks_per_cta, plan.late_ctas)
        for number in range(count):
            place, *others = piece(*words, chunks, number)
            yield cta, number, place * plan.runs + run, *others


sizes = {"sequences": st.integers(1, 600), "chunks": st.integers(1, 200), "processors": st.integers(1, 140)}


@given(**sizes, key_dim=st.sampled_from([8, 16]))
def test_every_chunk_is_in_one_piece(sequences, chunks, processors, key_dim):
    plan = schedule(sequences, chunks, processors, config.work("forward", key_dim, 64))
    seen = [
        (sequence, chunk)
        for _, _, sequence, step, count, _ in pieces_of(plan, sequences, chunks)
        for chunk in range(step, step + count)
    ]
    assert sorted(seen) == [(sequence, chunk) for sequence in range(sequences) for chunk in range(chunks)]
    assert plan.hands_on == HandsOn.NOTHING or plan.ctas <= processors


@given(**sizes, key_dim=st.sampled_from([8, 16]))
def test_states_are_there_when_they_are_asked_for(sequences, chunks, processors, key_dim):
    """A piece that starts inside a sequence continues the CTA before. Chained, that CTA made the state its first piece, and
    this one asks for it last; so no CTA waits for one that waits, and none for a later one."""
    plan = schedule(sequences, chunks, processors, config.work("forward", key_dim, 64))
    cut = list(pieces_of(plan, sequences, chunks))
    last_number = {cta: number for cta, number, *_ in cut}
    for cta, number, sequence, step, count, _ in cut:
        assert count > 0
        if plan.late_ctas and step > 0:
            assert cta == sequence < plan.late_ctas and step == plan.stride  # and slot `sequence` has the first part's state
        elif step > 0:
            assert plan.hands_on != HandsOn.NOTHING and number == last_number[cta]
            before = [x for x in cut if x[0] == cta - 1 and x[2] == sequence]
            assert [x[3] + x[4] for x in before] == [step]
            assert plan.hands_on == HandsOn.SUMS or (before[0][1] == 0 and before[0][3] == 0)


@given(**sizes)
def test_positions_count_the_chunks_before(sequences, chunks, processors):
    plan = schedule(sequences, chunks, processors, config.work("forward", 16, 64))
    done: dict[int, int] = {}
    for cta, _, _, _, count, position in pieces_of(plan, sequences, chunks):
        assert position == done.get(cta, 0)
        done[cta] = position + count


@given(**sizes, key_dim=st.sampled_from([8, 16]))
def test_neighbours_walk_side_by_side(sequences, chunks, processors, key_dim):
    """What a CTA takes, those of the same number in the other runs take of the next sequences."""
    plan = schedule(sequences, chunks, processors, config.work("forward", key_dim, 64))
    of_a_run = plan.ctas_of_a_run
    cut = list(pieces_of(plan, sequences, chunks))
    first = [x for x in cut if x[0] < of_a_run]
    shifted = [(cta + run * of_a_run, n, sequence + run, *at) for run in range(plan.runs) for cta, n, sequence, *at in first]
    assert shifted == cut


@pytest.mark.parametrize(
    ("sequences", "chunks", "hands_on", "share"),
    [
        (96, 128, HandsOn.SUMS, 96),  # of 128 chunks, the later 96 alone, or the first 32 of three sequences
        (88, 128, HandsOn.SUMS, 86),
        (112, 128, HandsOn.SUMS, 110),
        (124, 128, HandsOn.NOTHING, 128),  # too little to gain
        (128, 128, HandsOn.NOTHING, 128),
        (132, 128, HandsOn.NOTHING, 128),
        (144, 128, HandsOn.STATE, 140),
        (192, 64, HandsOn.STATE, 94),
        (256, 128, HandsOn.STATE, 249),
        (264, 128, HandsOn.NOTHING, 128),  # two full waves
        (8, 2048, HandsOn.SUMS, 125),  # 33 CTAs for every two
        (48, 128, HandsOn.SUMS, 47),  # 11 for every four
        (60, 128, HandsOn.SUMS, 64),
        (16, 32, HandsOn.SUMS, 4),
        (16, 6, HandsOn.SUMS, 1),
        (64, 8, HandsOn.SUMS, 4),
        (32, 6, HandsOn.NOTHING, 6),  # too short to pay for the passes that sum states
        (1, 5, HandsOn.NOTHING, 5),
    ],
)
def test_choice_on_132_processors(sequences, chunks, hands_on, share):
    plan = schedule(sequences, chunks, 132, config.work("backward", 16, 128))
    assert (plan.hands_on, max(plan.chunks_per_cta, chunks - plan.stride)) == (hands_on, share)


def test_no_key_dim_of_8_is_chained_for_a_few_percent():
    assert schedule(256, 128, 132, config.work("forward", 8, 64)).hands_on == HandsOn.NOTHING
    assert schedule(144, 128, 132, config.work("forward", 8, 64)).hands_on == HandsOn.STATE


def test_fewer_sequences_are_cut_where_a_sweep_takes_whole_ones():
    for sequences, alone, beside_a_sweep in ((240, HandsOn.STATE, HandsOn.NOTHING), (110, HandsOn.SUMS, HandsOn.NOTHING)):
        for kind, expected in (("forward", alone), ("backward", beside_a_sweep)):
            assert schedule(sequences, 128, 132, config.work(kind, 8, 128)).hands_on == expected


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU


RULES = {
    "chained": chained(1.3),
    "chained in runs": chained(1.3, 5),
    "summed": summed(3),
    "summed in runs": summed(3, 5),
    "parted": parted(4, 3),
}


def results(monkeypatch, rule, inputs):
    """o and the three gradients under a rule."""
    cut_by(monkeypatch, rule)
    q, k, v, do = inputs
    return based_attention(q, k, v, backend="cute"), *based_backward(q, k, v, do, backend="cute")


def errors(found, inputs):
    q, k, v, do = inputs
    return accuracy.measure_errors(found, (accuracy.gold_output(q, k, v), *accuracy.gold_gradients(q, k, v, do)))


@pytest.mark.gpu
@every_row
@pytest.mark.parametrize("length", [65, 1000])
@pytest.mark.parametrize("share", [1.0, 1.3, 2.0, 3.4, 9.0])
def test_chained_is_bitwise_equal(monkeypatch, key_dim, value_dim, length, share):
    inputs = accuracy.make_inputs((3, length, 3, key_dim, value_dim), "cuda")
    o, *_ = results(monkeypatch, uncut, inputs)
    _, *gradients = results(monkeypatch, scans(key_dim, value_dim), inputs)
    expected = o, *gradients
    found = results(monkeypatch, chained(share), inputs)
    assert equal(found, expected)


@pytest.mark.gpu
@every_row
@pytest.mark.parametrize("length", [129, 1000, 4000])
@pytest.mark.parametrize("share", [1, 3, 8])
def test_any_number_of_segments_is_accurate(monkeypatch, key_dim, value_dim, length, share):
    inputs = accuracy.make_inputs((1, length, 2, key_dim, value_dim), "cuda")
    found = results(monkeypatch, summed(share), inputs)
    o, *gradients = errors(found, inputs)
    assert o <= accuracy.OUTPUT_LIMIT and max(gradients) <= accuracy.NORMAL_INPUT_LIMIT


@pytest.mark.gpu
@every_row
@pytest.mark.parametrize("length", [129, 1000])
@pytest.mark.parametrize("share", [1, 2])
def test_two_parts_are_accurate(monkeypatch, key_dim, value_dim, length, share):
    inputs = accuracy.make_inputs((1, length, 4, key_dim, value_dim), "cuda")
    o, *gradients = errors(results(monkeypatch, parted(share, 3), inputs), inputs)
    assert o <= accuracy.OUTPUT_LIMIT and max(gradients) <= accuracy.NORMAL_INPUT_LIMIT


@pytest.mark.gpu
@every_row
@pytest.mark.parametrize("early", [1e-3, 1e3])
def test_segments_hold_where_key_sizes_change(monkeypatch, key_dim, value_dim, early):
    """The first half's keys 1000 times smaller, or larger, than the second's: cutting the scan adds no error."""
    inputs = with_two_key_sizes(accuracy.make_inputs((1, 2000, 2, key_dim, value_dim), "cuda"), early)
    expected = errors(results(monkeypatch, scans(key_dim, value_dim), inputs), inputs)
    found = errors(results(monkeypatch, summed(4), inputs), inputs)
    assert all(x <= 1.05 * y + 5e-5 for x, y in zip(found, expected, strict=True)), (found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("value_dim", [64, 128])
@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 4000, 8192, 8193, 20_000])
def test_sweep_is_accurate_also_at_its_beginning(monkeypatch, value_dim, factor, length):
    """At every kind of length and number of checkpoints, behind keys 1000 times smaller or larger in the second half."""
    inputs = with_two_key_sizes(accuracy.make_inputs((2, length, 32 if length == 1 else 4, 8, value_dim), "cuda"), factor)
    cut_by(monkeypatch, uncut)
    found = based_backward(*inputs, backend="cute")
    assert equal(based_backward(*inputs, backend="cute"), found)
    gold, floors = accuracy.gold_gradients(*inputs), accuracy.cancellation_floors(*inputs)
    assert max(accuracy.measure_errors(found, gold, floors)) <= accuracy.NORMAL_INPUT_LIMIT
    if length > 128:
        first = [tuple(x[:, :64] for x in tensors) for tensors in (found, gold)]
        assert max(accuracy.measure_errors(*first)) <= accuracy.NORMAL_INPUT_LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_cut_scans_are_deterministic_and_capturable(monkeypatch, rule):
    inputs = accuracy.make_inputs((2, 1000, 5, 16, 128), "cuda")
    expected = results(monkeypatch, rule, inputs)
    noise, neighbour = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    for _ in range(10):
        with torch.cuda.stream(neighbour):
            noise @ noise
        assert equal(results(monkeypatch, rule, inputs), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(monkeypatch, rule, inputs)
    for _ in range(2):
        graph.replay()
        assert equal(captured, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rule", "length"),
    [(uncut, 64), *((rule, 1000) for rule in (uncut, *RULES.values()))],
    ids=["a chunk", "uncut", *RULES],
)
def test_calls_in_a_queue_do_not_see_each_other(monkeypatch, rule, length):
    """Each pass starts while the one before it ends: calls on two inputs in turn, in the same memory, must not mix them."""
    sets = [accuracy.make_inputs((2, length, 5, 16, 128), "cuda", seed) for seed in range(2)]
    expected = [results(monkeypatch, rule, inputs) for inputs in sets]
    for _ in range(10):
        torch.cuda._sleep(1_000_000)  # the host gets ahead
        found = [results(monkeypatch, rule, inputs) for inputs in sets]
        assert all(equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [(1, 20_000, 4, 16, 128), (1, 8192, 24, 16, 64), (6, 1024, 24, 16, 128), (6, 2048, 24, 8, 64), (4, 4000, 24, 16, 64)],
    ids=str,
)
def test_real_card_cuts_these(shape):
    batch, length, heads, key_dim, value_dim = shape
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    plan = schedule(batch * heads, math.ceil(length / 64), processors, config.work("backward", key_dim, value_dim))
    if plan.hands_on == HandsOn.NOTHING:
        pytest.skip(f"not on {processors} SMs")
    result = accuracy.check_shape(shape, "cute", "cuda")
    assert result.passed, result


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_scratch_is_one_state_a_cta(monkeypatch, rule):
    inputs = accuracy.make_inputs((2, 4096, 5, 16, 128), "cuda")
    call = functools.partial(based_backward, *inputs, backend="cute")
    cut_by(monkeypatch, rule)
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = sum(x.numel() * x.element_size() for x in call())
    states = 4 * config.state_size(16, 128) * rule(10, 64, 132).slots
    scratch = torch.cuda.max_memory_allocated() - before - outputs
    assert states <= scratch <= states + 8 * 2 * 4096 * 5 + (1 << 20)
