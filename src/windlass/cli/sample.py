"""`windlass sample`: text from a saved model, streamed to the terminal."""

from __future__ import annotations

import sys

import typer


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
    import windlass
    from windlass.evaluation.generate import TextSampler
    from windlass.evaluation.source import find_source

    settings = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    settings |= {} if seed is None else {"seed": seed}
    source = find_source(run)
    typer.echo(f"# {source.title}", err=True)
    if chat:
        sampler, terminal = TextSampler(source, device, **settings), sys.stdin.isatty()
        while True:
            try:
                message = input("> " if terminal else "").strip()
            except EOFError:
                return
            if message:
                _write("" if terminal else f"> {message}\n")  # so that what is written shows both sides
                for piece in sampler.reply(message):
                    _write(piece)
                _write("\n")
    text = _piped(wait=prompt == "-") if prompt in ("", "-") else prompt
    shown = -1
    for number, piece in windlass.sample(source, text, n, device, **settings):
        if number > shown:
            _write("\n" * (number > 0) + (f"=== {number + 1} of {n} ===\n" if n > 1 else "") + text)
            shown = number
        _write(piece)
    _write("\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _piped(wait: bool) -> str:
    """What standard input holds, without its last line's end; empty where it is a terminal, or a pipe idle for a second."""
    import select

    try:
        if not wait and (sys.stdin.isatty() or not select.select([sys.stdin], [], [], 1.0)[0]):
            return ""
        return sys.stdin.read().removesuffix("\n")
    except (OSError, ValueError):  # closed, or not a file
        return ""
