"""Saving and reading in one process: exact, in the background, in the layout that the safetensors
library reads.
"""

import errno
import fcntl
import mmap
import os
import shutil
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file
from torch import nn

from helpers import refused
from windlass.checkpoint.commit import RESERVE_BYTES, shortage
from windlass.checkpoint.format import DTYPES, names_in, read_manifest
from windlass.checkpoint.image import HostBuffer
from windlass.checkpoint.load import Checkpoint, open_checkpoint
from windlass.checkpoint.save import Saver
from windlass.checkpoint.state_dict import State, gather_state, restore, state_of
from windlass.fileio import O_DIRECT, PAGE, Files


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


def commit(saver: Saver, step: int = 3, state: State | None = None, *more: Any) -> Path:
    saver.save(step, state or gather_state(Net()), {"step": step}, *more)
    [outcome] = saver.wait(30)
    assert not outcome.error, outcome.error
    return outcome.path


def save(run: Path, model: nn.Module, optimizer: Any = None) -> Checkpoint:
    return open_checkpoint(commit(Saver(run / "checkpoints"), 3, gather_state(model, optimizer)))


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


def test_a_state_that_stays_still_is_written_from_where_it_is(tmp_path, monkeypatch) -> None:
    """The file is the one of a copied state, for pieces that end inside and between boxes."""
    model, optimizer = trained(width=512)
    state, tensor = gather_state(model, optimizer), torch.arange(60.0).view(6, 10)
    state.slices.extend(state_of({"transposed": tensor.t(), "scalar": tensor[0, 1]}).slices)
    copied = commit(Saver(tmp_path / "copied", piece_bytes=PAGE), 3, state)

    def no_room(*_: Any) -> None:
        raise AssertionError("a buffer for the state")

    monkeypatch.setattr(HostBuffer, "reserve", no_room)
    for piece_bytes in (PAGE, 5000, 1 << 20):
        saver = Saver(tmp_path / f"{piece_bytes}", piece_bytes=piece_bytes)
        saver.save(3, state, {"step": 3}, still=True)
        [outcome] = saver.wait(30)
        assert not outcome.error
        name = "rank-00000.safetensors"
        assert (outcome.path / name).read_bytes() == (copied / name).read_bytes()
        manifests = [read_manifest(path) for path in (outcome.path, copied)]
        assert manifests[0].files == manifests[1].files
        assert manifests[0].tensors == manifests[1].tensors


@pytest.mark.parametrize("key", DTYPES)
def test_every_dtype_bit_for_bit(tmp_path: Path, key: str) -> None:
    dtype = getattr(torch, DTYPES[key][0])
    assert dtype.itemsize == DTYPES[key][1]
    end = 2 if dtype == torch.bool else 255
    raw = torch.randint(0, end, (5, 3, dtype.itemsize), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(5, 3)
    state = state_of({"x": tensor.t(), "s": tensor[0, 0], "odd": raw[:1, 0, 0]})
    checkpoint = open_checkpoint(commit(Saver(tmp_path / "checkpoints"), 1, state))
    transposed = tensor.t().contiguous()
    assert torch.equal(checkpoint.tensor("x").view(torch.uint8), transposed.view(torch.uint8))
    assert torch.equal(checkpoint.tensor("s").view(-1).view(torch.uint8), raw[0, 0])


class Odd(nn.Module):
    """Complex numbers as in Llama's rotary table, and tensors that are hard to copy."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.polar(torch.ones(4, 3), torch.rand(4, 3))
        shared = torch.arange(6)
        buffers = {
            "complex": table,
            "conjugate": table.conj(),
            "wide": table.to(torch.complex128).t(),
            "empty": torch.zeros(0, 3, dtype=torch.complex64),
            "scalar": torch.tensor(2 - 1j),
            "mask": torch.tensor([True, False]),
            "count": torch.tensor(7),
            "low": torch.rand(2, 2).to(torch.float8_e4m3fn),
            "brain": torch.rand(3).bfloat16(),
            "one": shared[:4],
            "other": shared[2:],
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))


def test_complex_numbers_and_odd_buffers_come_back_with_their_optimizer_state(tmp_path):
    model, other = Odd(), Odd()
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.1) for one in (model, other)]
    for one, optimizer in zip((model, other), optimizers, strict=True):
        (one.weight * one.complex.sum()).abs().sum().backward()
        optimizer.step()

    def raw(tensor: torch.Tensor) -> bytes:
        return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()

    checkpoint = save(tmp_path, model, optimizers[0])
    restore(checkpoint, other, optimizers[1])
    found = other.state_dict()
    for name, tensor in model.state_dict().items():
        assert found[name].dtype == tensor.dtype and raw(found[name]) == raw(tensor), name
    saved, read = (o.state[m.weight] for o, m in zip(optimizers, (model, other), strict=True))
    assert read["exp_avg"].is_complex() and torch.equal(saved["exp_avg"], read["exp_avg"])
    pairs = load_file(checkpoint.path / "rank-00000.safetensors")["model/complex"]
    assert torch.equal(torch.view_as_complex(pairs), model.complex), "other tools read it"


@pytest.mark.parametrize(
    "buffer", [torch.ones(2).to(torch.float8_e4m3fnuz), torch.eye(2).to_sparse()]
)
def test_a_tensor_that_no_checkpoint_can_hold_is_named(buffer):
    model = Net()
    model.register_buffer("freqs", buffer)
    with refused("model/freqs", str(buffer.dtype), "persistent=False"):
        gather_state(model)


def test_optimizer_state_that_the_checkpoint_has_not_is_dropped(tmp_path: Path) -> None:
    """A rewind to a checkpoint from before the first step starts the optimizer over."""
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


# -- the saver


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
    saver = Saver(tmp_path / "checkpoints", files=gate)
    model, optimizer = trained()
    before = model.embedding.weight.detach().clone()
    saver.save(3, gather_state(model, optimizer), {"step": 3})
    assert gate.reached.wait(30) and saver.busy and saver.poll() == []
    assert saver.wait(timeout=0.01) == [] and saver.busy
    train(model, optimizer, 1)
    saver.save(
        4, gather_state(model), {}, while_waiting=lambda: (waited.append(1), gate.open.set())
    )
    first, second = saver.wait()
    assert waited and second.waited_s > 0 and not (first.error or second.error or saver.busy)
    assert torch.equal(open_checkpoint(first.path).tensor("model/embedding.weight"), before)


@pytest.mark.parametrize("background", [True, False])
def test_a_deferred_copy_ends_before_the_state_changes(tmp_path: Path, background: bool) -> None:
    """Whichever thread copies how much; a forward pass changes BatchNorm's statistics before."""
    saver = Saver(tmp_path / "checkpoints", deferred=True, background=background)
    model, optimizer = trained(width=3000)
    for step in range(3, 9):
        state = gather_state(model, optimizer)
        before = {box.name: box.tensor.clone() for box in state.slices}
        saver.save(step, state, {})
        saver.settle()
        train(model, optimizer, 1)
        [outcome] = saver.wait(30)
        checkpoint = open_checkpoint(outcome.path)
        assert len(before) > 10
        assert all(checkpoint.tensor(name).equal(tensor) for name, tensor in before.items())


def test_the_copy_takes_what_is_there_when_it_settles_except_what_a_forward_pass_changes() -> None:
    tensors = {"model/weight": torch.arange(5.0), "model/buffer": torch.arange(4)}
    tensors |= {"model/across": torch.arange(6.0).view(2, 3).t()}  # not contiguous: copied at once
    save, state = Mock(rank=0), state_of(tensors)
    HostBuffer().fill(save, state.slices, {"model/buffer"})
    for tensor in tensors.values():
        tensor += 100
    save.copy.settle()
    for tensor in tensors.values():
        tensor += 100
    save.copy.finish()
    found = load(bytes(save.image))
    assert found["model/weight"].tolist() == [100, 101, 102, 103, 104]
    assert found["model/buffer"].tolist() == [0, 1, 2, 3]
    assert found["model/across"].tolist() == [[0, 3], [1, 4], [2, 5]]


class Cudart:
    """CUDA's runtime as its manual says: it registers what it is given, or answers with an error
    code.
    """

    def __init__(self, code: int = 0):
        self.code, self.registered, self.threads = code, dict[int, int](), list[str]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.threads.append(threading.current_thread().name)
        if not self.code:
            self.registered[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    fake = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return fake


def test_without_page_locked_memory_saves_work_and_say_so_once(cudart: Cudart) -> None:
    """An error of `cudaHostRegister` must not fail the save."""
    cudart.code = 2
    buffer = HostBuffer()
    buffer.reserve(10_000, torch.device("cuda", 0))
    assert buffer._bytes.numel() >= 10_000
    assert "error 2" in buffer.warning and "page-locked" in buffer.warning
    buffer.warning = ""
    buffer.reserve(100_000, torch.device("cuda", 0))
    assert buffer._bytes.numel() >= 100_000 and not buffer.warning
    assert len(cudart.threads) == 1 and threading.current_thread().name not in cudart.threads


def test_page_locked_memory_has_the_size_of_the_state_and_is_given_back(cudart: Cudart) -> None:
    """torch's own pinned memory would be 8 and 32 MiB, and never be given back."""
    buffer, device = HostBuffer(), torch.device("cuda", 0)
    for size in (5 * 2**20 + 1, 17 * 2**20):
        buffer.reserve(size, device)
        assert list(cudart.registered.values()) == [-(-size // PAGE) * PAGE]
        assert list(cudart.registered) == [buffer._bytes.data_ptr()]
    buffer.reserve(2**20, device)
    assert len(cudart.threads) == 2, "a smaller state fits"
    del buffer
    assert not cudart.registered


def test_the_first_save_allocates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is reserved in the background, also where a save comes before it is there."""
    state = gather_state(*trained())
    saver = Saver(tmp_path / "checkpoints")
    go_on, real, sizes = threading.Event(), mmap.mmap, list[int]()

    def late(*args: Any) -> mmap.mmap:
        go_on.wait(10)
        sizes.append(args[1])
        return real(*args)

    monkeypatch.setattr(mmap, "mmap", late)
    saver.reserve(state)
    assert not sizes, "reserve does not wait"
    threading.Timer(0.05, go_on.set).start()
    path = commit(saver, 3, state)
    (file,) = path.glob("*.safetensors")
    assert sizes == [-(-file.stat().st_size // PAGE) * PAGE]
    commit(saver, 4, state)
    assert len(sizes) == 1


def test_the_writer_uses_the_device_of_the_state(tmp_path, monkeypatch):
    """A new thread starts with CUDA device 0, whatever the device of its rank."""
    calls: dict[str, torch.device] = {}
    thread = threading.current_thread
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: calls.update({thread().name: d}))
    commit(Saver(tmp_path / "checkpoints", device=torch.device("cuda", 3)))
    assert calls == {"checkpoint-writer": torch.device("cuda", 3)}


@pytest.mark.parametrize("where", ["commit.parse", "save.HostBuffer.fill"])
def test_an_error_in_the_writer_or_the_copy_is_an_outcome(tmp_path, monkeypatch, where):
    saver = Saver(tmp_path / "checkpoints")
    with monkeypatch.context() as patch:
        patch.setattr(f"windlass.checkpoint.{where}", Mock(side_effect=MemoryError("oops")))
        saver.save(1, gather_state(Net()), {})
        [outcome] = saver.wait(timeout=30)
    assert "oops" in outcome.error and names_in(tmp_path / "checkpoints") == []
    commit(saver)


@pytest.mark.parametrize("size", [0, 1, 4096, 70_001])
def test_written_past_the_page_cache(tmp_path, monkeypatch, size):
    """With an end that does not fill a page."""
    monkeypatch.setattr("windlass.checkpoint.commit.DIRECT_BYTES", 0)
    numbers = torch.randint(0, 255, (size + 3,), dtype=torch.uint8)
    path = commit(Saver(tmp_path / "checkpoints", piece_bytes=8192), 1, state_of({"x": numbers}))
    assert torch.equal(open_checkpoint(path).tensor("x"), numbers)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_without_direct_writes(tmp_path, monkeypatch, code):
    """EINVAL is not the only code with which a file system rejects O_DIRECT."""
    real = os.write

    def refuses(descriptor: int, data: memoryview) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", refuses)
    with Files().create(tmp_path / "x", direct=True) as output:
        output.write(bytes(range(256)) * 40)
        output.sync()
    assert (tmp_path / "x").read_bytes() == bytes(range(256)) * 40


def test_each_manifest_is_read_once_in_the_writer(tmp_path, monkeypatch):
    read: list[str] = []
    counted = lambda path: (read.append(path.name), read_manifest(path))[1]  # noqa: E731
    monkeypatch.setattr("windlass.checkpoint.format.read_manifest", counted)
    for attempt in ("a", "b"):
        saver = Saver(tmp_path / "checkpoints", attempt=attempt)
        for step in (1, 2, 3):
            commit(saver, step)
        assert read == ([] if attempt == "a" else [f"step-0000000{s}" for s in (1, 2, 3)])


def test_a_full_disk_is_answered_with_the_bytes_and_the_reserve_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Mock(free=3_000_000))
    text = shortage(tmp_path, 1_000_000, "a save")
    assert "needs 1 MB and a reserve of 16.8 MB" in text and "3 MB are free" in text
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Mock(free=1_000_000 + RESERVE_BYTES))
    assert shortage(tmp_path, 1_000_000, "a save") == ""
