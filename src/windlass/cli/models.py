"""`windlass eval`, `sample` and `export`: what is done with a trained model."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.cli import Json, Overrides, complete, print_json
from windlass.processes import WINDLASS

UNITS = {"loss": "nats/token", "exact_match": "%", "f1": "%", "runtime_s": "s"}
MODEL_HELP = "A run, RUN@STEP, RUN@best, a checkpoint, a directory of transformers or of an adapter, or hf:NAME."
Model = Annotated[
    str, typer.Argument(metavar="RUN|HF_DIR", help=MODEL_HELP, autocompletion=complete.runs)
]


def evaluate(
    run: Model,
    overrides: Overrides,
    suite: str = typer.Option(
        "", metavar="NAMES", help="loss, hellaswag, squad, lm-eval:TASKS; default: the run's."
    ),
    world: str = typer.Option(
        "", metavar="N", help="Spread the items over so many local processes."
    ),
    out: Path = typer.Option(
        None, metavar="DIR", help="Where results and predictions go; default: RUN/eval."
    ),
    json_: Json = False,
) -> int:
    """Measure a model: token-weighted validation loss, perplexity and bits per byte; HellaSwag; SQuAD's EM and F1.

    Each item is scored once, whatever the number of ranks, and in fp32: for the training's precision add train.precision=bf16;
    for other data data.eval_source=FILE. The results go to RUN/eval as JSON, with settings and files; SQuAD's predictions
    beside them in the official format.
    """
    from windlass.parallel.env import detect_env

    env = detect_env(os.environ)
    if env.launcher == "none" and world not in ("", "1"):
        from windlass.launch.local import launch, parse_worlds

        return launch([*WINDLASS, *sys.argv[1:]], parse_worlds(world)[:1])
    from windlass import evaluate as evaluate_model
    from windlass.data.documents import Progress
    from windlass.evaluation.source import find_source
    from windlass.telemetry.terminal import print_table

    bar = Progress("eval")

    def show_progress(name: str, done: int, total: int) -> None:
        if env.rank == 0:
            bar.update(f"{name} {done:,}/{total:,}", done / total)

    def show(name: str, numbers: dict[str, Any]) -> None:
        bar.close()
        if not json_:
            forms = (
                "" if isinstance(v, str) else ",.4f" if isinstance(v, float) else ","
                for v in numbers.values()
            )
            rows = [
                (k, format(v, form), UNITS.get(k, ""))
                for (k, v), form in zip(numbers.items(), forms, strict=True)
            ]
            print_table((name, "value", "unit"), rows, text=(name, "unit"))

    source = find_source(run, overrides)
    if env.rank == 0 and not json_:
        typer.echo(f"{source.title}, {env.world} rank{'s' if env.world > 1 else ''}")
    suites = [s.strip() for s in suite.split(",") if s.strip()]
    try:
        result = evaluate_model(source, suites, overrides, out, show, show_progress)
    finally:
        bar.close()
    if env.rank == 0 and json_:
        print_json(
            {key: getattr(result, key) for key in ("model", "step", "results", "measured")},
            indent=None,
        )
    if result.predictions_path:
        typer.echo(f"predictions: {result.predictions_path}", err=True)
    return 0


def sample(
    run: Model,
    prompt: str = typer.Option(
        "", help="What the text begins with; - reads it from standard input."
    ),
    n: int = typer.Option(1, "--n", min=1, help="How many texts."),
    max_tokens: int = typer.Option(256, "--max-tokens", min=1, help="Tokens to generate, at most."),
    temperature: float = typer.Option(0.8, min=0, help="0 takes the likeliest token."),
    top_k: int = typer.Option(
        0, "--top-k", min=0, help="Choose among the k likeliest tokens; 0: among all."
    ),
    top_p: float = typer.Option(
        1.0, "--top-p", help="Choose among the likeliest that together have this probability."
    ),
    seed: int = typer.Option(None, help="Determines the texts; default: the run's own."),
    chat: bool = typer.Option(
        False,
        "--chat",
        help="Talk: each line you write is a turn, until the end of input; or answer --prompt, once.",
    ),
    device: str = typer.Option(
        "", metavar="cpu|cuda", help="Where to compute; default: cuda where there is one."
    ),
) -> None:
    """Generate text.

    The texts are a function of the seed: the same command gives the same texts. They are generated together, with a KV
    cache, and shown one after the other as they come.
    """
    import windlass
    from windlass.evaluation.generate import TextSampler
    from windlass.evaluation.source import find_source

    settings = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
    }
    settings |= {} if seed is None else {"seed": seed}
    source = find_source(run)
    typer.echo(f"# {source.title}", err=True)
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    if chat:
        sampler, asks = TextSampler(source, device, **settings), sys.stdin.isatty()
        for message in [text] if text else _messages("> " if asks else ""):
            for piece in sampler.reply(message):
                _write(piece)
            _write("\n")
        return
    shown = -1
    for number, piece in windlass.sample(source, text, n, device, **settings):
        if number > shown:
            _write("\n" * (number > 0) + (f"=== {number + 1} of {n} ===\n" if n > 1 else "") + text)
            shown = number
        _write(piece)
    _write("\n")


def _messages(prompt: str) -> Iterator[str]:
    """The lines of the standard input, without empty ones."""
    with contextlib.suppress(EOFError):
        while True:
            if message := input(prompt).strip():
                yield message


def _write(text: str) -> None:
    """Write a piece of text at once: as it is into a file, without characters that steer a terminal into one."""
    from windlass.telemetry.terminal import printable

    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
    if getattr(sys.stdout, "gone", False):  # nobody reads on
        raise typer.Exit


def export(
    run: str = typer.Argument(
        ...,
        metavar="RUN",
        help="A run (its newest checkpoint), RUN@STEP, RUN@best.",
        autocompletion=complete.runs,
    ),
    directory: Path = typer.Argument(..., metavar="DIR", help="A new directory."),
    adapter: bool = typer.Option(
        False, "--adapter", help="Of a model with model.lora: the adapter alone, for peft."
    ),
    push: str = typer.Option(
        "",
        metavar="NAME/MODEL",
        help="Upload it to the Hub, to a private repository; needs HF_TOKEN.",
    ),
) -> None:
    """Write a run's model as AutoModelForCausalLM.from_pretrained loads it, with its tokenizer and a model card.

    Our GPT becomes GPT-2 (learned positions, LayerNorm) or, with RoPE and RMSNorm, Llama, Qwen3, Arcee or Apertus, with
    equal logits. If it is none of them, its code is written beside the weights, and from_pretrained needs
    trust_remote_code=True. A model of transformers stays what it is, its adapters merged.
    """
    from windlass.interop.export import export as export_run

    typer.echo(f"exported: {(done := export_run(run, directory, adapter, push))}")
    if not (done / "config.json").exists() and not adapter:
        typer.echo(
            "the weights alone: it is a model of your own code, which no architecture of transformers computes"
        )
    if push:
        typer.echo(f"pushed: https://huggingface.co/{push}")
