"""What training computes, bit for bit, so that two versions of the code can be compared.

    PYTHONPATH=<checkout>/src python benchmarks/pins.py record OUT.json [--only name,name]
    PYTHONPATH=<checkout>/src python benchmarks/pins.py compare OLD.json [--only name,name]

`record` trains small recipes on the CPU with the windlass of PYTHONPATH, one thread a rank, and
writes losses, gradient norms, learning rates, evaluation scores, samples, the SHA-256 of every
tensor, predictions, batch indices and plans. `compare` does the same again and exits with 1 on any
difference. All inputs are made here from a seed, except the SQuAD questions, which are read from
$WINDLASS_TEST_DATA or ../shared/data. Both sides need the same versions of the libraries.

Only the command line and the files of a run are used; what is imported from windlass is in
`batch_indices`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from array import array
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[1]
TEST_DATA = Path(os.environ.get("WINDLASS_TEST_DATA", TOP.parent / "shared" / "data"))
UNPINNED = set(
    "time seconds attempt kind runtime_s samples_per_s items_per_s questions_per_s "
    "full_loss full_bits_per_byte full_tokens full_samples items_hash label_tokens".split()
)
"""Fields of `eval` lines that are times, or that 9e460e2 lacks, whose record is compared."""

BASE = """
model.layers=2 model.heads=4 model.width=32 model.context=32 data.source=corpus.txt data.workers=1
optim.lr=3e-3 train.steps=50 train.global_batch=8 train.micro_batch=4 train.threads=1
parallel.device=cpu telemetry.every=1 eval.every=25 eval.batches=4 eval.sample_every=25
eval.sample_tokens=32 eval.prompt=ba checkpoint.every=0
"""
SHORT = {
    "NEW": "model.position=rope model.norm=rmsnorm model.kv_heads=2 model.tie_head=false "
    "model.attn_bias=false model.ff_bias=false",
    "LLAMA": "model.kind=hf model.context=96 model.name=llama data.tokenizer=hf:llama "
    "optim.schedule.warmup=0 train.grad_clip=5",
    "GPT2": "model.kind=hf model.context=96 model.name=gpt2 data.tokenizer=hf:gpt2 "
    "optim.schedule.warmup=0 train.grad_clip=5",
    "SQUAD": "data.format=squad data.source=squad:squad.json data.eval_source=squad:held.json "
    'eval.suites=["loss","squad"] train.steps=100 eval.every=50 optim.weight_decay=0',
    "LORA": "model.lora.rank=4 model.lora.dropout=0.1 optim.lr=1e-2 "
    'model.lora.targets=["q_proj","v_proj","down_proj"]',
    "BPE": "data.tokenizer=bpe data.tokenizer_vocab=400",
    "SHARDED": "parallel.strategy=full_shard",
    "RELU2": "model.activation=relu2",
}
"""Words of RECIPES that stand for several settings."""
RECIPES = """
single               |                                                          | 1 | export eval sample
ddp                  | parallel.strategy=ddp                                    | 2 |
full_shard           | SHARDED                                                  | 2 | export
shard_grad_op        | parallel.strategy=shard_grad_op                          | 2 |
hybrid_shard         | parallel.strategy=hybrid_shard parallel.shard_size=1     | 2 |
accumulation         | train.micro_batch=2                                      | 1 |
dropout              | model.dropout=0.1                                        | 1 |
old_parts            | model.activation=gelu_tanh model.ff_width=96 data.order=sequential | 1 |
new_parts            | NEW RELU2 model.qk_norm=true model.zero_init_output=true model.logit_cap=15 | 1 | sample
no_positions         | model.position=none model.final_norm=false model.activation=relu model.norm_bias=false | 1 |
llama_parts          | NEW model.activation=swiglu model.vocab=320              | 1 | export
muon                 | NEW RELU2 optim.kind=muon                                | 1 |
muon_full_shard      | optim.kind=muon SHARDED                                  | 2 |
wsd                  | optim.schedule.kind=wsd optim.schedule.warmup=5 optim.schedule.decay=0.3 optim.schedule.final=0.1 | 1 |
linear_char          | data.tokenizer=char optim.schedule.kind=linear optim.schedule.warmup=0.1 optim.decay_on=all | 1 |
grad_clip            | train.grad_clip=0.05 optim.schedule.kind=constant        | 1 |
bf16                 | train.precision=bf16 parallel.activation_checkpointing=full | 1 |
selective_fp64       | train.precision=fp64 parallel.activation_checkpointing=selective train.steps=20 | 1 |
epochs               | data.source=little.txt train.steps="3_epochs" eval.every="1_epoch" | 1 |
shards_shuffled      | data.order=shards-shuffled data.shard_tokens=1024 data.source=documents.jsonl train.steps=120 | 1 |
foreign_shards       | data.source=shards:tokens_*.bin data.order=shards-shuffled train.steps=120 eval.sample_every=0 | 1 |
bpe                  | BPE                                                      | 1 | export
resume               | model.dropout=0.1                                        | 1 | stop
reshard              | model.dropout=0.1 SHARDED                                | 2 | stop
hf_llama             | LLAMA                                                    | 1 | export sample
hf_gpt2              | GPT2                                                     | 1 | export
hf_from_scratch      | GPT2 model.from_scratch=true                             | 1 |
hf_full_shard        | LLAMA SHARDED                                            | 2 |
lora                 | LLAMA LORA                                               | 1 | export
squad                | LLAMA SQUAD                                              | 1 | squad
squad_gpt            | SQUAD model.context=256 BPE train.steps=50               | 2 |
chat                 | LLAMA data.format=chat data.source=chat.jsonl            | 1 |
"""
"""Name; settings that differ from BASE, with `_` for a space; ranks; what else is pinned.

export: the exported tensors; eval, squad, sample: what these verbs print; stop: stop at step 20,
and go on with one rank.
"""
ROWS = {
    name: (settings, int(world), extra.split())
    for name, settings, world, extra in (
        [cell.strip() for cell in line.split("|")] for line in RECIPES.strip().split("\n")
    )
}
PRESETS = "bloom-560m-squad c4-29m c4-30m gpt-squad gpt2-124m quickstart shakespeare-char-cpu"
PRESETS += " shakespeare-char-fast shakespeare-char"
PLANNED = ("model", "flops", "memory", "recommendation", "disk", "length", "precision")
"""What is pinned of `plan --json`: all that is arithmetic from the recipe."""


def text(seed: int, words: int) -> str:
    """Sentences of made-up words, rare and frequent ones as in a language."""
    rng = random.Random(seed)
    syllables = ["ba", "do", "ri", "mel", "tos", "una", "qi", "é"]
    lexicon = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(300)]
    chosen = rng.choices(lexicon, weights=[1 / (i + 1) for i in range(300)], k=words)
    return "".join(word + (".\n" if rng.random() < 0.1 else " ") for word in chosen)


def make_inputs(work: Path) -> bool:
    """Corpora, tiny models and their tokenizer; False if there is no SQuAD file."""
    (work / "base.toml").write_text("")
    (work / "corpus.txt").write_text(text(1, 12_000))
    (work / "little.txt").write_text(text(2, 800))
    documents = [text(10 + i, 1 + 7 * i % 90) for i in range(150)]
    (work / "documents.jsonl").write_text(json_lines({"text": one} for one in documents))
    for number, name in enumerate(("train_0", "train_1", "val_0")):  # as nanoGPT's
        ids = array("H", list(text(90 + number, 700).encode()))
        (work / f"tokens_{name}.bin").write_bytes(ids.tobytes())
    roles = [("system", 500), ("user", 600), ("assistant", 700), ("user", 800), ("assistant", 900)]
    talks = []
    for i in range(60):
        turns = roles[i % 2 : 3 + 2 * (i % 3 == 0)]
        talks.append([{"role": r, "content": text(seed + i, 3 + i % 9)} for r, seed in turns])
    (work / "chat.jsonl").write_text(json_lines({"messages": talk} for talk in talks))
    source, questions = TEST_DATA / "squad" / "dev-v1.1.json", list[str]()
    if source.is_file():
        articles = json.loads(source.read_text(encoding="utf-8"))["data"]
        parts = [p for article in articles for p in article["paragraphs"] if len(p["qas"]) >= 2]
        parts.sort(key=lambda part: len(part["context"]))  # equal lengths stay in file order
        few = [{"context": p["context"], "qas": p["qas"][:2]} for p in parts[:6]]
        for name, own in (("held.json", few[:2]), ("squad.json", few[2:])):
            tree = {"version": "1.1", "data": [{"title": name, "paragraphs": own}]}
            (work / name).write_text(json.dumps(tree))
        questions = [t for p in few for t in (p["context"], *(q["question"] for q in p["qas"]))]
    save_models(work, [*documents, *questions])
    return source.is_file()


def json_lines(items: Any) -> str:
    return "".join(json.dumps(item) + "\n" for item in items)


def save_models(work: Path, texts: list[str]) -> None:
    """Tiny models of `transformers`, as directories with a tokenizer of these texts."""
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    ids = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    llama = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        **ids,
    )
    gpt2 = GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=256, **ids)
    card = {"tokenizer_class": "PreTrainedTokenizerFast"}
    card |= {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    for name, config in {"llama": llama, "gpt2": gpt2}.items():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                # biases and norms too, so that none can be forgotten
                parameter.add_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(work / name)
        tokenizer.save(str(work / name / "tokenizer.json"))
        (work / name / "tokenizer_config.json").write_text(json.dumps(card))


def windlass(work: Path, *words: str, codes: tuple[int, ...] = (0,)) -> str:
    """What a verb prints, which has to end with one of these exit codes."""
    outside = ("WINDLASS_", "MASTER_", "SLURM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
    places = [Path(p).resolve() for p in os.environ.get("PYTHONPATH", "").split(":") if p]
    kept |= {"PYTHONPATH": ":".join(map(str, places)), "OMP_NUM_THREADS": "1"}
    kept |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "120", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "windlass", *words]
    done = subprocess.run(command, cwd=work, env=kept, capture_output=True, text=True, timeout=400)
    if done.returncode not in codes:
        last = " | ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-4:])
        raise RuntimeError(f"windlass {words[0]} exited with {done.returncode}: {last}")
    return done.stdout if done.returncode == codes[0] else ""


def tensors(folder: Path) -> dict[str, str]:
    """SHA-256 of type, shape and bytes of each tensor in the safetensors files of a directory."""
    import torch
    from safetensors import safe_open

    hashes: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                tensor = file.get_tensor(name).contiguous()
                kind = f"{tensor.dtype} {list(tensor.shape)}".encode()
                content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                hashes[f"{path.name}:{name}"] = hashlib.sha256(kind + content).hexdigest()
    if not hashes:
        raise RuntimeError(f"{folder} has no tensor in a safetensors file")
    return hashes


def words_of(name: str) -> list[str]:
    """A recipe's words on the command line."""
    words = [SHORT.get(word, word) for word in ROWS[name][0].split()]
    settings = dict(word.split("=", 1) for word in f"{BASE} {' '.join(words)}".split())
    if settings.get("model.kind") == "hf":  # whose shape is in its configuration
        for key in ("model.layers", "model.heads", "model.width"):
            del settings[key]
    for key in ("train.steps", "eval.every"):
        settings[key] = settings[key].replace("_", " ")
    settings |= {"run.dir": f"{name}/run", "data.dir": f"{name}/data"}
    return ["base.toml", *(f"{key}={value}" for key, value in settings.items())]


def train(work: Path, name: str) -> dict[str, Any]:
    """Train a recipe, and what is pinned of it."""
    _, world, extra = ROWS[name]
    run, ranks = f"{name}/run", ["--world", str(world)] if world > 1 else []
    if "stop" in extra:
        windlass(work, "train", *words_of(name), *ranks, "--stop-at", "20", codes=(0, 75))
        ranks = []
    windlass(work, "train", *words_of(name), *ranks)
    ledger = (work / run / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in ledger.splitlines()]

    def pinned(line: dict[str, Any], fields: str) -> dict[str, Any]:
        return {field: line.get(field) for field in fields.split()}

    step = "loss grad_norm lr tokens samples epoch"
    start = "steps parameters samples_per_epoch"
    end = "final_loss best_eval_loss best_score best_step"
    evaluations = [line for line in lines if line["kind"] == "eval"]
    texts = [line for line in lines if line["kind"] == "sample"]
    checkpoint = max((p.parent for p in (work / run).rglob("*.safetensors")), key=lambda p: p.name)
    pins: dict[str, Any] = {
        "train": {f"step {x['step']}": pinned(x, step) for x in lines if x["kind"] == "train"},
        "eval": [{k: v for k, v in x.items() if k not in UNPINNED} for x in evaluations],
        "sample": [[line["step"], line["index"], line["text"]] for line in texts],
        "started": [pinned(line, start) for line in lines if line.get("event") == "started"],
        "summary": [pinned(line, end) for line in lines if line["kind"] == "summary"],
        "checkpoint tensors": tensors(checkpoint),
    }
    if "export" in extra:
        windlass(work, "export", run, f"{name}/hf")
        pins["exported tensors"] = tensors(work / name / "hf")
    if "sample" in extra:
        options = ["--n", "2", "--max-tokens", "24", "--seed", "5", "--top-k", "20"]
        pins["sample verb"] = windlass(work, "sample", run, "--prompt", "ba do", *options)
    if "eval" in extra or "squad" in extra:
        suites = "loss,squad" if "squad" in extra else "loss"
        options = ["--suite", suites, "--out", f"{name}/eval", "--json"]
        scores = json.loads(windlass(work, "eval", run, *options))["results"]
        pins["eval verb"] = {
            suite: {k: v for k, v in values.items() if not k.endswith("_s")}
            for suite, values in scores.items()
        }
    for path in sorted((work / name).rglob("*predictions*.json")):
        key = f"predictions {path.parent.name}/{path.name}"
        pins[key] = json.loads(path.read_text(encoding="utf-8"))
    shutil.rmtree(work / name)
    return pins


def presets(work: Path, name: str) -> dict[str, Any]:
    """Each preset with every setting, and the arithmetic of its plan on 1 and 8 A100."""
    pins: dict[str, Any] = {}
    for preset in PRESETS.split():
        pins[f"recipe {preset}"] = tomllib.loads(windlass(work, "recipe", preset))
        for world in ("1", "8"):
            options = ["--world", world, "--device", "A100-80GB", "--json"]
            # BLOOM's size needs its files from the Hub
            shown = windlass(work, "plan", preset, *options, codes=(0, 2))
            plan = json.loads(shown or "{}")
            kept = {key: plan[key] for key in PLANNED if key in plan}
            pins[f"plan {preset} {world}"] = {"exit": 0 if shown else 2} | kept
    return pins


def batch_indices(work: Path, name: str) -> dict[str, Any]:
    """The samples of each step and their places in the corpus. The one function that imports
    windlass: adapt it here.
    """
    import numpy as np

    from windlass.data.order import sample_indices

    shards, pins = [40, 0, 7, 90, 33, 1, 80], {}
    for kind in ("shuffled", "sequential", "shards-shuffled"):
        for seed, epoch in ((0, 0), (1337, 0), (1337, 1), (1337, 2), (2**62, 5)):
            numbers = 251 * epoch + np.arange(251)
            indices = sample_indices(numbers, 251, kind, seed, shards)
            pins[f"{kind} seed {seed} epoch {epoch}"] = indices.tolist()
    for n in (1, 2, 1000, 10**9):
        numbers = 3 * n + np.arange(min(n, 20))
        pins[f"shuffled of {n}"] = sample_indices(numbers, n, "shuffled", 7).tolist()
    return pins


TASKS = dict.fromkeys(ROWS, train) | {"presets": presets, "order": batch_indices}


def record(only: list[str], jobs: int) -> dict[str, Any]:
    """Run the recipes, `jobs` at a time, the slow ones first."""
    names = [name for name in TASKS if not only or name in only]
    work, pins = Path(tempfile.mkdtemp(prefix="pins-")), dict[str, Any]()

    def one(name: str) -> None:
        start = time.perf_counter()
        try:
            pins[name] = TASKS[name](work, name)
        except Exception as error:  # the other recipes are still worth running
            pins[name] = {"failed": f"{type(error).__name__}: {error}"}
        failed = pins[name].get("failed", "")
        print(f"{name:19} {time.perf_counter() - start:5.1f} s  {failed}", flush=True)

    try:
        if not make_inputs(work):
            print(f"no {TEST_DATA}/squad/dev-v1.1.json: set WINDLASS_TEST_DATA", flush=True)
            names = [name for name in names if not name.startswith("squad")]
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, sorted(names, key=lambda n: (n != "presets", "squad" not in n))))
    finally:
        shutil.rmtree(work)
    return json.loads(json.dumps({name: pins[name] for name in names}))  # without tuples


def leaves(tree: Any, path: str = "") -> dict[str, str]:
    """Every value by its path, as text: exact for floats, and NaN equals NaN."""
    items = list(enumerate(tree)) if isinstance(tree, list) else []
    if isinstance(tree, dict):
        items = list(tree.items())
    if not items:  # a value, or an empty list or dictionary
        return {path: repr(tree)}
    found: dict[str, str] = {}
    for key, child in items:
        found |= leaves(child, f"{path} / {key}" if path else str(key))
    return found


def difference(what: str, old: Any, new: Any) -> tuple[bool, str]:
    """Whether two records are equal, and the first difference in words."""
    a, b = leaves(old), leaves(new)
    if a == b:
        return True, f"equal ({len(a)} values)"
    same_values = Counter(a.values()) == Counter(b.values())
    if what == "checkpoint tensors" and a.keys() != b.keys() and same_values:
        renamed = len(a.keys() - b.keys())
        return True, f"equal ({len(a)} values), {renamed} tensors have another name"
    changed = [key for key in a | b if a.get(key) != b.get(key)]
    first = changed[0]
    shown = f"{a.get(first, 'nothing')[:150]} -> {b.get(first, 'nothing')[:150]}"
    return False, f"{len(changed)} of {len(a)} values differ, first {first or 'the whole'}: {shown}"


def compare(old: dict[str, Any], new: dict[str, Any]) -> int:
    """Print the table; the number of differences."""
    bad = 0
    for name in old | new:
        if name not in old or name not in new:
            bad += 1
            print(f"{name:19} {'is not in the old record' if name in new else 'was not run'}")
            continue
        for what in old[name] | new[name]:
            equal, said = difference(what, old[name].get(what), new[name].get(what))
            bad += not equal
            print(f"{name:19} {what:28} {'' if equal else 'DIFFERS: '}{said}")
    return bad


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=["record", "compare"])
    parser.add_argument("file", type=Path, help="the record to write, or to compare with")
    parser.add_argument("--only", default="", help="recipes to run, as single,ddp")
    parser.add_argument("--jobs", type=int, default=2, help="recipes at a time")
    parser.add_argument("--save", type=Path, help="with compare: also write the new record")
    args = parser.parse_args()
    only = [name for name in args.only.split(",") if name]
    if unknown := set(only) - set(TASKS):
        sys.exit(f"no recipe {', '.join(sorted(unknown))}; there are {', '.join(TASKS)}")
    import torch
    import transformers

    import windlass as package

    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    versions["transformers"] = transformers.__version__
    print(f"windlass of {Path(package.__file__).parent}, {versions}", flush=True)
    start = time.perf_counter()
    new = record(only, args.jobs)
    print(f"{len(new)} recipes in {time.perf_counter() - start:.0f} s", flush=True)
    out = args.file if args.verb == "record" else args.save
    if out:
        out.write_text(json.dumps({"versions": versions, "pins": new}, indent=1) + "\n")
    if args.verb == "record":
        failed = [name for name, pins in new.items() if "failed" in pins]
        sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
    old = json.loads(args.file.read_text())
    if old["versions"] != versions:
        print(f"WARNING: the old record is of other versions: {old['versions']}")
    expected = {name: pins for name, pins in old["pins"].items() if not only or name in only}
    bad = compare(expected, new)
    sys.exit(f"{bad} differences" if bad else 0)


if __name__ == "__main__":
    main()
