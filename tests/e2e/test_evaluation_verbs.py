"""The verbs that ask a trained model: eval, sample and export, as they are typed; and a book
learned, exported and told alike.
"""

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from helpers import tiny_recipe
from windlass import train
from windlass.evaluation.api import TextSampler, evaluate, sample
from windlass.evaluation.source import find_source

ITEM = {"ctx": "the cat", "endings": ["sat", "flew", "is blue", "the"], "label": 0}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ask")
    (folder / "text.txt").write_text("the cat sat on the mat and the dog ran after the cat " * 40)
    return train(tiny_recipe(folder / "text.txt", folder / "run", checkpoint__every=6)).path


def test_eval_writes_what_it_measured(run: Path, tmp_path: Path, call: Any) -> None:
    answers = [{"text": "the mat", "answer_start": 10}]
    questions = [{"id": f"q{i}", "question": f"Where {i}?", "answers": answers} for i in range(3)]
    paragraph = {"context": "It sat on the mat.", "qas": questions}
    squad = tmp_path / "s.json"
    squad.write_text(json.dumps({"data": [{"title": "t", "paragraphs": [paragraph]}]}))
    (tmp_path / "h.jsonl").write_text(json.dumps(ITEM) + "\n")
    items = f"eval.hellaswag_file={tmp_path / 'h.jsonl'}"
    files = (items, f"eval.squad_file={squad}", "data.eval_size=2")
    words = ("eval", run, "--suite", "loss,hellaswag,squad", *files, "--json")
    shown = json.loads(call(*words)[0])
    assert shown == json.loads((run / "eval" / "step-00000012.json").read_text())
    assert shown["step"] == 12
    results = shown["results"]
    bits = results["loss"]["loss"] / math.log(2)
    assert results["loss"]["bits_per_byte"] == pytest.approx(bits)  # tokens are bytes
    assert [results[suite]["items"] for suite in ("hellaswag", "squad")] == [1, 2]
    predictions = json.loads((run / "eval" / "squad-predictions-step-00000012.json").read_text())
    assert len(predictions) == 2
    again = evaluate(run, ["squad"], files[1:], tmp_path / "again")
    assert again.predictions == predictions
    assert again.results["squad"]["f1"] == results["squad"]["f1"]
    assert "bits_per_byte" in call("eval", f"{run}@6", "--suite", "loss")[0]
    assert (run / "eval" / "step-00000006.json").is_file()


def test_results_tell_what_they_were_measured_on(run: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "h.jsonl", tmp_path / "out"
    file.write_text((json.dumps(ITEM) + "\n") * 3)

    def record(*settings: str, suite: str = "hellaswag") -> dict[str, Any]:
        evaluate(run, [suite], [f"eval.hellaswag_file={file}", *settings], out)
        return dict(json.loads((out / "step-00000012.json").read_text()))

    first = record("eval.hellaswag_items=2")
    assert first["results"]["hellaswag"]["items"] == 2
    measured = first["measured"]["hellaswag"]
    settings = {"eval.hellaswag_file": str(file), "eval.hellaswag_items": 2}
    assert measured["settings"].items() >= (settings | {"train.precision": "fp32"}).items()
    # a suite measured again replaces its scores, the others stay
    whole, both = record(), record(suite="loss")
    assert whole["results"]["hellaswag"]["items"] == 3
    assert both["results"]["hellaswag"] == whole["results"]["hellaswag"]
    assert len(both["measured"]["loss"]["data"]) >= 12
    assert "eval.batches" in both["measured"]["loss"]["settings"]
    low = record("train.precision=bf16", suite="loss")
    losses = [x["results"]["loss"]["loss"] for x in (low, both)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02) and losses[0] != losses[1]


def test_sample_has_a_seed_and_reads_a_pipe(run: Path, call: Any, monkeypatch: Any) -> None:
    command = ("sample", run, "--prompt", "the ", "--n", "2", "--max-tokens", "20", "--seed", "3")
    first, _ = call(*command)
    monkeypatch.setattr("sys.stdin", io.StringIO("the dog"))
    assert call("sample", run, "--prompt", "-", "--max-tokens", "5")[0].startswith("the dog")
    pieces = list(sample(run, "the ", 2, "cpu", max_tokens=20, seed=3))
    texts = ["the " + "".join(piece for i, piece in pieces if i == number) for number in range(2)]
    assert first == f"=== 1 of 2 ===\n{texts[0]}\n=== 2 of 2 ===\n{texts[1]}\n"


def test_a_conversation_remembers_its_turns(run: Path, call: Any, monkeypatch: Any) -> None:
    sampler = TextSampler(find_source(run), "cpu", max_tokens=4, temperature=0)
    answers = ["".join(sampler.reply(message)) for message in ("the cat", "the dog")]
    assert [m["role"] for m in sampler.messages] == ["user", "assistant"] * 2
    assert [m["content"] for m in sampler.messages[1::2]] == [answer.strip() for answer in answers]
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\nthe dog\n"))
    chat = ("sample", run, "--chat", "--max-tokens", "4", "--temperature", "0")
    assert call(*chat)[0] == f"{answers[0]}\n{answers[1]}\n"
    # is not read: a prompt has one answer
    monkeypatch.setattr("sys.stdin", io.StringIO("the dog\n"))
    assert call(*chat, "--prompt", "the cat")[0] == f"{answers[0]}\n"
    sampler.messages = [{"role": "system", "content": "dogs"}]
    answer = "".join(sampler.reply("the cat"))
    told, _ = call(*chat, "--prompt", "the cat", "--system", "dogs")
    assert told == f"{answer}\n" != f"{answers[0]}\n"


def test_mistakes_are_one_message(run: Path, tmp_path: Path, call: Any) -> None:
    for command, word in (
        (("eval", run, "--suite", "trivia"), "trivia"),
        (("sample", tmp_path / "nowhere"), "nowhere"),
        (("sample", run, "--top-p", "2"), "top-p"),
        (("sample", run, "--system", "dogs"), "--chat"),
        (("sample", f"{run}@7"), "step 7"),
    ):
        _, error = call(*command, code=2)
        assert word in error and "Traceback" not in error, error
