"""A manifest is read as what a stranger may have written: everything in it is checked, nothing outside is opened."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from windlass.checkpoint import format as format_
from windlass.checkpoint import load
from windlass.checkpoint.format import Damaged
from windlass.checkpoint.load import open_checkpoint
from windlass.checkpoint.reshard import Slice
from windlass.checkpoint.save import Saver
from windlass.errors import UserError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    saver = Saver(tmp_path / "run" / "checkpoints", background=False)
    saver.save(4, {"model/x": Slice(torch.arange(12.0).reshape(4, 3), (4, 3))}, {"step": 4}, {"loss": float("nan")})
    [outcome] = saver.poll()
    assert not outcome.error
    return outcome.path


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest and mark it as committed again: what a stranger can do, and a bad disk can not."""
    tree = json.loads((path / "manifest.json").read_text())
    change(tree)
    data = json.dumps(tree).encode()
    seal(path, data)


def seal(path: Path, data: bytes) -> None:
    (path / "manifest.json").write_bytes(data)
    (path / "COMMITTED").write_text(hashlib.sha256(data).hexdigest() + "\n")


def chunk(place: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(tree: dict[str, Any]) -> None:
        tree["tensors"]["model/x"]["chunks"][0][place] = value

    return change


def put(*keys: Any) -> Callable[[dict[str, Any]], None]:
    *path, last, value = keys

    def change(tree: Any) -> None:
        for key in path:
            tree = tree[key]
        tree[last] = value

    return change


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another format": (put("format", "other"), "not of a Windlass checkpoint"),
    "a newer version": (put("version", 2), "format version 2; this Windlass reads version 1"),
    "no step": (lambda t: t.pop("step"), "malformed"),
    "a negative step": (put("step", -1), "malformed"),
    "a true step": (put("step", True), "malformed"),
    "a file outside": (put("files", "../../secret", {"size": 1, "sha256": "0" * 64}), "no name of a checkpoint's file"),
    "an absolute file": (put("files", "/etc/passwd", {"size": 1, "sha256": "0" * 64}), "no name of a checkpoint's"),
    "a pickle": (put("files", "rank-00000.pkl", {"size": 1, "sha256": "0" * 64}), "no name of a checkpoint's"),
    "a chunk outside": (chunk(0, "../x"), "no name of a checkpoint's file"),
    "a chunk of no file": (chunk(0, "rank-00007.safetensors"), "lie outside of rank-00007"),
    "an offset past the end": (chunk(1, 10**9), "lie outside"),
    "a negative offset": (chunk(1, -8), "malformed"),
    "rows missing": (chunk(3, 3), "rows 3 to 4 of model/x are missing"),
    "rows twice": (chunk(2, 1), "missing or written twice"),
    "a huge shape": (put("tensors", "model/x", "shape", [2**60, 3]), "missing"),
    "wide rows": (put("tensors", "model/x", "shape", [4, 2**60]), "lie outside"),
    "a strange dtype": (put("tensors", "model/x", "dtype", "O"), "no type of a tensor"),
    "a short digest": (put("files", "state.json", "sha256", "abc"), "no SHA-256"),
    "no state": (lambda t: t["files"].pop("state.json"), "names no state.json"),
    "an alias of nothing": (put("aliases", "model/y", "model/z"), "stands for model/z, which is not there"),
    "an alias of itself": (put("aliases", "model/x", "model/x"), "stands for model/x"),
    "tensors a list": (put("tensors", [1]), "malformed"),
    "chunks of four": (put("tensors", "model/x", "chunks", [[1, 2]]), "malformed"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_manifest_is_refused(checkpoint: Path, name: str) -> None:
    change, message = BAD[name]
    rewrite(checkpoint, change)
    with pytest.raises(Damaged, match=message):
        format_.read(checkpoint)
    with pytest.raises(UserError, match=message):
        open_checkpoint(checkpoint, deep=False)


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"[" * 100_000, b"\xff\xfe", b'{"format": '])
def test_what_is_no_manifest_at_all(checkpoint: Path, data: bytes) -> None:
    seal(checkpoint, data)
    with pytest.raises(Damaged):
        format_.read(checkpoint)


def test_the_manifest_says_what_was_saved(checkpoint: Path) -> None:
    manifest = format_.verify(checkpoint)
    assert manifest.step == 4 and manifest.world == 1 and manifest.meta["loss"] is None and manifest.loss is None
    assert format_.parse(json.dumps(manifest.to_json()).encode()) == manifest
    assert manifest.bytes == sum((checkpoint / n).stat().st_size for n in manifest.files)
    for name, info in manifest.files.items():
        assert hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() == info.sha256


class Canary:
    """Unpickling it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def canaries(path: Path) -> dict[str, bytes]:
    plain = pickle.dumps(Canary(path))
    archive = io.BytesIO()
    torch.save(Canary(path), archive)
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as file:
        file.writestr("archive/data.pkl", plain)
    return {"pickle": plain, "torch": archive.getvalue(), "zip": zipped.getvalue()}


@pytest.mark.parametrize("kind", ["pickle", "torch", "zip"])
@pytest.mark.parametrize(
    "place", ["rank-00000.safetensors", "state.json", "manifest.json", "COMMITTED", "loss.json", ".metadata"]
)
@pytest.mark.parametrize("sealed", [False, True])
def test_no_file_is_ever_run(checkpoint: Path, tmp_path: Path, place: str, kind: str, sealed: bool) -> None:
    """Not even where a stranger has made size and digest fit."""
    flown = tmp_path / "flown"
    data = canaries(flown)[kind]
    (checkpoint / place).write_bytes(data)
    if sealed and place in ("rank-00000.safetensors", "state.json"):
        entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        rewrite(checkpoint, put("files", place, entry))
        if place == "rank-00000.safetensors":
            rewrite(checkpoint, lambda t: chunk(1, 0)(t))
    elif sealed and place == "manifest.json":
        seal(checkpoint, data)
    for attempt in (lambda: load.choose(tmp_path / "run"), lambda: touch_everything(checkpoint)):
        try:
            attempt()
        except (UserError, Damaged, ValueError):
            assert place not in ("loss.json", ".metadata")
    assert not flown.exists()
    pickle.loads(canaries(flown)["pickle"])
    assert flown.exists(), "the canary cannot fly, so that it did not means nothing"


def touch_everything(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    for name in checkpoint.names():
        checkpoint.tensor(name)
    assert checkpoint.counters


def test_nothing_in_the_package_unpickles() -> None:
    """No `torch.load`, no `pickle` in what reads checkpoints."""
    folder = Path(load.__file__).parent
    for file in folder.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert (
            "torch.load" not in text and "import pickle" not in text and "eval(" not in text.replace(".eval()", "")
        ), file
