"""From an operation to a callable: compile without tensors or a GPU, keep the object, load it.

`load` looks in this process, among the objects shipped with the package, in the on-disk cache, and compiles last. A compiled
kernel is always loaded from its exported object: that gives a bare TVM-FFI function, without the DSL's Python wrapper
around every call. A cache entry is named after everything that decides its content (its name, the fingerprint of these
sources, the compiler's versions), begins with the digest of its object, and appears by rename, so that several processes
need no lock: at worst each compiles for itself.

    python -m based_cute.kernels.build --export DIR      compile every operation into DIR (what an ahead-of-time build ships)
"""

import argparse
import hashlib
import os
import tempfile
import threading
import warnings
from importlib import metadata
from pathlib import Path

from .config import Operation, ScanConfig, all_operations, operation_of

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


def object_key(operation: Operation) -> str:
    """Name of the operation's object: its own and a digest of what else decides its content."""
    versions = [f"{name}={metadata.version(name)}" for name in COMPILERS]
    digest = hashlib.sha256("\n".join([sources_sha256(), ARCH, *versions]).encode()).hexdigest()
    return f"{operation.name}-{digest[:16]}"


def load(operation: Operation):
    """The operation's compiled function; its arguments are those of its `__call__` in operation.py without the stream.

    It takes torch tensors (bf16, last stride 1, 16-byte aligned; checked at the call) and runs on torch's current stream.
    Raises ImportError where the DSL is not installed.
    """
    function = _functions.get(operation.name)
    if function is None:
        with _lock:
            function = _functions.get(operation.name) or _load(operation)
            _functions[operation.name] = function
    return function


def _load(operation: Operation):
    key = object_key(operation)
    shipped = SHIPPED / f"{key}.o"
    if shipped.is_file():
        return _load_object(shipped.read_bytes(), operation.name)
    cache = cache_directory()
    content = _read_entry(cache / key) if cache else None
    if content is None:
        content = compile_object(operation)
        if cache:
            _write_entry(cache / key, content)
    return _load_object(content, operation.name)


def _load_object(content: bytes, name: str):
    from cutlass.cute.runtime import load_module

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"{name}.o"
        path.write_bytes(content)
        return getattr(load_module(str(path), enable_tvm_ffi=True), name)


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
        f"based_cute: kernels are compiled anew in every process, since {reason}; set BASED_CUTE_CACHE to a writable directory",
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


def compile_object(operation: Operation) -> bytes:
    """Compile an operation to a relocatable object whose function has its name."""
    compiled = compile_kernels(operation.kind, operation.kernels)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"{operation.name}.o"
        compiled.export_to_c(object_file_path=str(path), function_name=operation.name)
        return path.read_bytes()


def compile_kernel(*rows: ScanConfig):
    """Compile one kernel alone, of one pass or of passes one after the other, for those who want to look at it."""
    return compile_kernels(operation_of(rows[0]), (rows,))


def compile_kernels(kind: str, kernels: tuple[tuple[ScanConfig, ...], ...]):
    """Compile kernels of an operation, each given by its rows, from fake tensors with symbolic B, T and H; needs neither a GPU
    nor torch.

    Strides are 64-bit: B * T * H * V passes 2^31 at sizes people use.
    """
    os.environ.setdefault("CUTE_DSL_ARCH", ARCH)
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

    from .operation import OPERATIONS

    batch, tokens, heads, halves = (cute.sym_int32() for _ in range(4))

    def tokenwise(width):
        strides = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
        return make_fake_tensor(cutlass.BFloat16, (batch, tokens, heads, width), stride=strides, assumed_align=16)

    def contiguous(dtype, *shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    widths = {"k": kernels[0][0].key_dim, "v": kernels[0][0].value_dim}
    named = {"forward": "kkvv", "backward": "kkvvkkv"}[kind]  # q, k, v, o and q, k, v, do, dq, dk, dv
    tensors = [tokenwise(widths[width]) for width in named]
    if kind == "forward":
        tensors.append(contiguous(cutlass.Float32, batch, heads, tokens))
    numbers = (cutlass.Float32(1.0), *[cutlass.Int32(1)] * 6, *[cutlass.Int64(1)] * 2)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    arguments = (*tensors, contiguous(cutlass.BFloat16, halves), *numbers, stream)
    return cute.compile(OPERATIONS[kind](kernels), *arguments, options=f"--enable-tvm-ffi --gpu-arch {ARCH}")


def export(directory: Path) -> None:
    """Compile every operation into `directory`, under the names that `load` looks for."""
    directory.mkdir(parents=True, exist_ok=True)
    for operation in all_operations():
        (directory / f"{object_key(operation)}.o").write_bytes(compile_object(operation))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the kernels ahead of time, for sm_90a.")
    parser.add_argument("--export", type=Path, required=True, metavar="DIR", help="where the objects go")
    export(parser.parse_args().export)


if __name__ == "__main__":
    main()
