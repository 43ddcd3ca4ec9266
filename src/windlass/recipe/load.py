"""From a preset's name or a TOML file, and overrides, to a checked recipe.

A name, a file's `extends` and the overrides are merged as plain TOML first (`layers.py`), and validated once. Each setting is checked
where it is declared (`settings.py`); here are the combinations that cannot work, which no single setting can know. All
problems of a recipe are reported together, each with its key and the nearest valid name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

import windlass.recipe.settings as sections
from windlass.errors import UserError, require
from windlass.recipe.keys import problems_of
from windlass.recipe.layers import Changes, check_preset, dotted, flatten, layers, merge, presets, typed
from windlass.recipe.network import ModelSettings, Section
from windlass.recipe.units import BatchPlan, plan_batch

NON_SEMANTIC = (
    "run.name", "run.dir", "run.notes", "data.dir", "data.workers", "data.prefetch", "train.micro_batch",
    "train.threads", "train.early_stop", "train.startup_checks", "train.compile", "train.deterministic",
    "parallel.", "checkpoint.", "eval.", "telemetry.",
)  # fmt: skip
"""Settings that change where and how a run computes, but not what: not in the config hash, free to differ on resume."""

MEASURED_ON = ("eval.batches", "eval.hellaswag_", "eval.squad_")
"""Those that say what is evaluated on: a resume may change them, and then compares no evaluation with those before."""
UNRECORDED = ("preset", "run.dir", "data.dir", "checkpoint.resume")
"""Those that a resume records nowhere: where things are, and what one start does. All others it writes into the run."""
REPR_SETTINGS = 8  # changed settings that the repr of a recipe has, at most


class RecipeError(UserError):
    """All that is wrong with a recipe; `problems` holds (key, message) pairs."""

    def __init__(self, name: str, problems: list[tuple[str, str]]):
        self.problems = problems
        many = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
        super().__init__("\n".join([f"recipe {name} has {many}:", *(f"  {key}: {text}" for key, text in problems)]))


class Recipe(BaseModel):
    """Everything that defines a run. Frozen: `replace` makes a changed copy."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    preset: str = Field("custom", pattern=r"^[A-Za-z0-9._+-]+$")
    """The preset or file this recipe came from: the first half of the run's name."""
    run: sections.RunSettings = sections.RunSettings()
    model: ModelSettings = ModelSettings()
    data: sections.DataSettings = sections.DataSettings()
    train: sections.TrainSettings = sections.TrainSettings()
    optim: sections.OptimSettings = sections.OptimSettings()
    parallel: sections.ParallelSettings = sections.ParallelSettings()
    checkpoint: sections.CheckpointSettings = sections.CheckpointSettings()
    eval: sections.EvalSettings = sections.EvalSettings()
    telemetry: sections.TelemetrySettings = sections.TelemetrySettings()

    @model_validator(mode="after")
    def _resolve_defaults(self) -> Recipe:
        """Where they are not set, learning rate and tokenizer follow from `model`, and do not count as set afterwards."""
        for section, name, default in (("optim", "lr", default_lr), ("data", "tokenizer", own_tokenizer)):
            part = getattr(self, section)
            if name not in part.model_fields_set or getattr(part, name) == "auto":
                part = part.model_copy(update={name: default(self.model)})
                part.model_fields_set.discard(name)
                self.__dict__[section] = part
        return self

    def replace(self, *changes: Changes, **values: Any) -> Recipe:
        """A checked copy with settings changed: `replace({"optim.lr": 3e-4})`, `replace(optim={"lr": 3e-4})`, or as text."""
        tree = self.model_dump(mode="json", exclude_unset=True)
        merge(tree, {key: value for change in (*changes, values) for key, value in dotted(change).items()})
        return validate(tree, self.preset)

    def __repr__(self) -> str:
        """Its preset, and what differs from that one, or from the defaults."""
        before = (Recipe.load(self.preset) if self.preset in presets() else Recipe()).flat()
        flat = self.flat().items()
        changed = [f"{key}={typed(value)}" for key, value in flat if key != "preset" and value != before.get(key)]
        shown = [*changed[:REPR_SETTINGS], f"and {len(changed) - REPR_SETTINGS} more"][: len(changed)]
        return f"Recipe({self.preset}{': ' * bool(shown)}{', '.join(shown)})"

    __str__ = __repr__

    def tree(self) -> dict[str, Any]:
        """Every setting that has an effect, as nested plain values."""
        return self.model_dump(mode="json", exclude={"model": set(self.model.unused)})

    def flat(self) -> dict[str, Any]:
        """The same, each under its dotted key."""
        return flatten(self.tree())

    def semantic_settings(self) -> dict[str, Any]:
        """The settings that determine the numbers of a run: all but the NON_SEMANTIC ones."""
        return {k: v for k, v in self.flat().items() if k != "preset" and not k.startswith(NON_SEMANTIC)}

    @property
    def config_hash(self) -> str:
        """Twelve hexadecimal digits: equal for recipes that train the same model the same way."""
        return hashlib.sha256(json.dumps(self.semantic_settings(), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """The run's name: `run.name`, or `<preset>-<config hash>`."""
        return self.run.name or f"{self.preset}-{self.config_hash[:8]}"

    @property
    def run_dir(self) -> Path:
        """The run's directory: `run.dir`, or `runs/<name>`."""
        return Path(self.run.dir or f"runs/{self.name}")

    @property
    def tokenizer(self) -> str:
        """`data.tokenizer`; where it is the one of the Hub that comes with the model, at the model's revision too."""
        place, m = self.data.tokenizer, self.model
        return f"{place}@{m.revision}" if m.kind == "hf" and m.revision and place == f"hf:{m.name}" else place

    @property
    def tokenizer_key(self) -> str:
        """The setting that names the tokenizer: where `data.tokenizer` is left out, that of the model or of its weights."""
        if "tokenizer" in self.data.model_fields_set or not self.data.tokenizer.startswith("hf:"):
            return "data.tokenizer"
        return "model.init_from" if self.model.init_from else "model.name"

    def strategy(self, world: int) -> str:
        """The sharding strategy with `auto` resolved for a number of ranks."""
        auto = "ddp" if world > 1 else "single"
        return auto if self.parallel.strategy == "auto" else self.parallel.strategy

    def batch(self, world: int, device: str = "cpu") -> BatchPlan:
        """How a step's samples are divided among `world` ranks; a UserError names the sizes that would work."""
        return plan_batch(self.train.global_batch, self.train.micro_batch, world, self.model.context, device)

    def check_packages(self) -> None:
        """Raise UserError where training this recipe needs an optional package that is not installed."""
        if self.model.kind == "hf":
            for package in ("transformers", "accelerate"):
                require(package, 'model.kind = "hf"')
            if self.model.lora.rank:
                require("peft", 'model.kind = "hf" with model.lora')
        init_from = self.model.init_from
        if init_from.startswith("hf:") or Path(init_from, "config.json").is_file():
            require("transformers", f"model.init_from: {init_from}")
        for suite in self.eval.suites:
            if suite.startswith("lm-eval:") or (suite == sections.HELLASWAG_SUITE and not self.eval.hellaswag_file):
                require("lm_eval" if suite.startswith("lm-eval:") else "datasets", f"eval.suites: {suite}")
        for tracker in self.telemetry.trackers:
            require(tracker, f'telemetry.trackers = ["{tracker}"]')

    def toml(self) -> str:
        """The resolved recipe as TOML; loading it gives an equal recipe."""
        import tomli_w

        return tomli_w.dumps(self.tree())

    @staticmethod
    def load(recipe: str | Path, overrides: Changes = ()) -> Recipe:
        """Read a preset by name, a `.toml` file or a run directory, change settings, check everything; UserError.

        `overrides`: a mapping (`{"train.steps": 5}`, nested or dotted), or text as on the command line (`["train.steps=5"]`).
        """
        tree: dict[str, Any] = {}
        for _, layer in layers(recipe, overrides):
            merge(tree, layer)
        return validate(tree, str(recipe))

    @staticmethod
    def from_dict(settings: Mapping[str, Any]) -> Recipe:
        """A recipe of settings as a file has them, nested or dotted; `extends` names the preset or file that they change."""
        own = {key: value for key, value in dotted(settings).items() if key != "extends"}
        if "extends" in settings:
            return Recipe.load(settings["extends"], own)
        check_preset(own, "from_dict")
        merge(tree := dict[str, Any](), own)
        return validate(tree, str(own.get("preset", "custom")))


def as_recipe(source: Any) -> Recipe:
    """What a verb was given as its recipe: a `Recipe`, a run, a preset's name, or the path of a file or a run."""
    if isinstance(source, str | Path):
        return Recipe.load(source)
    recipe = getattr(source, "recipe", source)
    if not isinstance(recipe, Recipe):
        advice = "; Recipe.from_dict makes one of a dictionary" if isinstance(source, Mapping) else ""
        given = type(source).__name__
        raise UserError(f"{given} is no recipe: give a Recipe, a preset's name or a .toml's path{advice}")
    return recipe


def default_lr(model: ModelSettings) -> float:
    """The peak learning rate where a recipe sets none."""
    if model.kind == "gpt" or model.from_scratch:
        return 1e-3
    return 2e-4 if model.lora.rank else 5e-5


def own_tokenizer(model: ModelSettings) -> str:
    """What `data.tokenizer = "auto"` stands for: the tokenizer of the weights or of the model that is named, else `byte`."""
    origin = model.init_from
    if origin.startswith("hf:"):
        return origin
    path = Path(origin.partition("@")[0]).expanduser()
    for run in (path, path.parent.parent) if origin else ():  # a run, or a checkpoint in one
        with contextlib.suppress(OSError, ValueError, KeyError):
            name = tomllib.loads((run / "recipe.toml").read_text(encoding="utf-8"))["data"]["tokenizer"]
            return f"hf:{run / 'tokenizer'}" if name in ("bpe", "char") else str(name)  # those are of the run's corpus
    if origin and any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return f"hf:{path}"
    return f"hf:{model.name}" if model.kind == "hf" else "byte"


def settings(section: type[BaseModel] = Recipe, prefix: str = "") -> dict[str, Any]:
    """Every dotted key with its pydantic field, in the order of declaration."""
    fields: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        inner = field.annotation
        is_section = isinstance(inner, type) and issubclass(inner, Section)
        fields |= settings(inner, f"{prefix}{name}.") if is_section else {prefix + name: field}  # type: ignore[arg-type]
    return fields


def validate(tree: Mapping[str, Any], name: str) -> Recipe:
    """A recipe from nested settings; RecipeError names every unknown key, wrong value and impossible combination."""
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(name, problems_of(error.errors(), settings())) from None
    if problems := list(_impossible(recipe)):
        raise RecipeError(name, problems)
    return recipe


def _impossible_model(m: ModelSettings, vocab: int) -> Iterator[tuple[str, str]]:
    """The same inside `[model]`; `vocab`: the tokenizer's, or 0."""
    if m.kind == "hf" and not m.name:
        yield "model.name", 'model.kind = "hf" needs the model\'s name on the Hub or a directory'
    if m.kind == "hf" and m.from_scratch and m.init_from:
        yield "model.init_from", "it names first weights, and model.from_scratch asks for none; leave one out"
    if given := [key for key in m.unused if key in m.model_fields_set]:
        keys = ", ".join(f"model.{key}" for key in given)
        if m.kind == "gpt":
            yield keys, 'for model.kind = "hf" alone: write that too, or leave them out (run.name names the run)'
        else:
            copy = "give model.name a directory with an edited copy of it" if m.from_scratch else "leave them out"
            yield keys, f'no effect with model.kind = "hf", where the model\'s own config.json decides: {copy}'
    if m.lora.base == "4bit" and (not m.lora.rank or m.from_scratch):
        yield "model.lora.base", "weights in 4 bits are not trained: set model.lora.rank, on a model that has weights"
    if m.kind == "gpt":
        if m.width % m.heads:
            near = min((h for h in range(1, m.width + 1) if m.width % h == 0), key=lambda h: abs(h - m.heads))
            yield "model.heads", f"{m.heads} heads do not divide the width {m.width}; the nearest that does is {near}"
        elif m.position == "rope" and (m.width // m.heads) % 2:
            yield "model.heads", f"rotary positions need an even size per head, and {m.width} / {m.heads} is odd"
        if m.heads % m.kv_heads_:
            yield "model.kv_heads", f"{m.kv_heads} key/value heads do not divide the {m.heads} heads"
        if 0 < m.vocab < vocab:
            yield "model.vocab", f"{m.vocab} is smaller than the tokenizer's vocabulary of {vocab:,}"


def _impossible(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Combinations that cannot work."""
    m, d, t, p, optim = recipe.model, recipe.data, recipe.train, recipe.parallel, recipe.optim
    yield from _impossible_model(m, d.vocab_)
    if not d.sources or not all(map(str.strip, d.sources)):
        yield "data.source", 'it is empty: name a file, a directory, a pattern or hf:NAME ("." is this directory)'
    if any(source.startswith(("http://", "https://")) for source in d.sources) and not d.sha256:
        yield "data.sha256", "a source that is downloaded needs the SHA-256 it must have"
    if d.format == "text" and any(source.split(":")[0] == "squad" for source in d.sources):
        yield "data.format", 'the source squad needs data.format = "squad"'
    shards = [source.startswith("shards:") for source in d.sources]
    if any(shards) and not all(shards):
        yield "data.source", "token shards and texts cannot be in one list: tokens are not made again"
    if any(shards) and d.packing == "documents":
        yield "data.packing", 'shards that others wrote are streams of tokens: write "packed"'
    if d.streaming and not all(source.startswith("hf:") for source in d.sources):
        yield "data.streaming", "only sources hf:... are streamed"
    best, suites = recipe.checkpoint.best, recipe.eval.suites
    suite = best.partition(".")[0]
    if suite not in ("loss", *suites) and not suite.startswith(sections.OWN_SUITE):
        more = json.dumps([*suites, suite], separators=(",", ":"))
        write = f'write eval.suites={more}, or checkpoint.best="loss"'
        yield "checkpoint.best", f'it is "{best}", and eval.suites does not measure {suite}: {write}'
    if recipe.eval.train_batches and sections.LOSS_SUITE not in suites:
        problem = "it is measured with the suite loss, which eval.suites leaves out: add it, or write 0"
        yield "eval.train_batches", problem
    if t.early_stop and not recipe.eval.every:
        yield "train.early_stop", "it needs evaluations, and eval.every is 0: set that, or leave this out"
    try:
        recipe.batch(1)
    except UserError as error:
        yield "train.micro_batch", str(error)
    if p.offload and p.strategy not in sections.SHARDED:
        yield "parallel.offload", f'offload belongs to FSDP2; parallel.strategy is "{p.strategy}"'
    if p.shard_size and p.strategy != "hybrid_shard":
        yield "parallel.shard_size", 'a sharding group\'s size goes with parallel.strategy = "hybrid_shard"'
    if optim.options and not optim.kind.startswith("torch."):
        yield "optim.options", f'they are for optim.kind = "torch.optim...", and it is "{optim.kind}"'
    if optim.kind == "muon" and m.lora.rank:
        yield "optim.kind", "muon orthogonalises whole matrices; adapters are trained with adamw"
    warmup, decay = optim.schedule.warmup, optim.schedule.decay if optim.schedule.kind == "wsd" else 0
    steps = sum(part for part in (warmup, decay) if isinstance(part, int))
    share = sum(part for part in (warmup, decay) if isinstance(part, float))
    length, what = (optim.schedule.steps, "schedule") if optim.schedule.steps else (t.steps, "run")
    if share > 1 or (isinstance(length, int) and steps > length):
        alone = isinstance(warmup, int) and isinstance(length, int) and warmup > length
        key = "decay" if decay and not alone else "warmup"
        problem = f"warm-up {warmup} and decay {decay} are longer than the {what} ({length} steps)"
        yield f"optim.schedule.{key}", f"{problem}: shorten it, or write a share of the run, as 0.02"
