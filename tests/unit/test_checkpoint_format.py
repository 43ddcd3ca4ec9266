"""A manifest is read as what a stranger may have written: all of it is checked, nothing outside is
opened or run.
"""

import hashlib
import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import refused
from windlass.checkpoint import choose
from windlass.checkpoint import format as format_
from windlass.checkpoint.format import Checkpoint, Damaged, Manifest, open_checkpoint
from windlass.checkpoint.save import Writer
from windlass.checkpoint.state_dict import shard_of
from windlass.errors import UserError

Change = Callable[[Any], Any]
FILES = ("rank-00000.safetensors", "state.json", "manifest.json", "manifest.sha256")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    writer = Writer(tmp_path / "run" / "checkpoints")
    state = shard_of({"model/x": torch.arange(12.0).reshape(4, 3)})
    writer.write(4, state, {"step": 4}, {"recipe": "1a2b"})
    return writer.wait()[0].path


def seal(path: Path, manifest: bytes) -> None:
    """Put a manifest in place of another one, digest and all: what a stranger can do, and a bad
    disk can not.
    """
    (path / "manifest.json").write_bytes(manifest)
    (path / "manifest.sha256").write_bytes(format_.digest_line(manifest))


def rewrite(path: Path, change: Change) -> None:
    tree = json.loads((path / "manifest.json").read_text())
    change(tree)
    seal(path, json.dumps(tree).encode())


def put(*keys: Any) -> Change:
    *path, last, value = keys

    def change(tree: Any) -> None:
        for key in path:
            tree = tree[key]
        tree[last] = value

    return change


def chunk(place: int, value: Any) -> Change:
    return put("tensors", "model/x", "chunks", 0, place, value)


def info_of(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


FILE = info_of(b"?")
BAD: dict[str, tuple[Change, str]] = {
    "another format": (put("format", "other"), "format"),
    "a newer version": (put("version", 4), "version"),
    "no step": (lambda t: t.pop("step"), "step"),
    "a negative step": (put("step", -1), "step"),
    "a file outside": (put("files", "../../secret", FILE), "files"),
    "a chunk outside": (chunk(0, "../x"), "chunks"),
    "a chunk of no file": (chunk(0, "rank-00007.safetensors"), "rank-00007"),
    "an offset past the end": (chunk(1, 10**9), "outside"),
    "rows missing": (chunk(3, [3, 3]), "each element"),
    "a huge shape": (put("tensors", "model/x", "shape", [2**60, 3]), "each element"),
    "a strange dtype": (put("tensors", "model/x", "dtype", "O"), "'O'"),
    "no state": (lambda t: t["files"].pop("state.json"), "state.json"),
    "an alias of nothing": (put("aliases", "model/y", "model/z"), "model/z"),
    "an alias of itself": (put("aliases", "model/x", "model/x"), "model/x"),
    "chunks of two": (put("tensors", "model/x", "chunks", [[1, 2]]), "chunks"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_manifest_is_refused_by_name(checkpoint: Path, name: str) -> None:
    change, where = BAD[name]
    rewrite(checkpoint, change)
    with refused(where, "manifest.json"):
        open_checkpoint(checkpoint, deep=False)


def test_each_file_is_verified_by_one_rank(checkpoint: Path) -> None:
    files = {}
    for i, size in enumerate([40, 30, 20, 20, 10]):
        (checkpoint / f"rank-{i:05d}.safetensors").write_bytes(data := bytes([i]) * size)
        files[f"rank-{i:05d}.safetensors"] = info_of(data)
    tree = json.loads((checkpoint / "manifest.json").read_text()) | {"tensors": {}, "aliases": {}}
    manifest = Manifest.model_validate(tree | {"files": {**tree["files"], **files}})
    for name, info in files.items():
        data = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(b"?" * info["size"])
        problems = [Checkpoint(checkpoint, 4, manifest).verify(rank, 3) for rank in range(3)]
        (checkpoint / name).write_bytes(data)
        [rank] = [rank for rank, problem in enumerate(problems) if problem]
        assert name in problems[rank]


class Canary:
    """Unpickling it makes a directory."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("kind", ["pickle", "torch"])
@pytest.mark.parametrize("name", [*FILES, ".metadata"])
@pytest.mark.parametrize("sealed", [False, True])
def test_no_file_is_ever_run(checkpoint, tmp_path, name, kind, sealed):
    executed, file = tmp_path / "executed", io.BytesIO()
    if kind == "torch":
        torch.save(Canary(executed), file)
    data = file.getvalue() or pickle.dumps(Canary(executed))
    (checkpoint / name).write_bytes(data)
    if sealed and name in ("rank-00000.safetensors", "state.json"):
        rewrite(checkpoint, put("files", name, info_of(data)))
        if name == "rank-00000.safetensors":
            rewrite(checkpoint, chunk(1, 0))
    elif sealed and name == "manifest.json":
        seal(checkpoint, data)

    def read_everything() -> None:
        opened = open_checkpoint(checkpoint)
        for tensor in opened.names():
            opened.tensor(tensor)
        assert opened.counters

    for attempt in (lambda: choose.choose_checkpoint(tmp_path / "run"), read_everything):
        try:
            attempt()
        except (UserError, Damaged, ValueError):
            assert name != ".metadata"
    assert not executed.exists()
    pickle.loads(pickle.dumps(Canary(executed)))
    assert executed.exists(), "the canary does nothing, so this test would prove nothing"
