"""The parts of `benchmarks/gpu.sh`, which says how to call it. Each command runs in a process of
its own, under a time limit.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from peers import Shape, nanogpt_seconds, nanogpt_words

TOP = Path(__file__).parent.parent
DEVICE, SMALL = os.environ.get("DEVICE", "cuda"), bool(os.environ.get("SMALL"))
CUDA = DEVICE == "cuda"
NANOGPT = os.environ.get("NANOGPT", "")
DEADLINE = time.monotonic() + 60 * float(os.environ.get("MINUTES", "28"))
# Sequences in a micro-batch; layers, heads, width, context of GPT-2 small without biases, as
# nanoGPT's train.py has it.
MICRO_BATCHES = (2, 4) if SMALL else (16, 64)
LAYERS, HEADS, WIDTH, CONTEXT = (2, 2, 64, 64) if SMALL else (12, 12, 768, 1024)
STEPS, WARM = (12, 4) if SMALL else (40, 10)
PRECISION = "bf16" if CUDA else "fp32"


class Table:
    """The rows so far, kept in a file, so that a call that is cut off leaves what it has measured."""

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / "rows.json"
        self.rows = json.loads(self.path.read_text()) if self.path.is_file() else []

    def add(self, part: str, what: str, result: str, command: str = "") -> None:
        """Add a row, in place of an earlier one of the same name, and write the table."""
        print(f"{part} | {what} | {result}", flush=True)
        self.rows = [row for row in self.rows if row[:2] != [part, what]]
        self.rows.append([part, what, result, command])
        self.rows.sort(key=lambda row: list(PARTS).index(row[0]))
        self.path.write_text(json.dumps(self.rows, indent=1))
        cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in self.rows]
        lines = [
            f"| {part} | {what} | {result} | {command and f'`{command}`'} |"
            for part, what, result, command in cells
        ]
        head = "| part | what | result | command |\n|---|---|---|---|\n"
        (self.folder / "gpu.md").write_text(head + "\n".join(lines) + "\n")


def run(
    folder: Path, name: str, command: Sequence[str | Path], limit: float, cwd: Path | None = None
) -> tuple[str, str]:
    """Run a command; returns what it printed, also in `logs/NAME.txt`, and why it failed: empty if
    it did not.
    """
    left = DEADLINE - time.monotonic()
    if left < 20:
        return "", "not run: no time was left"
    log = folder / "logs" / f"{name}.txt"
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as file:
        words = [str(word) for word in command]
        process = subprocess.Popen(
            words, stdout=file, stderr=subprocess.STDOUT, cwd=cwd, start_new_session=True
        )
        try:
            code = process.wait(min(limit, left))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return log.read_text(), f"killed after {min(limit, left):.0f} s"
    text = log.read_text()
    memory = "OutOfMemoryError" in text or "memory ran out" in text
    return text, "" if code == 0 else "out of memory" if memory else f"exit code {code}: see {log}"


def shown(command: Sequence[str | Path]) -> str:
    """A command as a reader types it."""
    words = [str(word).replace(f"{TOP}/", "") for word in command]
    return shlex.join(
        ["windlass", *words[3:]] if words[1:3] == ["-m", "windlass"] else ["python", *words[1:]]
    )


def tokens(folder: Path) -> Path:
    """A folder with random tokens in nanoGPT's format: ids of bytes, 16 bits each."""
    import numpy as np

    data, rng = folder / "tokens", np.random.default_rng(0)
    data.mkdir(exist_ok=True)
    for name, count in (("train", 300_000 if SMALL else 20_000_000), ("val", 100_000)):
        if not (data / f"{name}.bin").is_file():
            rng.integers(0, 256, count, dtype=np.uint16).tofile(data / f"{name}.bin")
    return data


def gpt2(folder: Path, name: str, micro_batch: int, *settings: str) -> list[str]:
    """The words of `train`: GPT-2 small as nanoGPT's train.py has it, on random tokens, one
    micro-batch a step.
    """
    data = tokens(folder)
    return [
        "gpt2-124m",
        f"run.dir={folder / 'runs' / name}",
        f"data.source=shards:{data}/*.bin",
        "data.tokenizer=byte",
        "data.val_shards=0",
        "data.streaming=false",
        f"data.dir={folder / 'prepared'}",
        "data.order=shuffled",
        f"model.layers={LAYERS}",
        f"model.heads={HEADS}",
        f"model.width={WIDTH}",
        f"model.context={CONTEXT}",
        "model.attn_bias=false",
        "model.ff_bias=false",
        "model.norm_bias=false",
        f"train.steps={STEPS}",
        f"train.global_batch={micro_batch}",
        f"train.micro_batch={micro_batch}",
        f"train.precision={PRECISION}",
        "train.tf32=true",
        "optim.schedule.warmup=2",
        "eval.every=0",
        "eval.suites=[loss]",
        "eval.sample_every=0",
        "checkpoint.every=0",
        "checkpoint.keep_every=0",
        "telemetry.every=2",
        f"parallel.device={DEVICE}",
        *settings,
    ]


def train(
    folder: Path, name: str, micro_batch: int, *settings: str, limit: float
) -> tuple[Any, list[str], str]:
    """A run with `windlass train` (None if it failed), the command, and why it failed."""
    from windlass.run import Run

    command = [
        sys.executable,
        "-m",
        "windlass",
        "train",
        *gpt2(folder, name, micro_batch, *settings),
        "--fresh",
    ]
    _, problem = run(folder, name, command, limit)
    return None if problem else Run(folder / "runs" / name), command, problem


def versions(folder: Path, table: Table) -> None:
    """The machine, the packages and how fast each attention back-end is."""
    command = [sys.executable, __file__, "--versions"]
    text, problem = run(folder, "versions", command, 120)
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("[")]
    for what, result in rows or [["versions", problem]]:
        table.add("versions", what, result)


def print_versions() -> None:
    """In a process of its own: a JSON list on each line, what and how much."""
    import platform

    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def show(what: str, result: str) -> None:
        print(json.dumps([what, result]), flush=True)

    cpu = (
        f"{os.cpu_count()} logical cores, Python {platform.python_version()}, {platform.platform()}"
    )
    show("host", cpu)
    show(
        "torch",
        f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
    )
    commit = subprocess.run(
        ["git", "-C", TOP, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    show("Windlass", commit.stdout.strip() or "not a checkout")
    if CUDA:
        properties = torch.cuda.get_device_properties(0)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        memory = f"{properties.total_memory / 2**30:.1f} GiB"
        show(
            "device",
            f"{properties.name}, {memory}, sm_{properties.major}{properties.minor}, NCCL {nccl}",
        )
    batch, dtype = MICRO_BATCHES[0], torch.bfloat16 if CUDA else torch.float32
    q, k, v = (
        torch.randn(
            batch, HEADS, CONTEXT, WIDTH // HEADS, device=DEVICE, dtype=dtype, requires_grad=True
        )
        for _ in range(3)
    )
    show(
        "attention, torch's choice",
        SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True)).name,
    )
    for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
        times = []
        try:
            with sdpa_kernel(getattr(SDPBackend, name)):
                for _ in range(10):
                    began = time.perf_counter()
                    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                    out.backward(torch.ones_like(out))
                    if CUDA:
                        torch.cuda.synchronize()
                    times.append(1e3 * (time.perf_counter() - began))
            result = f"{statistics.median(times[2:]):.2f} ms forward and backward, the first {times[0]:.0f} ms"
        except RuntimeError as error:
            result = f"not available: {str(error).splitlines()[0]}"
        show(
            f"attention, {name}",
            f"{result} ({batch} x {HEADS} x {CONTEXT} x {WIDTH // HEADS}, {dtype})",
        )


def tests(folder: Path, table: Table) -> None:
    """`make test-gpu`; on a CPU one file of it."""
    command = ["make", "-C", str(TOP), "test-gpu", f"PYTHON={sys.executable}"]
    if not CUDA:
        os.environ["WINDLASS_TEST_DEVICE"] = "cpu"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu/test_model_gpu.py"]
    text, problem = run(folder, "tests", command, 620, cwd=TOP)
    last = re.findall(r"^=+ (.*(?:passed|failed|skipped|error).*?) =+$", text, re.MULTILINE)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    result = "; ".join(filter(None, [last[-1] if last else "", "" if last else problem, *failed]))
    table.add("tests", "make test-gpu", result, shown(command) if not CUDA else "make test-gpu")


def speed(folder: Path, table: Table) -> None:
    """Tokens a second of the same network, eager and compiled, beside nanoGPT's train.py."""
    data = tokens(folder)
    for compiled in (False, True):
        for micro in MICRO_BATCHES:
            what = f"{'compiled' if compiled else 'eager'}, micro-batch {micro}"
            made, command, problem = train(
                folder,
                f"speed-{compiled}-{micro}",
                micro,
                f"train.compile={str(compiled).lower()}",
                limit=150,
            )
            ours, result = 0.0, problem
            if made is not None:
                lines = [line for line in made.lines("train") if line["step"] > WARM]
                ours = statistics.median(line["tokens_per_s"] for line in lines)
                mfu = (
                    "" if lines[-1].get("mfu") is None else f", MFU {100 * lines[-1]['mfu']:.1f} %"
                )
                result = (
                    f"{ours:,.0f} tokens/s{mfu}, peak {made.summary['peak_mem_mb'] / 1e3:.2f} GB"
                )
            table.add("speed", f"Windlass, {what}", result, shown(command))
            if not NANOGPT:
                continue
            shape = Shape(LAYERS, HEADS, WIDTH, CONTEXT, micro, STEPS, WARM, window=1)
            more = [f"--compile={compiled}", f"--device={DEVICE}"]
            more += [f"--dtype={'bfloat16' if CUDA else 'float32'}"]
            more += [f"--out_dir={folder.resolve() / 'nanogpt'}"]
            command = [sys.executable, "train.py", *nanogpt_words(shape, data, *more)]
            text, problem = run(
                folder, f"nanogpt-{compiled}-{micro}", command, 150, cwd=Path(NANOGPT)
            )
            seconds, result = nanogpt_seconds(text), problem
            if seconds and not problem:
                theirs = shape.speed_of_steps(seconds)
                ratio = f"; Windlass / nanoGPT {ours / theirs:.2f}" if ours else ""
                result = f"{theirs:,.0f} tokens/s{ratio}"
            table.add("speed", f"nanoGPT, {what}", result, shown(command))


def profile(folder: Path, table: Table) -> None:
    """The kernels of three steps, by time."""
    words = gpt2(folder, "profile", MICRO_BATCHES[0])
    command = [sys.executable, __file__, "--profile", str(folder / "profile.txt"), *words]
    text, problem = run(folder, "profile", command, 120)
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("[")]
    for what, result in [*rows, *([["profile", problem]] if problem else [])]:
        table.add("profile", what, result)


def profile_training(report: Path, words: list[str]) -> None:
    """In a process of its own: train, and profile the steps after the first `WARM`."""
    import torch
    from torch.profiler import ProfilerActivity

    import windlass

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if CUDA else [])]
    profiler, times = torch.profiler.profile(activities=activities), dict[int, float]()

    def on_step(now: Any) -> None:
        if now.step in (WARM, WARM + 3):
            if CUDA:
                torch.cuda.synchronize()
            times[now.step] = time.perf_counter()
            profiler.start() if now.step == WARM else profiler.stop()
            times[WARM] = time.perf_counter() if now.step == WARM else times[WARM]

    recipe = windlass.Recipe.load(words[0], words[1:]).replace(["telemetry.every=1000"])
    windlass.train(recipe, on_step=on_step, fresh=True)
    key, events = (
        "self_device_time_total" if CUDA else "self_cpu_time_total",
        profiler.key_averages(),
    )
    report.write_text(events.table(sort_by=key, row_limit=60))
    wall = 1e6 * (times[WARM + 3] - times[WARM])
    # On CUDA a kernel has a row of its own; the rows of the operations that start it would count it
    # twice.
    on_device = [e for e in events if not CUDA or str(e.device_type).endswith("CUDA")]
    kernels = [e for e in on_device if not getattr(e, "is_user_annotation", False)]
    totals = sorted(((getattr(e, key), e.key) for e in kernels), reverse=True)
    busy = sum(us for us, _ in totals)
    print(
        json.dumps(
            [
                "three steps",
                f"{wall / 1e3:.1f} ms, of which the device computes {100 * busy / wall:.0f} %",
            ]
        )
    )
    for number, (us, name) in enumerate(totals[:8], 1):
        print(json.dumps([f"kernel {number}", f"{100 * us / busy:.1f} % {name[:90]}"]))


def memory(folder: Path, table: Table) -> None:
    """The peak of the allocator beside what `plan` says, for every strategy on one device."""
    from windlass import plan

    micro = MICRO_BATCHES[0]
    cases = {
        name: [f"parallel.strategy={name}"]
        for name in ("single", "ddp", "shard_optim", "shard_grad_op", "full_shard")
    }
    cases["full_shard, offload"] = ["parallel.strategy=full_shard", "parallel.offload=true"]
    for how in ("selective", "full"):
        cases[f"single, {how} checkpointing"] = [f"parallel.activation_checkpointing={how}"]
    cases["single, dropout"] = ["model.dropout=0.1"]
    cases["single, muon"] = ["optim.kind=muon"]
    for what, settings in cases.items():
        name = "memory-" + re.sub(r"\W+", "-", what)
        made, command, problem = train(folder, name, micro, *settings, "train.steps=6", limit=60)
        if made is not None:
            predicted = next(row.memory.total for row in plan(made).memory if row.chosen)
            peak = made.summary["peak_mem_mb"] * 1e6
            off = (
                f" ({100 * (predicted / peak - 1):+.1f} %)"
                if CUDA
                else " (of the process: not comparable)"
            )
            problem = f"plan {predicted / 1e9:.2f} GB, peak {peak / 1e9:.2f} GB{off}"
        table.add("memory", what, problem, shown(command))


def saves(folder: Path, table: Table) -> None:
    """How long a save blocks the step, and how long it takes in the background."""
    for background in (True, False):
        settings = (
            "checkpoint.every=10",
            "checkpoint.keep_last=1",
            f"checkpoint.background={str(background).lower()}",
        )
        name = f"saves-{background}"
        steps = f"train.steps={30 if SMALL else 60}"
        made, command, problem = train(folder, name, MICRO_BATCHES[0], *settings, steps, limit=120)
        if made is not None:
            events = [event for event in made.events if event["event"] == "checkpoint"]
            blocked, write = ([event[key] for event in events] for key in ("blocked_s", "write_s"))
            size = events[-1]["bytes"] / 1e9
            later = f"blocks {1e3 * statistics.median(blocked[1:]):.0f} ms (the first one {1e3 * blocked[0]:.0f})"
            problem = f"{size:.2f} GB: {later}, writes in {statistics.median(write):.2f} s"
        table.add(
            "saves", "in the background" if background else "waited for", problem, shown(command)
        )


def verify(folder: Path, table: Table) -> None:
    """`windlass verify`, with kills at random moments."""
    command = [
        sys.executable,
        "-m",
        "windlass",
        "verify",
        "--kills",
        "1" if SMALL else "5",
        "--json",
    ]
    command += ["--world", "1"] if SMALL else []
    command += [] if CUDA else ["quickstart", "parallel.device=cpu"]
    text, problem = run(folder, "verify", command, 420)
    start = text.find("{")
    try:
        proofs = json.JSONDecoder().raw_decode(text[start:])[0]["proofs"] if start >= 0 else []
    except ValueError:
        proofs = []
    for proof in proofs:
        word = {True: "proved", False: "FAILED", None: "not tried"}[proof["passed"]]
        result = f"{word} ({proof['seconds']:.0f} s): {proof['measured']}"
        table.add("verify", proof["claim"], result, shown(command))
    if not proofs:
        table.add("verify", "windlass verify", problem or "no proofs", shown(command))


PARTS: dict[str, Callable[[Path, Table], None]] = {
    "versions": versions,
    "tests": tests,
    "speed": speed,
    "profile": profile,
    "memory": memory,
    "saves": saves,
    "verify": verify,
}


def main() -> None:
    """Run the parts that are named, or all, and say where the table is."""
    if sys.argv[1] == "--versions":
        print_versions()
        return
    if sys.argv[1] == "--profile":
        profile_training(Path(sys.argv[2]), sys.argv[3:])
        return
    folder, chosen = Path(sys.argv[1]).absolute(), sys.argv[2:] or list(PARTS)
    if unknown := set(chosen) - set(PARTS):
        sys.exit(f"no part {', '.join(sorted(unknown))}: there are {' '.join(PARTS)}")
    if NANOGPT and not (Path(NANOGPT) / "train.py").is_file():
        sys.exit(f"NANOGPT={NANOGPT}: there is no train.py; name a checkout of nanoGPT")
    folder.mkdir(parents=True, exist_ok=True)
    table = Table(folder)
    for part, measure in PARTS.items():
        if part in chosen:
            began = time.monotonic()
            measure(folder, table)
            print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
    print(f"table: {folder / 'gpu.md'}")


if __name__ == "__main__":
    main()
