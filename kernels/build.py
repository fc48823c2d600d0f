"""From a config row to a callable: compile without tensors or a GPU, keep the object, load it.

`load` looks in this process, among the objects shipped with the package, in the on-disk cache, and compiles last. A compiled
kernel is always loaded from its exported object: that gives a bare TVM-FFI function, without the DSL's Python wrapper
around every call. A cache entry is named after everything that decides its content (the row, the fingerprint of these
sources, the compiler's versions), begins with the digest of its object, and appears by rename, so that several processes
need no lock: at worst each compiles for itself.

    python -m based_cute.kernels.build --export DIR      compile every row into DIR (what an ahead-of-time build ships)
"""

import argparse
import hashlib
import os
import tempfile
import threading
import warnings
from importlib import metadata
from pathlib import Path

from .config import ROWS, ScanConfig

ARCH = "sm_90a"
COMPILERS = ("nvidia-cutlass-dsl", "apache-tvm-ffi")  # distributions whose version decides the object
SHIPPED = Path(__file__).resolve().parent.parent / "_aot"
_functions: dict[str, object] = {}
_lock = threading.Lock()  # cute.compile is not thread-safe


def sources_sha256() -> str:
    """Fingerprint of the kernels: SHA-256 over the names and contents of every .py file of this package, in order."""
    root, digest = Path(__file__).resolve().parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def object_key(config: ScanConfig) -> str:
    """Name of the row's object: the row and a digest of what else decides its content."""
    versions = [f"{name}={metadata.version(name)}" for name in COMPILERS]
    digest = hashlib.sha256("\n".join([sources_sha256(), ARCH, *versions]).encode()).hexdigest()
    return f"{config.name}-{digest[:16]}"


def load(config: ScanConfig):
    """The row's compiled function; its arguments are those of the scan's `__call__` without the stream.

    It takes torch tensors (bf16, last stride 1, 16-byte aligned; checked at the call) and runs on torch's current stream.
    Raises ImportError where the DSL is not installed.
    """
    function = _functions.get(config.name)
    if function is None:
        with _lock:
            function = _functions.get(config.name) or _load(config)
            _functions[config.name] = function
    return function


def _load(config: ScanConfig):
    key = object_key(config)
    shipped = SHIPPED / f"{key}.o"
    if shipped.is_file():
        return _load_object(shipped.read_bytes(), config)
    cache = cache_directory()
    content = _read_entry(cache / key) if cache else None
    if content is None:
        content = compile_object(config)
        if cache:
            _write_entry(cache / key, content)
    return _load_object(content, config)


def _load_object(content: bytes, config: ScanConfig):
    from cutlass.cute.runtime import load_module

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"{config.name}.o"
        path.write_bytes(content)
        return getattr(load_module(str(path), enable_tvm_ffi=True), config.name)


# ---- the on-disk cache ----


def cache_directory() -> Path | None:
    """BASED_CUTE_CACHE, else `based_cute` in the user's cache directory; None, with a warning, where neither can be written."""
    try:
        default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "based_cute"
        directory = Path(os.environ.get("BASED_CUTE_CACHE") or default)
        directory.mkdir(parents=True, exist_ok=True)
        if os.access(directory, os.W_OK):
            return directory
        reason = f"{directory} is not writable"
    except (OSError, RuntimeError) as error:  # no home directory, a read-only file system
        reason = str(error)
    warnings.warn(
        f"based_cute: kernels are compiled anew in every process, since {reason}; "
        "set BASED_CUTE_CACHE to a writable directory",
        stacklevel=2,
    )
    return None


def _read_entry(path: Path) -> bytes | None:
    """The object of an entry, or None where there is none or it is damaged."""
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    digest, content = entry[:32], entry[32:]
    return content if hashlib.sha256(content).digest() == digest else None


def _write_entry(path: Path, content: bytes) -> None:
    """Write beside the entry, then rename: readers see a whole entry or none. A full disk costs the entry, not the call."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(hashlib.sha256(content).digest() + content)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        warnings.warn(f"based_cute: could not keep a compiled kernel: {error}", stacklevel=2)


# ---- compiling ----


def compile_object(config: ScanConfig) -> bytes:
    """Compile one row to a relocatable object whose function is named `config.name`."""
    compiled = compile_row(config)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"{config.name}.o"
        compiled.export_to_c(object_file_path=str(path), function_name=config.name)
        return path.read_bytes()


def compile_row(config: ScanConfig):
    """Compile one row from fake tensors with symbolic B, T and H; needs neither a GPU nor torch.

    Strides are 64-bit: B * T * H * V passes 2^31 at sizes people use.
    """
    os.environ.setdefault("CUTE_DSL_ARCH", ARCH)
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

    from .forward_scan import ForwardScan
    from .output import OutputScan
    from .reverse_scan import ReverseScan
    from .segment_state import ForwardState, OutputState, ReverseState, StateSum

    batch, tokens, heads, padded, values, slots = (cute.sym_int32() for _ in range(6))

    def rows(width):
        strides = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
        return make_fake_tensor(cutlass.BFloat16, (batch, tokens, heads, width), stride=strides, assumed_align=16)

    def contiguous(*shape, dtype=cutlass.Float32):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    def key():
        return rows(config.key_dim)

    def value():
        return rows(config.value_dim)

    scale, count, states = cutlass.Float32(1.0), cutlass.Int32(1), contiguous(values)
    statistics = contiguous(batch, heads, padded, 2)
    cuts = (scale, count, count, count, count, count, states, contiguous(slots, dtype=cutlass.Int32))
    scan, *arguments = {
        "forward_scan": (ForwardScan, key(), key(), value(), value(), key(), statistics, *cuts),
        "reverse_scan": (ReverseScan, key(), key(), value(), value(), statistics, key(), value(), *cuts),
        "output": (OutputScan, key(), key(), value(), value(), contiguous(batch, heads, tokens), *cuts),
        "forward_state": (ForwardState, key(), value(), scale, count, count, count, states),
        "reverse_state": (ReverseState, key(), value(), statistics, scale, count, count, count, states),
        "output_state": (OutputState, key(), value(), scale, count, count, count, states),
        "state_sum": (StateSum, states, count, count, count),
    }[config.scan]
    scan.kernel.set_name_prefix(config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(scan(config), *arguments, stream, options=f"--enable-tvm-ffi --gpu-arch {ARCH}")


def export(directory: Path) -> None:
    """Compile every row into `directory`, under the names that `load` looks for."""
    directory.mkdir(parents=True, exist_ok=True)
    for config in ROWS:
        (directory / f"{object_key(config)}.o").write_bytes(compile_object(config))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the kernels ahead of time, for sm_90a.")
    parser.add_argument("--export", type=Path, required=True, metavar="DIR", help="where the objects go")
    export(parser.parse_args().export)


if __name__ == "__main__":
    main()
