"""What a start refuses before it changes anything, and that a signal ends the reading of a checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest

from windlass.checkpoint import format as manifest
from windlass.checkpoint.load import PIECE_BYTES, Checkpoint
from windlass.errors import Stopped, UserError
from windlass.recipe import Recipe
from windlass.training.start import resolve_start

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(
    ("resume", "message"),
    [("5", "checkpoint.resume is 5"), ("/nowhere/step-00000005", "there is no such checkpoint")],
)
def test_a_new_run_cannot_go_on_from_what_is_not_there_and_nothing_is_set_aside(tmp_path, fresh, resume, message):
    run = tmp_path / "run"
    recipe = Recipe.load("quickstart", [f"run.dir='{run}'", f"checkpoint.resume='{resume}'"])
    if fresh:
        (run / "checkpoints" / "step-00000003").mkdir(parents=True)
        (run / "recipe.toml").write_text(recipe.toml())
    with pytest.raises(UserError, match=message):
        resolve_start(recipe, fresh=fresh)
    assert [p.name for p in tmp_path.iterdir()] == (["run"] if fresh else [])


def test_what_is_set_aside_cannot_be_resumed_from(tmp_path):
    run = tmp_path / "run"
    inside = run / "checkpoints" / "step-00000003"
    inside.mkdir(parents=True)
    recipe = Recipe.load("quickstart", [f"run.dir='{run}'", f"checkpoint.resume='{inside}'"])
    (run / "recipe.toml").write_text(recipe.toml())
    with pytest.raises(UserError, match="which --fresh would set aside"):
        resolve_start(recipe, fresh=True)
    assert inside.is_dir()


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts what the process reads")
def test_a_signal_ends_the_verification_of_a_checkpoint(tmp_path):
    """A file of 64 GB with nothing in it takes a minute to read; a moment later a handler raises."""
    size = 64 * 2**30
    with (tmp_path / "rank-00000.safetensors").open("wb") as file:
        os.truncate(file.fileno(), size)
    files = {"rank-00000.safetensors": SimpleNamespace(size=size, sha256="0" * 64)}

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped("now")

    old = signal.signal(signal.SIGALRM, stop)
    before = bytes_read()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Stopped):
            manifest.verify(tmp_path, SimpleNamespace(files=files))
    finally:
        signal.signal(signal.SIGALRM, old)
    assert bytes_read() - before < size / 2


def test_a_large_tensor_is_read_in_pieces_and_a_poll_may_end_it_between_two(tmp_path):
    size = 3 * PIECE_BYTES + 5
    with (tmp_path / "file").open("wb") as file:
        os.truncate(file.fileno(), size)
        os.pwrite(file.fileno(), b"\x07", size - 1)
    checkpoint = Checkpoint(tmp_path, None)  # type: ignore[arg-type]
    target, polls = bytearray(size), []
    checkpoint.poll = lambda: polls.append(1)
    checkpoint._read("file", 0, memoryview(target))
    assert len(polls) == 4 and target[-1] == 7 and not any(target[: 2**20])

    def stop() -> None:
        polls.append(1)
        if len(polls) == 6:
            raise Stopped("now")

    checkpoint.poll, target = stop, bytearray(b"\x01" * size)
    with pytest.raises(Stopped):
        checkpoint._read("file", 0, memoryview(target))
    assert target[PIECE_BYTES - 1] == 0 and target[PIECE_BYTES] == 1
