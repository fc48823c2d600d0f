"""What a newcomer gets: the distribution as installed, the README's commands, and a table that cannot drift."""

import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from based_cute import bench

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
RECORD = ROOT / "benchmarks" / "results" / "h200.json"


def requirements() -> list[str]:
    return importlib.metadata.requires("based-cute")


def readme_block(name: str) -> list[str]:
    """The lines of the README's code block ```bash NAME."""
    return re.search(rf"^```bash {name}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)[1].splitlines()


def test_metadata():
    metadata = importlib.metadata.metadata("based-cute")
    assert metadata["Name"] == "based-cute"
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["Requires-Python"] == ">=3.10"
    assert set(metadata.get_all("Provides-Extra")) == {"test", "bench"}


def test_license_text_is_bsd_3_clause():
    text = (ROOT / "LICENSE").read_text()
    assert text.startswith("BSD 3-Clause License")
    assert "The based_cute authors" in text and "Neither the name" in text


def test_entry_point():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="based-cute")
    assert script.value == "based_cute.cli:main"


def test_dsl_is_pinned_exactly_and_on_linux_only():
    (dsl,) = [line for line in requirements() if line.startswith("nvidia-cutlass-dsl")]
    assert re.fullmatch(r"nvidia-cutlass-dsl\[cu13\]==[\d.]+; platform_system == ['\"]Linux['\"]", dsl)


def test_third_party_readme_names_every_requirement_and_exact_pin():
    text = (ROOT / "third_party" / "README.md").read_text()
    for line in requirements():
        name = re.match(r"[\w.-]+", line)[0]
        assert name in text, f"third_party/README.md does not name {name}"
        pin = re.search(r"==([\d.]+)", line)
        assert pin is None or f"{pin[1]} exactly" in text, f"third_party/README.md does not give {line}"


def test_import_needs_neither_the_source_folder_nor_the_dsl_nor_cuda(tmp_path):
    code = (
        "import sys, torch, based_bwd, based_cute, based_cute.cli, based_cute.kernels.config\n"
        "assert based_bwd.based_backward is based_cute.based_backward\n"
        "assert 'cutlass' not in sys.modules and not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_kernels_import_without_torch():
    """As the build does it: from the top of the source tree, where `kernels` is a package of its own."""
    code = "import sys, kernels.config, kernels.build; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
@pytest.mark.skipif(importlib.util.find_spec("cutlass_library") is None, reason="needs the nvidia-cutlass wheel")
def test_cmake_finds_the_cutlass_headers(tmp_path):
    script = tmp_path / "find.cmake"
    modules = (ROOT / "third_party" / "cmake").as_posix()
    script.write_text(
        f'list(APPEND CMAKE_MODULE_PATH "{modules}")\n'
        "find_package(CutlassHeaders REQUIRED)\n"
        'if(NOT EXISTS "${CutlassHeaders_INCLUDE_DIR}/cute/tensor.hpp")\n  message(FATAL_ERROR "no CuTe")\nendif()\n'
    )
    subprocess.run(["cmake", f"-DPython_EXECUTABLE={sys.executable}", "-P", script], check=True)


def test_readme_commands_are_what_ci_runs():
    assert len(readme_block("setup")) == 1 and readme_block("setup")[0].endswith("based-cute check")
    assert readme_block("test") == ["pytest"]
    ci = (ROOT / ".ci" / "run").read_text()
    assert 'eval "$(readme setup)"' in ci and 'eval "$(readme test)"' in ci


def test_readme_names_only_files_that_exist():
    for path in re.findall(r"\]\((?!http)([^)#]+)\)", README) + re.findall(
        r"`((?:kernels|python|third_party)/\S*)`", README
    ):
        assert (ROOT / path).exists(), path


def test_readme_usage_example_runs():
    exec(re.search(r"```python\n(.*?)```", README, re.DOTALL)[1], {})


def test_readme_table_is_what_the_record_says():
    shown = re.search(r"<!-- bench:begin -->\n(.*?)<!-- bench:end -->", README, re.DOTALL)[1].strip()
    assert shown == (bench.markdown(json.loads(RECORD.read_text())) if RECORD.exists() else "")
