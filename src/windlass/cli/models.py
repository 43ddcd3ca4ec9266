"""`windlass eval`, `sample` and `export`: the verbs for a trained model."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from windlass.cli import Json, Model, Overrides, RunPath, print_json
from windlass.errors import UserError, plural
from windlass.processes import WINDLASS

Weights = Annotated[
    str, Option(metavar="raw|average", help="The trained weights, or their train.average.")
]


def evaluate(
    run: Model,
    overrides: Overrides,
    suite: str = Option("", metavar="NAMES", help="loss, hellaswag, squad, lm-eval:TASKS."),
    world: int = Option(1, min=1, metavar="N", help="Divide the items among N local processes."),
    out: Path = Option(None, metavar="DIR", help="Directory of the results; default: RUN/eval."),
    weights: Weights = "raw",
    json_: Json = False,
) -> int:
    """Measure a model: loss, HellaSwag, SQuAD or lm-eval.

    The loss is weighted by tokens, with perplexity and bits per byte. Each item counts once for
    any number of ranks. The arithmetic is fp32 on a CPU, and the training's on a GPU;
    train.precision=bf16 sets another. For other data add data.eval_source=FILE. The results go
    to RUN/eval as JSON with the settings, and SQuAD's predictions in the official format.

    Example: `windlass eval runs/first --suite loss`
    """
    from windlass.parallel.env import detect_env

    env = detect_env(os.environ)
    if env.launcher == "none" and world > 1:
        from windlass.launch.local import launch

        return launch([*WINDLASS, *sys.argv[1:]], world)
    from windlass import evaluate as evaluate_model
    from windlass.data.progress import Progress
    from windlass.evaluation.source import find_source
    from windlass.telemetry.measures import of_eval, show
    from windlass.telemetry.terminal import print_table

    bar = Progress("eval")

    def show_progress(name: str, done: int, total: int) -> None:
        if env.rank == 0:
            bar.update(f"{name} {done:,}/{total:,}", done / total)

    def show_scores(name: str, scores: dict[str, Any]) -> None:
        bar.close()
        if not json_:
            rows = []
            for key, value in scores.items():
                rows.append((key, show(value, of_eval(key).kind), of_eval(key).unit))
            print_table((name, "value", "unit"), rows, text=(name, "unit"))

    source = find_source(run, overrides, weights=weights)
    if env.rank == 0 and not json_:
        typer.echo(f"{source.title}, {plural(env.world, 'rank')}")
    suites = [s.strip() for s in suite.split(",") if s.strip()]
    try:
        result = evaluate_model(source, suites, overrides, out, show_scores, show_progress)
    finally:
        bar.close()
    if env.rank == 0 and json_:
        fields = ("model", "step", "weights", "results", "measured")
        print_json({key: getattr(result, key) for key in fields}, indent=None)
    return 0


def sample(
    run: Model,
    overrides: Overrides,
    prompt: str = Option("", help="Beginning of the text; - reads it from standard input."),
    n: int = Option(1, "--n", min=1, help="Number of texts."),
    max_tokens: int = Option(256, "--max-tokens", min=1, help="Most tokens to generate."),
    temperature: float = Option(0.8, min=0, help="0 takes the most likely token."),
    top_k: int = Option(0, "--top-k", min=0, help="Sample from the k most likely; 0: from all."),
    top_p: float = Option(1.0, help="Sample from the fewest with this total probability."),
    seed: int = Option(None, help="Seed of the texts; default: the seed of the run."),
    chat: bool = Option(False, "--chat", help="Talk, a line a turn; or answer --prompt once."),
    system: str = Option("", help="With --chat: a system message, which begins the conversation."),
    device: str = Option("", metavar="cpu|cuda", help="Device; default: cuda if there is one."),
    weights: Weights = "raw",
) -> None:
    """Generate text with a model, or chat with it.

    The texts are a function of the seed: the same command gives the same texts. They share a batch
    with a KV cache, and appear one after the other as they grow.

    Example: `windlass sample runs/first --prompt "def main"`
    """
    import windlass
    from windlass.evaluation.api import TextSampler
    from windlass.evaluation.source import find_source

    settings: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    settings |= {"top_k": top_k, "top_p": top_p}
    if seed is not None:
        settings["seed"] = seed
    source = find_source(run, overrides, weights=weights)
    typer.echo(f"# {source.title}", err=True)
    if system and not chat:
        raise UserError("--system begins a conversation: add --chat")
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    if chat:
        sampler = TextSampler(source, device, **settings)
        if system:
            sampler.messages.append({"role": "system", "content": system})
        while True:
            try:
                message = text or input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return
            if message:
                for piece in sampler.reply(message):
                    _write(piece)
                _write("\n")
            if text:
                return
    shown = -1
    for number, piece in windlass.sample(source, text, n, device, **settings):
        if number > shown:
            if n > 1:
                _write(f"\n=== {number + 1} of {n} ===\n" if number else f"=== 1 of {n} ===\n")
            _write(text)
            shown = number
        _write(piece)
    _write("\n")


def _write(text: str) -> None:
    """Write a piece of text at once; on a terminal without control characters."""
    from windlass.telemetry.terminal import printable

    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
    if getattr(sys.stdout, "gone", False):  # nobody reads on
        raise typer.Exit


def export(
    run: RunPath,
    directory: Annotated[Path, Argument(metavar="DIR", help="A new directory.")],
    overrides: Overrides,
    adapter: bool = Option(False, "--adapter", help="Write only the LoRA adapter, for peft."),
    push: str = Option("", metavar="NAME/MODEL", help="Upload to a private Hub repository."),
    dtype: str = Option(
        "auto", metavar="fp32|bf16|fp16", help="Precision of the weights; default: the base's."
    ),
    weights: Weights = "raw",
) -> None:
    """Write a model as a directory that transformers loads.

    It has the tokenizer and a model card, for AutoModelForCausalLM.from_pretrained. RUN takes
    the newest checkpoint, RUN@STEP and RUN@best another one. Our GPT becomes GPT-2 (learned
    positions, LayerNorm) or, with RoPE and RMSNorm, Llama, Qwen3, Arcee or Apertus, with equal
    logits. For any other GPT the export includes its code, and from_pretrained needs
    trust_remote_code=True. A model of transformers keeps its architecture, with merged
    adapters. The directory of an adapter is merged into its base, too. --push needs HF_TOKEN.

    Example: `windlass export runs/first exported`
    """
    from windlass.interop.export import export as export_run

    done = export_run(run, directory, adapter, push, dtype, weights, overrides)
    typer.echo(f"exported: {done}")
    if not (done / "config.json").exists() and not adapter:
        typer.echo("the weights alone, because no architecture of transformers is your own model")
    if push:
        typer.echo(f"pushed: https://huggingface.co/{push}")
