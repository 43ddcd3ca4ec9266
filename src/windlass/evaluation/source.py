"""A saved model and its tokenizer: a run, a checkpoint, a Hugging Face directory or name."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from windlass import hub
from windlass.checkpoint import choose
from windlass.checkpoint.base import fill_base
from windlass.checkpoint.format import Checkpoint, open_checkpoint
from windlass.checkpoint.state_dict import restore
from windlass.data.chat import Template
from windlass.data.tokenizer import FOLDER, Tokenizer
from windlass.data.tokenizer_kinds import load_tokenizer, named_tokenizer
from windlass.errors import UserError, argument
from windlass.model.adapters import CONFIG as ADAPTER
from windlass.model.adapters import adapter_settings, fill_from_adapter
from windlass.model.build import build_model, own_module
from windlass.model.gpt import initialise
from windlass.model.sharding import unwrap
from windlass.parallel.parallelize import parallelize
from windlass.parallel.ranks import Ranks, alone
from windlass.recipe import Changes, Recipe
from windlass.recipe.strategies import NO_LAYOUT
from windlass.run import Run

# The settings of every saved model; `api.py` adds the settings of a measurement.
IN_FLOAT32 = {"train.master": "fp32"}  # bf16 weights are read into float32, unless overridden
AS_READ = {"train.compile": False}  # lengths vary from pass to pass


@dataclass(frozen=True)
class Source:
    name: str
    recipe: Recipe
    tokenizer: Tokenizer  # None for a run on a user's data without one
    template: Template
    checkpoint: Path | None = None  # None: the weights are in a directory of `transformers`
    step: int | None = None
    run: Run | None = None
    module: nn.Module | None = None  # the user's own, into which the weights are loaded
    adapter: Path | None = None  # a directory with the weights of an adapter only
    weights: str = "raw"  # or `average`: the averaged weights of the checkpoint

    @property
    def own_model(self) -> str:
        """The class of the run's model if it is the user's own; else empty."""
        return str(self.run.environment.get("own_model", "")) if self.run else ""

    @property
    def title(self) -> str:
        averaged = ", averaged weights" if self.weights == "average" else ""
        at = f" at step {self.step}" if self.step is not None else ""
        return f"{self.name}{at}{averaged}"

    def open_checkpoint(self) -> Checkpoint:
        """The checkpoint, which `find_source` has verified, with the source's weights."""
        assert self.checkpoint is not None, "the weights are in a directory of `transformers`"
        return open_checkpoint(self.checkpoint, deep=False).with_weights(self.weights)


def find_source(
    name: str | Path | Run,
    overrides: Changes = (),
    module: nn.Module | None = None,
    weights: str = "raw",
) -> Source:
    """The saved model `name`; UserError if it does not exist or is damaged.

    Args:
        name: `RUN` (its newest checkpoint), `RUN@STEP`, `RUN@best`, a checkpoint's path, a
            directory of `transformers` or of an adapter, or `hf:NAME` of the Hub.
        overrides: Settings of its recipe to change, for example the validation data.
        module: A user's own model.
        weights: `raw`, or `average`: the averaged weights of the checkpoint (`train.average`).
    """
    name = str(name.path if isinstance(name, Run) else name)
    path = Path(name).expanduser()
    adapter = path if (path / ADAPTER).is_file() else None
    foreign = name.startswith("hf:") or adapter or (path / "config.json").is_file()
    if not foreign or Run(path).exists:
        source = replace(_of_run(name, overrides), module=module, weights=weights)
        source.open_checkpoint()  # raises if it lacks averaged weights
        return source
    if weights != "raw":
        problem = f"{name} is a directory of transformers, which has one set of weights"
        raise UserError(f"{argument('weights', weights)}: {problem}: leave it out")
    return _of_transformers(name, adapter, overrides)


def _of_run(name: str, overrides: Changes) -> Source:
    choice = choose.find_checkpoint(name)
    run = Run(choice.path.parent.parent)
    if not run.exists:
        problem = f"{choice.path} is not in a run directory"
        raise UserError(f"{problem}: there is no {run.recipe_path}")
    folder = run.path / FOLDER
    tokenizer: Any = load_tokenizer(folder) if folder.is_dir() else None
    if not tokenizer and "own_model" not in run.environment:  # on the user's own data
        tokenizer = named_tokenizer(run.recipe.tokenizer, run.recipe.tokenizer_key)
        tokenizer = tokenizer if tokenizer.vocab <= choice.manifest.meta["vocab"] else None
    if tokenizer and run.recipe.model.is_new:
        tokenizer.start = None  # of the model that the tokenizer comes from
    template = Template.of_directory(folder)
    recipe = run.recipe.replace(IN_FLOAT32).replace(overrides, AS_READ | NO_LAYOUT)
    return Source(str(run.path), recipe, tokenizer, template, choice.path, choice.step, run)


def _of_transformers(name: str, adapter: Path | None, overrides: Changes) -> Source:
    from windlass.model.hf import open_hf

    if adapter:
        settings = adapter_settings(adapter)
    else:
        settings = {"kind": "hf", "name": name.removeprefix("hf:")}
    recipe = Recipe.from_dict({"preset": "hf", "model": settings})
    model = recipe.replace(overrides).model
    directory = hub.directory(model.name, model.revision, key=name)
    # The context and the tokenizer of the directory, unless overridden.
    home = adapter if adapter and (adapter / "tokenizer.json").is_file() else directory
    defaults = {"model.context": open_hf(directory, model).context, "data.tokenizer": f"hf:{home}"}
    recipe = recipe.replace(defaults).replace(overrides, AS_READ)
    tokenizer = named_tokenizer(f"hf:{home}")
    if home == adapter:  # the start and the ends of a text are beside the model
        with suppress(UserError):
            base = named_tokenizer(f"hf:{directory}")
            if base.fingerprint == tokenizer.fingerprint:
                tokenizer.start, tokenizer.ends = base.start, tokenizer.ends | base.ends
    return Source(name, recipe, tokenizer, Template.of_directory(home), adapter=adapter)


def open_model(source: Source, ranks: Ranks) -> nn.Module:
    """The model with its weights, of which each rank reads its part; a user's keeps its mode."""
    recipe = source.recipe
    model = source.module and own_module(source.module, recipe.model.context)
    if source.own_model and model is None:
        raise UserError(
            f"{source.name} is the run of your model class ({source.own_model}): "
            f"pass the model from Python, as evaluate(run, model={source.own_model}(...))"
        )
    if model is None:
        run_path = source.run.path if source.run else None
        if source.checkpoint is not None:
            vocab = source.open_checkpoint().manifest.meta["vocab"]
        else:
            vocab = source.tokenizer.vocab if source.tokenizer else 0
        model = build_model(recipe, vocab, run=run_path)
    if recipe.train.precision == "fp64":
        model = model.double()
    wrapped = parallelize(model, ranks, recipe)
    if source.checkpoint is None:
        initialise(unwrap(wrapped), recipe.run.seed)
        if source.adapter is not None:
            fill_from_adapter(unwrap(wrapped).model, source.adapter)  # type: ignore[arg-type]
    else:
        checkpoint = source.open_checkpoint()
        fill_base(checkpoint, unwrap(wrapped), recipe, ranks)
        restore(checkpoint, wrapped)
    return wrapped.eval() if source.module is None else wrapped


def load_model(
    run: str | Path | Run,
    *,
    model: nn.Module | None = None,
    device: str = "",
    weights: str = "raw",
    overrides: Changes = (),
) -> nn.Module:
    """A saved model in evaluation mode: `load_model(run)(tokens)` returns logits [B, T, V].

    Args:
        run: A run (its newest checkpoint), RUN@STEP, RUN@best, a checkpoint, a directory of
            `transformers`, `hf:NAME`.
        model: An instance of your class, for a run that trains it; the weights are loaded into
            it.
        device: `cpu` or `cuda`; default: cuda if available.
        weights: `raw`, or `average` for the averaged weights (`train.average`).
        overrides: Settings of its recipe to change, as `model.trust_remote_code=true`.

    Raises:
        UserError: The model does not exist, is damaged, or needs `model`.
    """
    return open_model(find_source(run, overrides, model, weights), alone(device or None)).eval()


def same_tokenizer(source: Source, directory: Path) -> bool:
    """Whether the tokenizer in a directory of `transformers` is the source's tokenizer."""
    recipe = source.recipe
    if not (directory / "tokenizer.json").is_file():
        return recipe.tokenizer.partition("@")[0] in (f"hf:{recipe.model.name}", f"hf:{directory}")
    other, ours = named_tokenizer(f"hf:{directory}"), source.tokenizer
    return other.fingerprint == ours.fingerprint
