import errno
import json
import math
import os

import numpy as np
import pytest

from windlass import ledger as module
from windlass.ledger import Ledger, encode, read_lines


def test_non_finite_numbers_are_words_which_are_read_back_but_not_in_texts(tmp_path):
    ledger = Ledger(tmp_path / "metrics.jsonl")
    ledger.write(
        "train", 1, a=math.nan, b=[-math.inf], c=np.float32(0.1), d=np.int64(3), e=math.inf
    )
    ledger.write("sample", 1, text="NaN")
    ledger.close()
    raw = json.loads(ledger.path.read_text().splitlines()[0])
    assert [raw[name] for name in "abcde"] == [
        "NaN",
        ["-Infinity"],
        float(np.float32(0.1)),
        3,
        "Infinity",
    ]
    train, sample = read_lines(ledger.path)
    assert math.isnan(train["a"]) and train["e"] == math.inf and sample["text"] == "NaN"
    with pytest.raises(TypeError):
        encode({"a": object()})


def test_a_line_has_kind_step_time_attempt_and_its_fields(tmp_path):
    seconds = {"seconds": {"train": 1.5}}
    ledger = Ledger(tmp_path / "metrics.jsonl", attempt=2, stamp=lambda: seconds)
    ledger.write("train", 3, loss=0.1, mfu=None)
    ledger.write("sample", 3, text="a\nb\ud800 \N{SNOWMAN}")
    ledger.close()
    first, second = read_lines(tmp_path / "metrics.jsonl")
    assert (first["kind"], first["step"], first["attempt"], first["loss"]) == ("train", 3, 2, 0.1)
    assert first["time"].endswith("Z") and "mfu" not in first and first.items() >= seconds.items()
    assert "seconds" not in second and second["text"] == "a\nb? \N{SNOWMAN}"
    other = Ledger(tmp_path / "other.jsonl", enabled=False)
    assert other.write("train", 1, loss=1.0)["loss"] == 1.0
    assert not other.path.exists(), "ranks other than 0 write nothing"


def test_a_torn_line_does_not_take_the_next_one_with_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "train", "step": 1}\n{"kind": "train", "st')
    ledger = Ledger(path, attempt=1)
    ledger.write("train", 2)
    ledger.close()
    assert [line["step"] for line in read_lines(path)] == [1, 2]


def test_a_full_disk_costs_nothing_but_time(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "metrics.jsonl")
    ledger.write("train", 1)
    real, left = os.write, [10]

    def full(file, data):
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done, left[0] = left[0], 0
        return real(file, bytes(data[:done]))  # the disk takes a part of the line, then no more

    monkeypatch.setattr(module.os, "write", full)
    ledger.write("train", 2)
    ledger.write("train", 3)
    assert "No space left" in ledger.warning
    assert [line["step"] for line in read_lines(ledger.path)] == [1]
    monkeypatch.setattr(module.os, "write", real)
    ledger.write("train", 4)
    ledger.close()
    assert [line["step"] for line in read_lines(ledger.path)] == [1, 2, 3, 4]
