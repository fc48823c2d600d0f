"""Every kernel compiles for sm_90a with no GPU, and to the code that was meant: no WGMMA serialised, no spills beyond what its
rows allow, the instructions that it is about in the PTX, and warps that never wait for ever."""

import math
import warnings
from collections import Counter
from dataclasses import replace

import ptx_machine
import pytest
import sass
import torch

from based_cute import launcher
from based_cute.kernels import build, config
from based_cute.kernels.schedule import HandsOn, Schedule

pytest.importorskip("cutlass", reason="the DSL has no wheel for this platform")

from compiled import (  # noqa: E402  (it imports nothing of the DSL, but compiles with it)
    KERNELS,
    compile_report,
    compiled_program,
    control_program,
    descriptors_of,
    launch_parameters,
    stored_by_warps,
    without,
)

TENSOR_CORE = ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg", "mbarrier")


def title(rows) -> str:
    return "+".join(row.scan for row in rows) + f"-{rows[0].key_dim}-{rows[0].value_dim}"


every_kernel = pytest.mark.parametrize("rows", KERNELS, ids=title)


def test_every_row_is_in_a_kernel():
    assert {row for rows in KERNELS for row in rows} == set(config.ROWS)


@every_kernel
def test_kernel_compiles_to_the_code_that_was_meant(rows):
    report = compile_report(*rows)
    assert report.remarks == []
    assert report.spilled <= max(row.allowed_spill for row in rows)
    if rows[0].scan == config.STATE_SUM:
        assert "ld.global.cg.v4.b32" in report.ptx
        return
    for instruction in TENSOR_CORE:
        assert instruction in report.ptx
    assert f"n{rows[0].features}k16.f32.bf16.bf16" in report.ptx  # the packed features, never the full K^2


@every_kernel
def test_no_stage_is_released_while_its_rows_are_loaded(rows):
    """ptxas lets the release pass loads, which may then find the next chunk (docs/performance.md)."""
    (code,) = map(sass.instructions, sass.text_sections(compile_report(*rows).cubin))
    found = sass.releases(code)
    assert (rows[0].scan == config.STATE_SUM) == (found == [])
    assert not any(found)
    if rows[0].publishes:  # the tokens load rows; the test would see it if nothing waited for them
        assert any(sass.releases([instruction._replace(waits=0) for instruction in code]))


WITH_MOST_LAUNCHES = [x for x in config.all_operations() if x.way != "scans" or (x.key_dim, x.value_dim) == (16, 128)]


@pytest.mark.parametrize("operation", WITH_MOST_LAUNCHES, ids=lambda operation: operation.name)
def test_operation_launches_its_kernels_in_order(monkeypatch, operation):
    """The DSL numbers the kernels of a function as they are launched. It has nothing to warn the user of."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(build, "load", build.compile_object)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        content = launcher._operation.__wrapped__(operation)
    assert operation.name.encode() in content
    for number, rows in enumerate(operation.kernels):
        name = "_then_".join(row.name for row in rows)
        assert f"{name}_{number}".encode() in content


def test_gate_sees_serialised_products():
    """A row whose state warpgroup has too few registers must come out red, or the gate above proves nothing."""
    starved = replace(config.find("forward_scan", 16, 128), state_registers=168, token_registers=160)
    report = compile_report(starved)
    assert report.remarks and report.spilled > 64


# ---------------------------------------------------------------------------------------------------------------------
# Who waits for whom, run on a machine that follows the compiled control flow (ptx_machine.py)

BATCH, HEADS, CHUNKS = 2, 3, 5
LENGTH = 64 * CHUNKS - 7
UNCUT = Schedule(6, 5, 5, HandsOn.NOTHING)
SCHEDULES = {
    "one CTA a sequence": UNCUT,
    "chained, one cut a sequence": Schedule(4, 8, 5, HandsOn.STATE),
    "chained, one cut at a boundary": Schedule(2, 15, 5, HandsOn.STATE),
    "chained, one CTA": Schedule(1, 30, 5, HandsOn.STATE),
    "chained, two runs": Schedule(4, 8, 5, HandsOn.STATE, runs=2),
    "summed, a chunk a CTA": Schedule(30, 1, 5, HandsOn.SUMS, runs=6),
    "summed, a short last range": Schedule(18, 2, 5, HandsOn.SUMS, runs=6),
    "summed, two sequences a run": Schedule(12, 3, 5, HandsOn.SUMS, runs=3),
    "summed, room behind every sequence": Schedule(12, 3, 6, HandsOn.SUMS, runs=3),
    "summed, one run": Schedule(15, 2, 5, HandsOn.SUMS),
    "summed, the later parts alone": Schedule(8, 6, 2, HandsOn.SUMS, 6),
    "summed, first parts in one CTA": Schedule(7, 6, 1, HandsOn.SUMS, 6),
}


class Unread(dict):
    """A tensor's pointer and strides: they decide no warp's way."""

    def __missing__(self, offset):
        return ptx_machine.GLOBAL


def bytes_of(name: str) -> int:
    """Of one box of a tensor."""
    return config.CHUNK * (8 if name == "rh" else 2 * (16 if name in ("q", "k") else 64))


def run_kernel(rows, plan: Schedule, program: ptx_machine.Program | None = None) -> tuple:
    """The machine after one launch, and its CTAs."""
    parameters, _ = launch_parameters(rows, (BATCH, LENGTH, HEADS), 0, plan, others=Unread)
    boxes = {position: bytes_of(name) for position, name in descriptors_of(rows).items()}
    machine = ptx_machine.Machine(program or control_program(*rows), rows[0].threads, parameters, boxes)
    return machine, machine.run(plan.ctas_of_a_run, plan.runs)


def copies_of(rows, places) -> Counter:
    """The bulk copies of chunks (batch, head, chunk), but for what is stored by warps."""
    expected = Counter()
    for descriptor, name in descriptors_of(rows).items():
        for batch, head, chunk in () if stored_by_warps(rows, name) else places:
            columns = range(0, rows[0].value_dim if name in ("v", "do", "dv") else 1, 64)
            boxes = [(column, 64 * chunk, head, batch) for column in columns]
            if name == "rh":
                boxes = [(2 * 64 * chunk, head, batch)]
            expected.update(("store" if name == "dv" else "load", descriptor, box) for box in boxes)
    return expected


SCANNED = [
    pytest.param(rows, schedule, id=f"{title(rows)}-{name}")
    for rows in KERNELS
    for name, schedule in SCHEDULES.items()
    if rows[0].scan in config.SCANS and (len(rows) == 1 or schedule == UNCUT)  # both in one kernel take whole sequences
]


@pytest.mark.parametrize(("rows", "schedule"), SCANNED)
def test_every_chunk_is_scanned_once(rows, schedule):
    machine, ctas = run_kernel(rows, schedule)
    places = [(b, h, c) for b in range(BATCH) for h in range(HEADS) for c in range(CHUNKS)]
    stores = rows[0].scan != "output"
    assert Counter(copy for cta in ctas for copy in cta.copies if stores or copy[0] == "load") == copies_of(rows, places)
    of_a_run = range(1, schedule.ctas_of_a_run)
    cuts = schedule.runs * sum(1 for number in of_a_run if number * schedule.chunks_per_cta % schedule.stride)
    # a flag for each cut inside a sequence, and lowered again for the next pass
    assert len(machine.flags) == (cuts if schedule.hands_on == HandsOn.STATE else 0)
    assert not any(machine.flags.values())


@pytest.mark.parametrize("rows", [rows for rows in KERNELS if rows[0].scan in config.SWEEP], ids=title)
def test_every_chunk_is_swept_once(rows):
    """Behind the pass before, which reads k and v of all but the last of each sequence."""
    _, ctas = run_kernel(rows, UNCUT)
    sequences = [(b, h) for b in range(BATCH) for h in range(HEADS)]
    expected = copies_of(rows, [(*sequence, chunk) for sequence in sequences for chunk in range(CHUNKS)])
    first_pass = list(descriptors_of(rows))[:2]
    for copy in copies_of(rows, [(*sequence, CHUNKS - 1) for sequence in sequences]):
        if copy[1] in first_pass:
            del expected[copy]
    assert Counter(copy for cta in ctas for copy in cta.copies if copy[0] == "load") == expected


SUMMED = [x for x in SCHEDULES.values() if x.hands_on == HandsOn.SUMS and not x.late_ctas]
FIRST_PARTS = [Schedule(6, 2, 2, HandsOn.SUMS), Schedule(6, 4, 4, HandsOn.SUMS)]  # what the later parts start from


@pytest.mark.parametrize("schedule", SUMMED + FIRST_PARTS, ids=lambda x: f"{x.ctas} CTAs")
@pytest.mark.parametrize("row", [row for row in config.ROWS if row.scan in config.STATES], ids=lambda row: row.name)
def test_every_range_is_summed_unless_it_ends_its_sequence(row, schedule):
    """Of its last sequence, where it touches several."""
    _, ctas = run_kernel((row,), schedule)
    of_a_run, length = schedule.ctas_of_a_run, BATCH * HEADS // schedule.runs * schedule.stride
    for cta in ctas:
        number, run, _ = cta.index
        if row.scan == "reverse_state":
            number, run = of_a_run - 1 - number, schedule.runs - 1 - run
        first = number * schedule.chunks_per_cta
        last = min(first + schedule.chunks_per_cta, length)
        place = (last - 1) // schedule.stride
        start = place * schedule.stride
        steps = range(max(first - start, 0), min(last - start, CHUNKS))
        if steps[-1] == CHUNKS - 1:
            steps = ()
        chunks = [CHUNKS - 1 - step for step in steps] if row.scan == "reverse_state" else steps
        sequence = place * schedule.runs + run
        assert Counter(cta.copies) == copies_of((row,), [(*divmod(sequence, HEADS), chunk) for chunk in chunks])


def test_machine_sees_a_hang():
    """A load too few: the state warpgroup waits for bytes that never come."""
    row = config.find("forward_scan", 16, 128)
    program = ptx_machine.slice_control(without(compiled_program(row), "cp.async.bulk.tensor"))
    with pytest.raises(ptx_machine.Stuck, match=r"warp 4 waits for mbarrier"):
        run_kernel((row,), UNCUT, program)


def test_machine_sees_registers_that_are_not_there():
    program = ptx_machine.parse(".visible .entry f(.param .u32 f_param_0) { setmaxnreg.inc.sync.aligned.u32 120; ret; }")
    with pytest.raises(AssertionError, match="setmaxnreg.inc.sync.aligned.u32 120 after a launch with 128"):
        ptx_machine.Machine(program, 512, {}, {}).run(1)


def test_schedules_of_these_tests_cover_the_tape():
    for x in SCHEDULES.values():
        assert x.ctas - x.late_ctas == x.runs * math.ceil(BATCH * HEADS // x.runs * x.stride / x.chunks_per_cta)
