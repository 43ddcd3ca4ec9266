"""Windlass beside its peers, one command for each comparison; prints rows of a Markdown table.

    python benchmarks/peers.py COMPARISON [--rounds 3] [--quick] [--peers PYTHON] [--nanogpt DIR]

Each round runs every side once, one after the other, in a process of its own; the order turns round
from round to round. A row has the median of each side, and median, lowest and highest of the
rounds' ratios, and how many cores other programs used meanwhile. Both sides have the same data, shape, batch, precision (fp32), number of threads and,
where the peer allows it, optimizer. The speed of a training is the median over windows of steps
after the warm-up. Peak memory is the process's.

The peers are not part of this repository. `--peers` is a Python with torch, transformers, peft,
datasets, accelerate, trl, tiktoken, lightning and litgpt (`pip install --no-deps litgpt`, because it
asks for an older huggingface_hub), and `--nanogpt` a checkout of karpathy/nanoGPT. `--data` is a
folder with tinyshakespeare/input.txt, gpt2/ (encoder.json, vocab.bpe, gpt2-tokenizer.json)
and squad/dev-v1.1.json. No side needs a network.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from windlass.cli import SPIN
from windlass.ledger import timestamp
from windlass.processes import WINDLASS, usable_cores
from windlass.run import Run

TOP = Path(__file__).resolve().parent.parent
DRIVERS = TOP / "benchmarks" / "peers"
NANOGPT_TIME = re.compile(r"^iter (\d+): loss [\d.a-z]+, time ([\d.]+)ms", re.MULTILINE)
NANOGPT_LOSS = re.compile(r"^step \d+: train loss [\d.]+, val loss ([\d.]+)", re.MULTILINE)
PACKAGES = ("torch", "transformers", "trl", "peft", "litgpt", "tiktoken")
SPEED, MEMORY, SECONDS = "tokens/s", "peak GB", "seconds"
QUIET = ("eval.every=0", "eval.sample_every=0", "checkpoint.every=0", "checkpoint.keep_every=0")
HEAD = "| comparison | measure | goal | ratio | first | second | met | others (cores) |"

Measures = dict[str, float]
Side = Callable[[], Measures]


class Goal(NamedTuple):
    """The bound on the ratio of a measure of one side to that of another."""

    measure: str
    side: str
    peer: str
    bound: float
    at_least: bool = True


class Comparison(NamedTuple):
    sides: dict[str, Side]
    goals: list[Goal]


@dataclass(frozen=True)
class Shape:
    """A GPT as nanoGPT has it; its steps in all, in the warm-up, and in a window."""

    layers: int
    heads: int
    width: int
    context: int
    batch: int
    steps: int
    warm: int
    window: int
    vocab: int = 65  # characters

    def speed(self, windows: Sequence[float]) -> float:
        """Tokens a second from the mean seconds of a step in each window."""
        return self.batch * self.context / statistics.median(windows)

    def speed_of_steps(self, seconds: Sequence[float]) -> float:
        """Tokens a second from the seconds of every step, the warm-up included."""
        rest = seconds[self.warm :]
        starts = range(0, len(rest), self.window)
        return self.speed([statistics.mean(rest[i : i + self.window]) for i in starts])


SMALL = Shape(4, 4, 128, 64, 12, 120, 20, 20)
LARGE = Shape(6, 6, 384, 256, 12, 14, 2, 2)
GPT2 = Shape(12, 12, 768, 256, 4, 6, 1, 1, vocab=50_304)
SHORT_STEP = Shape(4, 4, 128, 64, 8, 820, 20, 10)
MUON_STEPS = 240  # to below nanoGPT's 1.88


class Child(NamedTuple):
    text: str  # its standard output
    began: float  # seconds since 1970
    seconds: float
    peak_gb: float

    @property
    def result(self) -> dict[str, Any]:
        """The last line that is a JSON object."""
        lines = [line for line in self.text.splitlines() if line.startswith('{"')]
        return json.loads(lines[-1])  # type: ignore[no-any-return]


@dataclass
class Bench:
    """What all sides need: the options, and a folder for everything that they write."""

    options: argparse.Namespace
    folder: Path
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def child(
        self, words: Sequence[str | Path], cwd: Path | None = None, **variables: str
    ) -> Child:
        """Run a command, with more environment variables; exits with its output if it fails."""
        out, errors = (self.folder / f"{next(self.numbers)}.txt" for _ in range(2))
        environment = os.environ | {
            "PYTHONPATH": str(TOP / "src"),
            "OMP_NUM_THREADS": str(self.options.threads),
            "HF_HUB_OFFLINE": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            **({"GOMP_SPINCOUNT": SPIN} if self.options.busy else {}),
            **variables,
        }
        words = [str(word) for word in words]
        began = time.time()
        with out.open("w") as stdout, errors.open("w") as stderr:
            process = subprocess.Popen(
                words, cwd=cwd or self.folder, env=environment, stdout=stdout, stderr=stderr
            )
            _, status, usage = os.wait4(process.pid, 0)
        seconds = time.time() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        text = out.read_text()
        if process.returncode:
            tail = "\n".join((text + errors.read_text()).splitlines()[-30:])
            sys.exit(f"{tail}\n{shlex.join(words)}: exit code {process.returncode}")
        return Child(text, began, seconds, 1024 * usage.ru_maxrss / 1e9)

    def peer(self, driver: str, *words: object) -> Child:
        return self.child([self.options.peers, DRIVERS / driver, *map(str, words)])

    def own(self, *words: object) -> Child:
        driver = DRIVERS / "windlass_side.py"
        return self.child([sys.executable, driver, *map(str, words)], GOMP_SPINCOUNT=SPIN)

    def windlass(self, verb: str, recipe: str | Path, settings: Sequence[str]) -> Child:
        return self.child([*WINDLASS, verb, recipe, *settings])

    def train(self, recipe: str | Path, settings: Sequence[str]) -> tuple[Child, Run]:
        """A new run; `forget` removes it."""
        run = Run(self.folder / f"run-{next(self.numbers)}")
        threads = f"train.threads={self.options.threads}"
        return self.windlass("train", recipe, [f"run.dir={run.path}", threads, *settings]), run

    def data(self, name: str) -> Path:
        path = Path(self.options.data).resolve() / name
        if not path.exists():
            sys.exit(f"--data: there is no {path}")
        return path

    def nanogpt(self, *words: str) -> Child:
        if not (self.options.nanogpt / "train.py").is_file():
            sys.exit(f"--nanogpt: there is no {self.options.nanogpt / 'train.py'}")
        out = f"--out_dir={self.folder / 'nanogpt'}"
        return self.child([self.options.peers, "train.py", *words, out], self.options.nanogpt)

    def tokens(self, vocab: int) -> Path:
        """Tiny Shakespeare in nanoGPT's files: as characters if `vocab` is 65, else GPT-2's."""
        folder, text = self.folder / f"tokens-{vocab}", self.text().read_text(encoding="utf-8")
        if folder.exists():
            return folder
        folder.mkdir()
        cut = int(0.9 * len(text))
        if vocab == SMALL.vocab:
            ids = {c: i for i, c in enumerate(sorted(set(text)))}
            parts = [[ids[c] for c in part] for part in (text[:cut], text[cut:])]
        else:
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(self.data("gpt2/gpt2-tokenizer.json")))
            parts = [tokenizer.encode(part).ids for part in (text[:cut], text[cut:])]
        for name, part in zip(("train", "val"), parts, strict=True):
            np.array(part, dtype=np.uint16).tofile(folder / f"{name}.bin")
        (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab}))
        return folder

    def text(self) -> Path:
        return self.data("tinyshakespeare/input.txt")

    def model(self, kind: str, layers: int = 0) -> Path:
        """A directory of `transformers` with random weights; 0: all layers of its shape."""
        folder = self.folder / kind
        if not folder.exists():
            layers = 2 if self.options.quick else layers
            self.peer("models.py", kind, self.data("gpt2"), folder, layers)
        return folder


def nanogpt_words(shape: Shape, data: Path, *more: str) -> list[str]:
    """Words of nanoGPT's train.py for steps of one micro-batch, each shown, without evaluation."""
    sizes = {"n_layer": shape.layers, "n_head": shape.heads, "n_embd": shape.width}
    sizes |= {"block_size": shape.context, "batch_size": shape.batch, "max_iters": shape.steps}
    settings = "gradient_accumulation_steps=1 eval_interval=1000000 eval_iters=1 log_interval=1"
    settings += " warmup_iters=2 always_save_checkpoint=False"
    words = [*(f"{name}={size}" for name, size in sizes.items()), *settings.split()]
    return [*(f"--{word}" for word in [*words, f"dataset={data.resolve()}"]), *more]


def nanogpt_seconds(text: str) -> list[float]:
    """The seconds of every step that nanoGPT shows."""
    return [float(ms) / 1e3 for _, ms in NANOGPT_TIME.findall(text)]


def window_seconds(run: Run, shape: Shape) -> list[float]:
    """The mean seconds of a step in each line of a run's ledger after the warm-up."""
    lines = [line["step_ms"] / 1e3 for line in run.lines("train") if line["step"] > shape.warm]
    shutil.rmtree(run.path)
    return lines


def recipe_of(bench: Bench, shape: Shape) -> tuple[str, list[str]]:
    """The recipe of a shape, and its settings; prepares its data."""
    settings = [
        f"data.source={bench.text()}",
        f"data.dir={bench.folder / f'prepared-{shape.vocab}'}",
        f"model.layers={shape.layers}",
        f"model.heads={shape.heads}",
        f"model.width={shape.width}",
        f"model.context={shape.context}",
        "model.dropout=0",
        f"train.global_batch={shape.batch}",
        f"train.micro_batch={shape.batch}",
        f"train.steps={shape.steps}",
        "train.precision=fp32",
        f"telemetry.every={shape.window}",
        *QUIET,
    ]
    preset = "shakespeare-char"
    if shape.vocab != SMALL.vocab:
        preset = "gpt2-124m"
        settings += [f"data.tokenizer=gpt2:{bench.data('gpt2')}", "data.streaming=false"]
        settings += ["data.val_shards=0", "data.order=shuffled", "eval.suites=[loss]"]
        settings += [f"model.{part}_bias=false" for part in ("attn", "ff", "norm")]
        settings += ["model.activation=gelu"]
    bench.windlass("prepare", preset, settings)
    return preset, settings


def training(bench: Bench, shape: Shape, goals: Sequence[Goal]) -> Comparison:
    """The same GPT in nanoGPT, eager and compiled, litgpt and the Trainer of `transformers`."""
    if bench.options.quick:
        shape = replace(shape, layers=2, steps=6, warm=2, window=2)
    preset, settings = recipe_of(bench, shape)
    data = bench.tokens(shape.vocab)
    sizes = (shape.vocab, shape.layers, shape.heads, shape.width)

    def windlass() -> Measures:
        child, run = bench.train(preset, settings)
        return {SPEED: shape.speed(window_seconds(run, shape)), MEMORY: child.peak_gb}

    def nanogpt(compiled: bool) -> Measures:
        more = ("--device=cpu", "--dtype=float32", f"--compile={compiled}")
        child = bench.nanogpt(*nanogpt_words(shape, data, *more))
        seconds = nanogpt_seconds(child.text)
        return {SPEED: shape.speed_of_steps(seconds), MEMORY: child.peak_gb}

    def peer(driver: str, *words: object) -> Measures:
        child = bench.peer(driver, data / "train.bin", *words)
        return {SPEED: shape.speed_of_steps(child.result["step_s"]), MEMORY: child.peak_gb}

    litgpt = (*sizes, shape.context, shape.batch, shape.steps)
    trainer = (shape.context, shape.batch, shape.steps, *sizes)
    sides: dict[str, Side] = {
        "Windlass": windlass,
        "nanoGPT": lambda: nanogpt(False),
        "nanoGPT compiled": lambda: nanogpt(True),
        "litgpt": lambda: peer("litgpt_loop.py", *litgpt),
        "Trainer": lambda: peer("hf_trainer.py", *trainer),
    }
    asked = {name for goal in goals for name in (goal.side, goal.peer)}
    return Comparison({name: sides[name] for name in sides if name in asked}, [*goals])


def small(bench: Bench) -> Comparison:
    """Tokens/s at 4 layers, 4 heads, width 128, 12 x 64 tokens."""
    bounds = {"nanoGPT": 1.25, "nanoGPT compiled": 1.25, "litgpt": 1.5, "Trainer": 1.6}
    return training(bench, SMALL, [Goal(SPEED, "Windlass", *bound) for bound in bounds.items()])


def large(bench: Bench) -> Comparison:
    """Tokens/s at 6 layers, 6 heads, width 384, 12 x 256 tokens."""
    bounds = {"nanoGPT": 1.02, "nanoGPT compiled": 1.02, "litgpt": 1.02, "Trainer": 1.2}
    return training(bench, LARGE, [Goal(SPEED, "Windlass", *bound) for bound in bounds.items()])


def gpt2(bench: Bench) -> Comparison:
    """Tokens/s and memory of GPT-2 124M with 4 x 256 tokens."""
    goals = [Goal(SPEED, "Windlass", name, 1.1) for name in ("nanoGPT", "nanoGPT compiled")]
    memory = Goal(MEMORY, "Windlass", "nanoGPT", 0.7, at_least=False)
    return training(bench, GPT2, [*goals, memory])


def loss(bench: Bench) -> Comparison:
    """Seconds of the whole command to the loss of nanoGPT's README on a CPU, 1.88."""
    steps, muon = (20, 20) if bench.options.quick else (2000, MUON_STEPS)
    data = bench.tokens(SMALL.vocab)
    settings = [f"data.source={bench.text()}", f"data.dir={bench.folder / 'prepared'}"]
    settings += (
        "model.tie_head=false optim.kind=muon optim.lr=0.02 optim.muon_momentum=0.85".split()
    )
    settings += "train.global_batch=16 eval.batches=20 eval.at_end=all eval.sample_every=0".split()
    settings += ["checkpoint.every=0", f"train.steps={muon}", f"eval.every={muon}"]
    bench.windlass("prepare", "shakespeare-char-fast", settings)
    words = ["config/train_shakespeare_char.py", "--device=cpu", "--compile=False"]
    words += ["--eval_iters=20", "--log_interval=1", "--block_size=64", "--batch_size=12"]
    words += ["--n_layer=4", "--n_head=4", "--n_embd=128", "--dropout=0.0", f"--dataset={data}"]
    words += [f"--max_iters={steps}", f"--lr_decay_iters={steps}"]

    def windlass() -> Measures:
        child, run = bench.train("shakespeare-char-fast", settings)
        reached = run.lines("eval", suite="loss")[-1]["full_loss"]
        return {SECONDS: child.seconds, "loss": reached}

    def nanogpt() -> Measures:
        child = bench.nanogpt(*words)
        return {SECONDS: child.seconds, "loss": float(NANOGPT_LOSS.findall(child.text)[-1])}

    sides = {
        "Windlass": windlass,
        "nanoGPT": nanogpt,
        "README of nanoGPT": lambda: {"loss": 1.88},
    }
    goals = [Goal(SECONDS, "Windlass", "nanoGPT", 0.2, at_least=False)]
    return Comparison(
        sides, [*goals, Goal("loss", "Windlass", "README of nanoGPT", 1.0, at_least=False)]
    )


def chat(bench: Bench) -> Comparison:
    """Unpadded tokens/s of LoRA adapters on a Llama of 135M, conversations packed in 2 x 512."""
    return adapters(bench, "fp32", context=512, steps=7)


def curve(bench: Bench) -> Comparison:
    """The same with 4 layers, in bf16, 2 x 128 tokens: tokens/s, and losses of 100 steps by tenths."""
    return adapters(bench, "bf16", context=128, steps=100)


def adapters(bench: Bench, precision: str, context: int, steps: int) -> Comparison:
    folder = bench.model("llama-bf16", layers=4) if precision == "bf16" else bench.model("llama")
    talk, warm, batch = bench.folder / "talk.jsonl", 1, 2
    steps = 3 if bench.options.quick else steps
    with talk.open("w", encoding="utf-8") as file:
        for article in json.loads(bench.data("squad/dev-v1.1.json").read_text())["data"][:8]:
            for part in article["paragraphs"]:
                for qa in part["qas"][:2]:
                    asked = (
                        f"{part['context']}\n{qa['question']}" if context > 128 else qa["question"]
                    )
                    messages = [
                        {"role": "user", "content": asked},
                        {"role": "assistant", "content": qa["answers"][0]["text"]},
                    ]
                    file.write(json.dumps({"messages": messages}) + "\n")
    settings = [f"model.name={folder}", f"data.source={talk}", "data.eval_split="]
    settings += [f"data.dir={bench.folder / 'prepared-chat'}", f"model.context={context}"]
    settings += [f"train.global_batch={batch}", f"train.micro_batch={batch}"]
    settings += [f"train.steps={steps}", f"train.precision={precision}", "telemetry.every=1"]
    settings += ["optim.betas=[0.9,0.999]", "optim.schedule.kind=constant"]
    settings += ["optim.schedule.warmup=0", *QUIET]
    bench.windlass("prepare", "chat-lora", settings)

    def measures(rates: list[float], losses: list[float], peak_gb: float) -> Measures:
        tenth = max(1, steps // 10)
        means = [statistics.mean(losses[i : i + tenth]) for i in range(0, steps, tenth)]
        print(f"  losses: {' '.join(f'{mean:.3f}' for mean in means)}", file=sys.stderr)
        return {SPEED: statistics.median(rates[warm:]), MEMORY: peak_gb, "loss": means[-1]}

    def windlass() -> Measures:
        child, run = bench.train("chat-lora", settings)
        lines = run.lines("train")
        shutil.rmtree(run.path)
        speeds, losses = ([line[key] for line in lines] for key in ("tokens_per_s", "loss"))
        return measures(speeds, losses, child.peak_gb)

    def trl() -> Measures:
        child = bench.peer("trl_chat.py", folder, talk, context, batch, steps, precision)
        pairs = zip(child.result["tokens"], child.result["step_s"], strict=True)
        speeds = [tokens / seconds for tokens, seconds in pairs]
        return measures(speeds, child.result["losses"], child.peak_gb)

    goals = [Goal(SPEED, "Windlass", "TRL", 1.3)]
    if precision == "bf16":
        goals.append(Goal("loss", "Windlass", "TRL", 1.02, at_least=False))
    return Comparison({"Windlass": windlass, "TRL": trl}, goals)


def overhead(bench: Bench) -> Comparison:
    """Tokens/s of Windlass's trainer beside a bare loop of the same model, for a short step."""
    shape = replace(SHORT_STEP, steps=60) if bench.options.quick else SHORT_STEP
    preset, settings = recipe_of(bench, shape)
    data = bench.tokens(shape.vocab)
    measured: dict[str, list[float]] = {}

    def side(name: str) -> Measures:
        if name not in measured:  # one command measures both
            run = f"run.dir={bench.folder / f'run-{next(bench.numbers)}'}"
            words = (shape.window, preset, *settings, run, f"train.threads={bench.options.threads}")
            measured.update(bench.own("overhead", data / "train.bin", *words).result)
        return {SPEED: shape.speed(measured.pop(name)[shape.warm // shape.window :])}

    return Comparison(
        {"Windlass": lambda: side("trainer_s"), "bare loop": lambda: side("bare_s")},
        [Goal(SPEED, "Windlass", "bare loop", 0.99)],
    )


def tokenize(bench: Bench) -> Comparison:
    """MB/s of the whole `windlass prepare` with GPT-2's tokens, beside tiktoken's encoding alone."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(bench.data(".").glob("*/*.txt"))]
    size = bench.options.megabytes * 10**6
    workers = f"data.workers={bench.options.threads}"

    def documents(size: int) -> Path:
        path = bench.folder / f"documents-{size}.jsonl"
        pieces = (t[i : i + 4096] for t in itertools.cycle(texts) for i in range(0, len(t), 4096))
        with path.open("w", encoding="utf-8") as file:
            while file.tell() < size:
                file.write(json.dumps({"text": next(pieces)}, ensure_ascii=False) + "\n")
        return path

    def windlass(path: Path) -> Measures:
        folder = bench.folder / f"encoded-{next(bench.numbers)}"
        settings = [f"data.source={path}", f"data.tokenizer=gpt2:{bench.data('gpt2')}", workers]
        settings += ["model.vocab=0", "data.max_tokens=0"]
        child = bench.windlass("prepare", "quickstart", [*settings, f"data.dir={folder}"])
        shutil.rmtree(folder)
        return {"MB/s": path.stat().st_size / 1e6 / child.seconds, MEMORY: child.peak_gb}

    def tiktoken(path: Path) -> Measures:
        child = bench.peer("tiktoken_batch.py", bench.data("gpt2"), path, bench.options.threads)
        return {"MB/s": path.stat().st_size / 1e6 / child.result["seconds"]}

    whole, quarter = documents(size), documents(size // 4)
    return Comparison(
        {
            "Windlass": lambda: windlass(whole),
            "tiktoken": lambda: tiktoken(whole),
            "a quarter of the text": lambda: windlass(quarter),
        },
        [
            Goal("MB/s", "Windlass", "tiktoken", 0.95),
            Goal(MEMORY, "Windlass", "a quarter of the text", 1.1, at_least=False),
        ],
    )


def start(bench: Bench) -> Comparison:
    """Seconds from the command to the first step of quickstart, and between a study's cells."""
    settings = [f"data.dir={bench.folder / 'stdlib'}", "train.steps=1", *QUIET]
    bench.windlass("prepare", "quickstart", settings)
    # Windlass with compiled bytecode, as pip installs torch and Windlass
    bench.child([sys.executable, "-m", "compileall", "-q", TOP / "src"])
    default = ["env", "-u", "OMP_NUM_THREADS", *WINDLASS]  # chooses its threads itself
    code = (
        "import time, torch; from torch import nn; print('{\"now\":', time.time(), '}') "
        "if nn.Sequential(nn.Embedding(257, 128), nn.TransformerEncoder("
        "nn.TransformerEncoderLayer(128, 4, 512), 4), nn.Linear(128, 257)) else 0"
    )

    def windlass() -> Measures:
        run = Run(bench.folder / f"run-{next(bench.numbers)}")
        child = bench.child([*default, "train", "quickstart", f"run.dir={run.path}", *settings])
        return {SECONDS: timestamp(run.lines("train")[0]) - child.began}

    def torch() -> Measures:
        child = bench.child([sys.executable, "-c", code])
        return {SECONDS: child.result["now"] - child.began}

    def cell() -> Measures:
        study = bench.folder / f"study-{next(bench.numbers)}"
        axis = "optim.lr=1e-3,2e-3,3e-3"
        bench.child([*default, "sweep", "quickstart", axis, *settings, "--dir", study])
        runs = [Run(path.parent) for path in study.rglob("metrics.jsonl")]
        first = sorted(timestamp(run.lines("train")[0]) for run in runs)
        return {SECONDS: (first[-1] - first[0]) / (len(first) - 1)}

    return Comparison(
        {
            "Windlass": windlass,
            "import torch": torch,
            "cell of a study": cell,
            "1 s": lambda: {SECONDS: 1.0},
        },
        [
            Goal(SECONDS, "Windlass", "import torch", 1.3, at_least=False),
            Goal(SECONDS, "cell of a study", "1 s", 1.0, at_least=False),
        ],
    )


def generate(bench: Bench) -> Comparison:
    """Tokens/s of greedy generation with a cache, GPT-2 124M, for 1 and for 8 texts."""
    layers, tokens = (2, 8) if bench.options.quick else (12, 64)

    def rates(run: Callable[..., Child], *words: object) -> Measures:
        return {
            f"{SPEED}, batch {batch}": run(*words, "generate", layers, batch, tokens).result[SPEED]
            for batch in (1, 8)
        }

    return Comparison(
        {
            "Windlass": lambda: rates(bench.own),
            "transformers": lambda: rates(bench.peer, "gpt2.py"),
        },
        [
            Goal(f"{SPEED}, batch 1", "Windlass", "transformers", 1.3),
            Goal(f"{SPEED}, batch 8", "Windlass", "transformers", 2.0),
        ],
    )


FUNCTIONS = (small, large, loss, gpt2, chat, curve, overhead, tokenize, start, generate)
COMPARISONS = {function.__name__: function for function in FUNCTIONS}


def interleave(sides: dict[str, Side], rounds: int) -> dict[str, list[Measures]]:
    """The measures of each side in each round; every second round goes backwards."""
    results: dict[str, list[Measures]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            measures = sides[name]()
            shown = ", ".join(f"{measure} {value:.4g}" for measure, value in measures.items())
            print(f"  round {number + 1}, {name}: {shown}", file=sys.stderr, flush=True)
            results[name].append(measures)
    return results


def rows(
    name: str, goals: Sequence[Goal], results: dict[str, list[Measures]], others: float = 0.0
) -> list[str]:
    """A row of the table for each goal; `others`: cores that other programs used meanwhile."""
    lines = []
    for goal in goals:
        own, peer = ([m[goal.measure] for m in results[side]] for side in (goal.side, goal.peer))
        ratios = [a / b for a, b in zip(own, peer, strict=True)]
        ratio = statistics.median(ratios)
        met = ratio >= goal.bound if goal.at_least else ratio <= goal.bound
        cells = [
            f"`{name}`",
            f"{goal.measure}, {goal.side} / {goal.peer}",
            f"{'≥' if goal.at_least else '≤'} {goal.bound:g}",
            f"{ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            *(f"{statistics.median(values):,.4g}" for values in (own, peer)),
            "yes" if met else "no",
            f"{others:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def foreign_seconds() -> float:
    """CPU seconds of all programs but this one and its ended children, from some start."""
    times = psutil.cpu_times()
    return sum(times[:3]) - sum(os.times()[:4])  # user, nice, system


def machine(bench: Bench) -> str:
    """The cores, the load and the versions, for the reader of a table."""
    names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    code = f"import importlib.metadata as m\nfor p in {PACKAGES}:\n try: print(p, m.version(p))\n except m.PackageNotFoundError: pass"
    versions = bench.child([bench.options.peers, "-c", code]).text.splitlines()
    head = ["git", "-C", str(TOP), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True).stdout.strip()
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    cores = f"{usable_cores()} cores ({names[0] if names else platform.machine()})"
    return f"{cores}, load {load}; Windlass {commit}, {', '.join(versions)}"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    listed = "\n".join(
        f"  {name:10} {f.__doc__.splitlines()[0]}" for name, f in COMPARISONS.items()
    )
    parser = argparse.ArgumentParser(
        description=f"{__doc__.splitlines()[0]}\n\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("comparison", choices=[*COMPARISONS], metavar="COMPARISON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: tries the command alone")
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--nanogpt", type=Path, default=Path("nanoGPT"), metavar="DIR")
    parser.add_argument("--data", default="data", metavar="DIR")
    parser.add_argument(
        "--skip", nargs="*", default=[], metavar="SIDE", help="leave these sides out"
    )
    busy = "the peers' threads wait as Windlass's do, for a machine with other programs"
    parser.add_argument("--busy", action="store_true", help=busy)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--megabytes", type=int, default=1000, help="the text of `tokenize`")
    given = parser.parse_args(words)
    if given.quick:
        given.megabytes = min(given.megabytes, 4)
    given.nanogpt = given.nanogpt.resolve()
    return given


def main() -> None:
    given = parse()
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        bench = Bench(given, Path(name))
        print(machine(bench), file=sys.stderr)
        sides, goals = COMPARISONS[given.comparison](bench)
        sides = {side: run for side, run in sides.items() if side not in given.skip}
        before, began = foreign_seconds(), time.monotonic()
        results = interleave(sides, given.rounds)
        others = (foreign_seconds() - before) / (time.monotonic() - began)
        print(f"{HEAD}\n|---|---|---|---|---:|---:|---|---:|")
        left = [goal for goal in goals if {goal.side, goal.peer} <= set(sides)]
        print("\n".join(rows(given.comparison, left, results, others)))
        print(machine(bench), file=sys.stderr)


if __name__ == "__main__":
    main()
