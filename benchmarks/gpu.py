"""The parts of `benchmarks/gpu.sh`, which says how to call it. Each command runs in a process of
its own, under a time limit.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
from peers import DRIVERS, QUIET, Shape, nanogpt_seconds, nanogpt_words

from windlass import Run, plan
from windlass.processes import WINDLASS, kill_with_parent
from windlass.verification import PROOFS

TOP = Path(__file__).resolve().parent.parent
DEVICE, SMALL = os.environ["DEVICE"], bool(os.environ.get("SMALL"))
CUDA = DEVICE == "cuda"
NANOGPT = os.environ.get("NANOGPT", "")
BEGAN, SECONDS = time.monotonic(), 60 * float(os.environ.get("MINUTES", "9"))
BESIDE_SECONDS = 185.0
# Sequences in a micro-batch; layers, heads, width, context of GPT-2 small without biases, as
# nanoGPT's train.py has it.
MICRO = 4 if SMALL else 32
LAYERS, HEADS, WIDTH, CONTEXT = (2, 2, 128, 64) if SMALL else (12, 12, 768, 1024)
VOCAB = 512 if SMALL else 50_304
STEPS, WARM = (12, 4) if SMALL else (40, 10)
EAGER, COMPILED = "train.compile=false", "train.compile=true"
PYTEST = [sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-p", "pytest_timeout"]
PYTEST += ["-m", "gpu", "-v", "--tb=short", "--durations=15", "-p", "no:cacheprovider"]
TIMED_TESTS = "tests/gpu/test_telemetry_gpu.py"
LEDGERS = ("environment.json", "metrics.jsonl", "log.txt")


class Bench:
    """The folder for results, and one for data, runs and logs, which is removed at the end."""

    def __init__(self, out: Path, work: Path):
        self.out, self.work, self.lock = out, work, threading.RLock()
        self.end, rows = BEGAN + SECONDS, out / "rows.json"
        self.rows = json.loads(rows.read_text()) if rows.is_file() else []
        (work / "logs").mkdir()

    def say(self, text: str) -> None:
        line = f"[{time.monotonic() - BEGAN:.0f} s] {text}"
        print(line, flush=True)
        with (self.out / "session.log").open("a") as file:
            print(line, file=file)

    def part(self, name: str) -> None:
        """Measure a part; an error in it must not cost the parts that follow."""
        began = time.monotonic()
        try:
            PARTS[name](self)
        except Exception as error:
            self.add(name, "error", repr(error))
        self.say(f"{name}: {time.monotonic() - began:.0f} s")

    def add(self, part: str, what: str, result: str, command: Sequence[str | Path] = ()) -> None:
        """Add a row, in place of an earlier one of the same name, and write the table."""
        with self.lock:
            self.say(f"{part} | {what} | {result}")
            self.rows = [row for row in self.rows if row[:2] != [part, what]]
            self.rows.append([part, what, result, self.shown(command)])
            self.rows.sort(key=lambda row: list(PARTS).index(row[0]))
            (self.out / "rows.json").write_text(json.dumps(self.rows, indent=1))
            lines = ["| part | what | result | command |", "|---|---|---|---|"]
            for row in self.rows:
                *cells, words = (cell.replace("|", "\\|").replace("\n", " ") for cell in row)
                lines.append(f"| {' | '.join(cells)} | {words and f'`{words}`'} |")
            (self.out / "gpu.md").write_text("\n".join(lines) + "\n")

    def shown(self, command: Sequence[str | Path]) -> str:
        """A command as a reader types it."""
        words = " ".join(shlex.quote(str(word)) for word in command)
        for old, new in ((" ".join(WINDLASS), "windlass"), (sys.executable, "python")):
            words = words.replace(old, new)
        return words.replace(f"{TOP}/", "").replace(f"{self.work}/", "")

    def run(
        self,
        name: str,
        command: Sequence[str | Path],
        limit: float,
        cwd: Path = TOP,
        log: Path | None = None,
    ) -> tuple[str, str]:
        """Run a command; returns what it printed, also in a log, and why it failed: empty if it
        did not.
        """
        limit, log = min(limit, self.end - time.monotonic()), log or self.work / f"logs/{name}.txt"
        if limit < 5:
            return "", "not run: no time was left"
        with log.open("w") as file:
            process = subprocess.Popen(
                list(map(str, command)),
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                start_new_session=True,
                preexec_fn=kill_with_parent,  # noqa: PLW1509 - it only calls the kernel
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                kill([psutil.Process(process.pid)])
                process.wait()
                code = None
        text = log.read_text(errors="replace")
        self.keep_logs()
        memory = "OutOfMemoryError" in text or "memory ran out" in text
        failed = "out of memory" if memory else f"exit code {code}: see {name}.txt in logs.tgz"
        return text, f"killed after {limit:.0f} s" if code is None else failed if code else ""

    def keep_logs(self) -> None:
        """What every command printed, and the ledgers of the runs, as one file."""
        with self.lock, tarfile.open(self.out / "logs.new", "w:gz") as archive:
            for pattern in ("logs/*", *(f"runs/*/{name}" for name in LEDGERS)):
                for path in self.work.glob(pattern):
                    archive.add(path, path.relative_to(self.work))
        (self.out / "logs.new").replace(self.out / "logs.tgz")

    def train(
        self,
        part: str,
        what: str,
        words: Iterable[str],
        *settings: str,
        result: Callable[[Run], str] | None = None,
        micro: int = MICRO,
        limit: float = 80,
    ) -> None:
        """Train, one micro-batch a step, and add a row."""
        run = Run(self.work / "runs" / re.sub(r"\W+", "-", f"{part}-{what}"))
        command = [*WINDLASS, "train", *words, *COMMON, f"run.dir={run.path}"]
        command += [f"train.global_batch={micro}", f"train.micro_batch={micro}", *settings]
        _, problem = self.run(run.path.name, command, limit)
        self.add(part, what, problem or (result or speed_of)(run), command)
        shutil.rmtree(run.checkpoints_dir, ignore_errors=True)

    def gpt2(self) -> list[str]:
        """GPT-2 small as nanoGPT's train.py has it, on random tokens in nanoGPT's format."""
        data = self.work / "tokens"
        with self.lock:
            data.mkdir(exist_ok=True)
            for name, count in (("train", 300_000 if SMALL else 20_000_000), ("val", 100_000)):
                if not (data / f"{name}.bin").is_file():
                    tokens = np.random.default_rng(0).integers(0, 256, count, dtype=np.uint16)
                    tokens.tofile(data / f"{name}.bin")
            (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": VOCAB}))
        biases = (f"model.{part}_bias=false" for part in ("attn", "ff", "norm"))
        sizes = {"layers": LAYERS, "heads": HEADS, "width": WIDTH, "context": CONTEXT}
        sizes["vocab"] = VOCAB
        source = [f"data.source=shards:{data}/*.bin", f"data.dir={self.work / 'data'}"]
        shape = [*biases, "model.dropout=0", *(f"model.{k}={v}" for k, v in sizes.items())]
        return ["gpt2-124m", *source, *shape]

    def documents(self, masked: bool) -> list[str]:
        """The same model on texts of about 300 bytes, many in a row."""
        path, draw = self.work / "documents.jsonl", random.Random(0)
        if not path.is_file():
            with path.open("w") as file:
                for _ in range(2_000 if SMALL else 60_000):
                    count = max(3, int(draw.lognormvariate(4, 0.7)))
                    text = " ".join(draw.choices(("red", "green", "blue"), k=count))
                    print(json.dumps({"text": text}), file=file)
        more = (f"data.source={path}", f"data.dir={self.work / 'documents'}")
        return [*self.gpt2(), *more, f"data.document_mask={str(masked).lower()}"]

    def model(self) -> Path:
        """A directory with GPT-2 of transformers."""
        folder = self.work / "gpt2"
        if not folder.is_dir():
            self.run("model", [sys.executable, __file__, "--model", folder], 60)
        return folder

    def hf(self) -> list[str]:
        """GPT-2 of transformers, with random weights, on the same tokens."""
        more = ["model.kind=hf", f"model.name={self.model()}", f"model.context={CONTEXT}"]
        return ["continue-pretraining", *self.gpt2()[1:3], "data.max_tokens=0", *more]


COMMON = [
    "data.tokenizer=byte",
    "data.val_shards=0",
    "data.val_fraction=0.01",
    "data.streaming=false",
    "data.order=shuffled",
    f"train.steps={STEPS}",
    f"train.precision={'bf16' if CUDA else 'fp32'}",
    "train.tf32=true",
    "optim.schedule.warmup=2",
    "eval.suites=[loss]",
    "telemetry.every=2",
    f"parallel.device={DEVICE}",
    *QUIET,
]
# A rehearsal may have a device whose kernels do nothing, which leaves any bits in a gradient.
COMMON += ["train.on_nonfinite=skip"] if SMALL and CUDA else []


def kill(processes: Sequence[psutil.Process]) -> None:
    """End processes and all that they started, also in sessions of their own."""
    with suppress(psutil.NoSuchProcess):
        processes = [one for p in processes for one in (p, *p.children(recursive=True))]
    for end in ("terminate", "kill"):  # a compiler that is killed leaves half a file in the cache
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                getattr(process, end)()
        processes = psutil.wait_procs(processes, timeout=3)[1]


def memory_of(run: Run) -> str:
    predicted = next(row.memory.total for row in plan(run).memory if row.chosen)
    peak = run.summary["peak_mem_mb"] * 1e6
    off = f" ({100 * (predicted / peak - 1):+.1f} %)" if CUDA else " (of the whole process)"
    return f"plan {predicted / 1e9:.2f} GB, peak {peak / 1e9:.2f} GB{off}"


def speed_of(run: Run) -> str:
    lines = run.lines("train")
    lines = [line for line in lines if line["step"] > WARM] or lines
    speed, ms = (statistics.median(line[k] for line in lines) for k in ("tokens_per_s", "step_ms"))
    mfu = lines[-1].get("mfu")
    first = next(event for event in run.events if event["event"] == "first_step")
    parts = [f"{speed:,.0f} tokens/s", f"{ms:.1f} ms"] + ([f"MFU {100 * mfu:.1f} %"] if mfu else [])
    start = f"start {first['startup_s']:.0f} s, first step {first['first_step_s']:.0f} s"
    return ", ".join([*parts, memory_of(run), start])


def saves_of(run: Run) -> str:
    return "; ".join(
        f"step {e['step']}: {e['bytes'] / 1e9:.2f} GB, blocks {1e3 * e['blocked_s']:.0f} ms, "
        f"writes in {e['write_s']:.2f} s"
        for e in run.events
        if e["event"] == "checkpoint"
    )


def tests(bench: Bench) -> None:
    """All tests but those of timing, on six processes; if SMALL or on a CPU one or two files."""
    some = ["step", "memory"] if CUDA else ["model"]
    what = ["-n", "6", "tests/gpu", f"--ignore={TIMED_TESTS}"]
    if SMALL or not CUDA:
        what = [f"tests/gpu/test_{name}_gpu.py" for name in some]
    add_tests(bench, "tests", [*PYTEST, *what], 185)


def timing(bench: Bench) -> None:
    """The tests of timing, alone on the device."""
    add_tests(bench, "timing", [*PYTEST, TIMED_TESTS], 70)


def add_tests(bench: Bench, part: str, command: Sequence[str], limit: float) -> None:
    os.environ["WINDLASS_TEST_DEVICE"] = DEVICE
    text, problem = bench.run(part, command, limit, log=bench.out / f"{part}.txt")
    last = re.findall(r"^=+ (.*(?:passed|failed|skipped|error).*?) =+$", text, re.MULTILINE)
    counts = last[-1] if last else f"{problem}, {text.count(' PASSED ')} passed"
    failed = dict.fromkeys(re.findall(r"(?:FAILED|ERROR) (tests/\S+)", text))
    bench.add(part, "pytest", "; ".join([counts, *failed]), command)


def warm(bench: Bench) -> None:
    """Fill the compile caches that `speed` uses, three processes side by side."""

    def windlass(precision: str) -> None:
        more = (COMPILED, f"train.precision={precision}", "train.steps=3")
        bench.train("warm", precision, bench.gpt2(), *more, limit=160)

    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(windlass, one) for one in ("bf16", "float8") if CUDA or one == "bf16"]
        jobs += [pool.submit(nanogpt, bench, "warm", True, 3, 160)] if NANOGPT else []
        for job in jobs:
            job.result()


def memory(bench: Bench) -> None:
    """The peak of the allocator beside what `plan` says, for every strategy on one device."""
    strategies = ("single", "ddp", "shard_optim", "shard_grad_op", "full_shard")
    cases = {name: [f"parallel.strategy={name}"] for name in strategies}
    cases["full_shard, offload"] = [*cases["full_shard"], "parallel.offload=true"]
    for how in ("selective", "full"):
        cases[f"single, {how} checkpointing"] = [f"parallel.activation_checkpointing={how}"]
    cases["single, dropout"] = ["model.dropout=0.1"]
    cases["single, muon"] = ["optim.kind=muon"]
    micro = MICRO // 2
    for what, settings in cases.items():
        more = (EAGER, "train.steps=6", *settings)
        bench.train("memory", what, bench.gpt2(), *more, result=memory_of, micro=micro, limit=60)


def verify(bench: Bench) -> None:
    """`windlass verify`, three proofs at a time, with kills at random moments; if SMALL the proofs
    that take seconds.
    """

    def prove(name: str) -> None:
        command = [*WINDLASS, "verify", "--json", "--only", name, "--kills", "1" if SMALL else "5"]
        command += [] if CUDA else ["--world", "1", "quickstart", "parallel.device=cpu"]
        text, problem = bench.run(f"verify-{name}", command, 185)
        if start := text.find("{") + 1:
            (proof,) = json.JSONDecoder().raw_decode(text[start - 1 :])[0]["proofs"]
            word = {True: "proved", False: "FAILED", None: "not tried"}[proof["passed"]]
            problem = f"{word} ({proof['seconds']:.0f} s): {proof['measured']}"
        bench.add("verify", name, problem, command)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(prove, ("kills", "export") if SMALL else PROOFS))


def versions(bench: Bench) -> None:
    """The machine, the packages and how fast each attention back-end is."""
    text, problem = bench.run("versions", [sys.executable, __file__, "--versions"], 40)
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("[")]
    for what, result in rows + [["versions", problem]] * bool(problem):
        bench.add("versions", what, result)


def print_versions() -> None:
    """In a process of its own: a JSON list on each line, what and how much."""
    import platform

    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def show(what: str, *facts: object) -> None:
        print(json.dumps([what, ", ".join(map(str, facts))]), flush=True)

    git = ["git", "-C", str(TOP), "describe", "--always", "--dirty"]
    found = shutil.which("git") and subprocess.run(git, capture_output=True, text=True)
    commit = found.stdout.strip() if found else ""
    show("Windlass", commit or "not a checkout")
    python = f"Python {platform.python_version()}"
    show("host", f"{os.cpu_count()} logical cores", python, platform.platform())
    cudnn = f"cuDNN {torch.backends.cudnn.version()}"
    show("torch", torch.__version__, f"CUDA {torch.version.cuda}", cudnn)
    if CUDA:
        about = torch.cuda.get_device_properties(0)
        memory, nccl = f"{about.total_memory / 2**30:.1f} GiB", torch.cuda.nccl.version()
        show("device", about.name, memory, f"sm_{about.major}{about.minor}", f"NCCL {nccl}")
    size, dtype = (MICRO // 2, HEADS, CONTEXT, WIDTH // HEADS), torch.bfloat16
    q, k, v = torch.randn(3, *size, device=DEVICE, dtype=dtype).requires_grad_()
    chosen = SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True)).name
    show("attention, torch's choice", chosen)
    for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
        times = []
        try:
            for _ in range(10):
                began = time.perf_counter()
                with sdpa_kernel(getattr(SDPBackend, name)):
                    torch.nn.functional.scaled_dot_product_attention(
                        q, k, v, is_causal=True
                    ).sum().backward()
                if CUDA:
                    torch.cuda.synchronize()
                times.append(1e3 * (time.perf_counter() - began))
        except RuntimeError as error:
            show(f"attention, {name}", f"not available: {str(error).splitlines()[0]}")
            continue
        both = f"{statistics.median(times[2:]):.2f} ms forward and backward"
        show(f"attention, {name}", both, f"the first {times[0]:.0f} ms", size, dtype)


def speed(bench: Bench) -> None:
    """Tokens a second of the same network beside nanoGPT's train.py and transformers' Trainer."""
    for what, how in (("compiled", COMPILED), ("eager", EAGER)):
        bench.train("speed", f"Windlass {what}", bench.gpt2(), how)
        if NANOGPT:
            nanogpt(bench, "speed", what == "compiled", STEPS, 90)
    if CUDA:
        float8 = "train.precision=float8"
        bench.train("speed", "Windlass compiled, float8", bench.gpt2(), COMPILED, float8)
    command = [sys.executable, DRIVERS / "hf_trainer.py", bench.work / "tokens/train.bin"]
    command += [str(CONTEXT), str(MICRO), str(STEPS), bench.model()]
    text, problem = bench.run("trainer", command, 80, cwd=bench.work)
    if not problem:
        found = json.loads(text[text.rindex('{"step_s') :])
        ms = 1e3 * statistics.median(found["step_s"][WARM:])
        peak = f", peak {found['peak_gb']:.2f} GB" if CUDA else ""
        problem = f"{1e3 * MICRO * CONTEXT / ms:,.0f} tokens/s, {ms:.1f} ms{peak}"
    bench.add("speed", "Trainer of transformers, GPT-2", problem, command)
    bench.train("speed", "Windlass eager, GPT-2 of transformers", bench.hf(), EAGER)
    for masked in (True, False):
        what = f"Windlass eager, documents{'' if masked else ' not'} masked"
        bench.train("speed", what, bench.documents(masked), EAGER)


def nanogpt(bench: Bench, part: str, compiled: bool, steps: int, limit: float) -> None:
    shape = Shape(LAYERS, HEADS, WIDTH, CONTEXT, MICRO, steps, min(WARM, 1 + steps // 4), window=1)
    more = [f"--compile={compiled}", f"--device={DEVICE}", f"--out_dir={bench.work / 'nanogpt'}"]
    more += [f"--dtype={'bfloat16' if CUDA else 'float32'}"]
    bench.gpt2()
    words = [sys.executable, "train.py", *nanogpt_words(shape, bench.work / "tokens", *more)]
    text, problem = bench.run(f"{part}-nanogpt-{compiled}", words, limit, cwd=Path(NANOGPT))
    if not problem:
        seconds = nanogpt_seconds(text)
        ms = 1e3 * statistics.median(seconds[shape.warm :])
        problem = f"{shape.speed_of_steps(seconds):,.0f} tokens/s, {ms:.1f} ms"
    bench.add(part, f"nanoGPT {'compiled' if compiled else 'eager'}", problem, words)


def saves(bench: Bench) -> None:
    """How long a save blocks the step; no save waits for the one before."""
    every, steps = (6, 20) if SMALL else (50, 160)
    for what in ("background", "foreground"):
        background = f"checkpoint.background={str(what == 'background').lower()}"
        more = (f"checkpoint.every={every}", "checkpoint.keep_last=1", f"train.steps={steps}")
        half = MICRO // 2
        settings = (EAGER, background, *more)
        bench.train("saves", what, bench.gpt2(), *settings, result=saves_of, micro=half, limit=60)


def profile(bench: Bench, kinds: Sequence[str] = ("eager", "compiled")) -> None:
    """The operators and kernels of three steps, by time: DIR/profile-*.txt."""
    for kind in kinds:

        def totals(run: Run, kind: str = kind) -> str:
            table = next((run.path / "profile").glob("*.txt")).read_text()
            (bench.out / f"profile-{kind}.txt").write_text(table)
            return "; ".join(re.findall("^Self .*", table, re.MULTILINE))

        steps = (f"telemetry.profile={WARM}:3", f"train.steps={WARM + 3}")
        how = EAGER if kind == "eager" else COMPILED
        bench.train("profile", kind, bench.gpt2(), how, *steps, result=totals, limit=45)


def more(bench: Bench) -> None:
    """Other shapes and strategies."""
    llama = ("position=rope", "norm=rmsnorm", "activation=swiglu", "tie_head=false")
    relu2 = ("position=rope", "norm=rmsnorm", "activation=relu2", "qk_norm=true")
    long, micro = ("model.context=8192", 4) if not SMALL else ("model.context=128", 2)
    bench.train("more", long, bench.gpt2(), EAGER, long, micro=micro)
    cases = {
        "deterministic": ("train.deterministic=true",),
        "llama": (EAGER, *(f"model.{one}" for one in llama)),
        "relu2, qk_norm": (EAGER, *(f"model.{one}" for one in relu2)),
        "muon": (EAGER, "optim.kind=muon"),
        "full_shard": (EAGER, "parallel.strategy=full_shard"),
    }
    for what, settings in cases.items():
        bench.train("more", what, bench.gpt2(), *settings)
    bench.train("more", "LoRA on GPT-2 of transformers", bench.hf(), EAGER, "model.lora.rank=8")


def make_model(folder: str) -> None:
    """In a process of its own: GPT-2 of transformers with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "n_positions": CONTEXT}
    sizes["vocab_size"] = VOCAB
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout)).save_pretrained(folder)


BESIDE = {"tests": tests, "warm": warm, "memory": memory, "verify": verify}
ALONE = {"versions": versions, "speed": speed, "timing": timing}
ALONE |= {"saves": saves, "profile": profile, "more": more}
PARTS = BESIDE | ALONE


def main() -> None:
    """Run the parts that are named, or all: first what is not timed, side by side."""
    if sys.argv[1] == "--versions":
        return print_versions()
    if sys.argv[1] == "--model":
        return make_model(sys.argv[2])
    out, chosen = Path(sys.argv[1]).absolute(), sys.argv[2:] or list(PARTS)
    if unknown := set(chosen) - set(PARTS):
        sys.exit(f"no part {', '.join(sorted(unknown))}: there are {' '.join(PARTS)}")
    if NANOGPT and not (Path(NANOGPT) / "train.py").is_file():
        sys.exit(f"NANOGPT={NANOGPT}: there is no train.py; name a checkout of nanoGPT")
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor() as pool:
        bench = Bench(out, Path(work))
        try:
            bench.end = min(bench.end, time.monotonic() + BESIDE_SECONDS)
            jobs = [pool.submit(bench.part, part) for part in BESIDE if part in chosen]
            for job in jobs:
                job.result()
            bench.end = BEGAN + SECONDS
            for part in ALONE:
                if part in chosen:
                    bench.part(part)
        finally:
            bench.end = 0.0
            kill(psutil.Process().children())
            bench.keep_logs()
            bench.say("end")


if __name__ == "__main__":
    main()
