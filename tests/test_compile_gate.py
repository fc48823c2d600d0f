"""Every row of the table compiles for sm_90a with no GPU, and to the code that was meant: no WGMMA serialised, no spills
beyond what the row allows, the warpgroup MMA and the bulk tensor copy in the PTX."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from based_cute.kernels import config

pytest.importorskip("cutlass", reason="the DSL has no wheel for this platform")

COMPILE = """
import sys
from based_cute.kernels import build, config
build.compile_row(eval(sys.argv[1], vars(config)))
"""


class Report(NamedTuple):
    """What ptxas said of a row, and the PTX it said it of."""

    remarks: list[str]
    spilled: int
    ptx: str


def compile_report(row: config.ScanConfig, directory: Path) -> Report:
    """Compile in a process of its own: the DSL reads its environment once, and ptxas writes to the process's streams."""
    environment = dict(
        os.environ,
        CUDA_VISIBLE_DEVICES="",
        CUTE_DSL_ARCH="sm_90a",
        CUTE_DSL_COMPILER_OPT="remarks{ptx}",
        CUTE_DSL_KEEP="ptx",
        CUTE_DSL_DUMP_DIR=str(directory),
    )
    run = subprocess.run(
        [sys.executable, "-c", COMPILE, repr(row)], env=environment, capture_output=True, text=True, timeout=600
    )
    output = run.stdout + run.stderr
    assert run.returncode == 0, output[-3000:]
    spills = [int(n) for n in re.findall(r"(\d+)\s+bytes\s+spill\s+(?:stores|loads)", output)]
    assert spills, f"ptxas reported no resources:\n{output[-3000:]}"
    (ptx,) = directory.glob("*.ptx")
    return Report(sorted(set(re.findall(r"C75\d\d", output))), max(spills), ptx.read_text())


@pytest.mark.parametrize("row", config.ROWS, ids=lambda row: f"{row.scan}-{row.key_dim}-{row.value_dim}")
def test_row_compiles_to_the_code_that_was_meant(row, tmp_path):
    report = compile_report(row, tmp_path)
    assert report.remarks == []
    assert report.spilled <= row.allowed_spill
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg", "mbarrier"):
        assert instruction in report.ptx
    assert f"n{row.features}k16.f32.bf16.bf16" in report.ptx  # the packed features, never the full K^2


def test_gate_sees_serialised_products(tmp_path):
    """A row whose state warpgroup has too few registers must come out red, or the gate above proves nothing."""
    starved = replace(config.find("forward_scan", 16, 128), state_registers=168, token_registers=160)
    report = compile_report(starved, tmp_path)
    assert report.remarks and report.spilled > 64
