"""The verbs that ask a trained model: eval, sample and export, as they are typed; and a book learned, exported and told alike."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from windlass import Recipe, train
from windlass.cli import main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ask")
    (folder / "text.txt").write_text("the cat sat on the mat and the dog ran after the cat " * 40)
    tree: dict[str, Any] = {
        "preset": "ask",
        "model": {"layers": 2, "heads": 2, "width": 32, "context": 32},
        "data": {"source": str(folder / "text.txt"), "dir": str(folder / "data"), "tokenizer": "byte"},
        "train": {"steps": 12, "global_batch": 8},
        "optim": {"lr": 1e-2},
        "checkpoint": {"every": 6},
        "run": {"dir": str(folder / "run")},
    }
    train(Recipe.model_validate(tree))
    return folder / "run"


def typed(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    return int(ended.value.code or 0)


def test_eval_writes_what_it_measured(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    item = {"ctx": "the cat", "endings": ["sat", "flew", "is blue", "the"], "label": 0}
    (tmp_path / "h.jsonl").write_text(json.dumps(item) + "\n")
    assert typed("eval", run, "--suite", "loss,hellaswag", f"eval.hellaswag_file={tmp_path / 'h.jsonl'}", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    written = json.loads((run / "eval" / "step-00000012.json").read_text())
    assert shown["results"] == written["results"] and shown["step"] == 12
    loss = written["results"]["loss"]
    assert loss["bits_per_byte"] == pytest.approx(loss["loss"] / 0.6931471805599453)  # a byte is a token here
    assert written["results"]["hellaswag"]["items"] == 1
    assert typed("eval", f"{run}@6", "--suite", "loss") == 0
    assert (run / "eval" / "step-00000006.json").is_file() and "bits_per_byte" in capsys.readouterr().out


def test_results_say_what_they_were_measured_on_and_none_is_lost(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    item = {"ctx": "the cat", "endings": ["sat", "flew", "is blue", "the"], "label": 0}
    file, out = tmp_path / "h.jsonl", tmp_path / "out"
    file.write_text("".join(json.dumps(item) + "\n" for _ in range(3)))

    def record(*settings: str, suite: str = "hellaswag") -> dict[str, Any]:
        assert typed("eval", run, "--suite", suite, f"eval.hellaswag_file={file}", *settings, "--out", out) == 0
        return dict(json.loads((out / "step-00000012.json").read_text()))

    first = record("eval.hellaswag_items=2")
    assert first["results"]["hellaswag"]["items"] == 2 and "earlier" not in first
    assert first["measured"]["hellaswag"] == {
        "settings": {
            "train.precision": "fp32", "model.context": 32, "eval.hellaswag_file": str(file), "eval.hellaswag_items": 2,
        },
        "files": {str(file): hashlib.sha256(file.read_bytes()).hexdigest()},
    }  # fmt: skip
    assert record("eval.hellaswag_items=2")["results"]["hellaswag"]["items"] == 2
    whole = record()
    assert whole["results"]["hellaswag"]["items"] == 3
    assert [(e["suite"], e["results"]["items"]) for e in whole["earlier"]] == [("hellaswag", 2)]
    both = record(suite="loss")
    assert both["results"]["hellaswag"] == whole["results"]["hellaswag"] and both["earlier"] == whole["earlier"]
    assert len(both["measured"]["loss"]["data"]) >= 12 and both["measured"]["loss"]["settings"]["eval.batches"] == 0
    low = record("train.precision=bf16", suite="loss")
    assert low["measured"]["loss"]["settings"]["train.precision"] == "bf16" and len(low["earlier"]) == 2
    assert low["results"]["loss"]["loss"] == pytest.approx(both["results"]["loss"]["loss"], rel=0.02)
    assert low["results"]["loss"]["loss"] != both["results"]["loss"]["loss"]
    again = record("eval.hellaswag_items=2")
    assert [e["results"].get("items") for e in again["earlier"] if e["suite"] == "hellaswag"] == [3]
    (out / "step-00000012.json").write_text("[")
    capsys.readouterr()
    assert typed("eval", run, "--suite", "loss", "--out", out) == 2
    assert "is no record of results" in capsys.readouterr().err


def test_one_call_measures_all_three_suites_on_local_files(run: Path, tmp_path: Path) -> None:
    item = {"ctx": "the cat", "endings": ["sat", "flew", "is blue", "the"], "label": 0}
    (tmp_path / "h.jsonl").write_text(json.dumps(item) + "\n")
    answers = [{"text": "the mat", "answer_start": 10}]
    questions = [{"id": f"q{i}", "question": f"Where {i}?", "answers": answers} for i in range(3)]
    paragraph = {"context": "It sat on the mat.", "qas": questions}
    (tmp_path / "s.json").write_text(json.dumps({"data": [{"title": "t", "paragraphs": [paragraph]}]}))
    files = (f"eval.hellaswag_file={tmp_path / 'h.jsonl'}", f"eval.squad_file={tmp_path / 's.json'}")
    command = ("eval", run, "--suite", "loss,hellaswag,squad", *files, "eval.squad_items=2", "--out", tmp_path / "out")
    assert typed(*command) == 0
    written = json.loads((tmp_path / "out" / "step-00000012.json").read_text())
    assert list(written["results"]) == ["loss", "hellaswag", "squad"] and written["results"]["squad"]["items"] == 2
    assert len(json.loads((tmp_path / "out" / "squad-predictions-step-00000012.json").read_text())) == 2
    sums = written["measured"]["squad"]["files"]
    assert sums == {str(tmp_path / "s.json"): hashlib.sha256((tmp_path / "s.json").read_bytes()).hexdigest()}


def test_sample_is_a_function_of_its_seed_and_reads_a_pipe(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("sample", run, "--prompt", "the ", "--n", "2", "--max-tokens", "20", "--seed", "3")
    assert typed(*command) == 0
    first = capsys.readouterr().out
    assert typed(*command) == 0
    assert capsys.readouterr().out == first and first.count("the ") >= 2 and "=== 2 of 2 ===" in first
    monkeypatch.setattr("sys.stdin", io.StringIO("the dog"))
    assert typed("sample", run, "--prompt", "-", "--max-tokens", "5") == 0
    assert capsys.readouterr().out.startswith("the dog")


def test_mistakes_are_one_message_and_exit_code_2(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, said in (
        (("eval", run, "--suite", "trivia"), "unknown suite"),
        (("eval", tmp_path), "has no checkpoint yet"),
        (("sample", tmp_path / "nowhere"), "no run and no checkpoint"),
        (("sample", run, "--top-p", "2"), "top-p"),
        (("export", run, tmp_path / "out", "--to", "onnx"), "the one format is hf"),
        (("export", f"{run}@7", tmp_path / "out"), "no checkpoint of step 7"),
    ):
        assert typed(*command) == 2
        error = capsys.readouterr().err
        assert said in error and "Traceback" not in error, error


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_book_is_learned_exported_and_told_alike(tmp_path: Path, data_files: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from windlass.evaluation.generate import Sampling, generate
    from windlass.evaluation.source import alone, find_source, open_model
    from windlass.interop.export import export
    from windlass.run import Run

    tree: dict[str, Any] = {
        "preset": "books",
        "model": {
            "layers": 3, "heads": 4, "width": 96, "context": 96, "position": "rope", "norm": "rmsnorm",
            "activation": "swiglu", "ff_width": 256, "kv_heads": 2, "attn_bias": False, "ff_bias": False,
        },
        "data": {
            "source": str(data_files / "gutenberg" / "*.txt"), "dir": str(tmp_path / "data"), "tokenizer": "bpe",
            "tokenizer_vocab": 512, "val_fraction": 0.25,
        },
        "train": {"steps": 400, "global_batch": 8},
        "optim": {"lr": 3e-3},
        "eval": {"batches": 8, "every": 200},
        "checkpoint": {"every": 0},
        "run": {"dir": str(tmp_path / "run")},
    }  # fmt: skip
    train(Recipe.model_validate(tree))
    losses = [line["loss"] for line in Run(tmp_path / "run").lines("eval")]
    assert losses[-1] < 0.75 * losses[0]
    directory = export(str(tmp_path / "run"), tmp_path / "out")
    source = find_source(str(tmp_path / "run"))
    prompt = "It is a truth"
    ids = source.tokenizer.encode(prompt).tolist()
    made = generate(open_model(source, alone("cpu")), [ids], Sampling(max_tokens=60, temperature=0))
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)
    told = theirs.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=60, do_sample=False)
    assert made is not None and told[0].tolist() == [*ids, *made[0]]
    print(tokenizer.decode(told[0]))
