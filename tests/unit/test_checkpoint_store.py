"""Saver, slices and loading in one process: exact, in the background, in the layout that the safetensors library reads."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from windlass.checkpoint import catalog, load, space
from windlass.checkpoint.load import open_checkpoint
from windlass.checkpoint.priority import NICE
from windlass.checkpoint.reshard import Slice, expected_bytes, gather_state, restore, share, slices
from windlass.checkpoint.retention import EMERGENCY, Policy
from windlass.checkpoint.save import Saver
from windlass.checkpoint.stage import DTYPES, Stage
from windlass.errors import UserError
from windlass.fileio import DIRECT, Files, Output
from windlass.recipe import Recipe


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


def save(run: Path, model: nn.Module, optimizer: Any = None, step: int = 3, **meta: Any) -> Path:
    saver = Saver(run / "checkpoints", attempt=f"a{step}")
    saver.save(step, gather_state(model, optimizer), {"step": step, "list": [1, 2]}, meta)
    [outcome] = saver.wait()
    saver.close()
    assert not outcome.error, outcome.error
    return outcome.path


# -- dealing rows to ranks --------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=8), st.integers(1, 7))
def test_every_row_goes_to_one_rank_and_the_bytes_are_even(sizes: list[tuple[int, int]], count: int) -> None:
    tensors = [(str(i), rows, row_bytes) for i, (rows, row_bytes) in enumerate(sizes)]
    dealt: dict[str, list[int]] = {name: [] for name, _, _ in tensors}
    bytes_of = {name: row_bytes for name, _, row_bytes in tensors}
    each = []
    for index in range(count):
        mine = share(tensors, index, count)
        each.append(sum((b - a) * bytes_of[n] for n, (a, b) in mine.items()))
        for name, (a, b) in mine.items():
            dealt[name] += range(a, b)
    assert all(dealt[name] == list(range(rows)) for name, rows, row_bytes in tensors if row_bytes)
    largest = max(bytes_of.values(), default=0)
    assert max(each) - min(each) <= 2 * largest


# -- save and restore -------------------------------------------------------------------------------------------------


def test_training_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = save(tmp_path, model, optimizer)
    train(model, optimizer, 4)
    other = Net()
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1, fused=True)
    restore(open_checkpoint(path), other, fresh)
    assert other.head.weight is other.embedding.weight
    train(other, fresh, 4)
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert open_checkpoint(path).counters == {"step": 3, "list": [1, 2]}


def test_the_files_are_safetensors(tmp_path: Path) -> None:
    model, optimizer = trained()
    file = save(tmp_path, model, optimizer) / "rank-00000.safetensors"
    found = load_file(file)
    assert torch.equal(found["model/embedding.weight"], model.embedding.weight)
    assert torch.equal(found["optim/embedding.weight/exp_avg"], optimizer.state[model.embedding.weight]["exp_avg"])
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["format"] == "pt"


def test_tied_weights_are_written_once_and_found_by_both_names(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint = open_checkpoint(save(tmp_path, model, optimizer))
    assert "model/head.weight" not in checkpoint.names() and checkpoint.has("model/head.weight")
    assert torch.equal(checkpoint.tensor("model/head.weight"), model.embedding.weight)
    untied = Net(tied=False)
    restore(checkpoint, untied)
    assert torch.equal(untied.head.weight, model.head.weight) and untied.head.weight is not untied.embedding.weight


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype == torch.bool else 255, (5, 3, dtype.itemsize), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(5, 3)
    saver = Saver(tmp_path / "checkpoints", background=False)
    saver.save(1, {"x": Slice(tensor.t(), (3, 5)), "s": Slice(tensor[0, 0], ()), "odd": Slice(raw[:1, 0, 0], (1,))}, {})
    checkpoint = open_checkpoint(saver.poll()[0].path)
    assert torch.equal(checkpoint.tensor("x").contiguous().view(torch.uint8), tensor.t().contiguous().view(torch.uint8))
    assert torch.equal(checkpoint.tensor("s").view(-1).view(torch.uint8), raw[0, 0])
    assert torch.equal(checkpoint.slice("x", 1, 3).view(torch.uint8), tensor.t()[1:3].contiguous().view(torch.uint8))


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.AdamW(p, fused=False), lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1), torch.optim.Adagrad,
    lambda p: torch.optim.Adafactor(p, lr=0.01), torch.optim.Rprop, lambda p: torch.optim.ASGD(p, lr=0.1),
    torch.optim.NAdam, torch.optim.Adamax, lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
])  # fmt: skip
def test_any_torch_optimizer(tmp_path: Path, make: Any) -> None:
    torch.manual_seed(1)
    model, other = Net(), Net()
    optimizer = make(model.parameters())
    train(model, optimizer, 3)
    path = save(tmp_path, model, optimizer)
    train(model, optimizer, 3)
    fresh = make(other.parameters())
    restore(open_checkpoint(path), other, fresh)
    train(other, fresh, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_an_optimizer_of_several_and_python_numbers(tmp_path: Path) -> None:
    model, _ = trained(0, tied=False)
    parts = [torch.optim.SGD([model.embedding.weight], 0.1, momentum=0.9), torch.optim.AdamW(model.head.parameters())]
    for part in parts:
        train(model, part, 2)
    parts[1].state[model.head.weight].update(count=7, ratio=0.1, flag=True, nothing=None)
    path = save(tmp_path, model, parts)
    other = Net(tied=False)
    fresh = [torch.optim.SGD([other.embedding.weight], 0.1, momentum=0.9), torch.optim.AdamW(other.head.parameters())]
    restore(open_checkpoint(path), other, fresh)
    found = fresh[1].state[other.head.weight]
    assert (found["count"], found["ratio"], found["flag"]) == (7, 0.1, True) and found["flag"] is True
    assert torch.equal(found["exp_avg"], parts[1].state[model.head.weight]["exp_avg"])
    momentum = parts[0].state[model.embedding.weight]["momentum_buffer"]
    assert torch.equal(fresh[0].state[other.embedding.weight]["momentum_buffer"], momentum)


def test_state_that_the_checkpoint_has_not_is_dropped(tmp_path: Path) -> None:
    """A rewind to a checkpoint from before the first step starts the moments anew."""
    model, optimizer = trained(0)
    path = save(tmp_path, model, optimizer, step=0)
    train(model, optimizer, 3)
    restore(open_checkpoint(path), model, optimizer)
    assert not any(optimizer.state.values())
    twin, other = trained(3)
    train(model, optimizer, 3)
    assert torch.equal(model.embedding.weight, twin.embedding.weight) and other is not optimizer


def test_a_checkpoint_of_another_model_is_refused_with_every_difference(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint = open_checkpoint(save(tmp_path, model, optimizer))
    with pytest.raises(UserError, match=r"embedding.weight is \[11, 6\] there and \[11, 8\] here.*norm.weight"):
        restore(checkpoint, Net(width=8))
    with pytest.raises(UserError, match=r"float32 there and torch.float64 here"):
        restore(checkpoint, Net().double())
    with pytest.raises(UserError, match=r"0.weight is missing.*embedding.weight is not in this model"):
        restore(checkpoint, nn.Sequential(nn.Linear(6, 11)))
    other = Net().requires_grad_(False)
    other.norm.requires_grad_(True)
    with pytest.raises(
        UserError, match=r"optimizer's state for embedding.weight, which the optimizer here does not train"
    ):
        restore(checkpoint, other, torch.optim.AdamW([p for p in other.parameters() if p.requires_grad]))


def test_a_file_that_goes_bad_between_choosing_and_reading_is_one_message(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint = open_checkpoint(save(tmp_path, model, optimizer))
    file = checkpoint.path / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(UserError, match=r"was whole when it was chosen, and is not any more: .*ends too early"):
        restore(checkpoint, model, optimizer)
    file.unlink()
    with pytest.raises(UserError, match=r"cannot be read"):
        restore(checkpoint, model, optimizer)


def test_names_do_not_show_wrappers() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    plain = set(slices(inner))
    inner[0] = checkpoint_wrapper(inner[0])
    inner[1] = torch.compile(inner[1])
    assert set(slices(inner)) == plain == {f"model/{i}.{n}" for i in (0, 1) for n in ("weight", "bias")}


# -- the saver --------------------------------------------------------------------------------------------------------


class Gate(Files):
    """Stops the writer at its first file until it is let through."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()

    def about_to(
        self, operation: str, path: Path, output: Output | None = None, data: memoryview | None = None
    ) -> None:
        if operation == "create":
            self.reached.set()
            assert self.open.wait(30)


def test_the_step_does_not_wait_for_the_disk_and_may_change_the_state(tmp_path: Path) -> None:
    gate = Gate()
    saver = Saver(tmp_path / "checkpoints", files=gate)
    model, optimizer = trained()
    before = model.embedding.weight.detach().clone()
    saver.save(3, gather_state(model, optimizer), {"step": 3})
    assert gate.reached.wait(30) and saver.busy and saver.poll() == []
    assert saver.wait(timeout=0.01) == [] and saver.busy
    train(model, optimizer, 1)
    gate.open.set()
    [outcome] = saver.wait()
    assert not saver.busy and not outcome.error and saver.last_seconds is not None
    assert torch.equal(open_checkpoint(outcome.path).tensor("model/embedding.weight"), before)
    saver.close()
    assert not any(t.name == "checkpoint-writer" for t in threading.enumerate())


def test_a_save_that_comes_too_early_waits_for_the_one_before(tmp_path: Path) -> None:
    gate = Gate()
    saver = Saver(tmp_path / "checkpoints", files=gate)
    state = gather_state(trained()[0])
    saver.save(1, state, {})
    asked = []

    def waiting() -> None:
        asked.append(1)
        gate.open.set()

    saver.save(2, state, {}, while_waiting=waiting)
    assert asked
    outcomes = saver.wait()
    assert [o.step for o in outcomes] == [1, 2] and outcomes[1].waited_s > 0 and not any(o.error for o in outcomes)
    saver.close()


def test_one_buffer_serves_all_saves() -> None:
    stage = Stage()
    first = stage.fill(gather_state(trained()[0]).slices, 0)
    address = stage._bytes.data_ptr()
    again = stage.fill(gather_state(trained()[0]).slices, 0)
    assert stage._bytes.data_ptr() == address and bytes(first.image) == bytes(again.image)


@pytest.mark.parametrize("size", [0, 1, 4096, 70_001])
def test_written_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Whatever the file system makes of it, and with an end that is no whole page."""
    monkeypatch.setattr("windlass.checkpoint.commit.DIRECT_BYTES", 0)
    bytes_ = torch.randint(0, 255, (size + 3,), dtype=torch.uint8)
    for folder in (tmp_path, Path("/dev/shm") / f"windlass-test-{os.getpid()}-{size}"):
        if not folder.parent.is_dir():
            continue
        folder.mkdir(exist_ok=True)
        try:
            saver = Saver(folder / "checkpoints", background=False, piece_bytes=8192)
            saver.save(1, {"x": Slice(bytes_, (size + 3,))}, {})
            [outcome] = saver.poll()
            assert not outcome.error and torch.equal(open_checkpoint(outcome.path).tensor("x"), bytes_)
        finally:
            shutil.rmtree(folder)


def test_a_file_system_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write

    def refuses(descriptor: int, data: memoryview) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", refuses)
    with Files().create(tmp_path / "x", direct=True) as output:
        output.write(bytes(range(256)) * 40)
        output.sync()
    assert (tmp_path / "x").read_bytes() == bytes(range(256)) * 40


def test_the_buffer_may_be_there_before_the_first_save(tmp_path: Path) -> None:
    model, optimizer = trained()
    expected = expected_bytes(model)
    assert expected == gather_state(model, optimizer).total_bytes - 4 * 3  # but for the three counts of steps
    saver = Saver(tmp_path / "checkpoints")
    saver.reserve(expected)
    saver.wait()
    address = saver._stage._bytes.data_ptr()
    saver.save(3, gather_state(model, optimizer), {})
    assert saver._stage._bytes.data_ptr() == address and not saver.wait()[0].error
    saver.close()


def test_the_loss_may_come_after_the_save(tmp_path: Path) -> None:
    saver = Saver(tmp_path / "checkpoints", policy=Policy(last=1))
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None)):
        saver.save(step, gather_state(trained()[0]), {})
        if loss:
            saver.note(step, {"loss": loss})
        saver.wait()
    saver.note(9, {"loss": 0.5})  # of a step without a checkpoint
    saver.note(4, {"loss": float("nan")})
    saver.wait()
    index = json.loads((tmp_path / "checkpoints" / "index.json").read_text())
    assert index["latest"] == 4 and index["best"] == 2
    assert [(c["step"], c["loss"], c["kept"]) for c in index["checkpoints"]] == [
        (2, 1.0, ["best"]),
        (4, None, ["last"]),
    ]
    assert load.choose(tmp_path, "best").step == 2  # type: ignore[union-attr]
    saver.close()


def test_the_best_by_another_suites_measure(tmp_path: Path) -> None:
    saver = Saver(tmp_path / "checkpoints", policy=Policy(last=1, measure="squad.f1"))
    for step, loss, f1 in ((1, 1.0, 10.0), (2, 2.0, 60.0), (3, 3.0, float("nan")), (4, 4.0, 20.0)):
        saver.save(step, gather_state(trained()[0]), {}, {"loss": loss})
        saver.note(step, {"loss": loss, "squad.f1": f1})
        saver.wait()
    index = json.loads((tmp_path / "checkpoints" / "index.json").read_text())
    assert (index["latest"], index["best"], index["best_by"]) == (4, 2, "squad.f1")
    assert [(c["step"], c["loss"], c["scores"], c["kept"]) for c in index["checkpoints"]] == [
        (2, 2.0, {"squad.f1": 60.0}, ["best"]),
        (4, 4.0, {"squad.f1": 20.0}, ["last"]),
    ]
    assert load.find(f"{tmp_path}@best").step == 2
    (tmp_path / "checkpoints" / "index.json").unlink()  # without it the recipe says it
    recipe = Recipe.load("bloom-560m-squad")
    assert recipe.checkpoint.best == "squad.f1"
    (tmp_path / "recipe.toml").write_text(recipe.toml())
    assert load.find(f"{tmp_path}@best").step == 2
    saver.note_missing(4, {"loss": 4.0, "squad.f1": 20.0})  # it is known already
    assert not saver.busy
    (tmp_path / "checkpoints" / "step-00000004" / "loss.json").unlink()
    saver.note_missing(4, {"loss": 4.0, "squad.f1": 70.0})
    saver.wait()
    assert load.find(f"{tmp_path}@best").step == 4
    saver.close()


def test_what_was_noted_before_there_were_other_measures_is_read(tmp_path: Path) -> None:
    saver = Saver(tmp_path / "checkpoints", background=False)
    for step in (1, 2):
        saver.save(step, gather_state(trained()[0]), {}, {})
        place = tmp_path / "checkpoints" / f"step-{step:08d}"
        note = {"save_id": open_checkpoint(place).manifest.save_id, "loss": 3.0 - step}
        (place / "loss.json").write_text(json.dumps(note))
    assert load.find(f"{tmp_path}@best").step == 2
    assert [(e.step, e.loss, e.scores) for e in catalog.entries(tmp_path / "checkpoints")] == [
        (2, 1.0, {}),
        (1, 2.0, {}),
    ]


def test_retention_and_index_follow_each_commit(tmp_path: Path) -> None:
    saver = Saver(tmp_path / "checkpoints", policy=Policy(last=2, for_good=lambda step: step == 1))
    removed = []
    for step in range(1, 6):
        saver.save(step, gather_state(trained()[0]), {}, {"reason": EMERGENCY if step == 3 else "periodic"})
        removed += [name for o in saver.wait() for name in o.removed]
    assert removed == ["step-00000003", "step-00000002"]
    assert sorted(catalog.names(tmp_path / "checkpoints")) == ["index.json", *(f"step-0000000{s}" for s in (1, 4, 5))]
    saver.close()


def test_an_attempts_name_and_a_closed_saver(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="letters, digits and underscores"):
        Saver(tmp_path, attempt="../x")
    saver = Saver(tmp_path / "checkpoints")
    saver.close()
    with pytest.raises(AssertionError, match="after close"):
        saver.save(1, {}, {})


def test_a_programming_error_in_the_writer_is_an_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver(tmp_path / "checkpoints")

    def broken(*_: Any) -> None:
        raise KeyError("oops")

    monkeypatch.setattr("windlass.checkpoint.commit.Commit._manifest", broken)
    saver.save(1, gather_state(trained()[0]), {})
    [outcome] = saver.wait(timeout=30)
    assert outcome.error == "KeyError: 'oops'" and catalog.names(tmp_path / "checkpoints") == []
    monkeypatch.undo()
    saver.save(2, gather_state(trained()[0]), {})
    assert not saver.wait(timeout=30)[0].error
    saver.close()


@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="no priorities on this system")
def test_the_writer_gives_way(tmp_path: Path) -> None:
    gate = Gate()
    saver = Saver(tmp_path / "checkpoints", files=gate)
    saver.save(1, gather_state(trained()[0]), {})
    assert gate.reached.wait(30) and saver._thread is not None and saver._thread.native_id is not None
    assert os.getpriority(os.PRIO_PROCESS, saver._thread.native_id) == NICE
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < NICE
    gate.open.set()
    saver.wait()
    saver.close()


# -- choosing ---------------------------------------------------------------------------------------------------------


def test_what_resume_means(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert load.choose(run) is None and load.choose(run, "never") is None and load.newest(run) is None
    model, _ = trained()
    for step, loss in ((5, 1.0), (10, 2.0)):
        save(run, model, step=step, loss=loss)
    assert load.choose(run).step == 10  # type: ignore[union-attr]
    assert load.choose(run, "best").step == 5  # type: ignore[union-attr]
    assert load.choose(run, "5").path == run / "checkpoints" / "step-00000005"  # type: ignore[union-attr]
    assert load.choose(tmp_path / "other", str(run / "checkpoints" / "step-00000005")).step == 5  # type: ignore[union-attr]
    with pytest.raises(UserError, match=r"no checkpoint of step 7; there are: 5, 10"):
        load.choose(run, "7")
    with pytest.raises(UserError, match="resume is never"):
        load.choose(run, "never")
    with pytest.raises(UserError, match=r"'newest'.*latest, best, a step"):
        load.choose(run, "newest")
    assert load.find(run).step == 10 and load.find(f"{run}@5").step == 5 and load.find(f"{run}@best").step == 5
    assert load.find(run / "checkpoints" / "step-00000010").step == 10
    for wrong in (tmp_path / "nothing", f"{run}@6"):
        with pytest.raises(UserError):
            load.find(wrong)


def test_after_going_back_the_newest_commit_is_the_latest(tmp_path: Path) -> None:
    model, _ = trained()
    for step in (10, 20, 30, 15):
        save(tmp_path, model, step=step)
    assert load.choose(tmp_path).step == 15  # type: ignore[union-attr]


def test_room_on_the_disk(tmp_path: Path) -> None:
    assert space.shortage(tmp_path / "not" / "there", 1, "it") == ""
    assert "it needs 1,000,000 TB" in space.shortage(tmp_path, 10**18, "it")
    assert space.needed_bytes(10**9, kept=3, present=1) == 3 * 10**9 + space.RESERVE_BYTES
    assert [space.gb(n) for n in (17, 1234, 5 * 10**6, 1.5 * 10**9)] == ["17 bytes", "1.23 kB", "5 MB", "1.5 GB"]
