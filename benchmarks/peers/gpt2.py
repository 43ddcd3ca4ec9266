"""GPT-2 with random weights in `transformers`: generation with its cache, and HellaSwag one ending
after the other.

python benchmarks/peers/gpt2.py generate LAYERS BATCH TOKENS
python benchmarks/peers/gpt2.py hellaswag LAYERS GPT2_DIR FILE.jsonl ITEMS
"""

import itertools
import json
import sys
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

PROMPT = 16  # tokens


def generate(model: GPT2LMHeadModel, batch: int, tokens: int) -> float:
    """Tokens a second."""
    prompt = torch.arange(PROMPT * batch).reshape(batch, PROMPT)
    how = {"do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
    model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2, **how)
    began = time.perf_counter()
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, **how
    )
    assert out.shape[1] == PROMPT + tokens
    return batch * tokens / (time.perf_counter() - began)


def hellaswag(model: GPT2LMHeadModel, folder: str, file: str, count: int) -> float:
    """Items a second, with a forward pass for each ending."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(folder) / "gpt2-tokenizer.json"))
    with open(file, encoding="utf-8") as lines:
        items = [json.loads(line) for line in itertools.islice(lines, count)]
    began, right = time.perf_counter(), 0
    for item in items:
        context, scores = tokenizer(item["ctx"])["input_ids"], []
        for ending in item["endings"]:
            ids = torch.tensor([context + tokenizer(f" {ending}")["input_ids"]])
            logits = model(ids).logits[0, len(context) - 1 : -1]
            scores.append(torch.nn.functional.cross_entropy(logits, ids[0, len(context) :]).item())
        right += scores.index(min(scores)) == int(item["label"])
    return count / (time.perf_counter() - began)


def main() -> None:
    what, layers, *rest = sys.argv[1:]
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50_304, n_layer=int(layers))).eval()
    with torch.inference_mode():
        if what == "generate":
            print(json.dumps({"tokens/s": generate(model, *map(int, rest))}))
        else:
            print(json.dumps({"items/s": hellaswag(model, rest[0], rest[1], int(rest[2]))}))


if __name__ == "__main__":
    main()
