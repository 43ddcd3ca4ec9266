"""litgpt's GPT in the loop of its `pretrain.py`, without Fabric, data module and logger.

python benchmarks/peers/litgpt_loop.py TOKENS.bin VOCAB LAYERS HEADS WIDTH CONTEXT BATCH STEPS

litgpt has no learned positions, so it trains with its default, rotary embeddings.
"""

import json
import sys
import time

import numpy as np
import torch
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import chunked_cross_entropy


def main() -> None:
    vocab, layers, heads, width, context, batch, steps = map(int, sys.argv[2:])
    tokens = np.memmap(sys.argv[1], dtype=np.uint16, mode="r")
    config = Config(
        block_size=context,
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        padded_vocab_size=vocab,
        vocab_size=vocab,
        parallel_residual=False,
        bias=False,
        intermediate_size=4 * width,
    )
    torch.manual_seed(0)
    model = GPT(config)
    model.lm_head.weight = model.transformer.wte.weight  # as with train.tie_embeddings
    model.max_seq_length = context
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        starts = torch.randint(len(tokens) - context, (batch,)).tolist()
        rows = torch.stack(
            [torch.from_numpy(tokens[i : i + context + 1].astype(np.int64)) for i in starts]
        )
        logits = model(rows[:, :-1].contiguous())
        loss = chunked_cross_entropy(logits, rows[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"step_s": seconds, "loss": loss.item()}))


if __name__ == "__main__":
    main()
