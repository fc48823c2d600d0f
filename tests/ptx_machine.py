"""A machine that runs the control flow of a compiled kernel without a GPU: loops, branches, barriers and bulk copies.

Of every warp it follows lane 0 through the PTX and keeps only what decides where the warp goes and whom it waits for: integer
arithmetic, predicates, mbarriers with their byte counts, named barriers, flags in global memory, volatile words in shared
memory. Products and floating point are dropped before the run. That is enough to see a hang, a copy of the wrong chunk, or
registers that are not there; all of these show on a GPU only as a process that never returns.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

WARP = 32
SHARED = 1 << 20  # where shared memory begins: any multiple of 1024
RING_SCOPES = {"mbarrier.try_wait": "wait", "ld.acquire": "spin"}  # inline assembly that loops until something has happened


class Stuck(AssertionError):
    """Every warp waits, and the message says for what."""


@dataclass(frozen=True)
class Instruction:
    guard: str | None  # predicate register, "!" in front where it is negated
    name: str
    operands: tuple[str, ...]


# ---------------------------------------------------------------------------------------------------------------------
# Reading PTX


@dataclass
class Program:
    """A kernel's parameters (name -> position), their bytes, and its instructions, with labels as indices."""

    parameters: dict[str, int]
    sizes: list[int]
    instructions: list[Instruction]
    labels: dict[str, int]


def parse(ptx: str) -> Program:
    """The first entry of a PTX file."""
    text = re.sub(r"//[^\n]*", "", ptx)
    entry = re.search(r"\.entry\s+\w+\((.*?)\)(.*)", text, re.S)
    declared = re.findall(r"\.([usbf]\d+)\s+(\w+_param_\d+)(?:\[(\d+)\])?", entry[1])
    sizes = [int(kind[1:]) // 8 * int(count or 1) for kind, _, count in declared]
    body = entry[2][entry[2].index("{") + 1 : entry[2].rindex("}")]
    program = Program({name: i for i, (_, name, _) in enumerate(declared)}, sizes, [], {})
    scope: list[Instruction] | None = None
    for kind, content in _statements(body):
        if kind == "open":
            scope = []
        elif kind == "close":
            program.instructions += _looping(scope) or scope
            scope = None
        elif kind == "label" and scope is None:
            program.labels[content] = len(program.instructions)
        elif kind == "code":
            (program.instructions if scope is None else scope).append(content)
    return program


def _statements(body: str) -> Iterator[tuple[str, object]]:
    position = 0
    pattern = re.compile(r"\s*(?:(?P<open>\{)|(?P<close>\})|(?P<label>[$\w]+):|(?P<code>[^;{}]*(?:\{[^}]*\}[^;{}]*)*);)")
    while match := pattern.match(body, position):
        position = match.end()
        kind = match.lastgroup
        text = match[kind].strip()
        if kind == "code":
            if text.startswith("."):  # a declaration
                continue
            parts = re.fullmatch(r"(?:@(!?[%\w]+)\s+)?([\w.:]+)\s*(.*)", text, re.S)
            operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", parts[3])
            yield kind, Instruction(parts[1], parts[2], tuple(operands))
        else:
            yield kind, text
    assert not body[position:].strip(), f"not understood: {body[position : position + 80]!r}"


def _looping(scope: list[Instruction]) -> list[Instruction] | None:
    """One instruction in place of a scope of inline assembly that loops."""
    for instruction in scope:
        for start, name in RING_SCOPES.items():
            if instruction.name.startswith(start):
                return [Instruction(None, name, instruction.operands[1:])]
    return None


def slice_control(program: Program) -> None:
    """Replace by no-ops what no branch, barrier or bulk copy depends on."""
    needed: set[str] = set()
    kept = [instruction.name.split(".")[0] in EFFECTS or _is_effect(instruction.name) for instruction in program.instructions]
    changed = True
    while changed:
        changed = False
        for i, instruction in enumerate(program.instructions):
            if kept[i] or (instruction.operands and set(_registers(instruction.operands[0])) & needed):
                before = len(needed)
                sources = instruction.operands if kept[i] and _is_effect(instruction.name) else instruction.operands[1:]
                needed |= {name for operand in (*sources, instruction.guard or "") for name in _registers(operand)}
                changed |= len(needed) != before or not kept[i]
                kept[i] = True
    nothing = Instruction(None, "nop", ())
    program.instructions = [x if keep else nothing for x, keep in zip(program.instructions, kept, strict=True)]


EFFECTS = ("bra", "bar", "wait", "spin", "setmaxnreg", "griddepcontrol", "ret")


def _is_effect(name: str) -> bool:
    starts = ("mbarrier", "cp.async.bulk.tensor", "st.release", "st.volatile.shared", *EFFECTS)
    return name.startswith(starts)


def _registers(operand: str) -> list[str]:
    return re.findall(r"%(?:p|rs|rd|r)\d+", operand)


# ---------------------------------------------------------------------------------------------------------------------
# Running it


@dataclass
class Mbarrier:
    count: int
    pending: int
    bytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        assert self.pending >= 0, "more arrivals than the mbarrier counts"
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase + 1


@dataclass
class Cta:
    index: int
    threads: int
    mbarriers: dict[int, Mbarrier] = field(default_factory=dict)
    arrived: dict[int, int] = field(default_factory=dict)  # named barrier -> threads
    generation: dict[int, int] = field(default_factory=dict)
    copies: list[tuple[str, int, tuple[int, ...]]] = field(default_factory=list)  # ("load" | "store", parameter, coordinates)
    registers: dict[int, int] = field(default_factory=dict)  # warp -> registers a thread
    words: dict[int, int] = field(default_factory=dict)  # volatile shared memory


class Machine:
    """One launch. parameters: position -> value of a scalar, or {offset: value} of a struct; box_bytes: parameter -> bytes of
    one bulk load through it. `memory` is the global memory, by address."""

    def __init__(self, program: Program, threads: int, parameters: dict, box_bytes: dict[int, int]):
        self.program, self.threads, self.parameters, self.box_bytes = program, threads, parameters, box_bytes
        self.memory: dict[int, int] = {}
        self.launch_registers = 65536 // threads // 8 * 8

    def run(self, ctas: int) -> list[Cta]:
        """All CTAs to their end. Raises Stuck when nothing can go on."""
        grid = [Cta(index, self.threads) for index in range(ctas)]
        warps = deque((cta, warp, Warp(self, cta, warp).run()) for cta in grid for warp in range(self.threads // WARP))
        waiting: dict[tuple[int, int], str] = {}
        while warps:
            cta, warp, run = warps.popleft()
            reason = next(run, "done")
            if reason == "done":
                waiting.clear()
            else:
                warps.append((cta, warp, run))
                if reason == "moved":
                    waiting.clear()
                else:
                    waiting[cta.index, warp] = reason
                if len(waiting) == len(warps):
                    raise Stuck("; ".join(f"CTA {c} warp {w} waits for {why}" for (c, w), why in sorted(waiting.items())[:24]))
        for cta in grid:
            assert all(barrier.bytes == 0 for barrier in cta.mbarriers.values())
            assert sum(WARP * n for n in cta.registers.values()) <= self.launch_registers * self.threads
        return grid


class Warp:
    """Lane 0 of one warp."""

    def __init__(self, machine: Machine, cta: Cta, warp: int):
        self.machine, self.cta, self.warp = machine, cta, warp
        self.values: dict[str, int] = {"%tid.x": WARP * warp, "%ctaid.x": cta.index, "%ntid.x": machine.threads}
        self.values["__dynamic_shmem__0"] = SHARED

    def run(self) -> Iterator[str]:
        """Yields "moved" after an effect that others may wait for, else what it waits for."""
        program, at = self.machine.program, 0
        while at < len(program.instructions):
            instruction = program.instructions[at]
            at += 1
            if instruction.name == "nop" or (instruction.guard and not self.holds(instruction.guard)):
                continue
            name = instruction.name
            if name.startswith("bra"):
                at = program.labels[instruction.operands[0]]
            elif name in ("ret", "exit"):
                return
            elif _is_effect(name):
                yield from self.effect(name, instruction.operands)
            else:
                self.compute(name, instruction.operands)

    def holds(self, guard: str) -> bool:
        return bool(self.values[guard.removeprefix("!")]) != guard.startswith("!")

    def value(self, operand: str) -> int:
        """Of a register, a number, or an address in brackets."""
        if operand.startswith("["):
            return sum(self.value(term) for term in operand[1:-1].split("+"))
        if operand in self.values:
            return self.values[operand]
        if operand in self.machine.program.parameters:  # its address: what identifies a descriptor
            return self.machine.program.parameters[operand]
        return int(operand, 0)

    # ---- effects ----

    def effect(self, name: str, operands: tuple[str, ...]) -> Iterator[str]:
        cta = self.cta
        if name == "wait":
            barrier, parity = cta.mbarriers[self.value(operands[0])], self.value(operands[1])
            while barrier.phase % 2 == parity:
                yield f"mbarrier {self.value(operands[0]) - SHARED} (phase {barrier.phase}, {barrier.pending} arrivals short)"
        elif name == "spin":
            while not self.machine.memory.get(self.value(operands[0]), 0):
                yield f"the flag at {self.value(operands[0])}"
        elif name.startswith("bar") and ".warp" not in name:
            yield from self.named_barrier(name, operands)
        elif name.startswith("mbarrier"):
            self.mbarrier(name, operands)
            yield "moved"
        elif name.startswith("cp.async.bulk.tensor"):
            self.copy(name, operands)
            yield "moved"
        elif name.startswith("st.release"):
            self.machine.memory[self.value(operands[0])] = self.value(operands[1])
            yield "moved"
        elif name.startswith("st.volatile.shared"):
            cta.words[self.value(operands[0])] = self.value(operands[1])
        elif name.startswith("setmaxnreg"):
            count, launched = self.value(operands[0]), self.machine.launch_registers
            assert count >= launched if ".inc" in name else count <= launched, f"{name} {count} after a launch with {launched}"
            cta.registers[self.warp] = count

    def named_barrier(self, name: str, operands: tuple[str, ...]) -> Iterator[str]:
        cta, number = self.cta, self.value(operands[0])
        assert 0 <= number < 16
        threads = self.value(operands[1]) if len(operands) > 1 else cta.threads
        generation = cta.generation.get(number, 0)
        cta.arrived[number] = cta.arrived.get(number, 0) + WARP
        assert cta.arrived[number] <= threads, f"barrier {number}: more than {threads} threads"
        if cta.arrived[number] == threads:
            cta.arrived[number], cta.generation[number] = 0, generation + 1
        yield "moved"
        if "arrive" not in name:
            while cta.generation.get(number, 0) == generation:
                yield f"barrier {number} ({cta.arrived[number]} of {threads} threads)"

    def mbarrier(self, name: str, operands: tuple[str, ...]) -> None:
        barriers = self.cta.mbarriers
        if ".init" in name:
            count = self.value(operands[1])
            barriers[self.value(operands[0])] = Mbarrier(count, count)
            return
        barrier = barriers[self.value(operands[1])]
        if "expect_tx" in name:
            barrier.bytes += self.value(operands[2])
            barrier.pending -= 1
        else:
            barrier.pending -= self.value(operands[2]) if len(operands) > 2 else 1
        barrier.settle()

    def copy(self, name: str, operands: tuple[str, ...]) -> None:
        """Done at once. A load names its parameter and coordinates in the second operand, a store in the first."""
        load = "mbarrier" in name
        source = operands[1] if load else operands[0]
        parameter, *coordinates = (self.value(x) for x in re.findall(r"%\w+|\d+", source))
        self.cta.copies.append(("load" if load else "store", parameter, tuple(coordinates)))
        if load:
            barrier = self.cta.mbarriers[self.value(operands[2])]
            barrier.bytes -= self.machine.box_bytes[parameter]
            barrier.settle()

    # ---- integer arithmetic ----

    def compute(self, name: str, operands: tuple[str, ...]) -> None:
        target, *sources = operands
        operation, *kinds = name.split(".")
        kind = kinds[-1]
        if name.startswith("ld.volatile.shared"):
            self.values[target] = self.cta.words[self.value(sources[0])]
            return
        if operation == "ld":
            assert name.startswith("ld.param"), f"{name} decides where a warp goes"
            self.values[target] = self.parameter(sources[0])
            return
        if operation == "elect":
            self.values[target.split("|")[1]] = 1
            return
        numbers = [self.value(x) for x in sources]
        if operation in ("shfl", "mov", "cvta"):
            result = numbers[0]
        elif operation == "setp":
            a, b = (_signed(x, kind) for x in numbers)
            result, kind = int(COMPARISONS[kinds[0]](a, b)), "pred"
        elif operation == "selp":
            result = numbers[0] if numbers[2] else numbers[1]
        elif operation == "mul" and kinds[0] == "wide":
            result = _signed(numbers[0], kind) * _signed(numbers[1], kind)
            kind = f"b{2 * int(kind[1:])}"
        elif operation == "mul" and kinds[0] == "hi":
            result = (_signed(numbers[0], kind) * _signed(numbers[1], kind)) >> int(kind[1:])
        elif operation == "cvt":
            result = _signed(numbers[0], kinds[-1])
            kind = kinds[-2]
        else:
            result = ARITHMETIC[operation](*(_signed(x, kind) for x in numbers))
        self.values[target] = result & 1 if kind == "pred" else _signed(result, kind)

    def parameter(self, operand: str) -> int:
        name, _, offset = operand[1:-1].partition("+")
        value = self.machine.parameters[self.machine.program.parameters[name]]
        return value[int(offset or 0)] if isinstance(value, dict) else value


def _signed(value: int, kind: str) -> int:
    """The value that `kind` (s32, u16, b64, ...) sees in the low bits."""
    if kind == "pred":
        return value
    bits = int(kind[1:])
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] in "sb" and value >> (bits - 1) else value


def _divide(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


COMPARISONS: dict[str, Callable] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lo": lambda a, b: a < b,
    "ls": lambda a, b: a <= b,
    "hi": lambda a, b: a > b,
    "hs": lambda a, b: a >= b,
}
ARITHMETIC: dict[str, Callable] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "mad": lambda a, b, c: a * b + c,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "neg": lambda a: -a,
    "min": min,
    "max": max,
    "div": _divide,
    "rem": lambda a, b: a - b * _divide(a, b),
}
