"""Machine code of sm_90 as ptxas wrote it: 16 bytes an instruction, the last 23 bits of which say what it waits for.

What is known of it is read off disassembled kernels: the opcode is in bits 0 to 11; bits 110 to 112 name the scoreboard that a
load ticks when its data is there, 116 to 121 the scoreboards that an instruction waits for.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

LOADS = {0x984, 0x83B}  # LDS, LDSM
NO_BOARD = 7  # of a load whose data nobody uses: a volatile one
SYNCS = 0x9A7  # arrivals at mbarriers; with RELEASE those of a consumer, which carry no bytes to expect
RELEASE = 1 << 20


class Instruction(NamedTuple):
    opcode: int
    releases: bool
    ticks: int
    waits: int


def text_sections(cubin: bytes) -> Iterator[bytes]:
    """The code of each kernel in an ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + size * i) for i in range(count)]
    for name, _, _, _, offset, length in headers:
        start = headers[names][4] + name
        if cubin[start : start + 6] == b".text.":
            yield cubin[offset : offset + length]


def instructions(code: bytes) -> list[Instruction]:
    found = []
    for low, high in struct.iter_unpack("<QQ", code):
        opcode = low & 0xFFF
        releases = opcode == SYNCS and bool(high & RELEASE)
        found.append(Instruction(opcode, releases, high >> 46 & 7, high >> 52 & 63))
    return found


def releases(code: list[Instruction]) -> list[int]:
    """For each arrival at an mbarrier that gives a stage back, in the order of addresses, how many loads from shared memory are
    still under way: the arrival may be seen before they read."""
    loading = [0] * 8
    found = []
    for instruction in code:
        loading = [0 if instruction.waits >> board & 1 else count for board, count in enumerate(loading)]
        if instruction.releases:
            found.append(sum(loading))
        elif instruction.opcode in LOADS and instruction.ticks != NO_BOARD:
            loading[instruction.ticks] += 1
    return found
