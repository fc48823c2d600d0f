"""Kernels compiled without a GPU: what ptxas says of one, and operations as functions of CPU tensors on the PTX machine."""

import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import ptx_machine
import torch
from torch import Tensor

from based_cute.kernels import config
from based_cute.kernels.schedule import SUM_THREADS, HandsOn, Schedule, adds_up, sum_groups, summed_ranges

COMPILE = """
import sys
from based_cute.kernels import build, config
build.compile_kernel(*eval(sys.argv[1], vars(config)))
"""
Rows = tuple[config.ScanConfig, ...]  # of one kernel
FLAGS = 1 << 40  # the address of the flags: outside the machine's global memory, which keeps them apart
GUARD = 1 << 10  # bytes around every tensor in the machine's global memory


class Report(NamedTuple):
    """What ptxas said of a kernel, the PTX it said it of, and the machine code it made of it."""

    remarks: list[str]
    spilled: int
    ptx: str
    cubin: bytes


# Those of all operations, in order, each once.
KERNELS = list(dict.fromkeys(kernel for operation in config.all_operations() for kernel in operation.kernels))
_NEXT = dict(itertools.pairwise(KERNELS))
_compiler = ThreadPoolExecutor(2)


def compile_report(*rows: config.ScanConfig) -> Report:
    """What ptxas says of a kernel. The next one is compiled meanwhile: tests go through them in order."""
    report = _compiling(*rows)
    if rows in _NEXT:
        _compiling(*_NEXT[rows])
    return report.result()


@cache
def _compiling(*rows: config.ScanConfig) -> Future[Report]:
    return _compiler.submit(_compile, rows)


def _compile(rows: Rows) -> Report:
    """In a process of its own: the DSL reads its environment once, and ptxas writes to the process's streams."""
    with tempfile.TemporaryDirectory() as directory:
        environment = dict(
            os.environ,
            CUDA_VISIBLE_DEVICES="",
            CUTE_DSL_ARCH="sm_90a",
            CUTE_DSL_COMPILER_OPT="remarks{ptx}",
            CUTE_DSL_KEEP="ptx,cubin",
            CUTE_DSL_DUMP_DIR=directory,
        )
        run = subprocess.run(
            [sys.executable, "-c", COMPILE, repr(rows)], env=environment, capture_output=True, text=True, timeout=600
        )
        output = run.stdout + run.stderr
        assert run.returncode == 0, output[-3000:]
        (ptx,) = (path.read_text() for path in Path(directory).glob("*.ptx"))
        (cubin,) = (path.read_bytes() for path in Path(directory).glob("*.cubin"))
    spills = [int(n) for n in re.findall(r"(\d+)\s+bytes\s+spill\s+(?:stores|loads)", output)]
    assert spills, f"ptxas reported no resources:\n{output[-3000:]}"
    return Report(sorted(set(re.findall(r"C75\d\d", output))), max(spills), ptx, cubin)


@cache
def compiled_program(*rows: config.ScanConfig) -> ptx_machine.Program:
    return ptx_machine.parse(compile_report(*rows).ptx)


@cache
def control_program(*rows: config.ScanConfig) -> ptx_machine.Program:
    return ptx_machine.slice_control(compiled_program(*rows))


def without(program: ptx_machine.Program, name: str, which: int = -1) -> ptx_machine.Program:
    """The program less number `which` of the instructions of that name: a fault for tests to find."""
    place = [i for i, x in enumerate(program.instructions) if x.name.startswith(name)][which]
    instructions = list(program.instructions)
    instructions[place] = ptx_machine.Instruction(None, "nop", ())
    return replace(program, instructions=instructions)


# What a pass copies in bulk, in the order of its TMA descriptors: its inputs, and others, of which it stores dv and o.
INPUTS = {
    "forward_scan": ("q", "k", "v", "do"),
    "reverse_scan": ("q", "k", "v", "do"),
    "output": ("q", "k", "v"),
    "forward_state": ("k", "v"),
    "reverse_state": ("q", "do"),
    "output_state": ("k", "v"),
    "sweep_state": ("k", "v"),
    "sweep": ("k", "v", "q", "do"),
}
OTHERS = {"reverse_scan": ("rh", "dv"), "output": ("o",), "reverse_state": ("rh",), "sweep": ("dv",)}


def descriptors_of(rows: Rows) -> dict[int, str]:
    """The tensor's name for each parameter that is a TMA descriptor: those of the inputs of all passes come first."""
    positions = [i for i, size in enumerate(compiled_program(*rows).sizes) if size == 128]
    names = [name for table in (INPUTS, OTHERS) for row in rows for name in table.get(row.scan, ())]
    return dict(zip(positions, names, strict=True))


def settled(rows: Rows, plan: Schedule) -> tuple[str, ...]:
    """What a kernel loads that the kernel before does not write: the inputs, if that is one of the same call; r and h, if it is
    not the forward scan."""
    begins, scan = ("forward_state", "output_state", "sweep_state"), rows[0].scan
    if scan in begins or (scan in ("forward_scan", "output") and plan.hands_on != HandsOn.SUMS):
        return ()
    inputs = ("q", "k", "v", "do")
    return (*inputs, "rh") if scan == "reverse_scan" and plan.hands_on == HandsOn.SUMS else inputs


def flag_addresses(count: int) -> list[int]:
    return [FLAGS + 4 * i for i in range(count)]


def launch_parameters(
    rows: Rows, sizes: tuple[int, ...], factor: int, plan: Schedule, others: type[dict] = dict
) -> tuple[dict, int]:
    """The scalars of scan.Problem and the flags by their positions, and that of the states; `others` stands for the rest.

    sizes: (B, T, H). factor: the word of the scale."""
    batch, length, heads = sizes
    problem = (length, heads, batch * heads // plan.runs, factor, *plan._replace(ctas=plan.ctas_of_a_run))
    scalars = [i for i, size in enumerate(compiled_program(*rows).sizes) if size == 4]
    parameters = defaultdict(others, zip(scalars, problem, strict=True))
    parameters[scalars[-1] + 2] = FLAGS
    return parameters, scalars[-1] + 1


# ---------------------------------------------------------------------------------------------------------------------
# An operation as a function: what build.load(operation) returns, for CPU tensors

# The other tensors that a pass's code reads or writes, in order, and all tensors of an operation.
STRUCTS = {"sweep": ("dq", "dk"), "forward_scan": ("dq", "rh"), "reverse_scan": ("dk",), "output": ("r",)}
ARGUMENTS = {"forward": ("q", "k", "v", "o", "r"), "backward": ("q", "k", "v", "do", "dq", "dk", "dv")}


def emulated(operation: config.Operation, *, late: bool = False):
    """A stand-in for launcher._operation: its compiled kernels, run on the machine, and operation.py's host side in Python."""

    def function(*arguments):
        names = ARGUMENTS[operation.kind]
        named = dict(zip(names, arguments[: len(names)], strict=True))
        scratch, scale, *cut, states_at, flags_at = arguments[len(names) :]
        scratch = scratch.view(torch.float32)
        batch, _, heads, _ = named["q"].shape
        named["rh"] = scratch[:states_at].view(batch, heads, -1, 2)
        states = scratch[states_at:flags_at]
        plan = Schedule(*cut)
        flags = scratch[flags_at : flags_at + plan.flags].view(torch.int32)
        for rows in operation.kernels:
            scan = rows[0].scan
            if scan in config.SWEEP:
                run_kernel(rows, named, scale, plan, states, scratch[flags_at:], late=late)
            elif scan in config.SCANS:
                run_kernel(rows, named, scale, plan, states, flags, late=late)
            elif scan in config.STATES:
                of_a_run, per_cta = summed_ranges(plan.ctas_of_a_run, plan.stride, plan.chunks_per_cta, plan.late_ctas)
                ranges = Schedule(plan.runs * of_a_run, per_cta, plan.stride, HandsOn.NOTHING, runs=plan.runs)
                run_kernel(rows, named, scale, ranges, states, None, late=late)
            elif adds_up(batch * heads // plan.runs, plan.stride, plan.chunks_per_cta, plan.late_ctas):
                run_sum(*rows, states, batch * heads, plan)

    return function


class Heap:
    """Global memory of a launch: CPU tensors copied in, between guards, and out again."""

    def __init__(self) -> None:
        self.end, self.tensors = GUARD, []

    def add(self, tensor: Tensor) -> int:
        """The address at which the tensor will be."""
        address = ptx_machine.GLOBAL + self.end
        if tensor.numel():
            self.tensors.append((tensor, self.end))
        self.end += -(-tensor.numel() * tensor.element_size() // GUARD) * GUARD + GUARD
        return address

    def part(self, machine: ptx_machine.Machine, tensor: Tensor) -> Tensor:
        """An fp32 tensor as it stands in the machine's memory."""
        (start,) = (start for known, start in self.tensors if known is tensor)
        words = machine.memory[start // 4 : start // 4 + tensor.numel()]
        return torch.from_numpy(words.view(np.float32)).view(tensor.shape)

    def copy_in(self, machine: ptx_machine.Machine) -> None:
        self.untouched = np.ones(machine.memory.size * 4, bool)
        for tensor, start in self.tensors:
            data = tensor.contiguous().view(torch.uint8).flatten().numpy()
            machine.memory.view(np.uint8)[start : start + data.size] = data
            self.untouched[start : start + data.size] = False
        self.before = machine.memory.view(np.uint8)[self.untouched].copy()

    def copy_out(self, machine: ptx_machine.Machine) -> None:
        memory = machine.memory.view(np.uint8)
        assert (memory[self.untouched] == self.before).all(), "written outside the tensors"
        for tensor, start in self.tensors:
            size = tensor.numel() * tensor.element_size()
            data = torch.from_numpy(memory[start : start + size].copy())
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))


def stored_by_warps(rows: Rows, name: str) -> bool:
    """Whether the kernel, in its last pass, stores this tensor by the 16 rows of a warp, and not by chunks."""
    return name == "o" or (rows[-1].scan, name) == ("sweep", "dv")


def tensor_map(rows: Rows, name: str, tensor: Tensor) -> ptx_machine.TensorMap:
    """The box that a kernel copies of a tensor: (B, T, H, D) bf16 by 64 or 16 tokens, or (B, H, T, 2) fp32 by 64 pairs."""
    if name == "rh":
        return ptx_machine.TensorMap(tensor.flatten(2).numpy(), 1, 2 * config.CHUNK)
    array = tensor.view(torch.int16).numpy().view(np.uint16).transpose(0, 2, 1, 3)
    tokens = 16 if stored_by_warps(rows, name) else config.CHUNK
    return ptx_machine.TensorMap(array, tokens, 16 if name in ("q", "k") else 64)


def run_kernel(
    rows: Rows, tensors: dict[str, Tensor], scale: float, plan: Schedule, states, flags, late: bool = False
) -> None:
    """One launch; `tensors` are those of its operation."""
    program, heap = compiled_program(*rows), Heap()
    factor = int(np.float32(scale).view(np.uint32))
    parameters, states_at = launch_parameters(rows, tensors["q"].shape[:3], factor, plan)
    parameters[states_at] = heap.add(states)
    if rows[0].scan in config.SWEEP:
        parameters[states_at + 1] = heap.add(flags)
    structs = [i for i, size in enumerate(program.sizes) if size in (40, 48)]
    for position, name in zip(structs, [name for row in rows for name in STRUCTS.get(row.scan, ())], strict=True):
        strides = tensors[name].stride()
        parameters[position] = {0: heap.add(tensors[name])} | {24 + 8 * i: step for i, step in enumerate(strides[:3])}
    maps = {position: tensor_map(rows, name, tensors[name]) for position, name in descriptors_of(rows).items()}
    machine = ptx_machine.Machine(program, rows[0].threads, parameters, maps, heap.end, late)
    for position, name in descriptors_of(rows).items():
        if any(name in STRUCTS.get(row.scan, ()) for row in rows[:-1]):  # what an earlier pass of the kernel writes
            maps[position] = tensor_map(rows, name, heap.part(machine, tensors[name]))
    machine.shared_bytes = max(row.shared_memory for row in rows)
    machine.settled = {position for position, name in descriptors_of(rows).items() if name in settled(rows, plan)}
    handed_on = plan.hands_on == HandsOn.STATE
    if late:
        machine.kernel_before = lambda: heap.copy_in(machine)
    else:
        heap.copy_in(machine)
    if handed_on:
        machine.flags = dict(zip(flag_addresses(flags.numel()), flags.tolist(), strict=True))
    machine.run(plan.ctas_of_a_run, plan.runs)
    assert not machine.kernel_before, "nobody waits for the kernel before"
    heap.copy_out(machine)
    if handed_on:
        flags.copy_(torch.tensor([machine.flags.pop(address) for address in flag_addresses(flags.numel())]))
    assert not machine.flags, "flags outside the tensor"


def run_sum(row: config.ScanConfig, states: Tensor, sequences: int, plan: Schedule) -> None:
    """One launch of the sum of states along sequences."""
    program, heap, groups = compiled_program(row), Heap(), sum_groups(plan.stride, plan.chunks_per_cta)
    numbers = heap.add(states), plan.ctas_of_a_run, plan.stride, plan.chunks_per_cta, groups, SUM_THREADS // groups
    parameters = dict(enumerate(numbers))
    machine = ptx_machine.Machine(program, SUM_THREADS, parameters, {}, heap.end)
    heap.copy_in(machine)
    machine.run(groups * config.state_size(row.key_dim, row.value_dim) // (4 * SUM_THREADS), sequences // plan.runs, plan.runs)
    heap.copy_out(machine)
