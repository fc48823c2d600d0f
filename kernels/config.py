"""Tile configurations: one frozen row per (scan, K, V). Plain integers, no DSL import.

A row is the whole compile key of its kernel, the key of the object cache and the object's file name.
"""

from dataclasses import dataclass, field, fields
from typing import NamedTuple

from .features import feature_count

SHARED_MEMORY_LIMIT = 232448  # bytes one CTA may use on sm_90
REGISTER_FILE = 65536  # 32-bit registers of one SM
WARPGROUP = 128  # threads
CHUNK = 64  # tokens
TOKEN_WARPGROUPS = 2  # of a scan
# Chunks between two states that a sweep starts from. dq of any 64 tokens before keys 1000 times larger has an error of up to
# 3.0e-3 then, the same with 16, but 3.4e-3 with 128 (tests/ptx_machine.py).
CHECKPOINT = 64
NORMALISER_WORDS = 72  # a normaliser for K = 8 in memory: G (8 x 8) and the sums of 8 entries, fp32
SCANS = ("forward_scan", "reverse_scan", "output")
STATES = ("forward_state", "reverse_state", "output_state")  # their states at the cuts of a sequence
STATE_SUM = "state_sum"
SWEEP = ("sweep_state", "sweep")
PASSES = (*SCANS, *STATES, STATE_SUM, *SWEEP)
# What a call runs, in order: the scans; before each scan the passes that compute the states at the cuts; without cuts both
# scans of a backward in one kernel, and at K = 8 a sweep in their place, with the pass before it.
OPERATIONS = {
    "forward": {"scans": ("output",), "summed": ("output_state", STATE_SUM, "output")},
    "backward": {
        "scans": ("forward_scan", "reverse_scan"),
        "summed": ("forward_state", STATE_SUM, "forward_scan", "reverse_state", STATE_SUM, "reverse_scan"),
        "whole": (("forward_scan", "reverse_scan"),),
        "swept": (SWEEP,),
    },
}


@dataclass(frozen=True)
class ScanConfig:
    """One kernel: which scan, its problem dimensions, its pipeline depth and its register split.

    With two feature tiles the state warpgroup builds the next chunk's features while this chunk's are multiplied. A pass that
    sums states has a ring of them, which its token warpgroups fill.
    With early_inter a token warpgroup issues its product with the state (F/2 registers) together with the scores, before the
    elementwise work instead of after it.
    In blocks of `causal_block` rows and columns the elementwise work spares the masked ones, and the mask in the others but
    those on the diagonal: each warp, of 16 rows, takes the branch of its block.
    registers are per thread of the producer, the state and the two token warpgroups (setmaxnreg). Two fields take no part in
    the key: allowed_spill, in bytes a thread, which needs a measured reason in `origin`, and `origin`, which says where the
    row came from.
    """

    scan: str
    key_dim: int
    value_dim: int
    chunk: int = CHUNK
    stages: int = 3
    feature_tiles: int = 1
    token_warpgroups: int = TOKEN_WARPGROUPS
    early_inter: bool = False
    causal_block: int = 16
    producer_registers: int = 24
    state_registers: int = 200
    token_registers: int = 144
    allowed_spill: int = field(default=0, compare=False)
    origin: str = field(default="", compare=False)

    def __post_init__(self):
        if self.scan not in PASSES:
            raise ValueError(f"ScanConfig: got scan={self.scan!r}, need one of {PASSES}")
        if self.registers > self.launch_registers:  # setmaxnreg would wait for ever
            raise ValueError(f"{self.name}: {self.registers} registers, a launch of {self.threads} has {self.launch_registers}")
        if self.shared_memory > SHARED_MEMORY_LIMIT:
            raise ValueError(f"{self.name}: {self.shared_memory} bytes of shared memory, the limit is {SHARED_MEMORY_LIMIT}")

    @property
    def features(self) -> int:
        return feature_count(self.key_dim)

    @property
    def padded_key_dim(self) -> int:
        """Columns of a q or k tile: one k-step of the bf16 WGMMA; TMA fills columns past K with zeros."""
        return 16

    @property
    def row_blocks(self) -> int:
        return self.chunk // self.causal_block

    @property
    def threads(self) -> int:
        return (2 + self.token_warpgroups) * WARPGROUP

    @property
    def registers(self) -> int:
        return WARPGROUP * (self.producer_registers + self.state_registers + self.token_warpgroups * self.token_registers)

    @property
    def split(self) -> tuple[int, int, int]:
        """Registers of a thread of each role."""
        return self.producer_registers, self.state_registers, self.token_registers

    @property
    def launch_registers(self) -> int:
        """What a CTA is launched with, and all that setmaxnreg has to share out: per thread a multiple of 8."""
        return self.threads * (REGISTER_FILE // self.threads // 8 * 8)

    @property
    def name(self) -> str:
        """File name and kernel name of the row: every field of the key, in order."""
        return "based_" + "_".join(str(getattr(self, key.name)) for key in fields(self) if key.compare)

    @property
    def ahead(self) -> bool:
        """Whether the state warpgroup builds features one chunk ahead."""
        return self.feature_tiles == 2

    @property
    def publishes(self) -> bool:
        """Whether the token warpgroups get copies of the state."""
        return self.scan in (*SCANS, "sweep")

    @property
    def tile_bytes(self) -> int:
        """Bytes one stage loads: its tiles of (chunk, 16) and (chunk, V) bf16, and where the pass reads them r and h (fp32)."""
        rows, values = {"output": (2, 1), "forward_scan": (2, 2), "reverse_scan": (2, 2), "sweep": (2, 2)}.get(
            self.scan, (1, 1)
        )
        statistics = 8 if self.scan.startswith("reverse") else 0
        return self.chunk * (2 * rows * self.padded_key_dim + 2 * values * self.value_dim + statistics)

    @property
    def barriers(self) -> int:
        """mbarriers: of each stage that it is free and that it is full, in a sweep of its keys and of its queries."""
        return (3 if self.scan == "sweep" else 2) * self.stages

    @property
    def shared_memory(self) -> int:
        """Bytes a CTA takes (the kernel asserts that its storage struct has this size): the stages, the feature tiles, the
        barriers; where the state is published for each token warpgroup a bf16 copy of it, the normaliser (four bf16 tiles),
        in the output pass a tile of o, in a sweep both again for the other state, two tiles of 64 columns, and r and h; and for
        all of them a tile of ones."""
        features = 2 * self.feature_tiles * self.chunk * self.features
        barriers = 8 * self.barriers + 4 * 8  # and the eight words of the range
        total = self.stages * self.tile_bytes + features + barriers
        if self.publishes:
            published = 2 * self.value_dim * self.features + 4 * 2 * self.padded_key_dim**2
            staged = 2 * 2 * self.chunk * 64 + 8 * self.chunk
            own = {"output": 2 * self.chunk * self.value_dim, "sweep": published + staged}.get(self.scan, 0)
            total += self.token_warpgroups * (published + own) + 2 * self.chunk * self.padded_key_dim
        if self.scan in ("reverse_scan", "reverse_state"):
            total += self.feature_tiles * 2 * self.chunk * self.padded_key_dim
        return -(-total // 1024) * 1024


def _rows(scan: str) -> tuple[ScanConfig, ...]:
    """The rows of one scan, tuned on an H200 (docs/performance.md). Three splits of the register file: the state takes
    V F / 128 of its registers (160 at (16, 128), 80 at (16, 64), 48 and 24 at K = 8), the token warpgroups what is left."""
    wide, middle, narrow = ({"state_registers": s, "token_registers": t} for s, t in ((216, 136), (168, 160), (152, 168)))
    output, reverse = scan == "output", scan == "reverse_scan"
    early = {"early_inter": not output}
    stages, block, spill = (3, CHUNK, 8) if reverse else (4, 16, 0)
    plenty = "shared memory allows stages and tiles"
    paced = "reverse: 3 stages beat 4 by 6%, no blocks those of 32 by 1%: less work, but CTAs that drift apart"
    full = "the only split that compiles clean; shared memory is full; output: two tiles, 4%; reverse: blocks of 16 rows, 0.2%"
    full += " in spite of two words spilled once a chunk"
    return (
        ScanConfig(scan, 8, 64, stages=5, feature_tiles=2, **early, **narrow, origin=plenty),
        ScanConfig(scan, 8, 128, stages=stages, feature_tiles=2, **early, causal_block=block, **narrow, origin=paced),
        ScanConfig(scan, 16, 64, stages=5, feature_tiles=2, **middle, origin="as (8, 64); 216 + 136 serialises WGMMA"),
        ScanConfig(scan, 16, 128, feature_tiles=2 if output else 1, allowed_spill=spill, **wide, origin=full),
    )


SUMMING = {"stages": 6, "feature_tiles": 4, "token_registers": 136}  # of every pass that sums states


def _state_rows(scan: str) -> tuple[ScanConfig, ...]:
    """The rows of a pass that sums states, or adds them up along a sequence."""
    return tuple(
        ScanConfig(scan, key_dim, value_dim, **SUMMING, state_registers=216, origin="registers as in the scan at (16, 128)")
        for key_dim in (8, 16)
        for value_dim in (64, 128)
    )


def _sweep_rows(value_dim: int) -> tuple[ScanConfig, ...]:
    """The rows of a sweep and of the pass before it, in the same kernel. The state takes S, dS and what a chunk adds: 48
    registers each, or 24."""
    split = {"producer_registers": 40, "state_registers": 152, "token_registers": 160}
    tiles = {"stages": 3, "feature_tiles": 3, "causal_block": CHUNK}
    slower = "shared memory is full at V = 128; blocks of 32 rows made an early build 20% slower"
    like = "as the passes that sum states; registers of the sweep"
    return (
        ScanConfig("sweep_state", 8, value_dim, **SUMMING | split, origin=like),
        ScanConfig("sweep", 8, value_dim, **tiles, **split, origin=slower),
    )


ROWS: tuple[ScanConfig, ...] = (
    *(row for scan in SCANS for row in _rows(scan)),
    *(row for value_dim in (64, 128) for row in _sweep_rows(value_dim)),
    *(row for scan in (*STATES, STATE_SUM) for row in _state_rows(scan)),
)


def find(scan: str, key_dim: int, value_dim: int) -> ScanConfig | None:
    """The row that runs `scan` at (K, V), or None where the table has none."""
    return next((row for row in ROWS if (row.scan, row.key_dim, row.value_dim) == (scan, key_dim, value_dim)), None)


@dataclass(frozen=True)
class Operation:
    """All kernels that one call from the host launches, one after the other on a stream: a forward or a backward, in one of the
    ways of OPERATIONS."""

    kind: str
    key_dim: int
    value_dim: int
    way: str = "scans"

    @property
    def name(self) -> str:
        """File name and function name."""
        return f"based_{self.kind}_{self.key_dim}_{self.value_dim}" + f"_{self.way}" * (self.way != "scans")

    @property
    def kernels(self) -> tuple[tuple[ScanConfig, ...], ...]:
        """The rows of each kernel: one, or those of passes that a CTA takes one after the other."""
        named = (names if isinstance(names, tuple) else (names,) for names in OPERATIONS[self.kind][self.way])
        return tuple(tuple(find(name, self.key_dim, self.value_dim) for name in names) for names in named)

    @property
    def rows(self) -> tuple[ScanConfig, ...]:
        """Of all kernels."""
        return sum(self.kernels, ())


def operation_of(row: ScanConfig) -> str:
    """The kind of operation that has what the pass `row` works on."""
    return "forward" if row.scan.startswith("output") else "backward"


def all_operations() -> tuple[Operation, ...]:
    """Every operation of every (K, V) of the table."""
    dims = sorted({(row.key_dim, row.value_dim) for row in ROWS})
    operations = []
    for kind, ways in OPERATIONS.items():
        for pair in dims:
            wanted = (way for way in ways if way not in ("whole", "swept") or way == uncut_way(kind, *pair))
            operations += [Operation(kind, *pair, way) for way in wanted]
    return tuple(operations)


def uncut_way(kind: str, key_dim: int, value_dim: int) -> str:
    """The way of OPERATIONS in which sequences are taken that are not cut."""
    if kind == "forward":
        return "scans"
    return "swept" if find("sweep", key_dim, value_dim) else "whole"


def state_size(key_dim: int, value_dim: int) -> int:
    """fp32 values of a state in memory: the accumulators of V x F, and of the 64 x 16 normaliser."""
    return value_dim * feature_count(key_dim) + 64 * 16


def checkpoints(chunks):
    """How many states of a sequence a sweep starts from; on the device its chunks are a run-time value."""
    return (chunks + CHECKPOINT - 1) // CHECKPOINT


def sweep_sizes(sequences: int, chunks: int, key_dim: int, value_dim: int) -> tuple[int, int]:
    """fp32 values in memory that sweeps start from: those of their states, and of the normalisers, one for each chunk."""
    states = sequences * checkpoints(chunks) * value_dim * feature_count(key_dim)
    return states, sequences * chunks * NORMALISER_WORDS


class Work(NamedTuple):
    """Times that decide how sequences are cut (schedule.py), in that of a chunk of a call's scans of whole sequences.

    piece         what begins and ends each piece of a CTA, where states are handed on
    apart         there, a chunk where fewer than `neighbours` CTAs walk side by side. A sector of DRAM has 64 bytes, a row of
                  q or k 32 at K = 16 and 16 at K = 8: those of neighbouring heads are read together, if in time
    neighbours    CTAs side by side whose rows are at least 96 bytes
    whole         a chunk of a sequence that is not cut: a sweep takes 0.91 at V = 128 and 0.87 at 64
    read_twice, read_half
                  more for each chunk that the passes that sum states read once more; where only half of the CTAs read
    halves, ranges, parts
                  what begins and ends more passes: where sequences are cut in two; in more, and states are added up along
                  them; in a long and a short part
    uneven        more, where CTAs end one sequence and begin the next
    """

    piece: float
    apart: float
    neighbours: int
    whole: float = 1.0
    read_twice: float = 0.3
    read_half: float = 0.24
    halves: float = 2.5
    ranges: float = 4.6
    parts: float = 9.0
    uneven: float = 1.5


def work(kind: str, key_dim: int, value_dim: int) -> Work:
    """By fit to calls with 1 to 300 sequences of 256 to 131072 tokens at V = 128 (docs/performance.md). A chunk takes 4.05 us
    in a backward at K = 16 and 1.7 in a forward."""
    piece, apart = (3.0, 1.4) if key_dim == 8 else (1.3, 1.03)
    whole = 0.91 if uncut_way(kind, key_dim, value_dim) == "swept" else 1.0
    starts = {"halves": 4.4, "ranges": 7.0} if kind == "forward" else {}
    return Work(piece, apart, -(-96 // (2 * key_dim)), whole, **starts)
