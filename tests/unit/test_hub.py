"""What the Hub gives and refuses, through its own client, against a small server that answers as
the Hub does.
"""

import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from helpers import refused
from windlass import hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model": {"type": "WordLevel", "vocab": {"<|endoftext|>": 0, "a": 1}, "unk_token": "a"}}',
    "model.safetensors.index.json": b'{"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}',
    "model-1-of-2.safetensors": b"first",
    "model-2-of-2.safetensors": b"second",
    "consolidated.safetensors": b"the same again",
    "original/model.safetensors": b"and again",
    "onnx/config.json": b"{}",
    "pytorch_model.bin": b"pickled",
}


class Answers(BaseHTTPRequestHandler):
    """The few paths of the Hub that a download asks for: `some/open`, `some/gated`, and nothing
    else.
    """

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        parts = self.path.partition("?")[0].strip("/").split("/")
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        info: Any = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": path} for path in FILES]}
        if name == "some/gated":
            self.send(403, b"", {"X-Error-Code": "GatedRepo"})
        elif name != "some/open":
            self.send(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif "resolve" in parts:
            content = FILES["/".join(parts[parts.index("resolve") + 2 :])]
            self.send(200, content, {"ETag": f'"{len(content)}"', "X-Repo-Commit": COMMIT})
        elif "revision" in parts and parts[-1] not in ("main", COMMIT):
            self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            if "tree" in parts:
                info = [
                    {"type": "file", "path": path, "size": len(content), "oid": f"{number:040x}"}
                    for number, (path, content) in enumerate(FILES.items())
                ]
            self.send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    do_HEAD = do_GET

    def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.asked = []  # type: ignore[attr-defined]
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    url = address + "/{repo_id}/resolve/{revision}/{filename}"
    known = {"HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(tmp_path), "ENDPOINT": address}
    for name, value in (known | {"HUGGINGFACE_CO_URL_TEMPLATE": url}).items():
        monkeypatch.setattr(constants, name, value)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.asked  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()
    thread.join()


def names(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()}


def test_only_what_is_read_is_downloaded_and_the_commit_is_known(asked: list[str]) -> None:
    folder = hub.directory("some/open")
    small = {"config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert names(folder) == small and hub.commit_of(folder) == COMMIT
    assert (hub.repository_of(folder), hub.repository_of(folder.parent)) == ("some/open", "")
    assert hub.directory("some/open", COMMIT, weights=True) == folder
    assert names(folder) == small | {"model-1-of-2.safetensors", "model-2-of-2.safetensors"}
    assert not re.search("consolidated|original|pytorch", " ".join(asked))


def test_the_tokenizer_that_comes_with_the_model_is_of_the_models_revision(asked):
    from windlass.data.tokenizer_kinds import named_tokenizer
    from windlass.recipe import Recipe

    model = {"kind": "hf", "name": "some/open", "revision": COMMIT}
    recipe = Recipe.model_validate({"model": model, "data": {"tokenizer": "hf:some/open"}})
    tokenizer = named_tokenizer(recipe.tokenizer)
    assert (tokenizer.vocab, tokenizer.eot) == (2, 0) and any(COMMIT in path for path in asked)
    assert not any("/revision/main" in path or "/resolve/main/" in path for path in asked)
    with refused("data.tokenizer: some/open@v9 lacks this revision"):
        named_tokenizer(recipe.replace("model.revision=v9").tokenizer)


@pytest.mark.parametrize(
    ("name", "revision", "key", "words"),
    [
        ("some/gated", "", "model.name", ["licence", "HF_TOKEN"]),
        ("some/missing", "", "data.tokenizer", ["private", "HF_TOKEN"]),
        ("some/open", "v9", "model.name", ["some/open@v9", "commit"]),
    ],
)
def test_what_the_hub_refuses_comes_with_what_to_do(asked, name, revision, key, words) -> None:
    with refused(key, name, *words):
        hub.directory(name, revision, key)
    assert asked


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that says neither whether to work offline nor through which proxy."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("error", [None, TimeoutError(), ConnectionRefusedError()])
def test_a_hub_out_of_reach_puts_the_process_offline(error, undecided):
    connect = mock.Mock(side_effect=error, return_value=socket.socket())
    undecided.setattr(socket, "create_connection", connect)
    hub.detect_offline()
    assert (os.environ.get("HF_HUB_OFFLINE") == "1") is (error is not None)
    connect.assert_called_once()


def test_an_index_of_weights_names_files_of_its_own_directory(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert hub.weight_files(tmp_path) == ["model-1.safetensors"]
    for name in ("../other/model.safetensors", "/etc/model.safetensors", 3):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with refused("is not an index of safetensors files"):
            hub.weight_files(tmp_path)
