"""Saves on CUDA: a checkpoint holds the bytes of its step though training goes on; a killed run
continues bit for bit.
"""

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from helpers import curve, record_trainers

pytestmark = pytest.mark.gpu
KILLED = Path(__file__).parents[1] / "e2e" / "killed.py"


@pytest.mark.parametrize(
    ("precision", "strategy"),
    [("bf16", "single"), ("fp16", "single"), ("bf16", "shard_optim"), ("fp32", "full_shard")],
)
def test_a_checkpoint_holds_its_own_step_while_training_goes_on(
    recipe, monkeypatch, device, precision, strategy
):
    """The writer of step 4 waits until step 6 is done; weights and optimizer state have changed
    twice by then. On CUDA the copy begins late, too: when the next backward pass has been launched.
    """
    import torch

    from windlass import Callback, train
    from windlass.checkpoint.format import open_checkpoint
    from windlass.checkpoint.save import Writer
    from windlass.checkpoint.state_dict import named_state

    trainers, copy, write = record_trainers(monkeypatch), Writer._copy, Writer._write
    snapshots, two_steps_later = dict[int, dict[str, Any]](), threading.Event()

    def copy_late(self: Writer, save: Any, shard: Any) -> None:
        if device == "cuda":
            self._stream = self._stream or torch.cuda.Stream()
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(200_000_000)  # about 0.1 s
        copy(self, save, shard)

    def write_late(self: Writer, *job: Any) -> None:
        assert two_steps_later.wait(60)
        write(self, *job)

    class AtStep(Callback):
        def on_step(self, now: Any) -> None:
            tensors, _ = named_state(trainers[0].model, trainers[0].optimizer)
            snapshots[now.step] = {}
            for name, tensor in tensors.items():
                whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                snapshots[now.step][name] = whole.detach().clone()
            if now.step == 6:
                two_steps_later.set()

    monkeypatch.setattr(Writer, "_copy", copy_late)
    monkeypatch.setattr(Writer, "_write", write_late)
    settings = (f"train.precision={precision}", f"parallel.strategy={strategy}")
    run = train(recipe("run", *settings, "checkpoint.every=4"), callbacks=[AtStep()])
    assert len(snapshots) == 8
    for step in (4, 8):
        checkpoint = open_checkpoint(run.checkpoints_dir / f"step-{step:08d}")
        assert set(checkpoint.names()) == set(snapshots[step])
        for name, tensor in snapshots[step].items():
            assert checkpoint.tensor(name).equal(tensor.cpu()), (step, name)
    changed = sum(not tensor.equal(snapshots[6][name]) for name, tensor in snapshots[4].items())
    assert changed > len(snapshots[4]) / 2
    if device == "cuda":
        assert trainers[0].saver._host.is_pinned()


@pytest.mark.parametrize(
    "settings",
    [
        ("train.precision=fp32", "model.dropout=0.1"),
        ("train.precision=bf16", "model.dropout=0.1", "parallel.activation_checkpointing=full"),
        ("train.precision=fp16", "train.micro_batch=4"),
        ("train.precision=bf16", "optim.kind=muon", "parallel.strategy=full_shard"),
    ],
)
def test_a_killed_run_continues_bit_for_bit(recipe, words, settings):
    """SIGKILL after step 6; the run starts again from step 3, in another process."""
    from windlass import train

    settings = (*settings, "checkpoint.every=3")
    whole = train(recipe("whole", *settings))
    preset, *overrides = words("killed", *settings)
    command = [sys.executable, KILLED, preset, "5", *overrides]
    killed = subprocess.run(command, timeout=120, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    resumed = train(recipe("killed", *settings))
    assert [event["step"] for event in resumed.events if event["event"] == "resumed"] == [3]
    assert curve(resumed) == curve(whole) and len(curve(whole)) == 8
