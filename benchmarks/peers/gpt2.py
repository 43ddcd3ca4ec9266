"""GPT-2 with random weights in `transformers`: generation with its cache.

python benchmarks/peers/gpt2.py generate LAYERS BATCH TOKENS
"""

import json
import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

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


def main() -> None:
    layers, batch, tokens = map(int, sys.argv[2:])
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50_304, n_layer=layers)).eval()
    with torch.inference_mode():
        print(json.dumps({"tokens/s": generate(model, batch, tokens)}))


if __name__ == "__main__":
    main()
