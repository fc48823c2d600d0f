"""Tile configurations: one frozen row per (scan, K, V). Plain integers, no DSL import.

A row is the whole compile key of its kernel, the key of the object cache and the object's file name.
"""

from dataclasses import dataclass, field, fields

from .features import feature_count

SHARED_MEMORY_LIMIT = 232448  # bytes one CTA may use on sm_90
REGISTER_FILE = 65536  # 32-bit registers of one SM
WARPGROUP = 128  # threads
SCANS = ("forward_scan", "reverse_scan", "output")


@dataclass(frozen=True)
class ScanConfig:
    """One kernel: which scan, its problem dimensions, its pipeline depth and its register split.

    With two feature tiles the state warpgroup builds the next chunk's features while this chunk's are multiplied.
    With early_inter a token warpgroup issues its product with the state (F/2 registers) together with the scores, before the
    elementwise work instead of after it.
    registers are per thread of the producer, the state and the two token warpgroups (setmaxnreg). Two fields take no part in
    the key: allowed_spill, in bytes a thread, which needs a measured reason in `origin`, and `origin`, which says where the
    row came from.
    """

    scan: str
    key_dim: int
    value_dim: int
    chunk: int = 64
    stages: int = 3
    feature_tiles: int = 1
    early_inter: bool = False
    producer_registers: int = 24
    state_registers: int = 200
    token_registers: int = 144
    allowed_spill: int = field(default=0, compare=False)
    origin: str = field(default="", compare=False)

    def __post_init__(self):
        if self.scan not in SCANS:
            raise ValueError(f"ScanConfig: got scan={self.scan!r}, need one of {SCANS}")
        if self.registers > REGISTER_FILE:
            raise ValueError(f"{self.name}: {self.registers} registers, the SM has {REGISTER_FILE}")
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
    def threads(self) -> int:
        return 4 * WARPGROUP

    @property
    def registers(self) -> int:
        return WARPGROUP * (self.producer_registers + self.state_registers + 2 * self.token_registers)

    @property
    def name(self) -> str:
        """File name and kernel name of the row: every field of the key, in order."""
        return "based_" + "_".join(str(getattr(self, key.name)) for key in fields(self) if key.compare)

    @property
    def tile_bytes(self) -> int:
        """Bytes one stage loads: a chunk of q, k and v, in the backward of do, and in the reverse scan of r and h (fp32)."""
        values = 1 if self.scan == "output" else 2
        row_statistics = 8 if self.scan == "reverse_scan" else 0
        return self.chunk * (2 * 2 * self.padded_key_dim + values * 2 * self.value_dim + row_statistics)

    @property
    def shared_memory(self) -> int:
        """Bytes a CTA takes (the kernel asserts that its storage struct has this size): the stages, the state's bf16 copy
        twice, the feature tiles, the normaliser (four bf16 tiles) twice and its tile of ones, the barriers, and in
        the output pass a tile of o for each token warpgroup."""
        state = 2 * 2 * self.value_dim * self.features
        features = 2 * self.feature_tiles * self.chunk * self.features
        normaliser = 2 * 4 * 2 * self.padded_key_dim**2 + 2 * self.chunk * self.padded_key_dim
        barriers = 2 * 8 * self.stages
        outputs = 2 * 2 * self.chunk * self.value_dim if self.scan == "output" else 0
        total = self.stages * self.tile_bytes + state + features + normaliser + barriers + outputs
        return -(-total // 1024) * 1024


def _rows(scan: str) -> tuple[ScanConfig, ...]:
    """The rows of one scan, tuned on an H200 (docs/performance.md). Three splits of the register file: the state takes
    V F / 128 of its registers (160 at (16, 128), 80 at (16, 64), 48 and 24 at K = 8), the token warpgroups what is left."""
    wide, middle, narrow = ({"state_registers": s, "token_registers": t} for s, t in ((216, 136), (168, 160), (152, 168)))
    reverse = scan == "reverse_scan"
    early = {"early_inter": scan != "output"}
    stages, spill = (3, 16) if reverse else (4, 0)
    full = "the only split that compiles clean; shared memory is full"
    spilled = f"{full}; 12 B of spills 0.308 ms, none 0.315"
    return (
        ScanConfig(scan, 8, 64, stages=5, feature_tiles=2, **early, **narrow, origin="shared memory allows stages and tiles"),
        ScanConfig(scan, 8, 128, stages=stages, feature_tiles=2, **early, **narrow, origin="reverse: 3 stages beat 4 by 6%"),
        ScanConfig(scan, 16, 64, stages=5, feature_tiles=2, **middle, origin="as (8, 64); 216 + 136 serialises WGMMA"),
        ScanConfig(scan, 16, 128, allowed_spill=spill, **wide, origin=spilled if reverse else full),
    )


ROWS: tuple[ScanConfig, ...] = tuple(row for scan in SCANS for row in _rows(scan))


def find(scan: str, key_dim: int, value_dim: int) -> ScanConfig | None:
    """The row that runs `scan` at (K, V), or None where the table has none."""
    return next((row for row in ROWS if (row.scan, row.key_dim, row.value_dim) == (scan, key_dim, value_dim)), None)
