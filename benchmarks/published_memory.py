"""Planned memory of fine-tuning beside the peaks that torchtune and litgpt published; a Markdown table.

    python benchmarks/published_memory.py [--only TEXT]

Sources: torchtune's README at bd2a0fc7 (GiB), litgpt's config_hub/finetune/README.md at 26857050 (GB).
Each row has the recipe that is nearest to theirs: weights, adapters, moments and stream in bf16. The
networks are built from their sizes, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import NamedTuple

from windlass.estimate.memory import Memory, memory
from windlass.estimate.subject import subject_of, with_sizes
from windlass.recipe import Recipe

GIB = 2**30 / 1e9
LLAMA_3 = {"vocab_size": 128_256, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
SIZES = "hidden_size intermediate_size num_hidden_layers num_attention_heads tie_word_embeddings"
MODELS = {
    "Llama 3.1 8B": LLAMA_3 | dict(zip(SIZES.split(), (4096, 14336, 32, 32, False), strict=True)),
    "Llama 3.2 3B": LLAMA_3 | dict(zip(SIZES.split(), (3072, 8192, 28, 24, True), strict=True)),
    "Llama 3.2 1B": LLAMA_3 | dict(zip(SIZES.split(), (2048, 8192, 16, 32, True), strict=True)),
    "Llama 2 7B": dict(zip(SIZES.split(), (4096, 11008, 32, 32, False), strict=True)),
    "TinyLlama 1.1B": {"num_key_value_heads": 4}
    | dict(zip(SIZES.split(), (2048, 5632, 22, 32, False), strict=True)),
}
FULL = ["parallel.activation_checkpointing=full"]
MLP = "q_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
EIGHT_BIT = ["optim.kind=adamw8bit"]


def lora(rank: int, targets: str, base: str = "fp32") -> list[str]:
    return [f"model.lora.rank={rank}", f"model.lora.targets={targets}", f"model.lora.base={base}"]


class Published(NamedTuple):
    program: str
    model: str
    method: str  # as its source calls it
    batch: int
    tokens: int  # of a row
    gb: float
    settings: list[str]


TUNE, LIT = "torchtune", "litgpt"
EVERY = f"{MLP},k_proj"
ROWS = [
    Published(TUNE, "Llama 3.1 8B", "LoRA, 4090", 2, 2048, 16.2 * GIB, lora(8, MLP) + FULL),
    Published(TUNE, "Llama 3.1 8B", "QLoRA, 4090", 2, 2048, 7.4 * GIB, lora(8, MLP, "4bit") + FULL),
    Published(TUNE, "Llama 3.1 8B", "full, 4090", 2, 2048, 18.9 * GIB, FULL + EIGHT_BIT),
    Published(TUNE, "Llama 3.2 3B", "full, chunked loss", 2, 4096, 42.9 * GIB, []),
    Published(TUNE, "Llama 3.2 3B", "+ checkpointing", 2, 4096, 24.9 * GIB, FULL),
    Published(TUNE, "Llama 3.2 3B", "+ 8-bit, in backward", 2, 4096, 17.6 * GIB, FULL + EIGHT_BIT),
    Published(TUNE, "Llama 3.2 3B", "LoRA", 2, 4096, 8.5 * GIB, lora(64, MLP) + FULL),
    Published(TUNE, "Llama 3.2 3B", "QLoRA", 2, 4096, 4.6 * GIB, lora(64, MLP, "4bit") + FULL),
    Published(LIT, "Llama 3.1 8B", "LoRA", 1, 512, 19.73, lora(32, "q_proj,v_proj")),
    Published(LIT, "Llama 3.1 8B", "QLoRA", 2, 512, 17.41, lora(32, "q_proj,v_proj", "4bit")),
    Published(LIT, "Llama 3.2 3B", "LoRA", 1, 512, 9.67, lora(32, "q_proj,v_proj")),
    Published(LIT, "Llama 3.2 3B", "QLoRA", 2, 512, 10.30, lora(32, "q_proj,v_proj", "4bit")),
    Published(LIT, "Llama 3.2 1B", "LoRA", 1, 512, 4.49, lora(32, "q_proj,v_proj")),
    Published(LIT, "Llama 3.2 1B", "QLoRA", 2, 512, 5.53, lora(32, "q_proj,v_proj", "4bit")),
    Published(LIT, "Llama 2 7B", "LoRA", 2, 512, 19.77, lora(32, "q_proj,v_proj")),
    Published(LIT, "Llama 2 7B", "QLoRA", 2, 512, 13.68, lora(32, "q_proj,v_proj", "4bit")),
    Published(LIT, "TinyLlama 1.1B", "full", 4, 512, 14.10, []),
    Published(LIT, "TinyLlama 1.1B", "LoRA", 8, 512, 13.50, lora(32, f"{EVERY},lm_head")),
]


def planned(row: Published, folder: Path) -> Memory:
    """The plan's peak for one GPU."""
    config = {"model_type": "llama", "dtype": "bfloat16", **MODELS[row.model]}
    if row.program == LIT:  # it copies a tied matrix for the head
        config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "text.txt").write_text("text")
    own = [f"model.name={folder}", f"model.context={row.tokens}", f"data.source={folder}/text.txt"]
    own += [f"train.micro_batch={row.batch}", f"train.global_batch={row.batch}", "train.steps=100"]
    own += ["train.precision=bf16", "train.master=bf16", "train.stream=bf16", "data.format=text"]
    recipe = Recipe.load("chat-lora", [*own, "model.lora.rank=0", *row.settings])
    subject = with_sizes(subject_of(recipe, device="A100-80GB"), activations=True)
    assert subject.counted, subject.hf_reason
    assert not subject.activations_reason, subject.activations_reason
    return memory(subject.counted, subject.counted.vocab, subject.layout, recipe.optim.kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows with this text")
    only = parser.parse_args().only
    parts = "weights, gradients, state, activations"
    print(f"| program | model | method | rows | published GB | planned GB | off by | {parts} |")
    print("|---|---|---|---:|---:|---:|---:|---|")
    for row in ROWS:
        if only not in " ".join(row[:3]):
            continue
        with tempfile.TemporaryDirectory() as folder:
            peak = planned(row, Path(folder))
        sizes = peak.parameters, peak.gradients, peak.optimizer, peak.total
        weights, gradients, state, total = (size / 1e9 for size in sizes)
        rest = total - weights - gradients - state
        print(
            f"| {row.program} | {row.model} | {row.method} | {row.batch} × {row.tokens:,} "
            f"| {row.gb:.1f} | {total:.1f} | {100 * (total / row.gb - 1):+.0f} % "
            f"| {weights:.1f}, {gradients:.1f}, {state:.1f}, {rest:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
