"""`windlass export`: a run as a directory that `transformers` loads."""

from __future__ import annotations

from pathlib import Path

import typer


def export(
    run: str = typer.Argument(
        ..., metavar="RUN", help="A run (its newest checkpoint), RUN@STEP, RUN@best, or a checkpoint."
    ),
    directory: Path = typer.Argument(..., metavar="DIR", help="A new directory."),
    adapter: bool = typer.Option(False, "--adapter", help="Of a model with model.lora: the adapter alone, for peft."),
) -> None:
    """Write a run's model as AutoModelForCausalLM.from_pretrained loads it, with its tokenizer and a model card.

    Our GPT becomes GPT-2 (learned positions, LayerNorm) or Llama (RoPE, RMSNorm, SwiGLU), with equal logits; where it
    is neither, the message names what differs. A model of transformers stays what it is, its adapters merged.
    """
    from windlass.interop.export import export as export_run

    typer.echo(f"exported: {export_run(run, directory, adapter)}")
