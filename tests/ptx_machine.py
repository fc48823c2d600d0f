"""A machine that runs a compiled kernel without a GPU, slowly: the PTX subset that the kernels use, on numpy.

It executes integer, fp32 and packed bf16 arithmetic, shared and global memory, WGMMA with its shared-memory descriptors,
bulk tensor copies with their swizzles, mbarriers with their byte counts, named barriers and flags in global memory. A hang, a
copy of the wrong chunk, registers that are not there, a barrier with the wrong count, a wrong layout or a wrong number all show
on a CPU. Products and bulk copies are done at once. Or, with `late`, products and stores only when somebody waits for them,
bulk loads when nothing else can go on, the last one first, the last warps go first, and the kernel before ends only when
nothing else can go on: whatever is read too early or overwritten too soon, and whoever is taken to be slower, then shows in
one of the two runs.

A run that only asks who waits for whom first drops the arithmetic (`slice_control`) and is three times as fast.
"""

import functools
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

WARP = 32
SHARED = 1024  # where shared memory begins
SHARED_BYTES = 232448
GLOBAL = 1 << 33  # where global memory begins
LOOPING_SCOPES = {"mbarrier.try_wait": "wait", "ld.acquire": "spin"}  # inline assembly that loops until something has happened
DONE = 1 << 30  # the program counter of a lane that has returned
EFFECTS = (
    "bra",
    "ret",
    "bar",
    "wait",
    "spin",
    "griddepcontrol",
    "setmaxnreg",
    "mbarrier",
    "cp.async.bulk.tensor",
    "st.release",
    "st.volatile",
)
TYPES = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


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
        for start, name in LOOPING_SCOPES.items():
            if instruction.name.startswith(start):
                return [Instruction(None, name, instruction.operands[1:])]
    return None


def slice_control(program: Program) -> Program:
    """The program with no-ops for what no branch, barrier or bulk copy depends on."""
    needed: set[str] = set()
    kept = [instruction.name.startswith(EFFECTS) for instruction in program.instructions]
    effects, changed = list(kept), True
    while changed:
        changed = False
        for i, instruction in enumerate(program.instructions):
            if kept[i] or (instruction.operands and set(_registers(instruction.operands[0])) & needed):
                before = len(needed)
                sources = instruction.operands if effects[i] else instruction.operands[1:]
                needed |= {name for operand in (*sources, instruction.guard or "") for name in _registers(operand)}
                changed |= len(needed) != before or not kept[i]
                kept[i] = True
    nothing = Instruction(None, "nop", ())
    return replace(program, instructions=[x if keep else nothing for x, keep in zip(program.instructions, kept, strict=True)])


def _registers(operand: str) -> list[str]:
    return re.findall(r"%(?:p|rs|rd|r)\d+", operand)


# ---------------------------------------------------------------------------------------------------------------------
# The state of a launch


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
    index: tuple[int, int, int]
    threads: int
    shared_bytes: int
    mbarriers: dict[int, Mbarrier] = field(default_factory=dict)
    arrived: dict[int, int] = field(default_factory=dict)  # named barrier -> threads
    generation: dict[int, int] = field(default_factory=dict)
    copies: list[tuple[str, int, tuple[int, ...]]] = field(default_factory=list)  # ("load" | "store", parameter, coordinates)
    registers: dict[int, int] = field(default_factory=dict)  # warp -> registers a thread

    def __post_init__(self):
        self.shared = np.full(self.shared_bytes // 4, 0x7FC07FC0, np.uint32)  # NaN as fp32 and as bf16


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor: `tensor` (..., tokens, columns) of which a box of `rows` x `columns` is copied, swizzled over the bytes
    of a row; or (..., values), of which `columns` are, as they are."""

    tensor: np.ndarray
    rows: int
    columns: int

    @property
    def bytes(self) -> int:
        return self.rows * self.columns * self.tensor.itemsize

    def addresses(self, base: int) -> np.ndarray:
        """Byte addresses in shared memory of the box's elements."""
        width = self.columns * self.tensor.itemsize
        place = np.arange(self.rows)[:, None] * width + np.arange(self.columns) * self.tensor.itemsize
        return swizzle(base + place, width if self.tensor.itemsize == 2 else 0)

    def window(self, coordinates: tuple[int, ...]) -> tuple[np.ndarray, int, int]:
        """(the matrix, first row, first column) at coordinates given innermost first."""
        column, *outer = coordinates
        if self.rows == 1:  # of a vector
            return self.tensor[tuple(reversed(outer))][None], 0, column
        row, *outer = outer
        return self.tensor[tuple(reversed(outer))], row, column


def swizzle(addresses, width: int):
    """The hardware's exchange of 16-byte chunks in rows of `width` bytes, by address bits 7 and up."""
    mask = {128: 7, 64: 3, 32: 1, 0: 0}[width]
    return addresses ^ (((addresses >> 7) & mask) << 4)


class Machine:
    """One launch. parameters: position -> value of a scalar, or {offset: value} of a struct; maps: position -> TensorMap, or
    the bytes of a box where only control flow is run."""

    def __init__(self, program: Program, threads: int, parameters: dict, maps: dict, global_bytes: int = 0, late: bool = False):
        self.program, self.threads, self.parameters, self.maps = program, threads, parameters, maps
        self.late = late
        self.shared_bytes = SHARED_BYTES  # an access behind them is an IndexError
        self.memory = np.full(global_bytes // 4 + 1, 0x7FC07FC0, np.uint32)
        self.flags: dict[int, int] = {}
        self.kernel_before: Callable | None = None  # what it still does, once nothing else can go on
        self.settled: set[int] = set()  # descriptors of what it does not write
        self.arriving: list[Callable] = []  # bulk loads that have been issued, with `late`
        self.launch_registers = 65536 // threads // 8 * 8
        self.code = [compile_instruction(self, instruction) for instruction in program.instructions]

    def run(self, ctas: int, rows: int = 1, layers: int = 1) -> list[Cta]:
        """All CTAs of a (ctas, rows, layers) grid to their end. Raises Stuck when nothing can go on."""
        grid = [
            Cta((x, y, z), self.threads, self.shared_bytes) for z in range(layers) for y in range(rows) for x in range(ctas)
        ]
        units = [Unit(self, cta, first, count) for cta in grid for first, count in self.units()]
        units = deque((unit, unit.run()) for unit in (reversed(units) if self.late else units))
        waiting: dict[tuple, str] = {}
        while units:
            unit, steps = units.popleft()
            reason = next(steps, "done")
            if reason in ("done", "moved"):
                waiting.clear()
            else:
                waiting[unit.cta.index, unit.first_warp] = reason
            if reason != "done":
                units.append((unit, steps))
                if len(waiting) == len(units) and self.arriving:
                    self.arriving.pop()()
                    waiting.clear()
                elif len(waiting) == len(units) and self.kernel_before:
                    self.kernel_before()
                    self.kernel_before = None
                    waiting.clear()
                elif len(waiting) == len(units):
                    raise Stuck("; ".join(f"CTA {c} warp {w} waits for {why}" for (c, w), why in sorted(waiting.items())[:24]))
        for cta in grid:
            assert all(barrier.bytes == 0 for barrier in cta.mbarriers.values())
            assert sum(WARP * n for n in cta.registers.values()) <= self.launch_registers * self.threads
        return grid

    def units(self) -> list[tuple[int, int]]:
        """(first warp, warps) of what runs in step: the warps of the first warpgroup alone, of the others together."""
        return [(warp, 1) for warp in range(4)] + [(warp, 4) for warp in range(4, self.threads // WARP, 4)]


class Unit:
    """Warps in step; lanes part at a branch and meet again at the smallest program counter."""

    def __init__(self, machine: Machine, cta: Cta, first_warp: int, warps: int):
        self.machine, self.cta, self.first_warp, self.warps = machine, cta, first_warp, warps
        self.lanes = WARP * warps
        self.lane = np.arange(self.lanes) % WARP
        self.values: dict[str, np.ndarray] = {}
        thread = np.arange(self.lanes, dtype=np.uint32) + WARP * first_warp
        place = {f"%ctaid.{axis}": number for axis, number in zip("xyz", cta.index, strict=True)}
        special = {"%tid.x": thread, "%ntid.x": machine.threads} | place
        special["__dynamic_shmem__0"] = SHARED
        for name, value in special.items():
            self.values[name] = np.broadcast_to(np.asarray(value, np.uint32), self.lanes)
        self.everyone = np.ones(self.lanes, bool)
        self.groups = {"wgmma": deque([[]]), "cp": deque([[]])}  # what was issued and not waited for; the last one is open

    def run(self) -> Iterator[str]:
        """Yields "moved" after an effect that others may wait for, else what it waits for."""
        code, end = self.machine.code, len(self.machine.code)
        places = np.zeros(self.lanes, np.int64)
        while (at := int(places.min())) < end:
            mask = places == at
            together = bool(mask.all())
            meet = end if together else int(places[~mask].min())
            while True:  # until the lanes part, or meet others
                guard, negated, branch, effect, execute = code[at]
                active = self.everyone if together else mask
                if guard is not None:
                    holds = self.values[guard] if not negated else ~self.values[guard]
                    active = active & holds
                at += 1
                if branch is not None:
                    if together and (active.all() or not active.any()):
                        at = branch if active.any() else at
                        if at >= end:
                            return
                        continue
                    places = np.where(mask if not together else True, at, places)
                    places[active] = branch
                    break
                if execute is not None and active.any():
                    if effect:
                        yield from execute(self, active)
                    else:
                        execute(self, None if active.all() else active)
                if at >= meet:
                    places = np.where(mask, at, places)
                    break

    def later(self, kind: str, work: Callable) -> None:
        """Do `work` when its group is waited for, or now."""
        if self.machine.late:
            self.groups[kind][-1].append(work)
        else:
            work()

    def write(self, name: str, value, active: np.ndarray | None) -> None:
        """A register of the active lanes, from one value for all or one a lane."""
        value = full(self, value)
        if active is not None:
            old = self.values.get(name)
            value = np.where(active, value, np.zeros(self.lanes, value.dtype) if old is None else old)
        self.values[name] = value


# ---------------------------------------------------------------------------------------------------------------------
# Instructions


def compile_instruction(machine: Machine, instruction: Instruction) -> tuple:
    """(guard, negated, branch target, whether others may wait for it, function of unit and active lanes)."""
    guard, negated = instruction.guard, False
    if guard is not None and guard.startswith("!"):
        guard, negated = guard[1:], True
    name, operands = instruction.name, instruction.operands
    if name.startswith("bra"):
        return guard, negated, machine.program.labels[operands[0]], False, None
    if name in ("ret", "exit"):
        return guard, negated, DONE, False, None
    effect = find(EFFECT_HANDLERS, name)
    if effect is not None:
        return guard, negated, None, True, effect(machine, name, operands)
    if name.startswith(NOTHING):
        return guard, negated, None, False, None
    handler = find(HANDLERS, name)
    assert handler is not None, f"not understood: {name} {operands}"
    return guard, negated, None, False, handler(machine, name, operands)


NOTHING = ("nop", "fence", "prefetch", "cp.async.bulk.prefetch", "bar.warp", "wgmma.fence")


def find(table: dict[str, Callable], name: str) -> Callable | None:
    return next((handler for start, handler in table.items() if name.startswith(start)), None)


def bits_of(kind: str) -> int:
    return int(re.sub(r"\D", "", kind))


def reader(machine: Machine, operand: str, kind: str = "b32") -> Callable[[Unit], np.ndarray]:
    """What reads an operand as unsigned words of `kind`: a register, a number, or an address in brackets."""
    if operand.startswith("["):
        terms = [reader(machine, term, "b64" if "%rd" in operand else "b32") for term in operand[1:-1].split("+")]
        return terms[0] if len(terms) == 1 else lambda unit: terms[0](unit) + terms[1](unit)
    if operand.startswith(("%", "__")) or operand in ("p", "P1", "wanted", "zero", "word"):
        return lambda unit: unit.values[operand]
    if operand in machine.program.parameters:  # its address: what identifies a descriptor
        value = machine.program.parameters[operand]
    else:
        value = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)
    if kind == "pred":
        constant = np.bool_(value)
    else:
        constant = TYPES[bits_of(kind)](value & ((1 << bits_of(kind)) - 1))
    return lambda unit: constant


def signed(value, kind: str):
    """The words as numbers: signed for s and b kinds."""
    value = np.asarray(value)
    return value.view(np.dtype(f"i{value.itemsize}")) if kind[0] in "sb" else value


def floats(value) -> np.ndarray:
    return np.asarray(value).view(np.float32)


def words(value) -> np.ndarray:
    return np.asarray(value, np.float32).view(np.uint32)


def bf16_pair(value) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) of packed bf16 as float64."""
    value = np.asarray(value)
    return tuple(floats(x).astype(np.float64) for x in (value << np.uint32(16), value & np.uint32(0xFFFF0000)))


def rounded(value) -> np.ndarray:
    """float64 to the bits of the nearest bf16, ties to even, in the low half; exact enough to go through fp32."""
    bits = words(np.asarray(value))
    with np.errstate(over="ignore"):
        up = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.where(np.isnan(floats(bits)), np.uint32(0x7FFF), up >> np.uint32(16)).astype(np.uint32)


def packed(low, high) -> np.ndarray:
    return rounded(low) | (rounded(high) << np.uint32(16))


COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
INTEGERS: dict[str, Callable] = {
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
    "abs": np.abs,
    "min": np.minimum,
    "max": np.maximum,
    "div": lambda a, b: np.trunc(a.astype(np.float64) / b).astype(np.int64),
}
FLOATS: dict[str, Callable] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
    "neg": lambda a: -a,
    "rcp": lambda a: np.float32(1) / a,
}
PACKED: dict[str, Callable] = {"mul": lambda a, b: a * b, "fma": lambda a, b, c: a * b + c}


def arithmetic(machine: Machine, name: str, operands: tuple[str, ...]) -> Callable:
    target, *sources = operands
    operation, *kinds = name.split(".")
    kind = kinds[-1]
    read = [reader(machine, x, "b32" if kind in ("f32", "bf16x2") else kind) for x in sources]
    if kind == "f32":
        function = FLOATS[operation]

        def execute(unit, active):
            with np.errstate(all="ignore"):
                unit.write(target, words(function(*(floats(r(unit)) for r in read))), active)

    elif kind == "bf16x2":
        function = PACKED[operation]

        def execute(unit, active):
            pairs = [bf16_pair(r(unit)) for r in read]
            with np.errstate(all="ignore"):
                unit.write(target, packed(*(function(*(p[i] for p in pairs)) for i in range(2))), active)

    elif operation == "mul" and kinds[0] in ("wide", "hi"):
        bits = bits_of(kind)

        def execute(unit, active):
            a, b = (signed(r(unit), kind).astype(np.int64) for r in read)
            product = a * b if kinds[0] == "wide" else (a * b) >> bits
            unit.write(target, product.astype(TYPES[2 * bits if kinds[0] == "wide" else bits]), active)

    else:
        function = INTEGERS[operation]
        as_signed = operation in ("shr", "min", "max", "div", "neg", "abs")
        unsigned = kind[0] == "u" or (operation == "shr" and kind[0] == "b")

        def execute(unit, active):
            values = [r(unit) for r in read]
            if as_signed and not unsigned:
                values = [signed(x, "s") for x in values]
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                result = np.asarray(function(*values))
            unit.write(target, result if kind == "pred" else result.astype(TYPES[bits_of(kind)]), active)

    return execute


def full(unit: Unit, value) -> np.ndarray:
    """One value a lane."""
    value = np.asarray(value)
    return np.broadcast_to(value, unit.lanes) if value.ndim == 0 else value


def lane_value(unit: Unit, read: Callable, lane: int = 0) -> int:
    """What one lane reads."""
    return int(full(unit, read(unit))[lane])


def compare(machine, name, operands):
    target, *sources = operands
    _, condition, kind = name.split(".")
    function, read = COMPARISONS[condition], [reader(machine, x, kind) for x in sources]
    return lambda unit, active: unit.write(target, function(*(signed(r(unit), kind) for r in read)), active)


def select(machine, name, operands):
    target, a, b, condition = operands
    kind = name.split(".")[1].replace("f", "b")
    yes, no, when = reader(machine, a, kind), reader(machine, b, kind), reader(machine, condition, "pred")
    return lambda unit, active: unit.write(target, np.where(when(unit), yes(unit), no(unit)), active)


def move(machine, name, operands):
    target, source = operands[:2]
    if source.startswith("{"):  # two words to a double word
        low, high = (reader(machine, x) for x in re.findall(r"%\w+|-?\d+", source))

        def join(unit, active):
            both = [np.asarray(half(unit)).astype(np.uint64) for half in (low, high)]
            unit.write(target, both[0] | both[1] << np.uint64(32), active)

        return join
    if target.startswith("{"):  # and back
        names, double = re.findall(r"%\w+", target), reader(machine, source, "b64")

        def part(unit, active):
            for i, name in enumerate(names):
                unit.write(name, (double(unit) >> np.uint64(32 * i)).astype(np.uint32), active)

        return part
    read = reader(machine, source, name.split(".")[-1])
    return lambda unit, active: unit.write(target, read(unit), active)


def convert(machine, name, operands):
    target, *sources = operands
    if "bf16x2" in name:
        high, low = (reader(machine, x) for x in sources)
        return lambda unit, active: unit.write(target, packed(floats(low(unit)), floats(high(unit))), active)
    *_, to, kind = name.split(".")
    read = reader(machine, sources[0], kind if bits_of(kind) != 8 else "b16")

    def execute(unit, active):
        value = np.asarray(read(unit))
        value = signed(value.astype(np.uint8) if bits_of(kind) == 8 else value, kind)
        if to == "f32":
            result = words(value)
        elif to == "s8":
            result = value.astype(np.int8).astype(np.int16).view(np.uint16)
        else:
            result = value.astype(np.int64).astype(TYPES[bits_of(to)])
        unit.write(target, result, active)

    return execute


def permute(machine, name, operands):
    target, a, b, selector = operands
    assert selector == "0x5432"
    left, right = reader(machine, a), reader(machine, b)
    sixteen = np.uint32(16)
    return lambda unit, active: unit.write(target, (left(unit) >> sixteen) | (right(unit) << sixteen), active)


def shuffle(machine, name, operands):
    target, a, b = (operands[0].split("|")[0], *operands[1:3])
    value, lane, exchange = reader(machine, a), reader(machine, b), ".bfly" in name

    def execute(unit, active):
        other = np.asarray(lane(unit)).astype(np.int64)
        source = (unit.lane ^ other if exchange else other & (WARP - 1)) + np.arange(unit.lanes) // WARP * WARP
        unit.write(target, full(unit, value(unit))[np.broadcast_to(source, unit.lanes)], active)

    return execute


def elect(machine, name, operands):
    target = operands[0].split("|")[1]
    return lambda unit, active: unit.write(target, unit.lane == 0, active)


def load_parameter(machine, name, operands):
    position, _, offset = operands[1][1:-1].partition("+")
    value = machine.parameters[machine.program.parameters[position]]
    constant = TYPES[bits_of(name.split(".")[-1])](value[int(offset or 0)] if isinstance(value, dict) else value)
    return lambda unit, active: unit.write(operands[0], constant, active)


# ---- memory ----


def memory_of(machine: Machine, unit: Unit, name: str) -> tuple[np.ndarray, int]:
    """(32-bit words, address of the first) of the space an instruction names."""
    return (machine.memory, GLOBAL) if ".global" in name else (unit.cta.shared, SHARED)


def load(machine, name, operands):
    targets, address = re.findall(r"%\w+", operands[0]), reader(machine, operands[1])

    def execute(unit, active):
        space, start = memory_of(machine, unit, name)
        index = (full(unit, address(unit)).astype(np.int64) - start) >> 2
        index = index if active is None else np.where(active, index, 0)
        for i, target in enumerate(targets):
            unit.write(target, space[index + i], active)

    return execute


def store(machine, name, operands):
    sources, address = [reader(machine, x) for x in re.findall(r"%\w+|0f\w+|-?\d+", operands[1])], reader(machine, operands[0])

    def execute(unit, active):
        space, start = memory_of(machine, unit, name)
        index = (full(unit, address(unit)).astype(np.int64) - start) >> 2
        for i, source in enumerate(sources):
            value = full(unit, source(unit))
            if active is None:
                space[index + i] = value
            else:
                space[index[active] + i] = value[active]

    return execute


def matrices(unit: Unit, addresses: np.ndarray, active: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Word indices (warp, matrix, row, word) of the 8 x 8 bf16 matrices whose rows the lanes of the active warps point at, and
    which warps these are."""
    warps = np.ones(unit.warps, bool) if active is None else active.reshape(unit.warps, WARP).all(1)
    assert active is None or (np.repeat(warps, WARP) == active).all(), "a matrix moved by part of a warp"
    first = (addresses.astype(np.int64) - SHARED).reshape(unit.warps, 4, 8)[warps] >> 2
    return first[..., None] + np.arange(4), warps


def store_matrices(machine, name, operands):
    address, sources = reader(machine, operands[0]), [reader(machine, x) for x in re.findall(r"%\w+", operands[1])]

    def execute(unit, active):
        index, warps = matrices(unit, full(unit, address(unit)), active)
        for i, source in enumerate(sources):
            unit.cta.shared[index[:, i]] = full(unit, source(unit)).reshape(unit.warps, 8, 4)[warps]

    return execute


def load_matrices_transposed(machine, name, operands):
    targets, address = re.findall(r"%\w+", operands[0]), reader(machine, operands[1])

    def execute(unit, active):
        index, warps = matrices(unit, full(unit, address(unit)), active)
        for i, target in enumerate(targets):
            halves = np.ascontiguousarray(unit.cta.shared[index[:, i]]).view(np.uint16)  # (warp, row, column)
            turned = np.zeros((unit.warps, 8, 4), np.uint32)
            turned[warps] = np.ascontiguousarray(halves.transpose(0, 2, 1)).view(np.uint32)
            unit.write(target, turned.reshape(unit.lanes), active)

    return execute


def multiply_warps(machine, name, operands):
    """mma.sync of 16 x 8 x 16, a product for every warp."""
    targets = re.findall(r"%\w+", operands[0])
    a, b, c = ([reader(machine, x) for x in re.findall(r"%\w+|0f\w+", operand)] for operand in operands[1:4])
    register, lane = np.arange(4)[:, None], np.arange(WARP)
    row, column = lane // 4 + 8 * (register // 2), 2 * (lane % 4) + register % 2

    def entries(unit, registers):
        """(warp, row, column) of the 8 x 8 matrix that each register holds."""
        return [np.stack(bf16_pair(full(unit, r(unit)).reshape(unit.warps, 8, 4)), -1).reshape(-1, 8, 8) for r in registers]

    def execute(unit, active):
        a0, a1, a2, a3 = entries(unit, a)
        left = np.concatenate((np.concatenate((a0, a2), 2), np.concatenate((a1, a3), 2)), 1)
        product = left @ np.concatenate(entries(unit, b), 2).transpose(0, 2, 1)
        for i, (target, added) in enumerate(zip(targets, c, strict=True)):
            values = product[:, row[i], column[i]].reshape(unit.lanes) + floats(full(unit, added(unit)))
            unit.write(target, words(values), active)

    return execute


# ---- groups of asynchronous work ----


def commit_group(machine, name, operands):
    kind = name.split(".")[0]
    return lambda unit, active: unit.groups[kind].append([])


def wait_group(machine, name, operands):
    kind, allowed = name.split(".")[0], int(operands[0])

    def execute(unit, active):
        groups = unit.groups[kind]
        while len(groups) - 1 > allowed:
            for work in groups.popleft():
                work()

    return execute


# ---- WGMMA ----


@cache
def accumulator_places(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of register i of lane l, of 128 lanes."""
    register, lane = np.arange(columns // 2)[:, None], np.arange(128)
    row = 16 * (lane // 32) + lane % 32 // 4 + 8 * (register // 2 % 2)
    return row, 8 * (register // 4) + 2 * (lane % 4) + register % 2


def descriptor_tile(cta: Cta, descriptor: int, rows: int, transposed: bool) -> np.ndarray:
    """The (rows, 16) operand that a shared-memory descriptor names, as fp32."""
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    width = {1: 128, 2: 64, 3: 32}[descriptor >> 62 & 3]
    row, k = np.arange(rows)[:, None], np.arange(16)
    if transposed:
        line = width // 2
        place = row // line * leading + k // 8 * stride + k % 8 * width + row % line * 2
    else:
        place = row // 8 * stride + row % 8 * width + 2 * k
    address = swizzle(start + place, width) - SHARED
    halves = cta.shared.view(np.uint16)[address >> 1]
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def register_tile(unit: Unit, registers: list[np.ndarray]) -> np.ndarray:
    """The (64, 16) operand in four registers of 128 lanes."""
    tile, lane = np.zeros((64, 16), np.float32), np.arange(128)
    for i, register in enumerate(registers):
        row, column = 16 * (lane // 32) + lane % 32 // 4 + 8 * (i % 2), 2 * (lane % 4) + 8 * (i // 2)
        for half, values in enumerate(bf16_pair(register)):
            tile[row, column + half] = values
    return tile


def multiply(machine, name, operands):
    columns = int(re.search(r"m64n(\d+)k16", name)[1])
    accumulators = re.findall(r"%\w+", operands[0])
    in_registers = operands[1].startswith("{")
    a = [reader(machine, x, "b64") for x in re.findall(r"%\w+", operands[1])]
    b, accumulate = reader(machine, operands[2], "b64"), reader(machine, operands[3], "pred")
    flags = [bool(int(x)) for x in operands[6:]]
    row, column = accumulator_places(columns)

    def execute(unit, active):
        assert active is None and unit.lanes == 128, "a product by part of a warpgroup"
        issued = bool(lane_value(unit, accumulate)), lane_value(unit, b)
        descriptor = None if in_registers else lane_value(unit, a[0])
        unit.later("wgmma", lambda: finish(unit, *issued, descriptor))

    def finish(unit, keep, b_descriptor, a_descriptor):
        """Operands and accumulators as they are now; the descriptors were read at the issue."""
        if in_registers:
            left = register_tile(unit, [r(unit) for r in a])
        else:
            left = descriptor_tile(unit.cta, a_descriptor, 64, flags[0])
        product = left @ descriptor_tile(unit.cta, b_descriptor, columns, flags[-1]).T
        result = product[row, column]
        for i, register in enumerate(accumulators):
            value = floats(unit.values[register]) + result[i] if keep else result[i]
            unit.write(register, words(value), None)

    return execute


HANDLERS: dict[str, Callable] = {
    "setp": compare,
    "selp": select,
    "mov": move,
    "cvta": move,
    "cvt": convert,
    "prmt": permute,
    "shfl": shuffle,
    "elect": elect,
    "ld.param": load_parameter,
    "ld.": load,
    "st.": store,
    "stmatrix": store_matrices,
    "ldmatrix": load_matrices_transposed,
    "mma.sync": multiply_warps,
    "wgmma.mma_async": multiply,
    "wgmma.commit_group": commit_group,
    "wgmma.wait_group": wait_group,
    "cp.async.bulk.commit_group": commit_group,
    "cp.async.bulk.wait_group": wait_group,
    **dict.fromkeys({*INTEGERS, *FLOATS}, arithmetic),
}


# ---------------------------------------------------------------------------------------------------------------------
# Effects: generators that yield "moved", or what they wait for


def wait(machine, name, operands):
    address, parity = (reader(machine, x) for x in operands[:2])

    def execute(unit, active):
        first = int(np.argmax(active))
        number, want = lane_value(unit, address, first), lane_value(unit, parity, first)
        barrier = unit.cta.mbarriers[number]
        while barrier.phase % 2 == want:
            yield f"mbarrier {number - SHARED} (phase {barrier.phase}, {barrier.pending} arrivals short)"

    return execute


def grid_wait(machine, name, operands):
    def execute(unit, active):
        while machine.kernel_before:
            yield "the kernel before"

    return execute


def let_next_start(machine, name, operands):
    """Kernels count on it that the one before has waited for all others."""

    def execute(unit, active):
        assert not machine.kernel_before, "the next kernel is let start before the kernel before is through"
        yield "moved"

    return execute


def spin(machine, name, operands):
    address = reader(machine, operands[0])

    def execute(unit, active):
        for lane in np.flatnonzero(active):
            flag = lane_value(unit, address, lane)
            while not machine.flags.get(flag, 0):
                yield f"the flag at {flag}"

    return execute


def store_flag(machine, name, operands):
    address, value = (reader(machine, x) for x in operands)

    def execute(unit, active):
        for lane in np.flatnonzero(active):
            machine.flags[lane_value(unit, address, lane)] = lane_value(unit, value, lane)
        yield "moved"

    return execute


def named_barrier(machine, name, operands):
    number = reader(machine, operands[0])
    count = reader(machine, operands[1]) if len(operands) > 1 else None

    def execute(unit, active):
        cta, first = unit.cta, int(np.argmax(active))
        which = lane_value(unit, number, first)
        threads = cta.threads if count is None else lane_value(unit, count, first)
        assert 0 <= which < 16
        generation = cta.generation.get(which, 0)
        cta.arrived[which] = cta.arrived.get(which, 0) + WARP * int(active.reshape(-1, WARP).any(1).sum())
        assert cta.arrived[which] <= threads, f"barrier {which}: more than {threads} threads"
        if cta.arrived[which] == threads:
            cta.arrived[which], cta.generation[which] = 0, generation + 1
        yield "moved"
        while "arrive" not in name and cta.generation.get(which, 0) == generation:
            yield f"barrier {which} ({cta.arrived[which]} of {threads} threads)"

    return execute


def mbarrier(machine, name, operands):
    lifetime = ".init" in name or ".inval" in name
    address = reader(machine, operands[0] if lifetime else operands[1])
    count = reader(machine, operands[-1]) if ".init" in name or len(operands) > 2 else None

    def execute(unit, active):
        for lane in np.flatnonzero(active):
            where, number = lane_value(unit, address, lane), 1 if count is None else lane_value(unit, count, lane)
            if ".init" in name:
                assert where not in unit.cta.mbarriers, "an mbarrier is initialised twice"
                unit.cta.mbarriers[where] = Mbarrier(number, number)
                continue
            if ".inval" in name:
                assert unit.cta.mbarriers.pop(where).bytes == 0, "an mbarrier ends while bytes are on their way"
                continue
            barrier = unit.cta.mbarriers[where]
            barrier.pending -= 1 if "expect_tx" in name else number
            barrier.bytes += number if "expect_tx" in name else 0
            barrier.settle()
        yield "moved"

    return execute


def bulk_copy(machine, name, operands):
    """Once for a warp. A load names its parameter and coordinates in the second operand, a store in the first."""
    is_load = "mbarrier" in name
    tensor_side, shared_side = (operands[1], operands[0]) if is_load else (operands[0], operands[1])
    parts = [reader(machine, x, "b64" if x.startswith("%rd") else "b32") for x in re.findall(r"%\w+|\d+", tensor_side)]
    shared, barrier_address = reader(machine, shared_side), reader(machine, operands[2]) if is_load else None

    def execute(unit, active):
        warps = active.reshape(-1, WARP)
        for lane in WARP * np.flatnonzero(warps.any(1)) + warps.argmax(1)[warps.any(1)]:
            parameter, *coordinates = (int(signed(full(unit, part(unit))[lane], "s")) for part in parts)
            unit.cta.copies.append(("load" if is_load else "store", parameter, tuple(coordinates)))
            early = is_load and parameter in machine.settled
            assert early or not machine.kernel_before, "a bulk copy that does not wait for the kernel before"
            source = machine.maps.get(parameter)
            box = unit.cta, source, tuple(coordinates), lane_value(unit, shared, lane), is_load
            if is_load:
                barrier = unit.cta.mbarriers[lane_value(unit, barrier_address, lane)]
                work = functools.partial(arrive, box, barrier)
                machine.arriving.append(work) if machine.late else work()
            elif isinstance(source, TensorMap):
                unit.later("cp", functools.partial(copy_box, *box))
        yield "moved"

    return execute


def arrive(box: tuple, barrier: Mbarrier) -> None:
    """A load is done."""
    source = box[1]
    if isinstance(source, TensorMap):
        copy_box(*box)
    barrier.bytes -= source.bytes if isinstance(source, TensorMap) else source
    barrier.settle()


def copy_box(cta: Cta, source: TensorMap, coordinates: tuple[int, ...], base: int, is_load: bool) -> None:
    """Between the box at `coordinates` and shared memory; what lies outside the tensor is zero, or dropped."""
    matrix, first_row, first_column = source.window(coordinates)
    rows = max(0, min(source.rows, matrix.shape[0] - first_row))
    columns = max(0, min(source.columns, matrix.shape[1] - first_column))
    inside = matrix[first_row : first_row + rows, first_column : first_column + columns]
    space = cta.shared.view(matrix.dtype)
    index = (source.addresses(base) - SHARED) // matrix.itemsize
    if is_load:
        box = np.zeros((source.rows, source.columns), matrix.dtype)
        box[:rows, :columns] = inside
        space[index] = box
    else:
        inside[...] = space[index][:rows, :columns]


def set_registers(machine, name, operands):
    count = int(operands[0])

    def execute(unit, active):
        launched = machine.launch_registers
        assert count >= launched if ".inc" in name else count <= launched, f"{name} {count} after a launch with {launched}"
        for warp in range(unit.first_warp, unit.first_warp + unit.warps):
            unit.cta.registers[warp] = count
        yield "moved"

    return execute


EFFECT_HANDLERS: dict[str, Callable] = {
    "wait": wait,
    "spin": spin,
    "griddepcontrol.wait": grid_wait,
    "griddepcontrol.launch_dependents": let_next_start,
    "st.release": store_flag,
    "bar.sync": named_barrier,
    "bar.arrive": named_barrier,
    "mbarrier": mbarrier,
    "cp.async.bulk.tensor": bulk_copy,
    "setmaxnreg": set_registers,
}
