"""`windlass sample`: text from a saved model, streamed to the terminal."""

from __future__ import annotations

import sys

import typer

STDIN_SECONDS = 1.0
"""How long to wait for a prompt in a pipe before assuming that there is none."""


def sample(
    run: str = typer.Argument(
        ..., metavar="RUN", help="A run, RUN@STEP, RUN@best, a checkpoint, a directory of transformers, or hf:NAME."
    ),
    prompt: str = typer.Option("", help="What the text begins with; - reads it from standard input, as a pipe does."),
    n: int = typer.Option(1, "--n", min=1, help="How many texts."),
    max_tokens: int = typer.Option(256, "--max-tokens", min=1, help="Tokens to generate, at most."),
    temperature: float = typer.Option(0.8, min=0, help="0 takes the likeliest token."),
    top_k: int = typer.Option(0, "--top-k", min=0, help="Choose among the k likeliest tokens; 0: among all."),
    top_p: float = typer.Option(1.0, "--top-p", help="Choose among the likeliest that together have this probability."),
    seed: int = typer.Option(None, help="Determines the texts; default: the run's own."),
    chat: bool = typer.Option(False, "--chat", help="Talk: each line you write is a turn, until the end of input."),
    device: str = typer.Option("", metavar="cpu|cuda", help="Where to compute; default: cuda where there is one."),
) -> None:
    """Generate text.

    The texts are a function of the seed: the same command gives the same texts. They are generated together, with a KV
    cache, and shown one after the other as they come.
    """
    from windlass.evaluation.generate import TextSampler

    settings = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    sampler = TextSampler(run, device, **settings, **({} if seed is None else {"seed": seed}))
    typer.echo(f"# {sampler.source.title}", err=True)
    if chat:
        while True:
            try:
                message = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return
            if message:
                for piece in sampler.reply(message):
                    _write(piece)
                _write("\n")
    text = _piped(wait=prompt == "-") if prompt in ("", "-") else prompt
    shown = -1
    for number, piece in sampler.texts(text, n):
        if number > shown:
            _write("\n" * (number > 0) + (f"=== {number + 1} of {n} ===\n" if n > 1 else "") + text)
            shown = number
        _write(piece)
    _write("\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _piped(wait: bool) -> str:
    """What standard input holds, without its last line's end; empty where it is a terminal or an idle pipe."""
    import select

    try:
        if not wait and (sys.stdin.isatty() or not select.select([sys.stdin], [], [], STDIN_SECONDS)[0]):
            return ""
        return sys.stdin.read().removesuffix("\n")
    except (OSError, ValueError):  # closed, or not a file
        return ""
