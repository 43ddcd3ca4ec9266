"""`windlass sample`: text from a run, streamed to the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from windlass.evaluation.source import Source

STDIN_SECONDS = 1.0
"""How long to wait for a prompt in a pipe before taking it that there is none."""


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("sample")(sample)


def sample(
    run: str = typer.Argument(
        ..., metavar="RUN", help="A run, RUN@STEP, RUN@best, a checkpoint, a directory of transformers, or hf:NAME."
    ),
    prompt: str = typer.Option("", help="What the text begins with; - reads it from standard input, as a pipe does."),
    n: int = typer.Option(1, "--n", min=1, help="How many texts."),
    max_tokens: int = typer.Option(256, "--max-tokens", min=1, help="Tokens to generate, at most."),
    temperature: float = typer.Option(0.8, min=0, help="0 takes the likeliest token."),
    top_k: int = typer.Option(0, "--top-k", min=0, help="Choose among the k likeliest tokens; 0: among all."),
    top_p: float = typer.Option(1.0, "--top-p", help="Choose among the likeliest that have this probability together."),
    seed: int = typer.Option(None, help="Determines the texts; default: the run's own."),
    chat: bool = typer.Option(False, "--chat", help="Talk: each line you write is a turn, until the end of input."),
    device: str = typer.Option("", metavar="cpu|cuda", help="Where to compute; default: cuda where there is one."),
) -> None:
    """Generate text.

    The texts are a function of the seed: the same command gives the same texts. They are made together, with a cache of
    keys and values, and shown one after the other as they come.
    """
    from dataclasses import replace

    from windlass.evaluation import source as sources
    from windlass.evaluation.generate import Sampling

    source = sources.find_source(run)
    ranks = sources.alone(device or None)
    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=source.recipe.run.seed if seed is None else seed,
    )
    typer.echo(f"# {source.title}", err=True)
    model = sources.open_model(source, ranks)
    sampling = replace(sampling, stop=sources.stop_tokens(source, model))
    if chat:
        _talk(source, model, ranks, sampling)
        return
    text = _piped(wait=prompt == "-") if prompt in ("", "-") else prompt
    _show(source, model, ranks, sampling, [source.tokenizer.encode_prompt(text)] * n, text)


def _show(source: Source, model: Any, ranks: Any, sampling: Any, prompts: list[list[int]], text: str) -> None:
    from windlass.evaluation.generate import InOrder, generate

    def begin(number: int) -> None:
        if number:
            _write("\n")
        if len(prompts) > 1:
            _write(f"=== {number + 1} of {len(prompts)} ===\n")
        _write(text)

    stream = InOrder(source.tokenizer, len(prompts), _write, begin, after=prompts[0] if text else ())
    generate(
        model,
        prompts,
        sampling,
        ranks,
        vocab=source.tokenizer.vocab,
        autocast=_arithmetic(source, ranks),
        on_token=stream,
    )
    _write("\n")


def _talk(source: Source, model: Any, ranks: Any, sampling: Any) -> None:
    """A conversation: each turn reads all before it, in the layout of the tokenizer's chat template."""
    from windlass.data.chat import prompt_tokens
    from windlass.evaluation.generate import InOrder, generate, text_after

    messages: list[dict[str, str]] = []
    while True:
        try:
            said = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if not said:
            continue
        messages.append({"role": "user", "content": said})
        ids = prompt_tokens(messages, source.template, source.tokenizer)
        stream = InOrder(source.tokenizer, 1, _write, lambda _: None, after=ids)
        made = generate(
            model,
            [ids],
            sampling,
            ranks,
            indices=[0],
            vocab=source.tokenizer.vocab,
            autocast=_arithmetic(source, ranks),
            on_token=stream,
        )
        _write("\n")
        messages.append({"role": "assistant", "content": text_after(source.tokenizer, ids, (made or [[]])[0]).strip()})


def _arithmetic(source: Source, ranks: Any) -> Any:
    from functools import partial

    from windlass.parallel.parallelize import autocast

    return partial(autocast, source.recipe, ranks.device)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _piped(wait: bool) -> str:
    """What standard input holds, without its last line's end; nothing where it is a terminal or an idle pipe."""
    import select

    try:
        if not wait and (sys.stdin.isatty() or not select.select([sys.stdin], [], [], STDIN_SECONDS)[0]):
            return ""
        return sys.stdin.read().removesuffix("\n")
    except (OSError, ValueError):  # closed, or not a file
        return ""
