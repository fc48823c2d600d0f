"""Multi-query associative recall: a small Based model that learns to look things up, from data made on the fly.

The task is that of the Zoology paper (Arora et al., arXiv:2312.04927), which the Based paper (arXiv:2402.18668) uses too.
A sequence lists keys with their values and later comes back to each key, at any distance; there the model must say the
value. It measures what a fixed-size state can hold.

    python examples/mqar.py                                    # learns it on two CPU cores in a few minutes
    python examples/mqar.py --preset h200                      # long sequences through the kernels, bf16
    python examples/mqar.py --preset h200 --compare            # tokens per second against fla's layer and softmax attention
    python examples/mqar.py --preset h200 --steps 200 --attention kernels --curves curves.json
    python examples/mqar.py --preset h200 --steps 200 --attention torch --curves curves.json   # overlays both
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

from based_cute.launcher import which_backend
from based_cute.nn import BasedLinearAttention

PADDING = 0  # the token where a sequence says nothing
GAP_POWER = 0.01  # exponent of the power law of the distances from a pair to its query, as in the Zoology paper
# With torch's 1, a small model of 64 tokens and 8 pairs still guessed among the listed values after 800 steps (recall 12%);
# with 0.1 it had learned the task after 200 (97%).
EMBEDDING_STD = 0.1
EVAL_BATCHES = 4
WARM_UP_PART = 0.1  # of all steps, in which the learning rate rises
TIMED_STEPS = 20
ATTENTION = {"auto": "auto", "kernels": "cute", "torch": "torch"}  # --attention -> backend of based_cute


@dataclass(frozen=True)
class Config:
    """The task, the model and the training; all that a checkpoint must agree on to be resumed."""

    length: int  # tokens of a sequence
    pairs: int  # keys that a sequence lists and asks for, each once
    sizes: int  # training cycles through length and pairs as given, halved, quartered ... so many; 1 for no halving
    vocab: int  # tokens: padding, then keys up to vocab / 2, then values
    hidden: int
    heads: int
    feature_dim: int
    window: int  # tokens that the softmax attention sees
    batch: int
    steps: int
    lr: float
    precision: str  # "fp32", or "bf16" for autocast
    eval_every: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if name != "seed" and not isinstance(value, str) and value <= 0:
                raise ValueError(f"Config: got {name}={value}, need a positive number")
        if self.length < 4 * self.pairs:
            raise ValueError(f"Config: got length={self.length}, need at least 4 * pairs = {4 * self.pairs}")
        if self.vocab < 2 * (self.pairs + 1):
            raise ValueError(f"Config: got vocab={self.vocab}, need at least 2 * (pairs + 1) = {2 * (self.pairs + 1)}")
        halvings = 2 ** (self.sizes - 1)
        if self.length % halvings or self.pairs % halvings:
            raise ValueError(
                f"Config: got length={self.length} and pairs={self.pairs}, need multiples of 2 ** (sizes - 1) = {halvings}"
            )
        if self.hidden % self.heads:
            raise ValueError(f"Config: got hidden={self.hidden}, need a multiple of heads={self.heads}")

    def halved(self, times: int) -> "Config":
        """Shorter sequences with fewer pairs, and as many more of them: the tokens and the queries of a batch stay."""
        factor = 2**times
        return dataclasses.replace(
            self, length=self.length // factor, pairs=self.pairs // factor, batch=self.batch * factor, sizes=self.sizes - times
        )


PRESETS = {
    "cpu": Config(
        length=128, pairs=16, sizes=3, vocab=512, hidden=64, heads=2, feature_dim=16, window=8,
        batch=32, steps=400, lr=4e-3, precision="fp32", eval_every=50,
    ),
    "h200": Config(
        length=4096, pairs=128, sizes=6, vocab=8192, hidden=1024, heads=8, feature_dim=16, window=64,
        batch=16, steps=3000, lr=1e-3, precision="bf16", eval_every=100,
    ),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The task


@dataclass(frozen=True)
class Batch:
    """tokens (B, T); positions (B, pairs), where a key is asked for; answers (B, pairs), its value."""

    tokens: Tensor
    positions: Tensor
    answers: Tensor


def make_batch(config: Config, generator: torch.Generator) -> Batch:
    """Draw `config.batch` sequences on the generator's device; the generator's state decides everything.

    A sequence starts with `pairs` distinct keys, each followed by its value: k1 v1 k2 v2 ... Every key then comes once
    more, 2 g tokens into the rest, with distinct g drawn from a power law (short distances are likelier, as in text).
    """
    context, key_count = 2 * config.pairs, config.vocab // 2 - 1
    keys = 1 + _distinct(torch.ones(key_count), config, generator)
    values = 1 + key_count + _distinct(torch.ones(config.vocab - 1 - key_count), config, generator)
    slots = torch.arange(1, (config.length - context) // 2 + 1)
    positions = context + 2 * _distinct(slots ** (GAP_POWER - 1), config, generator)
    tokens = keys.new_full((config.batch, config.length), PADDING)
    tokens[:, 0:context:2], tokens[:, 1:context:2] = keys, values
    return Batch(tokens.scatter_(1, positions, keys), positions, values)


def _distinct(weights: Tensor, config: Config, generator: torch.Generator) -> Tensor:
    """(batch, pairs) indices into `weights`, without repetition in a row: the smallest of exponential waiting times."""
    times = torch.empty(config.batch, len(weights), device=generator.device).exponential_(generator=generator)
    return (times / weights.to(times)).topk(config.pairs, largest=False).indices


# ---------------------------------------------------------------------------------------------------------------------
# The model


class WindowAttention(nn.Module):
    """Causal softmax attention over the last `window` tokens, with a learned bias for each head and distance.

    O(T window): a block of `window` queries looks at its own block of keys and the one before. The bias is the model's
    only sense of position, enough to let a value find the key just before it.
    """

    def __init__(self, hidden: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv_proj = nn.Linear(hidden, 3 * hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.bias = nn.Parameter(torch.zeros(heads, window))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, hidden) -> (B, T, hidden)."""
        length = x.shape[1]
        x = F.pad(x, (0, 0, 0, -length % self.window))
        blocks = self.qkv_proj(x).unflatten(-1, (3, self.heads, -1)).unflatten(1, (-1, self.window))
        q, k, v = blocks.unbind(3)  # each (B, blocks, window, heads, D)
        k, v = (torch.cat((F.pad(y, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1], y), 2) for y in (k, v))
        scores = q.shape[-1] ** -0.5 * torch.einsum("bnqhd,bnkhd->bnhqk", q, k)
        distance, unseen = self._geometry(q.shape[1], x.device)
        scores = (scores + self.bias[:, distance]).masked_fill(unseen, -math.inf)
        o = torch.einsum("bnhqk,bnkhd->bnqhd", scores.softmax(-1).to(v.dtype), v)
        return self.o_proj(o.flatten(3).flatten(1, 2)[:, :length])

    def _geometry(self, blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Clamped distance (window, 2 window) from query to key, and whether it is unseen (blocks, 1, window, 2 window)."""
        query, key = torch.arange(self.window, device=device), torch.arange(2 * self.window, device=device)
        distance = self.window + query[:, None] - key
        outside = (distance < 0) | (distance >= self.window)
        first = torch.arange(blocks, device=device)[:, None, None, None] == 0
        return distance.clamp(0, self.window - 1), outside | first & (key < self.window)


class SoftmaxAttention(nn.Module):
    """Causal softmax attention over all tokens: what Based replaces. (B, T, hidden) -> (B, T, hidden)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_proj = nn.Linear(hidden, 3 * hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two layers around one residual stream: a softmax window that sees the near past, then `mixer`, which sees all."""

    def __init__(self, config: Config, mixer: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        self.window_norm, self.mixer_norm, self.head_norm = (nn.RMSNorm(config.hidden) for _ in range(3))
        self.window = WindowAttention(config.hidden, config.heads, config.window)
        self.mixer = mixer
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits (B, pairs, vocab) at `positions` (B, pairs) of `tokens` (B, T)."""
        x = self.embedding(tokens)
        x = x + self.window(self.window_norm(x))
        x = x + self.mixer(self.mixer_norm(x))
        asked = x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return self.head(self.head_norm(asked))


def based_mixer(config: Config, attention: str = "auto") -> nn.Module:
    """This package's layer, through the path that `attention` names (a key of ATTENTION)."""
    backend = ATTENTION[attention]
    return BasedLinearAttention(config.hidden, config.feature_dim, num_heads=config.heads, backend=backend)


def fla_mixer(config: Config) -> nn.Module:
    """fla's layer, with the same parameters."""
    from fla.layers import BasedLinearAttention as FlaLayer

    return FlaLayer(config.hidden, config.feature_dim, config.heads, config.heads)


# ---------------------------------------------------------------------------------------------------------------------
# Training


class Trainer:
    """A model, its optimiser and its data; `state` and `restore` continue a run, on a CPU to the last bit.

    Steps cycle through shorter sequences too, as the papers train on a mixture: what is learned on few pairs carries over.
    (256 tokens with 32 pairs alone: recall 3% after 900 steps. With three shorter sizes: 95% after 300.)

    Args:
        config: what to train.
        mixer: the layer that sees all tokens, drawn after `seed` was set; a callable of config.
        device: where everything lives, random numbers included.
    """

    def __init__(self, config: Config, mixer: Callable[[Config], nn.Module], device: torch.device | str = "cpu") -> None:
        self.config, self.device = config, torch.device(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.model = Model(config, mixer(config)).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, weight_decay=0.1)
        self.generator = torch.Generator(self.device).manual_seed(config.seed)
        self.losses: list[float] = []  # one a step
        self.evaluations: list[dict[str, float]] = []
        self._pending: list[Tensor] = []  # losses still on the device, so that no step waits for one

    @property
    def step_count(self) -> int:
        """Steps taken."""
        return len(self.losses) + len(self._pending)

    def step(self) -> bool:
        """Draw a batch and update once; evaluate, and return True, after every `eval_every` steps and after the last."""
        size = self.config.halved(self.step_count % self.config.sizes)
        self.update(make_batch(size, self.generator))
        if self.step_count % self.config.eval_every and self.step_count < self.config.steps:
            return False
        self._settle()
        self.evaluations.append({"step": self.step_count, **self.evaluate()})
        return True

    def update(self, batch: Batch) -> None:
        """One step of the optimiser on `batch`."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * self._schedule()
        loss, _ = self._loss(batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self._pending.append(loss.detach())

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Mean loss, and recall (part of the queries answered right), on batches that training never draws."""
        generator = torch.Generator(self.device).manual_seed(self.config.seed + 1)
        pairs = [self._loss(make_batch(self.config, generator)) for _ in range(EVAL_BATCHES)]
        loss, recall = (sum(x.item() for x in column) / EVAL_BATCHES for column in zip(*pairs, strict=True))
        return {"loss": loss, "recall": recall}

    def state(self) -> dict:
        """All that `restore` needs, in plain types and tensors."""
        self._settle()
        return {
            "config": dataclasses.asdict(self.config),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "losses": self.losses,
            "evaluations": self.evaluations,
        }

    def restore(self, state: dict) -> None:
        """Continue from another trainer's `state()`. Raises ValueError, naming the fields, if their configs differ."""
        mine, theirs = dataclasses.asdict(self.config), state["config"]
        changed = [f"{name}={theirs.get(name)} (need {mine[name]})" for name in mine if mine[name] != theirs.get(name)]
        if changed:
            raise ValueError(f"checkpoint: got {', '.join(changed)}; resume with the options it was started with")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.losses, self.evaluations, self._pending = list(state["losses"]), list(state["evaluations"]), []

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        enabled = self.config.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=enabled):
            logits = self.model(batch.tokens, batch.positions)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.answers.flatten())
        return loss, (logits.argmax(-1) == batch.answers).float().mean()

    def _schedule(self) -> float:
        """Factor of the learning rate: a linear rise, then half a cosine down to zero."""
        done = self.step_count / self.config.steps
        if done < WARM_UP_PART:
            return (self.step_count + 1) / (WARM_UP_PART * self.config.steps + 1)
        return 0.5 + 0.5 * math.cos(math.pi * (done - WARM_UP_PART) / (1 - WARM_UP_PART))

    def _settle(self) -> None:
        """Bring pending losses to the host."""
        if self._pending:
            self.losses += torch.stack(self._pending).tolist()
            self._pending = []


def save_checkpoint(trainer: Trainer, path: Path) -> None:
    """Write the trainer's state so that a reader finds the old file or the new one, never half of either."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    torch.save(trainer.state(), partial)
    os.replace(partial, path)


def train(trainer: Trainer, console: Console, checkpoint: Path | None) -> float:
    """Run the remaining steps with a progress bar; returns their seconds. Saves `checkpoint` at every evaluation.

    Raises click.ClickException after Ctrl-C, which lets the step finish and saves too.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    begin = time.perf_counter()
    with postponed_interrupt() as interrupt, Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("training", total=trainer.config.steps, completed=trainer.step_count)
        while trainer.step_count < trainer.config.steps and not interrupt.is_set():
            evaluated = trainer.step()
            progress.update(task, completed=trainer.step_count)
            if evaluated:
                progress.console.print(evaluation_text(trainer.evaluations[-1]))
            if checkpoint and (evaluated or interrupt.is_set()):
                save_checkpoint(trainer, checkpoint)
    if trainer.step_count < trainer.config.steps:
        advice = f"--resume goes on from {checkpoint}" if checkpoint else "give --checkpoint to be able to go on"
        raise click.ClickException(f"stopped after {trainer.step_count} steps; {advice}")
    return time.perf_counter() - begin


@contextlib.contextmanager
def postponed_interrupt() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets instead of raising in the middle of a step, which no checkpoint could repair."""
    asked = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda *_: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, previous)


def evaluation_text(evaluation: dict[str, float]) -> str:
    """One line of a run's log."""
    return f"step {evaluation['step']:5d}   loss {evaluation['loss']:.4f}   recall {100 * evaluation['recall']:.1f}%"


# ---------------------------------------------------------------------------------------------------------------------
# Results


def run_record(trainer: Trainer, attention: str, seconds: float, steps: int) -> dict:
    """What a run showed, for JSON: its config, a loss a step, the evaluations, and the speed of the `steps` just run."""
    tokens = steps * trainer.config.batch * trainer.config.length
    return {
        "config": dataclasses.asdict(trainer.config),
        "attention": attention,
        "device": device_name(trainer.device),
        "torch": torch.__version__,
        "parameters": sum(x.numel() for x in trainer.model.parameters()),
        "seconds": round(seconds, 1),
        "tokens_per_second": round(tokens / seconds) if steps else None,
        "losses": [round(x, 5) for x in trainer.losses],
        "evaluations": trainer.evaluations,
    }


def device_name(device: torch.device) -> str:
    """What a person calls the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def write_json(value: object, path: Path) -> None:
    """Raises ValueError rather than write a NaN."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_curves(path: Path, config: dict) -> dict[str, dict]:
    """The runs in a file of curves, by their attention; none if there is no file.

    Raises ValueError if they trained something other than `config`, which no curve can be laid over.
    """
    runs = json.loads(path.read_text()) if path.exists() else {}
    for name, run in runs.items():
        if run["config"] != config:
            raise ValueError(f"{path}: got a run {name!r} of another config there, need the same; choose another file")
    return runs


def curve_distance(runs: dict[str, dict]) -> str:
    """The largest and the mean difference of two loss curves, in words."""
    (first, one), (second, other) = list(runs.items())[:2]
    gaps = [abs(x - y) for x, y in zip(one["losses"], other["losses"], strict=True)]
    return f"{first} and {second}: losses differ by {max(gaps):.4f} at most, {sum(gaps) / len(gaps):.4f} on average"


def cycle_means(losses: list[float], sizes: int) -> tuple[range, list[float]]:
    """The last step and the mean loss of each whole cycle through the sizes: short sequences are easier than long ones."""
    steps = range(sizes, len(losses) + 1, sizes)
    return steps, [sum(losses[step - sizes : step]) / sizes for step in steps]


def plot_runs(runs: dict[str, dict], path: Path) -> None:
    """Loss of every cycle through the sizes (left) and recall at the evaluations (right) of each run, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    figure, (loss_axes, recall_axes) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name, run in runs.items():
        steps, losses = cycle_means(run["losses"], run["config"]["sizes"])
        loss_axes.plot(steps, losses, label=name, linewidth=1, alpha=0.8)
        steps, recall = zip(*((x["step"], 100 * x["recall"]) for x in run["evaluations"]), strict=True)
        recall_axes.plot(steps, recall, marker="o", markersize=3, label=name)
    config = next(iter(runs.values()))["config"]
    loss_axes.set(xlabel="step", ylabel="training loss (nats)", title=f"{config['pairs']} pairs, {config['length']} tokens")
    recall_axes.set(xlabel="step", ylabel="recall (%)", ylim=(0, 102), title="queries answered right, fresh sequences")
    for axes in (loss_axes, recall_axes):
        axes.grid(alpha=0.3)
    loss_axes.legend(title="attention")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def tokens_per_second(config: Config, mixer: Callable[[Config], nn.Module], device: torch.device) -> float:
    """Tokens a second of whole training steps (forward, backward, optimiser) on one batch, after a warm-up."""
    trainer = Trainer(config, mixer, device)
    batch = make_batch(config, trainer.generator)
    for _ in range(3):
        trainer.update(batch)
    begin = synchronised_time(device)
    for _ in range(TIMED_STEPS):
        trainer.update(batch)
    return TIMED_STEPS * batch.tokens.numel() / (synchronised_time(device) - begin)


def synchronised_time(device: torch.device) -> float:
    """Seconds of a clock, once the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def compare(config: Config, attention: str, device: torch.device, console: Console) -> dict[str, float]:
    """Time training with Based here, fla's Based where it can run, and softmax attention; print a table."""
    mixers = {f"based_cute ({attention})": lambda config: based_mixer(config, attention)}
    if device.type != "cuda":
        console.print("fla's Based needs a GPU: left out")
    elif importlib.util.find_spec("fla") is None:
        console.print("flash-linear-attention is not installed (pip install 'based-cute[bench]'): left out")
    else:
        mixers["fla BasedLinearAttention"] = fla_mixer
    mixers["softmax (SDPA)"] = lambda config: SoftmaxAttention(config.hidden, config.heads)
    speeds = {name: tokens_per_second(config, mixer, device) for name, mixer in mixers.items()}
    slowest = min(speeds.values())
    shape = f"{config.batch} sequences of {config.length} tokens, {config.heads} heads, hidden size {config.hidden}"
    console.print(f"whole training steps on {device_name(device)}: {shape}")
    table = Table("mixer", "tokens/s", "x the slowest")
    for name, speed in speeds.items():
        table.add_row(name, f"{speed:,.0f}", f"{speed / slowest:.2f}")
    console.print(table)
    return speeds


# ---------------------------------------------------------------------------------------------------------------------
# The command


def config_options(command: Callable) -> Callable:
    """An option for every field of Config, None where the preset decides."""
    for field in reversed(dataclasses.fields(Config)):
        kind = click.Choice(["fp32", "bf16"]) if field.name == "precision" else field.type
        command = click.option(f"--{field.name.replace('_', '-')}", type=kind, help="Instead of the preset's.")(command)
    return command


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--preset", type=click.Choice(list(PRESETS)), default="cpu")
@click.option("--attention", type=click.Choice(list(ATTENTION)), default="auto", help="Path through based_cute.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--threads", type=click.IntRange(1), default=1, help="On a CPU; more only help on an idle machine.")
@click.option("--checkpoint", type=click.Path(dir_okay=False, path_type=Path), help="Saved at evaluations and on Ctrl-C.")
@click.option("--resume", is_flag=True, help="Go on from --checkpoint.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write loss and recall as a PNG.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the run's numbers.")
@click.option("--curves", type=click.Path(dir_okay=False, path_type=Path), help="Add this run to a JSON of runs, overlaid.")
@click.option("--compare", "only_compare", is_flag=True, help="Time training steps against other mixers; no training.")
@config_options
def main(
    preset, attention, device, threads, checkpoint, resume, plot, json_path, curves, only_compare, **overrides
) -> None:  # fmt: skip
    """Train a two-layer Based model on multi-query associative recall."""
    torch.set_num_threads(threads)
    console = Console(highlight=False)
    target = torch_device(device)
    try:
        config = dataclasses.replace(PRESETS[preset], **{k: v for k, v in overrides.items() if v is not None})
        check_attention(config, attention, target)
        if only_compare:
            speeds = compare(config, attention, target, console)
            if json_path:
                write_json({"config": dataclasses.asdict(config), "tokens_per_second": speeds}, json_path)
            return
        check_outputs(config, plot, curves)
        trainer = Trainer(config, lambda config: based_mixer(config, attention), target)
        if resume:
            restore_from(checkpoint, trainer)
        before = trainer.step_count
        seconds = train(trainer, console, checkpoint)
        record = run_record(trainer, attention, seconds, trainer.step_count - before)
        report(record, console, plot, json_path, curves)
    except ValueError as error:
        raise click.ClickException(str(error)) from error


def torch_device(name: str) -> torch.device:
    """The device of --device; "auto" is CUDA where there is one."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise click.ClickException(f"got --device cuda, but torch {torch.__version__} sees none; use --device cpu")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def check_attention(config: Config, attention: str, device: torch.device) -> None:
    """Fail before the first step where --attention kernels cannot run."""
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    _, reason = which_backend(device, config.feature_dim, config.hidden // config.heads, dtype)
    if attention == "kernels" and reason:
        raise click.ClickException(f"--attention kernels: {reason}; use --attention torch or auto")


def check_outputs(config: Config, plot: Path | None, curves: Path | None) -> None:
    """Fail before the first step rather than lose a finished run for want of a plot."""
    if (plot or curves) and importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException("--plot and --curves need matplotlib: pip install 'based-cute[bench]'")
    if curves:
        read_curves(curves, dataclasses.asdict(config))


def restore_from(checkpoint: Path | None, trainer: Trainer) -> None:
    """Load --checkpoint for --resume."""
    if checkpoint is None or not checkpoint.exists():
        raise click.UsageError(f"got --resume with --checkpoint {checkpoint}, need a file saved by an earlier run")
    trainer.restore(torch.load(checkpoint, map_location="cpu", weights_only=True))


def report(record: dict, console: Console, plot: Path | None, json_path: Path | None, curves: Path | None) -> None:
    """Say how the run ended and write the files asked for."""
    if record["tokens_per_second"]:
        console.print(f"{record['seconds']:.0f} s, {record['tokens_per_second']:,} tokens/s on {record['device']}")
    if json_path:
        write_json(record, json_path)
    if plot:
        plot_runs({record["attention"]: record}, plot)
    if curves:
        runs = read_curves(curves, record["config"]) | {record["attention"]: record}
        write_json(runs, curves)
        plot_runs(runs, curves.with_suffix(".png"))
        if len(runs) > 1:
            console.print(curve_distance(runs))


if __name__ == "__main__":
    main()
