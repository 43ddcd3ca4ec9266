"""Seconds of tiktoken's batch encoding alone, without reading the documents.

python benchmarks/peers/tiktoken_batch.py GPT2_DIR DOCUMENTS.jsonl THREADS

GPT2_DIR has GPT-2's vocab.bpe and encoder.json, so that tiktoken downloads nothing.
"""

import json
import sys
import time
from pathlib import Path

import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tiktoken_ext.openai_public import r50k_pat_str


def main() -> None:
    folder, documents, threads = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    ranks = data_gym_to_mergeable_bpe_ranks(
        vocab_bpe_file=str(folder / "vocab.bpe"), encoder_json_file=str(folder / "encoder.json")
    )
    encoding = tiktoken.Encoding(
        "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256}
    )
    texts = [json.loads(line)["text"] for line in documents.open(encoding="utf-8")]
    began = time.perf_counter()
    rows = encoding.encode_ordinary_batch(texts, num_threads=threads)
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "tokens": sum(map(len, rows))}))


if __name__ == "__main__":
    main()
