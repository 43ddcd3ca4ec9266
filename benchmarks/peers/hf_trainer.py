"""The Trainer of `transformers`, on GPT-2 of a given shape or on a model in a directory; in bf16 on
a GPU with DEVICE=cuda.

python benchmarks/peers/hf_trainer.py TOKENS.bin CONTEXT BATCH STEPS VOCAB LAYERS HEADS WIDTH
python benchmarks/peers/hf_trainer.py TOKENS.bin CONTEXT BATCH STEPS DIR
"""

import json
import os
import sys
import time
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

CUDA = os.environ.get("DEVICE") == "cuda"


class Windows(torch.utils.data.Dataset):
    def __init__(self, path: str, context: int, count: int):
        self.tokens, self.context = np.memmap(path, dtype=np.uint16, mode="r"), context
        random = np.random.default_rng(0)
        self.starts = random.integers(0, len(self.tokens) - context, count)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> dict[str, Any]:
        ids = self.tokens[self.starts[i] : self.starts[i] + self.context].astype(np.int64)
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(ids)}


class StepSeconds(TrainerCallback):
    """The time of each step, from the end of the last one, so that reading a batch counts."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.last = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.last = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if CUDA:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now


def main() -> None:
    path, context, batch, steps = sys.argv[1], *map(int, sys.argv[2:5])
    torch.manual_seed(0)
    if len(sys.argv) == 6:
        model = AutoModelForCausalLM.from_pretrained(sys.argv[5], dtype=torch.float32)
    else:
        vocab, layers, heads, width = map(int, sys.argv[5:])
        sizes = {"vocab_size": vocab, "n_positions": context, "n_layer": layers}
        sizes |= {"n_head": heads, "n_embd": width}
        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        no_ends = dict.fromkeys(("bos_token_id", "eos_token_id"))
        model = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, **no_ends))
    arguments = TrainingArguments(
        output_dir="trainer",
        per_device_train_batch_size=batch,
        max_steps=steps,
        learning_rate=1e-3,
        weight_decay=0.1,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=not CUDA,
        bf16=CUDA,
        tf32=CUDA or None,
        dataloader_num_workers=2 if CUDA else 0,
        disable_tqdm=True,
    )
    timer = StepSeconds()
    data = Windows(path, context, batch * steps)
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[timer]).train()
    peak = torch.cuda.max_memory_allocated() / 1e9 if CUDA else None
    print(json.dumps({"step_s": timer.seconds, "peak_gb": peak}))


if __name__ == "__main__":
    main()
