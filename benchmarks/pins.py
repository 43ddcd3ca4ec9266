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
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLACES = [
    ROOT.parent / "shared" / "data",
    ROOT.parents[1] / "shared" / "data",
]  # of a checkout, of a worktree below it
TEST_DATA = Path(
    os.environ.get("WINDLASS_TEST_DATA") or next((p for p in PLACES if p.is_dir()), PLACES[0])
)
CLOCK = {
    "time",
    "seconds",
    "attempt",
    "kind",
    "runtime_s",
    "samples_per_s",
    "items_per_s",
    "questions_per_s",
}
"""Fields of `eval` and `sample` lines that do not follow from the recipe alone."""
LATER = {
    "full_loss",
    "full_bits_per_byte",
    "full_tokens",
    "full_samples",
    "items_hash",
    "label_tokens",
}
"""Fields of `eval` lines that 9e460e2, with whose record the present code is compared, does not
have.
"""

BASE = """
model.layers=2 model.heads=4 model.width=32 model.context=32 data.source=corpus.txt data.workers=1 optim.lr=3e-3
train.steps=50 train.global_batch=8 train.micro_batch=4 train.threads=1 parallel.device=cpu telemetry.every=1
eval.every=25 eval.batches=4 eval.sample_every=25 eval.sample_tokens=32 eval.prompt=ba checkpoint.every=0
"""
NEW_PARTS = """model.position=rope model.norm=rmsnorm model.kv_heads=2 model.tie_head=false
model.attn_bias=false model.ff_bias=false"""
HF = "model.kind=hf model.context=96 model.name={0} data.tokenizer=hf:{0} optim.schedule.warmup=0 train.grad_clip=5"
SQUAD = """data.format=squad data.source=squad:squad.json data.eval_source=squad:held.json eval.suites=["loss","squad"]
train.steps=100 eval.every=50 optim.weight_decay=0"""
LORA = 'model.lora.rank=4 model.lora.dropout=0.1 model.lora.targets=["q_proj","v_proj","down_proj"] optim.lr=1e-2'

# name: (settings that differ from BASE, ranks, what else is pinned)
# export: the exported tensors; eval, squad, sample: what these verbs print; resume, reshard: stop
# at step 20 and go on.
RECIPES: dict[str, tuple[str, int, str]] = {
    "single": ("", 1, "export eval sample"),
    "ddp": ("parallel.strategy=ddp", 2, ""),
    "full_shard": ("parallel.strategy=full_shard", 2, "export"),
    "shard_grad_op": ("parallel.strategy=shard_grad_op", 2, ""),
    "hybrid_shard": ("parallel.strategy=hybrid_shard parallel.shard_size=1", 2, ""),
    "accumulation": ("train.micro_batch=2", 1, ""),
    "dropout": ("model.dropout=0.1", 1, ""),
    "old_parts": (
        "model.activation=gelu_tanh model.ff_width=96 data.order=sequential",
        1,
        "",
    ),
    "new_parts": (
        f"{NEW_PARTS} model.activation=relu2 model.qk_norm=true model.zero_init_output=true model.logit_cap=15",
        1,
        "sample",
    ),
    "no_positions": (
        "model.position=none model.final_norm=false model.activation=relu model.norm_bias=false",
        1,
        "",
    ),
    "llama_parts": (f"{NEW_PARTS} model.activation=swiglu model.vocab=320", 1, "export"),
    "muon": (f"{NEW_PARTS} model.activation=relu2 optim.kind=muon", 1, ""),
    "muon_full_shard": ("optim.kind=muon parallel.strategy=full_shard", 2, ""),
    "wsd": (
        "optim.schedule.kind=wsd optim.schedule.warmup=5 optim.schedule.decay=0.3 optim.schedule.final=0.1",
        1,
        "",
    ),
    "linear_char": (
        "data.tokenizer=char optim.schedule.kind=linear optim.schedule.warmup=0.1 optim.decay_on=all",
        1,
        "",
    ),
    "grad_clip": ("train.grad_clip=0.05 optim.schedule.kind=constant", 1, ""),
    "bf16": ("train.precision=bf16 parallel.activation_checkpointing=full", 1, ""),
    "selective_fp64": (
        "train.precision=fp64 parallel.activation_checkpointing=selective train.steps=20",
        1,
        "",
    ),
    "epochs": ('data.source=little.txt train.steps="3 epochs" eval.every="1 epoch"', 1, ""),
    "shards_shuffled": (
        "data.order=shards-shuffled data.shard_tokens=1024 data.source=documents.jsonl train.steps=120",
        1,
        "",
    ),
    "bpe": ("data.tokenizer=bpe data.tokenizer_vocab=400", 1, "export"),
    "resume": ("model.dropout=0.1", 1, "resume"),
    "reshard": ("model.dropout=0.1 parallel.strategy=full_shard", 2, "reshard"),
    "hf_llama": (HF.format("llama"), 1, "export sample"),
    "hf_gpt2": (HF.format("gpt2"), 1, "export"),
    "hf_from_scratch": (f"{HF.format('gpt2')} model.from_scratch=true", 1, ""),
    "hf_full_shard": (f"{HF.format('llama')} parallel.strategy=full_shard", 2, ""),
    "lora": (f"{HF.format('llama')} {LORA}", 1, "export"),
    "squad": (f"{HF.format('llama')} {SQUAD}", 1, "squad"),
    "squad_gpt": (
        f"{SQUAD} model.context=256 data.tokenizer=bpe data.tokenizer_vocab=400 train.steps=50",
        2,
        "",
    ),
    "chat": (f"{HF.format('llama')} data.format=chat data.source=chat.jsonl", 1, ""),
}
PRESETS = "bloom-560m-squad c4-29m c4-30m gpt-squad gpt2-124m quickstart shakespeare-char-cpu shakespeare-char-fast shakespeare-char"
PLANNED = ("model", "flops", "memory", "recommendation", "disk", "length", "precision")
"""What is pinned of `plan --json`: all that is arithmetic from the recipe."""


def text(seed: int, words: int) -> str:
    """Sentences of made-up words, rare and frequent ones as in a language."""
    rng = random.Random(seed)
    lexicon = [
        "".join(
            rng.choices(["ba", "do", "ri", "mel", "tos", "una", "qi", "é"], k=rng.randint(1, 3))
        )
        for _ in range(300)
    ]
    chosen = rng.choices(lexicon, weights=[1 / (i + 1) for i in range(300)], k=words)
    return "".join(word + (".\n" if rng.random() < 0.1 else " ") for word in chosen)


def make_inputs(work: Path) -> bool:
    """Corpora, tiny models of `transformers` and their tokenizer; False where there is no SQuAD
    file.
    """
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    (work / "base.toml").write_text("")
    (work / "corpus.txt").write_text(text(1, 12_000))
    (work / "little.txt").write_text(text(2, 800))
    documents = [text(10 + i, 1 + 7 * i % 90) for i in range(150)]
    (work / "documents.jsonl").write_text(
        "".join(json.dumps({"text": d}) + "\n" for d in documents)
    )
    turns = [
        [("system", 500), ("user", 600), ("assistant", 700), ("user", 800), ("assistant", 900)][
            i % 2 : 3 + 2 * (i % 3 == 0)
        ]
        for i in range(60)
    ]
    talks = [
        [{"role": role, "content": text(seed + i, 3 + i % 9)} for role, seed in t]
        for i, t in enumerate(turns)
    ]
    (work / "chat.jsonl").write_text(
        "".join(json.dumps({"messages": talk}) + "\n" for talk in talks)
    )
    questions: list[str] = []
    if has_squad := (source := TEST_DATA / "squad" / "dev-v1.1.json").is_file():
        tree = json.loads(source.read_text(encoding="utf-8"))
        parts = [
            part
            for article in tree["data"]
            for part in article["paragraphs"]
            if len(part["qas"]) >= 2
        ]
        parts.sort(key=lambda part: len(part["context"]))  # equal lengths stay in file order
        few = [{"context": p["context"], "qas": p["qas"][:2]} for p in parts[:6]]
        for name, own in (("held.json", few[:2]), ("squad.json", few[2:])):
            articles = [{"title": name, "paragraphs": own}]
            (work / name).write_text(json.dumps({"version": "1.1", "data": articles}))
        questions = [t for p in few for t in (p["context"], *(q["question"] for q in p["qas"]))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([*documents, *questions], trainer)
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
    for name, config in {
        "llama": llama,
        "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=256, **ids),
    }.items():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for (
                parameter
            ) in model.parameters():  # biases and norms too, so that none can be forgotten
                parameter.add_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(work / name)
        tokenizer.save(str(work / name / "tokenizer.json"))
        special = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
        (work / name / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special})
        )
    return has_squad


def windlass(
    work: Path, *words: str, codes: tuple[int, ...] = (0,)
) -> subprocess.CompletedProcess[str]:
    """Run a verb in the working directory; it has to end with one of these exit codes."""
    keep = {
        k: v for k, v in os.environ.items() if not k.startswith(("WINDLASS_", "MASTER_", "SLURM_"))
    }
    path = os.pathsep.join(
        str(Path(p).resolve()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p
    )
    env = keep | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "120",
        "NO_COLOR": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "windlass", *words],
        cwd=work,
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
    )
    if done.returncode not in codes:
        last = " | ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-4:])
        raise RuntimeError(f"windlass {words[0]} exited with {done.returncode}: {last}")
    return done


def tensors(folder: Path) -> dict[str, str]:
    """SHA-256 of type, shape and bytes of each tensor in a directory's safetensors files, by file
    and name.
    """
    import torch
    from safetensors import safe_open

    hashes: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                tensor = file.get_tensor(name).contiguous()
                content = (
                    tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                    if tensor.numel()
                    else b""
                )
                key = f"{path.name}:{name}"
                hashes[key] = hashlib.sha256(
                    f"{tensor.dtype} {list(tensor.shape)}".encode() + content
                ).hexdigest()
    if not hashes:
        raise RuntimeError(f"{folder} has no tensor in a safetensors file")
    return hashes


def train(work: Path, name: str) -> dict[str, Any]:
    """Train a recipe, and what is pinned of it."""
    changes, world, extra = RECIPES[name]
    settings = dict(
        word.split("=", 1) for word in f"{BASE} {changes}".replace(" epoch", "\0epoch").split()
    )
    if settings.get("model.kind") == "hf":  # whose shape is that of its configuration
        settings = {
            k: v
            for k, v in settings.items()
            if k not in ("model.layers", "model.heads", "model.width")
        }
    words = [f"{k}={v}".replace("\0", " ") for k, v in settings.items()]
    words = ["base.toml", *words, f"run.dir={name}/run", f"data.dir={name}/data"]
    ranks = ["--world", str(world)] if world > 1 else []
    if "res" in extra:  # resume and reshard
        windlass(work, "train", *words, *ranks, "--stop-at", "20", codes=(0, 75))
        ranks = []  # reshard goes on with one rank
    windlass(work, "train", *words, *ranks)
    run = f"{name}/run"
    lines = [
        json.loads(line)
        for line in (work / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    checkpoint = max((p.parent for p in (work / run).rglob("*.safetensors")), key=lambda p: p.name)
    pins: dict[str, Any] = {
        "train": {
            f"step {x['step']}": {
                k: x.get(k) for k in ("loss", "grad_norm", "lr", "tokens", "samples", "epoch")
            }
            for x in lines
            if x["kind"] == "train"
        },
        "eval": [
            {k: v for k, v in x.items() if k not in CLOCK | LATER}
            for x in lines
            if x["kind"] == "eval"
        ],
        "sample": [[x["step"], x["index"], x["text"]] for x in lines if x["kind"] == "sample"],
        "started": [
            {k: x.get(k) for k in ("steps", "parameters", "samples_per_epoch")}
            for x in lines
            if x.get("event") == "started"
        ],
        "summary": [
            {k: x.get(k) for k in ("final_loss", "best_eval_loss", "best_score", "best_step")}
            for x in lines
            if x["kind"] == "summary"
        ],
        "checkpoint tensors": tensors(checkpoint),
    }
    if "export" in extra:
        windlass(work, "export", run, f"{name}/hf")
        pins["exported tensors"] = tensors(work / name / "hf")
    if "sample" in extra:
        prompt = [
            "--prompt",
            "ba do",
            "--n",
            "2",
            "--max-tokens",
            "24",
            "--seed",
            "5",
            "--top-k",
            "20",
        ]
        pins["sample verb"] = windlass(work, "sample", run, *prompt).stdout
    if "eval" in extra or "squad" in extra:
        suites = "loss,squad" if "squad" in extra else "loss"
        results = json.loads(
            windlass(work, "eval", run, "--suite", suites, "--out", f"{name}/eval", "--json").stdout
        )
        results = {
            s: {k: v for k, v in r.items() if k not in CLOCK} for s, r in results["results"].items()
        }
        pins["eval verb"] = results
    for path in sorted((work / name).rglob("*predictions*.json")):
        pins[f"predictions {path.parent.name}/{path.name}"] = json.loads(
            path.read_text(encoding="utf-8")
        )
    shutil.rmtree(work / name)
    return pins


def presets(work: Path, name: str) -> dict[str, Any]:
    """Each preset with every setting, and the arithmetic of its plan on 1 and 8 A100."""
    pins: dict[str, Any] = {}
    for preset in PRESETS.split():
        pins[f"recipe {preset}"] = tomllib.loads(windlass(work, "recipe", preset).stdout)
        for world in ("1", "8"):
            done = windlass(
                work,
                "plan",
                preset,
                "--world",
                world,
                "--device",
                "A100-80GB",
                "--json",
                codes=(0, 2),
            )
            plan = (
                json.loads(done.stdout) if done.returncode == 0 else {}
            )  # BLOOM's size needs its files from the Hub
            pins[f"plan {preset} {world}"] = {"exit": done.returncode} | {
                k: plan[k] for k in PLANNED if k in plan
            }
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


def record(only: list[str], jobs: int) -> dict[str, Any]:
    """Run the recipes, two at a time, the slow ones first."""
    tasks = dict.fromkeys(RECIPES, train) | {"presets": presets, "order": batch_indices}
    if unknown := set(only) - set(tasks):
        sys.exit(f"no recipe {', '.join(sorted(unknown))}; there are {', '.join(tasks)}")
    work, pins = Path(tempfile.mkdtemp(prefix="pins-")), {}
    try:
        has_squad = make_inputs(work)
        names = [n for n in tasks if not only or n in only]
        for name in [n for n in names if n.startswith("squad") and not has_squad]:
            print(
                f"{name:19} SKIPPED: no {TEST_DATA}/squad/dev-v1.1.json; set WINDLASS_TEST_DATA",
                flush=True,
            )
            names.remove(name)

        def one(name: str) -> None:
            start = time.perf_counter()
            try:
                pins[name] = tasks[name](work, name)
            except Exception as error:  # the other recipes are still worth running
                pins[name] = {"failed": f"{type(error).__name__}: {error}"}
            print(
                f"{name:19} {time.perf_counter() - start:5.1f} s  {pins[name].get('failed', '')}",
                flush=True,
            )

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, sorted(names, key=lambda n: (n != "presets", "squad" not in n))))
    finally:
        shutil.rmtree(work)
    return json.loads(
        json.dumps({name: pins[name] for name in names})
    )  # as it reads back: no tuples


def leaves(tree: Any, path: str = "") -> dict[str, str]:
    """Every value by its path, as text: exact for floats, and NaN equals NaN."""
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else None
    )
    if not items:  # a value, or an empty list or dictionary
        return {path: repr(tree)}
    return {
        k: v
        for key, child in items
        for k, v in leaves(child, f"{path} / {key}" if path else str(key)).items()
    }


def difference(what: str, old: Any, new: Any) -> tuple[bool, str]:
    """Whether two records are equal, and the first difference in words."""
    a, b = leaves(old), leaves(new)
    if a == b:
        return True, f"equal ({len(a)} values)"
    if (
        what == "checkpoint tensors"
        and a.keys() != b.keys()
        and Counter(a.values()) == Counter(b.values())
    ):
        return (
            True,
            f"equal ({len(a)} values), {len(a.keys() - b.keys())} tensors have another name",
        )
    changed = [k for k in [*a, *(b.keys() - a.keys())] if a.get(k) != b.get(k)]
    first = changed[0]
    shown = f"{a.get(first, 'nothing')[:150]} -> {b.get(first, 'nothing')[:150]}"
    return False, f"{len(changed)} of {len(a)} values differ, first {first or 'the whole'}: {shown}"


def compare(old: dict[str, Any], new: dict[str, Any]) -> int:
    """Print the table; the number of differences."""
    bad = 0
    for name, pins in new.items():
        if name not in old:
            print(f"{name:19} is not in the old record")
            bad += 1
        for what in {**old.get(name, {}), **pins} if name in old else ():
            equal, said = difference(what, old[name].get(what), pins.get(what))
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
    import torch
    import transformers

    import windlass as package

    versions = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(f"windlass of {Path(package.__file__).parent}, {versions}", flush=True)
    start, only = time.perf_counter(), [name for name in args.only.split(",") if name]
    new = record(only, args.jobs)
    print(f"{len(new)} recipes in {time.perf_counter() - start:.0f} s", flush=True)
    failed = [name for name, pins in new.items() if "failed" in pins]
    if (out := args.file if args.verb == "record" else args.save) is not None:
        out.write_text(json.dumps({"versions": versions, "pins": new}, indent=1) + "\n")
    if args.verb == "record":
        sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
    old = json.loads(args.file.read_text())
    if old["versions"] != versions:
        print(f"WARNING: the old record is of other versions: {old['versions']}")
    expected = {name for name in old["pins"] if not only or name in only}
    bad = compare(old["pins"], new) + sum(
        print(f"{name:19} was not run") is None for name in sorted(expected - set(new))
    )
    sys.exit(f"{bad} differences" if bad else 0)


if __name__ == "__main__":
    main()
