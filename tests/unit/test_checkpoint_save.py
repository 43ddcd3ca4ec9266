"""Saving and reading in one process: exact, in the background, in the layout that the safetensors
library reads.
"""

import itertools
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from helpers import refused
from windlass.checkpoint.format import DTYPES, Checkpoint, names_in, open_checkpoint
from windlass.checkpoint.save import Writer
from windlass.checkpoint.state_dict import Box, Shard, gather_shard, restore, shard_of
from windlass.fileio import Files


class Net(nn.Module):
    def __init__(self, width: int = 6, tied: bool = True):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(tokens))).square().mean()


def trained(steps: int = 3, **kwargs: Any) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Net(**kwargs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model((torch.arange(9) * (step + 3)) % 11).backward()
        optimizer.step()


def commit(writer: Writer, step: int = 3, state: Shard | None = None, *more: Any) -> Path:
    writer.write(step, state or gather_shard(Net()), {"step": step}, *more)
    [outcome] = writer.wait(30)
    assert not outcome.error, outcome.error
    return outcome.path


def save(run: Path, model: nn.Module, optimizer: Any = None) -> Checkpoint:
    return open_checkpoint(commit(Writer(run / "checkpoints"), 3, gather_shard(model, optimizer)))


# -- what is written and read


def test_the_files_are_safetensors_and_tied_weights_are_written_once(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint = save(tmp_path, model, optimizer)
    file = checkpoint.path / "rank-00000.safetensors"
    saved, weight = load_file(file), model.embedding.weight
    assert torch.equal(saved["model/embedding.weight"], weight)
    assert torch.equal(saved["optim/embedding.weight/exp_avg"], optimizer.state[weight]["exp_avg"])
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["format"] == "pt"
    assert checkpoint.counters == {"step": 3} and "model/head.weight" not in checkpoint.names()
    assert torch.equal(checkpoint.tensor("model/head.weight"), model.embedding.weight)
    untied = Net(tied=False)
    restore(checkpoint, untied)
    assert torch.equal(untied.head.weight, model.head.weight)
    assert untied.head.weight is not untied.embedding.weight


@pytest.mark.parametrize("key", DTYPES)
def test_every_dtype_bit_for_bit(tmp_path: Path, key: str) -> None:
    dtype = getattr(torch, DTYPES[key][0])
    assert dtype.itemsize == DTYPES[key][1]
    end = 2 if dtype == torch.bool else 255
    raw = torch.randint(0, end, (5, 3, dtype.itemsize), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(5, 3)
    tensors = {"x": tensor.t(), "s": tensor[0, 0], "odd": raw[:1, 0, 0], "empty": tensor[:0]}
    state = shard_of(tensors)
    checkpoint = open_checkpoint(commit(Writer(tmp_path / "checkpoints"), 1, state))
    transposed = tensor.t().contiguous()
    assert torch.equal(checkpoint.tensor("x").view(torch.uint8), transposed.view(torch.uint8))
    assert torch.equal(checkpoint.tensor("s").view(-1).view(torch.uint8), raw[0, 0])
    assert checkpoint.tensor("empty").shape == (0, 3) and checkpoint.dtype("empty") == dtype


@pytest.mark.parametrize(
    "cuts", [([0, 6], [0, 1, 4, 5], [0, 7]), ([0, 1, 6], [0, 2, 5], [0, 6, 7])]
)
def test_any_box_is_read_from_any_boxes(tmp_path, cuts):
    shape = tuple(ends[-1] for ends in cuts)
    whole = torch.randn(shape, dtype=torch.float64)
    boxes = list[Box]()
    for cell in itertools.product(*map(itertools.pairwise, cuts)):
        starts, stops = zip(*cell, strict=True)
        boxes.append(Box("x", whole[tuple(map(slice, starts, stops))], shape, starts))
    path = commit(Writer(tmp_path / "checkpoints"), 1, Shard(boxes[::-1], {}))
    checkpoint = open_checkpoint(path)
    assert torch.equal(checkpoint.tensor("x"), whole)
    for low in itertools.product((0, 3), (0, 2), (0, 1, 5)):
        for high in itertools.product((4, 6), (3, 5), (6, 7)):
            wanted = whole[tuple(map(slice, low, high))]
            target = torch.full(wanted.shape, torch.nan, dtype=torch.float64)
            checkpoint.read_into("x", low, target)
            assert torch.equal(target, wanted)
            spread = torch.full(wanted.shape[::-1], torch.nan, dtype=torch.float64).permute(2, 1, 0)
            checkpoint.read_into("x", low, spread)  # into memory in another order
            assert torch.equal(spread, wanted)


@pytest.mark.parametrize(
    "buffer",
    [
        torch.ones(2).to(torch.float8_e4m3fnuz),
        torch.eye(2).to_sparse(),
        torch.polar(torch.ones(2), torch.ones(2)),
    ],
)
def test_a_tensor_that_no_checkpoint_can_hold_is_named(buffer):
    model = Net()
    model.register_buffer("freqs", buffer)
    with refused("model/freqs", str(buffer.dtype), "persistent=False"):
        gather_shard(model)


def test_optimizer_state_that_the_checkpoint_has_not_is_dropped(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    checkpoint = save(tmp_path, model, optimizer)
    train(model, optimizer, 3)
    restore(checkpoint, model, optimizer)
    assert not any(optimizer.state.values())
    train(model, optimizer, 3)
    assert torch.equal(model.embedding.weight, trained(3)[0].embedding.weight)


def test_a_checkpoint_of_another_model_is_refused_with_every_difference(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint = save(tmp_path, model, optimizer)
    frozen = Net().requires_grad_(False)
    frozen.norm.requires_grad_(True)
    adam = torch.optim.AdamW([p for p in frozen.parameters() if p.requires_grad])
    linear = nn.Sequential(nn.Linear(6, 11))
    for other, optim, named in (
        (Net(width=8), None, ["embedding.weight is [11, 6] there and [11, 8] here", "norm.weight"]),
        (Net().double(), None, ["torch.float32 there and torch.float64 here"]),
        (linear, None, ["0.weight is missing", "embedding.weight is not in this model"]),
        (frozen, adam, ["embedding.weight"]),
    ):
        with refused(*named):
            restore(checkpoint, other, optim)


# -- the writer


class Gate(Files):
    """Stops the writer at its first file until it is let through."""

    def __init__(self) -> None:
        self.open, self.reached = threading.Event(), threading.Event()

    def about_to(self, operation, path, output=None, data=None):
        if operation == "create":
            self.reached.set()
            assert self.open.wait(30)


def test_step_does_not_wait_for_disk_and_may_change_state_but_next_save_waits(tmp_path):
    gate, waited = Gate(), []
    writer = Writer(tmp_path / "checkpoints", files=gate)
    model, optimizer = trained()
    before = model.embedding.weight.detach().clone()
    writer.write(3, gather_shard(model, optimizer), {"step": 3})
    assert gate.reached.wait(30) and writer.busy and writer.poll() == []
    assert writer.wait(timeout=0.01) == [] and writer.busy
    train(model, optimizer, 1)
    writer.while_waiting = lambda: (waited.append(1), gate.open.set())
    writer.write(4, gather_shard(model), {})
    first, second = writer.wait()
    assert waited and second.waited_s > 0 and not (first.error or second.error or writer.busy)
    assert torch.equal(open_checkpoint(first.path).tensor("model/embedding.weight"), before)


def test_without_page_locked_memory_saves_work(tmp_path, monkeypatch) -> None:
    """An error of `cudaHostAlloc` must not fail the save."""
    empty = torch.empty

    def without(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", without)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    writer, cuda = Writer(tmp_path / "checkpoints"), torch.device("cuda", 0)
    allocate = writer._allocate
    monkeypatch.setattr(writer, "_allocate", lambda size, _: allocate(size, cuda))
    for step, width in enumerate((8, 80, 8)):
        writer.write(step, gather_shard(Net(width)), {})
        [outcome] = writer.wait(30)
        assert not outcome.error


def test_the_writer_uses_the_device_of_the_state(tmp_path, monkeypatch):
    """A new thread starts with CUDA device 0, whatever the device of its rank."""
    calls: dict[str, torch.device] = {}
    thread, writer = threading.current_thread, Writer(tmp_path / "checkpoints")
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: calls.update({thread().name: d}))
    monkeypatch.setattr(Shard, "device", torch.device("cuda", 3))
    monkeypatch.setattr(writer, "_copy", lambda save, shard: setattr(writer, "_copied", Mock()))
    commit(writer, 3, shard_of({}))
    assert calls == {"checkpoint-writer": torch.device("cuda", 3)}


@pytest.mark.parametrize("where", ["commit.Save._manifest", "save.Writer._copy"])
def test_an_error_in_the_writer_or_the_copy_is_an_outcome(tmp_path, monkeypatch, where):
    writer = Writer(tmp_path / "checkpoints")
    with monkeypatch.context() as patch:
        patch.setattr(f"windlass.checkpoint.{where}", Mock(side_effect=MemoryError("oops")))
        writer.write(1, gather_shard(Net()), {})
        [outcome] = writer.wait(timeout=30)
    assert "oops" in outcome.error and names_in(tmp_path / "checkpoints") == []
    commit(writer)
