"""The command line: what it prints, its exit codes, and that it starts without torch."""

import io
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import forked
from helpers import TINY, overrides, refused, tiny_recipe, windlass
from windlass import Recipe, evaluate, export, prepare, report, train, verification
from windlass.cli import VERBS, main, models
from windlass.cli import train as train_verbs
from windlass.evaluation.api import Evaluation, write
from windlass.recipe.explain import write_first_recipe
from windlass.run import Run

NANOGPT = {
    "model__position": "learned",
    "model__norm": "layernorm",
    "model__activation": "gelu_tanh",
    "model__qk_norm": False,
}


def test_numbers_that_are_not_finite_are_valid_json(tmp_path, capsys, monkeypatch):
    scores = {"loss": {"loss": math.nan, "perplexity": math.inf, "items": 3}}
    result = write(Evaluation("a-model", 7, scores, {"loss": {}}), tmp_path)
    monkeypatch.setattr("windlass.evaluate", lambda *_: result)
    source = SimpleNamespace(title="a model")
    monkeypatch.setattr("windlass.evaluation.source.find_source", lambda *_, **__: source)
    with pytest.raises(SystemExit, match="0"):
        main(["eval", "a-model", "--json"])

    def no_such_number(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    for text in (capsys.readouterr().out, (tmp_path / "step-00000007.json").read_text()):
        read = json.loads(text, parse_constant=no_such_number)
        assert read["results"]["loss"] == {"loss": "NaN", "perplexity": "Infinity", "items": 3}


@pytest.mark.parametrize(
    ("passed", "code", "last"),
    [
        ((True, True), 0, "proved"),
        ((True, None), 0, "1 of 2 proved; not tried: export"),
        ((False, None), 1, "0 of 2 proved; failed: resume; not tried: export"),
    ],
)
def test_verify_says_proved_only_of_what_was_tried(passed, code, last, monkeypatch, capsys):
    names = zip(("resume", "export"), passed, strict=True)
    proofs = [verification.Proof(name, "a claim", one, "so") for name, one in names]
    monkeypatch.setattr(verification, "verify", lambda *_: proofs)
    assert train_verbs.verify("", overrides=[], world=0, kills=1, only="", json_=False) == code
    output = capsys.readouterr().out.splitlines()
    assert output[-1] == last
    count = f"{len(verification.PROOFS)} proofs"
    assert any(count in line and "minutes" in line for line in output)


NAMES = [name for verbs in VERBS.values() for name in verbs]


def test_the_help_of_every_verb_fits_80_columns_and_has_an_example(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in NAMES:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        text = capsys.readouterr().out
        assert f" Example: windlass {name}" in text
        assert max(map(len, text.splitlines())) <= 80, name


COMMAND = """
import sys
from windlass.cli import main
try:
    main()
finally:
    slow = {"torch._dynamo", "torch.distributed.tensor", "sympy"} & {*sys.modules}
    open("imported", "w").write(" ".join(slow))
"""


def test_a_training_goes_on_where_its_reader_ends(tmp_path: Path, corpus: Path) -> None:
    """It imports neither torch's compiler nor DTensor, which take as long as torch itself."""
    run = Run(tmp_path / "run")
    places = {"data.source": str(corpus), "data.dir": str(tmp_path / "data")}
    settings = overrides(TINY | {"train.steps": 2, "run.dir": str(run.path)} | places)
    words = shlex.join([sys.executable, "-c", COMMAND, "train", "quickstart", *settings])
    shell = ["bash", "-c", f"{words} 2>&1 | head -n 1; echo ${{PIPESTATUS[@]}}"]
    done = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[1:] == ["0 0"] and done.stderr == ""
    assert (tmp_path / "imported").read_text() == ""
    assert (run.report_dir / "index.html").is_file() and not (run.report_dir / "plots").exists()
    assert run.state == "finished" and "step 2/2 | loss" in run.log_path.read_text()

    def in_ascii() -> None:
        sys.stdout = open(1, "w", encoding="ascii", closefd=False)  # noqa: SIM115
        main(["train", str(run.path)])

    def with_a_failing_report() -> None:
        fault = RuntimeError("no fonts here")
        with mock.patch("windlass.reports.write.report", side_effect=fault):
            main(["train", str(run.path)])

    plain, broken = (
        forked.run([again], env=os.environ | {"TERM": "dumb"}, capture_output=True, text=True)
        for again in (in_ascii, with_a_failing_report)
    )
    assert plain.returncode == broken.returncode == 0
    assert plain.stdout.isascii() and f"sample: windlass sample {run.path}" in plain.stdout
    assert "RuntimeError: no fonts here" in broken.stderr and "windlass report" in broken.stderr


LIGHT = """
import sys
from windlass.cli import main
for words in (["--help"], ["recipe", "quickstart"], ["recipe", "--list"]):
    try:
        main(words)
    except SystemExit:
        print({'torch', 'numpy'} & {*sys.modules})
"""


def test_help_and_version_import_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=60)
    assert done.stdout.count("\nset()\n") == 3, done.stderr


def test_init_writes_a_recipe_that_trains_and_overwrites_nothing(tmp_path, corpus):
    def init(file, *words, code=0):
        done = windlass("init", file, *words, code=code, cwd=tmp_path)
        return done.stderr if code else Recipe.load(tmp_path / file)

    recipe = init("mine.toml", "--data", corpus)
    text = (tmp_path / "mine.toml").read_text()
    keys = [line for line in text.splitlines() if " = " in line and not line.startswith("#")]
    assert len(keys) <= 17 and all(" # " in line for line in keys)
    assert (recipe.data.source, recipe.model.vocab, recipe.name[:5]) == (str(corpus), 0, "mine-")
    small = TINY | {"run.dir": str(tmp_path / "run"), "train.steps": 1}
    train(Recipe.load(tmp_path / "mine.toml", overrides(small)))
    assert "mine.toml" in init("mine.toml", code=2)
    assert (tmp_path / "mine.toml").read_text() == text
    assert (recipe.eval.prompt, init("sp ace.toml").eval.prompt) == ("", "def ")
    assert "`windlass train 'sp ace.toml'`" in (tmp_path / "sp ace.toml").read_text()
    (tmp_path / "talk.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "pages.jsonl").write_text('{"content": "a text", "id": 1}\n')
    tuned = init("tune.toml", "--model", "org/name", "--data", "talk.jsonl")
    assert (tuned.model.name, tuned.data.source) == ("org/name", "talk.jsonl")
    assert tuned.data.format == init("talk.toml", "--data", "talk.jsonl").data.format == "chat"
    pages = init("pages.toml", "--model", "org/name", "--data", "pages.jsonl").data
    assert (pages.format, pages.text_key) == ("text", "content")
    init("hub.toml", "--data", "hf:NAME")
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"the text of {name}. " * 200)
    assert init("two.toml", "--data", '["a.txt", "b.txt"]').data.sources == ["a.txt", "b.txt"]
    printed = windlass("prepare", "two.toml", "data.val_fraction=0.1", cwd=tmp_path).stdout
    assert "a.txt" in printed and "b.txt" in printed
    for data, word in (
        ('["talk.jsonl", "pages.jsonl"]', "data.mix"),
        ("none.txt", "none"),
        ('["a.txt", "none.txt"]', "none"),
        ("shards:none/*.bin", "none"),
        ("a.txt,b.txt", "are a list"),
    ):
        error = init("other.toml", "--data", data, code=2)
        assert "--data" in error and word in error and not (tmp_path / "other.toml").exists()
    error = windlass("prepare", "two.toml", "data.source=a.txt,b.txt", code=2, cwd=tmp_path).stderr
    assert "data.source" in error and "are a list" in error
    assert "a recipe's name ends in .toml" in init("mine", code=2)


def test_an_interrupted_verb_says_so_on_a_line_of_its_own(monkeypatch, capsys):
    def prepare(recipe: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("windlass.cli.recipes.prepare", prepare)
    with pytest.raises(SystemExit) as end:
        main(["prepare", "quickstart"])
    assert end.value.code == 130 and capsys.readouterr().err == "\nwindlass: interrupted\n"


def test_a_directory_that_cannot_be_written_is_one_message(tmp_path: Path, corpus: Path) -> None:
    run = train(tiny_recipe(corpus, tmp_path / "run", train__steps=1, **NANOGPT))
    under = corpus / "below"  # a file is not a directory, even for root
    new = tiny_recipe(corpus, tmp_path / "x")
    for remedy, call in (
        ("another run.dir", lambda: train(run.recipe.replace(f"run.dir={under}"))),
        ("another data.dir", lambda: prepare(new.replace(f"data.dir={under}"))),
        ("another directory", lambda: export(run.path, under)),
        ("another place as out=DIR", lambda: evaluate(run.path, ["loss"], out=under)),
        ("another out=DIR", lambda: report(run.path, under)),
        ("another name", lambda: write_first_recipe(under / "mine.toml")),
    ):
        with refused(str(under), remedy):
            call()
    study = ("sweep", "quickstart", "optim.lr=1,2", "--create", "--dir")
    error = windlass(*study, under, code=2).stderr
    assert str(under) in error and "another path" in error


def test_bad_input_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    book = tmp_path / "only=3, a book.txt"
    book.write_text("text")
    for words, expected in (
        (["train", "quikstart"], "did you mean quickstart?"),
        (["train", "quickstart", "optim.lrr=1"], "optim.lr"),
        (["report", "none"], "recipe.toml"),
        (["trian"], "trian"),
        (["recipe", "--nope"], "--nope"),
        (["recipe"], "--list"),
        (["train", "quickstart", "--lr", "5"], "KEY=VALUE"),
        # as the user wrote it, also where it is the name of an argument
        (["recipe", "path=a"], "path=a is a setting"),
        # a command that can be pasted, whatever the file's name
        (["recipe", book], f"windlass train quickstart 'data.source={book}'"),
        # more than 255 bytes, or bytes that are not UTF-8
        (["train", "quickstart", f"run.name={'x' * 300}"], "xxx"),
        (["train", "quickstart", f"data.source={'x' * 300}"], "xxx"),
        (["eval", "x" * 300], "xxx"),
        (["train", "quickstart", "run.dir=x\udcff"], "UTF-8"),
    ):
        error = windlass(*words, code=2, cwd=tmp_path).stderr
        assert expected in error.replace("\n", " ") and "Traceback" not in error, error
    assert "KEY=VALUE" not in windlass("runs", "--zorb", code=2).stderr  # it takes no settings


def test_a_sample_does_not_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal, shown in ((True, r"a\x1b[2J\x07b"), (False, "a\x1b[2J\x07b")):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda terminal=terminal: terminal, raising=False)
        monkeypatch.setattr("sys.stdout", stream)
        models._write("a\x1b[2J\x07b")
        assert stream.getvalue() == shown
