"""The example: its task, its model's parts, and a run that stops, goes on and reports."""

import dataclasses
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parents[1]


def load_example():
    """examples/ is no package: the file is loaded by its path."""
    spec = importlib.util.spec_from_file_location("mqar", ROOT / "examples" / "mqar.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["mqar"] = module  # where dataclasses look up a class's module
    spec.loader.exec_module(module)
    return module


mqar = load_example()

TINY = mqar.Config(
    length=24, pairs=4, sizes=2, vocab=24, hidden=16, heads=2, feature_dim=4, window=5,
    batch=8, steps=8, lr=1e-2, precision="fp32", eval_every=4,
)  # fmt: skip
TINY_OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in dataclasses.asdict(TINY).items()]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def run(*options):
    return CliRunner().invoke(mqar.main, ["--device=cpu", *TINY_OPTIONS, *map(str, options)])


# ---------------------------------------------------------------------------------------------------------------------
# The task


@pytest.mark.parametrize(
    "config", [TINY, mqar.PRESETS["cpu"], dataclasses.replace(TINY, length=16)], ids=["tiny", "cpu", "full"]
)
def test_every_listed_key_is_asked_for_once_and_answered_by_its_value(config):
    batch = mqar.make_batch(config, generator())
    context = 2 * config.pairs
    assert batch.tokens.shape == (config.batch, config.length)
    for tokens, positions, answers in zip(*(x.tolist() for x in dataclasses.astuple(batch)), strict=True):
        keys, values = tokens[0:context:2], tokens[1:context:2]
        assert len(set(keys)) == len(set(values)) == config.pairs
        assert all(1 <= key < config.vocab / 2 <= value < config.vocab for key, value in zip(keys, values, strict=True))
        assert [tokens[position] for position in positions] == keys and answers == values
        assert len(set(positions)) == config.pairs and min(positions) >= context
        assert all(tokens[i] == mqar.PADDING for i in range(context, config.length) if i not in positions)


def test_the_generator_decides_the_batch():
    one, same, other = (mqar.make_batch(TINY, generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(one.tokens, same.tokens) and not torch.equal(one.tokens, other.tokens)


def test_short_distances_are_likelier():
    config = dataclasses.replace(TINY, length=108, batch=500)
    distances = mqar.make_batch(config, generator()).positions - 8
    assert (distances < 20).float().mean() > 0.5 and distances.max() > 90


@pytest.mark.parametrize(
    "change, message",
    [
        ({"length": 15}, "got length=15, need at least 4 \\* pairs = 16"),
        ({"length": 21}, "got length=21 and pairs=4, need multiples of 2 \\*\\* \\(sizes - 1\\) = 2"),
        ({"vocab": 9}, "got vocab=9, need at least 2 \\* \\(pairs \\+ 1\\) = 10"),
        ({"heads": 3}, "got hidden=16, need a multiple of heads=3"),
        ({"batch": 0}, "got batch=0, need a positive number"),
    ],
)
def test_config_says_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)


def test_sizes_share_their_tokens_and_queries():
    config = dataclasses.replace(TINY, sizes=3)
    batches = [mqar.make_batch(config.halved(times), generator()) for times in range(3)]
    assert [tuple(batch.tokens.shape) for batch in batches] == [(8, 24), (16, 12), (32, 6)]
    assert [tuple(batch.answers.shape) for batch in batches] == [(8, 4), (16, 2), (32, 1)]


def test_smallest_vocabulary_works():
    mqar.make_batch(dataclasses.replace(TINY, vocab=10), generator())


# ---------------------------------------------------------------------------------------------------------------------
# The model


@pytest.mark.parametrize("length", [1, 4, 5, 6, 23])
def test_window_attention_equals_a_masked_softmax(length):
    layer = mqar.WindowAttention(16, 2, 5).double()
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(2, length, 16, dtype=torch.float64)
    q, k, v = layer.qkv_proj(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    scores = q @ k.mT / 8**0.5 + layer.bias[:, distance.clamp(0, 4)]
    scores = scores.masked_fill((distance < 0) | (distance >= 5), -torch.inf)
    expected = layer.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


def test_softmax_attention_equals_its_definition():
    layer = mqar.SoftmaxAttention(16, 2).double()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    q, k, v = layer.qkv_proj(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    expected = layer.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Training


def trained(steps, trainer=None):
    trainer = trainer or mqar.Trainer(TINY, mqar.based_mixer)
    while trainer.step_count < steps:
        trainer.step()
    return trainer


def test_a_resumed_run_equals_an_unbroken_one_bitwise(tmp_path):
    whole = trained(TINY.steps)
    mqar.save_checkpoint(trained(3), tmp_path / "run.pt")
    resumed = mqar.Trainer(TINY, mqar.based_mixer)
    mqar.restore_from(tmp_path / "run.pt", resumed)
    torch.rand(3)  # the global generator has no part in it
    trained(TINY.steps, resumed)
    assert resumed.losses == whole.losses and resumed.evaluations == whole.evaluations
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def test_training_cycles_through_the_sizes(monkeypatch):
    lengths, update = [], mqar.Trainer.update
    monkeypatch.setattr(
        mqar.Trainer, "update", lambda trainer, batch: (lengths.append(batch.tokens.shape[1]), update(trainer, batch))
    )
    trained(4)
    assert lengths == [24, 12, 24, 12]


def test_plotted_losses_are_means_of_whole_cycles():
    steps, losses = mqar.cycle_means([4.0, 2.0, 3.0, 1.0, 9.0], 2)
    assert list(steps) == [2, 4] and losses == [3.0, 2.0]


def test_training_lowers_the_loss():
    config = dataclasses.replace(TINY, batch=32, sizes=1, steps=60, eval_every=60)
    trainer = mqar.Trainer(config, mqar.based_mixer)
    trained(config.steps, trainer)
    assert trainer.evaluations[-1]["loss"] < trainer.losses[0] - 0.5


def test_precision_bf16_runs():
    trainer = mqar.Trainer(dataclasses.replace(TINY, precision="bf16"), mqar.based_mixer)
    trained(2, trainer)
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in trainer.model.parameters())


def test_learning_rate_rises_then_falls_to_nothing():
    config = dataclasses.replace(TINY, steps=100)
    trainer, factors = mqar.Trainer(config, mqar.based_mixer), []
    for step in range(100):
        trainer.losses = [0.0] * step
        factors.append(trainer._schedule())
    assert factors[:10] == sorted(factors[:10]) and factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[0] > 0 and max(factors) == 1 and factors[-1] < 1e-3


# ---------------------------------------------------------------------------------------------------------------------
# The command


def test_run_writes_its_record_and_its_plot(tmp_path):
    pytest.importorskip("matplotlib")
    done = run("--json", tmp_path / "a" / "run.json", "--plot", tmp_path / "b" / "run.png")
    assert done.exit_code == 0, done.output
    assert "step     4" in done.output and "recall" in done.output and "tokens/s" in done.output
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    assert record["config"] == dataclasses.asdict(TINY) and len(record["losses"]) == TINY.steps
    assert [x["step"] for x in record["evaluations"]] == [4, 8]
    assert (tmp_path / "b" / "run.png").read_bytes().startswith(b"\x89PNG")


def test_after_ctrl_c_resume_equals_an_unbroken_run(tmp_path, monkeypatch):
    checkpoint, update = tmp_path / "run.pt", mqar.Trainer.update

    def interrupted(trainer, batch):
        if trainer.step_count == 5:
            os.kill(os.getpid(), signal.SIGINT)
        update(trainer, batch)

    with monkeypatch.context() as patch:
        patch.setattr(mqar.Trainer, "update", interrupted)
        stopped = run("--checkpoint", checkpoint)
    assert stopped.exit_code == 1 and "stopped after 6 steps; --resume goes on" in stopped.output
    resumed = run("--checkpoint", checkpoint, "--resume", "--json", tmp_path / "resumed.json")
    assert resumed.exit_code == 0, resumed.output
    run("--json", tmp_path / "whole.json")
    one, other = (json.loads((tmp_path / name).read_text()) for name in ("resumed.json", "whole.json"))
    assert one["losses"] == other["losses"] and one["evaluations"] == other["evaluations"]


def test_ctrl_c_without_a_checkpoint_says_how_to_keep_one(monkeypatch):
    def interrupted(trainer):
        os.kill(os.getpid(), signal.SIGINT)
        return {"loss": 1.0, "recall": 0.0}

    monkeypatch.setattr(mqar.Trainer, "evaluate", interrupted)
    stopped = run()
    assert stopped.exit_code == 1 and "stopped after 4 steps; give --checkpoint" in stopped.output


def test_a_checkpoint_of_another_config_is_refused(tmp_path):
    assert run("--checkpoint", tmp_path / "run.pt").exit_code == 0
    refused = run("--checkpoint", tmp_path / "run.pt", "--resume", "--lr=0.5", "--pairs=6")
    assert refused.exit_code == 1
    assert "got pairs=4 (need 6), lr=0.01 (need 0.5); resume with the options" in " ".join(refused.output.split())


@pytest.mark.parametrize("options", [["--resume"], ["--resume", "--checkpoint", "missing.pt"]], ids=str)
def test_resume_without_a_checkpoint_is_refused(options):
    refused = run(*options)
    assert refused.exit_code == 2 and "need a file saved by an earlier run" in refused.output


def test_bad_config_and_missing_device_are_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "Error: Config: got length=5, need at least" in run("--length=5").output
    assert "Error: got --device cuda, but torch" in run("--device=cuda").output


def test_curves_of_two_paths_are_overlaid(tmp_path):
    pytest.importorskip("matplotlib")
    curves = tmp_path / "curves.json"
    first = run("--attention=auto", "--curves", curves)
    assert first.exit_code == 0 and "losses differ" not in first.output
    second = run("--attention=torch", "--curves", curves)
    assert "auto and torch: losses differ by 0.0000 at most" in second.output
    assert list(json.loads(curves.read_text())) == ["auto", "torch"]
    assert curves.with_suffix(".png").exists()
    refused = run("--attention=auto", "--lr=0.5", "--curves", curves)
    assert refused.exit_code == 1 and "of another config there" in refused.output


def test_a_missing_matplotlib_is_said_before_training(monkeypatch):
    monkeypatch.setattr(mqar.importlib.util, "find_spec", lambda name: None)
    refused = run("--plot=run.png")
    assert refused.exit_code == 1 and "need matplotlib: pip install" in refused.output and "step" not in refused.output


def test_kernels_are_insisted_on():
    refused = run("--attention=kernels")
    assert refused.exit_code == 1 and "--attention kernels: got tensors on cpu" in refused.output


def test_compare_on_a_cpu_leaves_fla_out(tmp_path):
    done = run("--compare", "--json", tmp_path / "speeds.json")
    assert done.exit_code == 0, done.output
    assert "fla's Based needs a GPU: left out" in done.output
    speeds = json.loads((tmp_path / "speeds.json").read_text())["tokens_per_second"]
    assert list(speeds) == ["based_cute (auto)", "softmax (SDPA)"] and min(speeds.values()) > 0


def test_shipped_record_is_of_the_default_run_and_learned_the_task():
    record = json.loads((ROOT / "docs" / "mqar.json").read_text())
    assert record["config"] == dataclasses.asdict(mqar.PRESETS["cpu"]) and record["device"] == "cpu"
    assert record["evaluations"][-1]["step"] == record["config"]["steps"]
    assert record["evaluations"][-1]["recall"] > 0.9
    assert (ROOT / "docs" / "mqar.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
def test_loss_curves_through_kernels_and_torch_path_overlap():
    config = dataclasses.replace(TINY, hidden=128, feature_dim=16, precision="bf16", steps=50, eval_every=50, lr=1e-3)
    curves = []
    for attention in ("kernels", "torch"):
        trainer = mqar.Trainer(config, lambda config, attention=attention: mqar.based_mixer(config, attention), "cuda")
        curves.append(trained(config.steps, trainer).losses)
    assert max(abs(x - y) for x, y in zip(*curves, strict=True)) < 0.05
