"""The command `based-cute`: `check` output and gradients anywhere, `bench` them on a CUDA card, `info` about what would run.

Tables go to standard output and progress to standard error; with `--json -` the tables move to standard error too, so
that standard output is JSON alone.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import accuracy, bench, launcher
from .kernels.build import sources_sha256
from .kernels.config import ROWS, STATE_SUM, ScanConfig

PLAIN_WIDTH = 120  # columns of output that is no terminal, where rich would assume 80 and fold cells
PATHS = {"cute": "CuTe-DSL kernels", "torch": "torch path"}


class ShapeType(click.ParamType):
    """`B,T,H,K,V`, five positive integers."""

    name = "B,T,H,K,V"

    def convert(self, value, param, ctx) -> accuracy.Shape:
        """The tuple of five, or a usage error (exit code 2)."""
        try:
            shape = tuple(int(part) for part in value.split(","))
        except ValueError:
            shape = ()
        if len(shape) != 5 or min(shape) < 1:
            self.fail(f"got {value!r}, need five positive integers B,T,H,K,V, such as 1,512,4,16,128", param, ctx)
        return shape


shapes_argument = click.argument("shapes", type=ShapeType(), nargs=-1, metavar="[B,T,H,K,V]...")
backend_option = click.option(
    "--backend", type=click.Choice(launcher.BACKENDS), default="auto", show_default=True, help="Path to run."
)
seed_option = click.option("--seed", default=0, show_default=True, help="Seed of the random inputs.")
json_option = click.option("--json", "json_path", metavar="FILE", help="Write JSON too; - is standard output.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(bench.version_of("based-cute"))
def main() -> None:
    """Based linear attention and its backward: CuTe-DSL kernels on Hopper, torch anywhere else."""


def console_for(json_path: str | None) -> Console:
    """Where tables go: standard output, unless that is to be JSON alone."""
    options = {"stderr": json_path == "-", "highlight": False, "markup": False}
    console = Console(**options)
    return console if console.is_terminal else Console(**options, width=PLAIN_WIDTH)


def progress_bar() -> Progress:
    """Progress on standard error, gone when done."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True)


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]], **options: object) -> Table:
    """A table of text whose long cells fold, and lose no character."""
    table = Table(caption_justify="left", **options)
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def write_json(value: object, path: str | None) -> None:
    """Write `value` to a file, to standard output for "-", or nowhere for None. Raises rather than write NaN."""
    if path is None:
        return
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    if path == "-":
        click.echo(text, nl=False)
    else:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)


def torch_device(name: str) -> torch.device:
    """The device of a --device option; "auto" is CUDA where there is one."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise click.ClickException(f"got --device cuda, but torch {torch.__version__} sees none; use --device cpu")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def routes(pairs: Sequence[tuple[int, int]], device: torch.device, backend: str) -> list[str]:
    """A line per path that runs, saying on what, why and for which (K, V). Fails where --backend cute cannot run."""
    pairs_of: dict[str, list[str]] = {}
    for key_dim, value_dim in dict.fromkeys(pairs):
        first_choice, reason = launcher.which_backend(device, key_dim, value_dim, torch.bfloat16)
        if backend == "cute" and reason:
            raise click.ClickException(f"--backend cute: {reason}; use --backend torch or auto")
        path = PATHS[first_choice if backend == "auto" else backend]
        why = f"asked for by --backend {backend}" if backend != "auto" else reason or "bfloat16 and a row of the table"
        answer = f"{path} on {bench.device_name(device)} ({why})"
        pairs_of.setdefault(answer, []).append(f"({key_dim}, {value_dim})")
    return [f"{answer} for (K, V) = {', '.join(served)}" for answer, served in pairs_of.items()]


# ---------------------------------------------------------------------------------------------------------------------
# check


@main.command()
@shapes_argument
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@backend_option
@seed_option
@json_option
def check(shapes: tuple[accuracy.Shape, ...], device: str, backend: str, seed: int, json_path: str | None) -> None:
    """Compare o, dq, dk and dv with the gold, beside what rounding to bf16 costs anyway (the yardstick).

    The gradients are those of autograd, and must be those of based_backward to the bit. Without shapes: every correctness
    shape. Exit code 1 if anything is off or not finite.
    """
    target, console = torch_device(device), console_for(json_path)
    shapes = shapes or accuracy.CORRECTNESS_SHAPES
    console.print(f"torch {torch.__version__}, CuTe DSL {bench.version_of(bench.DSL)}")
    console.print("\n".join(routes([shape[3:] for shape in shapes], target, backend)), soft_wrap=True)
    results = run_checks(shapes, backend, target, seed)
    console.print(check_table(results))
    failed = [result for result in results if not result.passed]
    for result in failed:
        console.print(f"{result.shape}: {result.reason}", style="red")
    console.print(f"{len(results) - len(failed)} passed, {len(failed)} failed")
    write_json([check_record(result, target) for result in results], json_path)
    sys.exit(bool(failed))


def run_checks(
    shapes: Sequence[accuracy.Shape], backend: str, device: torch.device, seed: int
) -> list[accuracy.CheckResult]:
    """One result per shape, with progress by stage."""
    results = []
    with progress_bar() as progress:
        task = progress.add_task("check", total=len(shapes))

        def say(line: str) -> None:
            progress.update(task, description=line)

        for shape in shapes:
            results.append(accuracy.check_shape(shape, backend, device, seed=seed, progress=say))
            progress.advance(task)
    return results


def check_table(results: Sequence[accuracy.CheckResult]) -> Table:
    """Per shape and quantity: the error beside the yardstick; the caption says what is allowed."""
    allowed = (
        f"Relative Frobenius error against the gold. Allowed: {accuracy.YARDSTICK_FACTOR:g} x the yardstick or "
        f"{accuracy.OUTPUT_ROUNDING:.1e}, whichever is more, and never above {accuracy.NORMAL_INPUT_LIMIT:.1e} "
        f"(o: {accuracy.OUTPUT_LIMIT:.1e})."
    )
    header = ("B, T, H, K, V", "ran", "of", "error", "yardstick", "verdict")
    return plain_table(header, [check_row(result) for result in results], caption=allowed, show_lines=True)


def check_row(result: accuracy.CheckResult) -> tuple[str, ...]:
    """The cells of one shape, a line for each quantity where they differ."""
    return (
        bench.shape_text(result.shape),
        result.backend,
        "\n".join(accuracy.QUANTITIES),
        "\n".join(f"{error:.2e}" for error in result.errors),
        "\n".join(f"{error:.2e}" for error in result.yardstick),
        "ok" if result.passed else "FAILED",
    )


def finite_or_null(errors: Sequence[float]) -> list[float | None]:
    """Errors for JSON, which has neither NaN nor infinity."""
    return [error if math.isfinite(error) else None for error in errors]


def check_record(result: accuracy.CheckResult, device: torch.device) -> bench.Record:
    """The JSON of one result."""
    return {
        "shape": list(result.shape),
        "op": "check",
        "backend": result.backend,
        "of": list(accuracy.QUANTITIES),
        "err": finite_or_null(result.errors),
        "yardstick": finite_or_null(result.yardstick),
        "passed": result.passed,
        "reason": result.reason,
        **bench.provenance(device),
    }


# ---------------------------------------------------------------------------------------------------------------------
# bench


@main.command("bench")
@shapes_argument
@click.option("--op", "ops", type=click.Choice([*bench.OPS, "all"]), default="all", show_default=True, help="What to time.")
@backend_option
@seed_option
@click.option("--sustained", default=0.0, metavar="SECONDS", help="Also time the backward without a pause, as long as this.")
@click.option("--baselines", is_flag=True, help="Also time other systems.")
@click.option("--from-json", type=click.Path(exists=True, dir_okay=False), help="Measure nothing; show this file.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the tables as README.md has them.")
@json_option
def bench_command(
    shapes: tuple[accuracy.Shape, ...],
    ops: str,
    from_json: str | None,
    as_markdown: bool,
    json_path: str | None,
    **settings,
) -> None:
    """Time the ops on CUDA events with a cold L2, beside the floors that the card sets in the same run.

    An op is the forward, the backward, or both through autograd (train). Without shapes: every speed shape. A shape whose
    check is red is not timed, and the exit code is 1.
    """
    if from_json:
        records, refusals = json.loads(Path(from_json).read_text()), []
    else:
        asked = bench.OPS if ops == "all" else (ops,)
        records, refusals = run_bench(shapes or accuracy.SPEED_SHAPES, asked, json_path, **settings)
    if as_markdown:
        click.echo(bench.markdown(records), err=json_path == "-")
    else:
        show_tables(records, console_for(json_path))
    for refusal in refusals:
        click.secho(str(refusal), fg="red", err=True)
    sys.exit(bool(refusals))


def show_tables(records: Sequence[bench.Record], console: Console) -> None:
    """A table per op, and the notes under the last one."""
    for op in bench.ops_of(records):
        console.print(plain_table(bench.header(op), bench.table_rows(records, op), title=bench.TITLES[op]))
    console.print("\n".join(bench.notes(records)), soft_wrap=True)


def run_bench(
    shapes: Sequence[accuracy.Shape],
    ops: Sequence[str],
    json_path: str | None,
    backend: str,
    seed: int,
    sustained: float,
    baselines: bool,
) -> tuple[list[bench.Record], list[bench.RedCheck]]:
    """Measure on the current CUDA device. A file is written after every record: a run cut short leaves what it has."""
    if not torch.cuda.is_available():
        raise click.ClickException(
            f"bench: got no CUDA device (torch {torch.__version__}), need one; call `based-cute check` instead"
        )
    device = torch_device("cuda")
    routes([shape[3:] for shape in shapes], device, backend)  # refuses --backend cute before anything is measured
    records, refusals = [], []
    with progress_bar() as progress:
        task = progress.add_task("the card's own rates", total=None)
        run = bench.Bench(device, bench.measure_card(device), backend, seed, sustained)
        for outcome in run.records(shapes, ops, baselines):
            (refusals if isinstance(outcome, bench.RedCheck) else records).append(outcome)
            progress.update(task, advance=1, description=str(records[-1]["shape"]) if records else "red")
            if json_path != "-":
                write_json(records, json_path)
    if json_path == "-":
        write_json(records, json_path)
    return records, refusals


# ---------------------------------------------------------------------------------------------------------------------
# info


@main.command()
@json_option
def info(json_path: str | None) -> None:
    """Versions, the device, the path that would run and why, and the table of kernel configurations."""
    console, report = console_for(json_path), describe()
    for key in ("versions", "device"):
        for name, value in report[key].items():
            console.print(f"{name}: {value}")
    console.print(f"sources_sha256: {report['sources_sha256']}")
    console.print("\n".join(report["routes"]), soft_wrap=True)
    header = ("kernel", "stages", "registers", "shared memory", "spill allowed", "origin")  # of producer, state, token threads
    console.print(plain_table(header, [config_row(row) for row in ROWS]))
    write_json(report, json_path)


def describe() -> dict[str, object]:
    """What `info` shows, as JSON. Imports no DSL, and asks CUDA only about the device."""
    device = torch_device("auto")
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else ()
    distributions = ("based-cute", "torch", bench.DSL, "apache-tvm-ffi")
    return {
        "versions": {**{name: bench.version_of(name) for name in distributions}, "cuda": torch.version.cuda},
        "device": {"name": bench.device_name(device), "capability": ".".join(map(str, capability)) or None},
        "sources_sha256": sources_sha256(),
        "routes": routes([(row.key_dim, row.value_dim) for row in ROWS], device, "auto"),
        "rows": [
            {"name": row.name, **asdict(row), "registers": row.registers, "shared_memory": row.shared_memory}
            for row in ROWS
        ],
    }


def config_row(row: ScanConfig) -> tuple[str, ...]:
    """The cells of one configuration; the sum of states along a sequence has no ring and no roles."""
    name = f"{row.scan} K={row.key_dim} V={row.value_dim}"
    if row.scan == STATE_SUM:
        return name, "", "", "", f"{row.allowed_spill} B", row.origin
    registers = [row.producer_registers, row.state_registers] + [row.token_registers] * bool(row.token_warpgroups)
    stages, shared_memory = str(row.stages), f"{row.shared_memory} B"
    return name, stages, ", ".join(map(str, registers)), shared_memory, f"{row.allowed_spill} B", row.origin
