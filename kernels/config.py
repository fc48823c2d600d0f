"""Tile configurations: one frozen row per (scan, K, V). Plain integers, no DSL import.

A row is the whole compile key of its kernel, the key of the object cache and the object's file name.
"""

from dataclasses import dataclass, field, fields

from .features import feature_count

SHARED_MEMORY_LIMIT = 232448  # bytes one CTA may use on sm_90
REGISTER_FILE = 65536  # 32-bit registers of one SM
WARPGROUP = 128  # threads
SCANS = ("forward_scan", "reverse_scan")


@dataclass(frozen=True)
class ScanConfig:
    """One kernel: which scan, its problem dimensions, its pipeline depth and its register split.

    registers are per thread of the producer, the state and the two token warpgroups (setmaxnreg). Two fields take no part in
    the key: allowed_spill, in bytes a thread, which needs a measured reason in `origin`, and `origin`, which says where the
    row came from.
    """

    scan: str
    key_dim: int
    value_dim: int
    chunk: int = 64
    stages: int = 3
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
    def feature_tokens(self) -> int:
        """Tokens of one feature tile: what 128 threads write at a time, K/4 threads to a token."""
        return WARPGROUP // (self.key_dim // 4)

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
        """Bytes one stage loads: a chunk of q, k, v and do, and in the reverse scan of r and h (fp32)."""
        row_statistics = 8 if self.scan == "reverse_scan" else 0
        return self.chunk * (2 * 2 * self.padded_key_dim + 2 * 2 * self.value_dim + row_statistics)

    @property
    def shared_memory(self) -> int:
        """Bytes a CTA takes (the kernel asserts that its storage struct has this size): the stages, the state's bf16 copy
        twice, two feature tiles, the Gram matrix (two bf16 terms) and the feature sum (fp32) twice, the barriers."""
        state = 2 * 2 * self.value_dim * self.features
        features = 2 * 2 * self.feature_tokens * self.features
        normaliser = 2 * (2 * 2 * self.padded_key_dim**2 + 4 * self.padded_key_dim)
        barriers = 2 * 8 * self.stages
        total = self.stages * self.tile_bytes + state + features + normaliser + barriers
        return -(-total // 1024) * 1024


ROWS: tuple[ScanConfig, ...] = tuple(
    ScanConfig(scan, key_dim, value_dim, state_registers=216, token_registers=136, origin=origin)
    for scan in SCANS
    for key_dim, value_dim, origin in (
        (8, 64, "as (16, 128)"),
        (8, 128, "as (16, 128)"),
        (16, 64, "as (16, 128)"),
        (16, 128, "216 + 136 is the only split of the register file without spills: S^T takes 160 of the 216"),
    )
)


def find(scan: str, key_dim: int, value_dim: int) -> ScanConfig | None:
    """The row that runs `scan` at (K, V), or None where the table has none."""
    return next((row for row in ROWS if (row.scan, row.key_dim, row.value_dim) == (scan, key_dim, value_dim)), None)
