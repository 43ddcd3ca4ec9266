"""Runs the commands of a page of the documentation: in order, in a scratch folder, at tiny sizes.

`smaller` shrinks trainings without help, and takes local data for what is downloaded. `Page` says
what else a page needs. A command that another test runs stands in `ELSEWHERE`.
"""

import contextlib
import glob
import io
import json
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import hf_fixtures
from docs_pages import (
    PLACEHOLDERS,
    Block,
    Command,
    blocks,
    command_line,
    commands_of,
)
from windlass.cli import main
from windlass.errors import UserError
from windlass.recipe import Recipe, presets, study_presets
from windlass.study.study import load_study

SMALL = {
    "model.layers": "1",
    "model.heads": "2",
    "model.kv_heads": "0",
    "model.width": "32",
    "model.ff_width": "0",
    "model.context": "32",
    "train.steps": "8",
    "train.global_batch": "8",
    "train.micro_batch": "0",
    "train.compile": "false",
    "checkpoint.every": "4",
    "eval.every": "4",
    "eval.batches": "1",
    "eval.sample_tokens": "8",
    "telemetry.every": "1",
    "parallel.device": "cpu",
}
"""Instead of a recipe's own values and of those on a page."""
TEXT = {"data.source": "book.txt", "data.eval_source": "", "data.tokenizer": "byte"}
TEXT |= {"data.streaming": "false", "data.sha256": "", "data.max_tokens": "0"}
TEXT |= {"data.val_fraction": "0.1", "data.val_shards": "0", "model.vocab": "0"}
SQUAD = {"data.source": "squad:dev-v1.1.json", "data.train_size": "16", "data.eval_size": "8"}
SQUAD |= {
    "eval.squad_file": "dev-v1.1.json",
    "data.eval_source": "",
    "eval.suites": "loss",
    "checkpoint.best": "loss",
}
SIZES = [(r"--world ([4-9]|\d\d+)\b", "--world 2"), (r"--worlds \d+\b(?!,)", "--worlds 2")]
SIZES += [(r"--worlds \d+,[\d,]+", "--worlds 1,2"), (r"--stop-at \d+", "--stop-at 4")]
SIZES += [(r"--extend-to \d+", "--extend-to 12"), (r"--max-tokens \d+", "--max-tokens 8")]
SIZES += [(r"HuggingFaceTB/[\w-]+|Qwen/[\w.-]+|bigscience/[\w-]+", "tiny-model")]
"""Sizes on the command line, and models of the Hub."""

CLUSTER = "tests/cluster/"
ELSEWHERE = {
    r"^torchrun .*--nnodes": f"{CLUSTER}test_two_hosts.py::test_torchrun_over_two_hosts",
    r"^torchrun ": f"{CLUSTER}test_launchers.py::test_torchrun_starts_again_after_a_kill",
    r"^srun ": f"{CLUSTER}test_slurm.py::test_srun_trains_over_two_nodes",
    r"^mpiexec ": f"{CLUSTER}test_launchers.py::test_mpiexec",
    r"^eval \"\$\(windlass env": "tests/unit/test_launch_allocation.py::test_a_second_shell_gets",
    r"^windlass env": "tests/unit/test_launch_allocation.py::test_a_second_shell_gets",
    r"^windlass verify": "tests/e2e/test_verification.py::test_the_verb_and_the_function_prove",
    r"^windlass submit .*--watch": f"{CLUSTER}test_submit.py::test_a_run_over_two_nodes_followed",
    r"^windlass submit .*--cancel": f"{CLUSTER}test_submit.py::test_cancel_saves_and_does_not",
    r"^windlass scale .*strategies": "tests/e2e/test_study_scale_runs.py::test_strategies_by",
    r"^windlass scale .*--nodes": f"{CLUSTER}test_scale_nodes.py::test_strong_scaling_over_two",
    r"^windlass launch": f"{CLUSTER}test_launchers.py::test_launch_trains_under_mpiexec",
}
"""Commands that need an allocation, another launcher, the Hub or minutes, and the tests of them."""


@dataclass
class Page:
    """What a page needs, what is run instead of what it says, and what there is afterwards."""

    instead: dict[str, str] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)  # path: `run`, `study`, `chat`, or a text
    makes: list[str] = field(default_factory=list)
    prints: list[str] = field(default_factory=list)
    codes: dict[str, int] = field(default_factory=dict)  # exit codes but 0, by a command's text
    stdin: str = "Who built it?\n"
    reports: bool = False  # the end of a training writes its report


class Prepared:
    """Files that pages may name, made once: texts, conversations, a model, a run and a study."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder = folder
        text = (data / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
        (folder / "book.txt").write_text(text[:60_000], encoding="utf-8")
        articles = json.loads((data / "squad" / "dev-v1.1.json").read_text(encoding="utf-8"))
        items = (data / "hellaswag" / "hellaswag_val.jsonl").read_text().splitlines(True)
        (folder / "hellaswag_val.jsonl").write_text("".join(items[:4]))
        texts, lines = [], []
        for article in articles["data"][:8]:
            article["paragraphs"] = article["paragraphs"][:5]
            for paragraph in article["paragraphs"]:
                asked = f"{paragraph['context'][:200]}\n{paragraph['qas'][0]['question']}"
                answer = paragraph["qas"][0]["answers"][0]["text"]
                turns = [{"role": "user", "content": asked}]
                turns.append({"role": "assistant", "content": answer})
                lines.append(json.dumps({"messages": turns}) + "\n")
                texts += [asked, answer]
        (folder / "chat.jsonl").write_text("".join(lines), encoding="utf-8")
        articles["data"] = articles["data"][:8]
        (folder / "dev-v1.1.json").write_text(json.dumps(articles))
        hf_fixtures.save("llama", folder / "tiny-model", max_position_embeddings=1024)
        hf_fixtures.save_tokenizer(texts, folder / "tiny-model")

    def copy(self, folder: Path) -> None:
        """Put the files into a scratch folder."""
        for path in self.folder.iterdir():
            if path.name not in ("made", "data", "data-chat"):
                (folder / path.name).symlink_to(path)

    def give(self, what: str, path: Path) -> None:
        """Put a run, a study or a file's text at a path."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if what not in ("run", "study", "chat"):
            path.write_text(what, encoding="utf-8")
            return
        made = self.folder / "made" / what
        if what == "chat" and not made.exists():
            self.train_chat(made)
        elif not made.exists():
            small = {**SMALL, "data.source": f"'{self.folder / 'book.txt'}'"}
            small["data.dir"] = f"'{self.folder / 'data'}'"
            changes = [f"{key}={value}" for key, value in small.items()]
            if what == "run":
                run_windlass(["train", "quickstart", f"run.dir='{made}'", *changes])
            else:
                several = [word for change in changes for word in ("--set", change)]
                axes = ["sweep", "quickstart", "optim.lr=1e-3,1e-2", "--dir", str(made)]
                run_windlass([*axes, *several])
        shutil.copytree(made, path)

    def train_chat(self, run: Path) -> None:
        """Fine-tune the model on the conversations."""
        recipe, model = run.with_suffix(".toml"), str(self.folder / "tiny-model")
        recipe.parent.mkdir(exist_ok=True)
        run_windlass(
            ["init", str(recipe), "--data", f"{self.folder / 'chat.jsonl'}", "--model", model]
        )
        settings = sizes(Recipe.load(recipe)) | {"run.dir": f"'{run}'"}
        settings["data.dir"] = f"'{self.folder / 'data-chat'}'"
        run_windlass(["train", str(recipe), *(f"{k}={v}" for k, v in settings.items())])


@pytest.fixture(scope="session")
def prepared(data_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return Prepared(tmp_path_factory.mktemp("prepared"), data_files)


def run_windlass(words: list[str]) -> object:
    """Run a command in this process; returns its exit code."""
    before, sys.argv = sys.argv, ["windlass", *words]
    try:
        main(words)
    except SystemExit as end:
        return end.code
    finally:
        sys.argv = before
    return None


def elsewhere(command: Command) -> str:
    """The test that runs a command of a page instead."""
    found = (test for pattern, test in ELSEWHERE.items() if re.search(pattern, command.text))
    return next(found, "")


def smaller(words: list[str]) -> list[str]:
    """The words of a command whose training takes a second, on local data."""
    verb, *_ = words
    if verb not in ("train", "sweep", "scale", "prepare", "plan", "submit", "eval"):
        return words
    values = command_line().commands[verb].make_context(verb, list(words[1:])).params
    name = values.get("recipe") or ""
    changes = [*(values.get("overrides") or []), *(values.get("set_") or [])]
    if name in study_presets():
        recipe = load_study(name, verb, changes)[0]
    elif name in presets() or name.endswith(".toml"):
        recipe = Recipe.load(name, changes)
    else:
        return words
    hub = recipe.model.kind == "hf" and not Path(recipe.model.name).exists()
    small = {"model.name": "tiny-model"} if hub else {}
    if verb in ("train", "sweep", "scale", "prepare"):
        small |= local_data(recipe)
        small |= {} if verb == "prepare" else sizes(recipe)
    if verb == "scale":
        small["train.steps"] = "8"  # the first five do not count
    axes = {key for axis in values.get("axes") or [] for key in axis.partition("=")[0].split("+")}
    small = {key: value for key, value in small.items() if key not in axes}
    if values.get("branch_from"):  # past the step of the checkpoint
        small["train.steps"] = "16"
    own = [word for word in words if word.partition("=")[0] not in small]
    after = [*own[1:], ""]  # a `--set` goes with its setting
    own = [word for word, next in zip(own, after, strict=True) if word != "--set" or "=" in next]
    added = [f"{key}={value}" for key, value in small.items()]
    if verb == "sweep":
        added = [word for change in added for word in ("--set", change)]
    return own + added


def local_data(recipe: Recipe) -> dict[str, str]:
    """Settings for data of this machine in place of a download."""
    sources = [*recipe.data.sources, *recipe.data.eval_sources]
    if recipe.data.mix:
        return {"data.tokenizer": "byte", "data.max_tokens": "20000"}
    if "squad" in sources:
        tokenizer = {} if recipe.model.kind == "hf" else {"data.tokenizer": "byte"}
        vocab = {} if recipe.model.kind == "hf" else {"model.vocab": "0"}
        return SQUAD | tokenizer | vocab
    remote = any(source.startswith(("hf:", "https:", "http:")) for source in sources)
    if remote or "stdlib" in sources:
        own = ("data.tokenizer", "model.vocab") if recipe.model.kind == "hf" else ()  # the model's
        return {key: value for key, value in TEXT.items() if key not in own}
    if recipe.model.kind == "hf":
        return {}
    known = recipe.data.tokenizer in ("byte", "char", "auto")
    return {} if known else {"data.tokenizer": "byte", "model.vocab": "0"}


def sizes(recipe: Recipe) -> dict[str, str]:
    """The sizes of a tiny training of a recipe."""
    small = {k: v for k, v in SMALL.items() if recipe.model.kind == "gpt" or k[:6] != "model."}
    if "hellaswag" in recipe.eval.suites:
        small |= {"eval.suites": "loss", "checkpoint.best": "loss"}
    if recipe.data.format != "text":  # a sample is as long as its text
        small |= {"model.context": "1024"} if recipe.model.kind == "gpt" else {}
        small |= {"train.steps": "4", "train.global_batch": "2", "checkpoint.every": "2"}
    if recipe.model.kind == "hf":
        small |= {"train.steps": "4", "train.global_batch": "2", "checkpoint.every": "2"}
        small |= {"optim.schedule.warmup": "0.1"}
        small |= {"model.context": "64"} if recipe.data.format == "text" else {}
    return small


class Runner:
    """The commands of one page, one after the other."""

    def __init__(self, page: Page, prepared: Prepared, capture: pytest.CaptureFixture[str]) -> None:
        self.page, self.prepared, self.capture = page, prepared, capture
        self.printed, self.unused = "", set(page.instead)
        self.names: dict = {"__name__": "__main__"}  # of the page's Python blocks

    def run(self, path: Path) -> None:
        """Run all commands of a page, and check what there is afterwards."""
        self.prepared.copy(Path())
        for place, what in self.page.given.items():
            self.prepared.give(what, Path(place))
        self.capture.readouterr()
        for block in blocks(path):
            self.take_block(block)
            for command in commands_of(block):
                if not elsewhere(command):
                    self.run_command(command)
        missing = [pattern for pattern in self.page.makes if not glob.glob(pattern)]
        there = sorted(map(str, Path().rglob("*")))[:80]
        assert not missing and not self.unused, (missing, self.unused, there)
        absent = [words for words in self.page.prints if words not in self.printed]
        assert not absent, (absent, self.printed[-3000:])

    def replaced(self, text: str) -> str:
        """A text with what is run instead of it."""
        for said, run in self.page.instead.items():
            if said in text:
                text = text.replace(said, run)
                self.unused.discard(said)
        for pattern, size in SIZES:
            text = re.sub(pattern, size, text)
        return text

    def take_block(self, block: Block) -> None:
        """Write a block that begins with its file's name, and run a block of Python: a file alone,
        the others as parts of one program.
        """
        text = self.replaced(block.text)
        if block.file:
            Path(block.file).write_text(text, encoding="utf-8")
        if block.language != "python":
            return
        text = re.sub(r"(train\.steps\"?[:=] ?)\d+", r"\g<1>8", text)
        names = {"__name__": "__main__"} if block.file else self.names
        exec(compile(text, f"{block.page}:{block.line}", "exec"), names)
        self.printed += self.capture.readouterr().out

    def run_command(self, command: Command) -> None:
        """Run the parts of a command line; the test fails if one ends with another code than 0."""
        wanted = next((c for said, c in self.page.codes.items() if said in command.text), 0)
        stdin = self.page.stdin
        remedy = "make it run by an entry for the page in PAGES, or name its test in ELSEWHERE"
        for part in Command(command.page, command.line, self.replaced(command.text)).parts():
            if part[0] == "echo":
                stdin = " ".join(part[1:]) + "\n"
                continue
            if "windlass" not in part:
                continue
            before, words = part[: part.index("windlass")], part[part.index("windlass") + 1 :]
            target = words[words.index(">") + 1] if ">" in words else ""
            words = words[: words.index(">")] if target else words
            with pytest.MonkeyPatch.context() as patch:
                for variable in before:
                    name, _, value = variable.partition("=")
                    assert re.fullmatch(r"[A-Z_]+", name), f"{command}: {remedy}"
                    patch.setenv(name, value)
                patch.setattr(sys, "stdin", io.StringIO(stdin))
                code, words = self.try_words(words)
            out = self.capture.readouterr()
            said = (
                f"{command}\nran as: windlass {' '.join(words)}\nexit code {code}, not {wanted}\n"
            )
            assert (code or 0) == wanted, f"{said}{out.out[-2000:]}\n{out.err[-3000:]}\n{remedy}"
            self.printed += out.out + out.err
            if target:
                Path(target).write_text(out.out, encoding="utf-8")

    def try_words(self, words: list[str]) -> tuple[object, list[str]]:
        """Run a command at tiny sizes; the exit code, and what ran."""
        words = [one for word in words for one in self.expanded(word)]
        with contextlib.suppress(UserError):  # the command itself will say it
            words = smaller(words)
        if words[0] == "submit" and "--dry-run" not in words:
            words.append("--dry-run")
        if words[0] == "submit" and "--scheduler" not in words:
            words += ["--scheduler", "slurm"]
        if words[0] == "scale" and "--no-probe" not in words:
            words.append("--no-probe")
        if words[0] == "scale" and words[1] in study_presets() and "--worlds" not in words:
            words += ["--worlds", "1,2"]
        if words[0] == "sample" and "--max-tokens" not in words:
            words += ["--max-tokens", "8"]
        return run_windlass(words), words

    def expanded(self, word: str) -> list[str]:
        """The paths of a pattern, as a shell gives them, and what a placeholder stands for."""
        name, at, checkpoint = word.partition("@")
        if name in ("RUN", "STUDY"):
            path = Path("runs/run" if name == "RUN" else "studies/study")
            if not path.exists():
                self.prepared.give(name.lower(), path)
                self.capture.readouterr()
            return [f"{path}{at}{checkpoint}"]
        if "=" in word:
            return [word]
        found = sorted(glob.glob(name.replace("HASH", "*"))) if re.search(r"\*|HASH", name) else []
        return [f"{path}{at}{checkpoint}" for path in found] or [PLACEHOLDERS.get(word, word)]
