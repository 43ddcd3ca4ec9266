"""Time and memory of `windlass prepare` with GPT-2's tokens, for a large text or conversations.

    python benchmarks/prepare.py text 1000 --gpt2 DIR [--from FILE ...]   # MB of text
    python benchmarks/prepare.py chat 1000000 --gpt2 DIR                  # conversations

`text` repeats the files, and `chat` generates conversations of about 32 words. Memory is the largest
sum over all processes of the command, read ten times a second. Processor time is their sum.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

WORDS = "the model reads a question and writes an answer about rivers towns weather and old books"


def write_text(file: Path, megabytes: int, sources: list[Path]) -> None:
    text = b"".join(source.read_bytes() for source in sources)
    with file.open("wb") as out:
        while out.tell() < megabytes * 10**6:
            out.write(text)


def write_chat(file: Path, count: int) -> None:
    draw, words = random.Random(1), WORDS.split()
    with file.open("w") as out:
        for number in range(count):
            question = f"{number}: {' '.join(draw.choices(words, k=12))}?"
            answer = " ".join(draw.choices(words, k=20))
            turns = [{"role": "user", "content": question}]
            turns.append({"role": "assistant", "content": f"{answer}."})
            out.write(json.dumps({"messages": turns}) + "\n")


def memory_of(process: psutil.Process) -> int:
    """The resident bytes of a process and its descendants."""
    total = 0
    for one in (process, *process.children(recursive=True)):
        try:
            total += one.memory_info().rss
        except psutil.Error:  # it has just ended
            continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=["text", "chat"])
    parser.add_argument("size", type=int)
    parser.add_argument("--gpt2", required=True, help="directory with vocab.bpe and encoder.json")
    parser.add_argument("--from", dest="sources", nargs="+", type=Path, default=[])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "corpus.txt" if options.kind == "text" else "corpus.jsonl")
        if options.kind == "text":
            write_text(file, options.size, options.sources)
        else:
            write_chat(file, options.size)
        settings = [f"data.source={file}", f"data.tokenizer=gpt2:{options.gpt2}"]
        settings += [
            f"data.format={options.kind}",
            f"data.dir={folder}/data",
            "data.max_tokens=0",
            "model.vocab=0",
        ]
        words = [sys.executable, "-m", "windlass", "prepare", "quickstart", *settings]
        started, peak = time.perf_counter(), 0
        with subprocess.Popen(words) as process:
            watched = psutil.Process(process.pid)
            while process.poll() is None:
                try:
                    peak = max(peak, memory_of(watched))
                except psutil.NoSuchProcess:
                    break
                time.sleep(0.1)
        if process.returncode:
            sys.exit(process.returncode)
        seconds, size = time.perf_counter() - started, file.stat().st_size / 1e6
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime
    print(f"{options.kind} {options.size:,}: {size:,.0f} MB in {seconds:,.0f} s, ", end="")
    print(f"{cpu:,.0f} s of processor time, peak {peak / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
