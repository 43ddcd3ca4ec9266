"""From a preset's name or a TOML file, and overrides (`layers.py`), to a checked recipe. A setting
is checked at its declaration, and then with the others (`combinations.py`)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, PrivateAttr, ValidationError, model_validator

import windlass.recipe.layers as layering
import windlass.recipe.settings as sections
from windlass.errors import UserError, argument, require
from windlass.recipe.combinations import CHECKS
from windlass.recipe.data import DataSettings
from windlass.recipe.keys import problems_of
from windlass.recipe.layers import RECIPE, Changes
from windlass.recipe.network import ModelSettings
from windlass.recipe.section import Frozen, Section
from windlass.recipe.strategies import STRATEGIES, Sizes, Strategy
from windlass.recipe.units import BatchPlan, Horizon, plan_batch

# Settings outside the config hash: they do not change a run's numbers and may change on resume.
NON_SEMANTIC = (
    *("run.name", "run.dir", "run.base", "run.notes", "data.dir", "data.workers"),
    *("data.changed", "data.cache_gb"),
    *("train.micro_batch", "train.threads", "train.startup_checks"),
    *("train.compile", "train.deterministic"),
    *("parallel.", "checkpoint.", "eval.", "telemetry."),
)
# Settings that belong to one start. A resume writes all other changes into the run's recipe.
UNRECORDED = ("preset", "run.dir", "data.dir", "data.changed", "checkpoint.resume")


class RecipeError(UserError):
    """Everything that is wrong with a recipe; `problems` holds (key, message) pairs."""

    def __init__(self, name: str, problems: list[tuple[str, str]]):
        self.problems = problems
        count = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
        lines = [f"  {key}: {text}" for key, text in problems]
        super().__init__("\n".join([f"recipe {name} has {count}:", *lines]))


class Recipe(Frozen):
    """Everything that defines a run. Frozen: `replace` makes a changed copy."""

    preset: str = Field("custom", pattern=r"^[A-Za-z0-9._+-]+$")
    """The preset or file this recipe came from: the first half of the run's name."""
    run: sections.RunSettings = sections.RunSettings()
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    train: sections.TrainSettings = sections.TrainSettings()
    optim: sections.OptimSettings = sections.OptimSettings()
    parallel: sections.ParallelSettings = sections.ParallelSettings()
    checkpoint: sections.CheckpointSettings = sections.CheckpointSettings()
    eval: sections.EvalSettings = sections.EvalSettings()
    telemetry: sections.TelemetrySettings = sections.TelemetrySettings()
    # The sections with their paths as written, if `run.base` has made these absolute.
    _written: dict[str, Section] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _resolve(self) -> Recipe:
        """Make paths absolute (`run.base`). Derive learning rate and tokenizer from `model` if
        unset; they still count as unset."""
        if home := self.home:
            for name in ("data", "model", "eval", "checkpoint"):
                part = getattr(self, name)
                changed = {}
                for key, value in part:
                    if (absolute := layering.located(f"{name}.{key}", value, home)) != value:
                        changed[key] = absolute
                if changed:
                    self._written[name] = part
                    self.__dict__[name] = part.model_copy(update=changed)
        lr, m = 1e-3, self.model
        if m.kind == "hf" and not m.from_scratch:
            lr = 2e-4 if m.lora.rank else 5e-5
        for section, name in (("optim", "lr"), ("data", "tokenizer")):
            part = getattr(self, section)
            if name not in part.model_fields_set or getattr(part, name) == "auto":
                value = lr if name == "lr" else own_tokenizer(m)
                for parts in (self.__dict__, self._written):
                    if section in parts:
                        part = parts[section].model_copy(update={name: value})
                        part.model_fields_set.discard(name)
                        parts[section] = part
        return self

    @property
    def home(self) -> Path | None:
        """The directory that relative paths start from; None: the working directory."""
        return layering.home_of(self.run.base)

    @property
    def as_written(self) -> Recipe:
        """This recipe with its paths as written, which identify its data; without `run.base` the
        same."""
        written = self.model_copy()
        written.__dict__.update(self._written)
        return written

    def replace(self, *changes: Changes, **values: Any) -> Recipe:
        """A checked copy: `replace({"optim.lr": 3e-4})`, `replace(optim={"lr": 3e-4})`, or text."""
        options: dict[str, Any] = {"exclude_unset": True, "exclude_none": True}
        tree = self.as_written.model_dump(mode="json", by_alias=True, **options)
        new = dict[str, Any]()
        for change in (*changes, values):
            new |= layering.dotted(change)
        _put(tree, layering.from_here(new, self.run.base))
        return validate(tree, self.preset)

    def __repr__(self) -> str:
        return f"Recipe({self.name})"

    __str__ = __repr__

    def tree(self) -> dict[str, Any]:
        """Every setting that has an effect, as nested plain values."""
        unused = {"model": set(self.model.unused), "data": set(self.data.unused)}
        # TOML lacks None.
        options: dict[str, Any] = {"exclude": unused, "exclude_none": True}
        return self.as_written.model_dump(mode="json", by_alias=True, **options)

    def flat(self) -> dict[str, Any]:
        """The same, each under its dotted key."""
        return layering.flatten(self.tree())

    def semantic_settings(self) -> dict[str, Any]:
        """The settings that determine the numbers of a run: all but the NON_SEMANTIC ones."""
        where = ("preset", *NON_SEMANTIC)
        return {key: value for key, value in self.flat().items() if not key.startswith(where)}

    @property
    def refers_to_base(self) -> bool:
        """Whether checkpoints refer to the files of frozen weights instead of holding them."""
        model = self.model
        if model.kind != "hf" or model.from_scratch or self.checkpoint.with_base:
            return False
        path = Path(model.init_from).expanduser()
        # The weights beside an adapter that is trained further come from the model's own files.
        if not model.init_from or (path / "adapter_config.json").is_file():
            return True
        # A run's checkpoint has a base, from which the weights beside its adapters come.
        run = Path(model.init_from.partition("@")[0]).expanduser()
        places = [place for place in (run, path.parent.parent) if (place / RECIPE).is_file()]
        return any(Recipe.load(place).refers_to_base for place in places)

    @property
    def config_hash(self) -> str:
        """Twelve hexadecimal digits: equal for recipes that train the same model the same way."""
        text = json.dumps(self.semantic_settings(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """The run's name: `run.name`, or `<preset>-<config hash>`."""
        return self.run.name or f"{self.preset}-{self.config_hash[:8]}"

    @property
    def run_dir(self) -> Path:
        """The run's directory: `run.dir`, or `runs/<name>`."""
        return Path(os.path.expanduser(self.run.dir or f"runs/{self.name}"))

    @property
    def tokenizer(self) -> str:
        """`data.tokenizer`; the tokenizer that comes with a model has the model's revision."""
        place = self.data.tokenizer
        m = self.model
        comes_with_model = m.kind == "hf" and place == f"hf:{m.name}"
        return f"{place}@{m.revision}" if comes_with_model and m.revision else place

    @property
    def tokenizer_key(self) -> str:
        """The setting that names the tokenizer; without `data.tokenizer` it names the model."""
        if "tokenizer" in self.data.model_fields_set or not self.data.tokenizer.startswith("hf:"):
            return "data.tokenizer"
        return "model.init_from" if self.model.init_from else "model.name"

    def strategy(self, world: int) -> Strategy:
        """The strategy for `world` ranks, with `auto` resolved; UserError for `single` on more."""
        auto = "ddp" if world > 1 else "single"
        name = auto if self.parallel.strategy == "auto" else self.parallel.strategy
        if name == "single" and world > 1:
            problem = f'parallel.strategy = "single" is for one rank, and there are {world}'
            raise UserError(f'{problem}; use "ddp" or "auto"')
        each = self.parallel.reduce_each_micro_batch
        return STRATEGIES[name] if each == "auto" else replace(STRATEGIES[name], reduces_each=each)

    def sizes(self, world: int, ranks_of_host: int = 0) -> Sizes:
        """How `world` ranks are arranged, `ranks_of_host` of them on each of several hosts (0: on
        one); UserError if the layout does not divide the ranks."""
        p = self.parallel
        strategy = self.strategy(world)
        if world % p.model_ranks:
            fewer = world // p.model_ranks * p.model_ranks
            near = [ranks for ranks in (fewer, fewer + p.model_ranks) if ranks]
            problem = f"{p.layout} needs a multiple of {p.model_ranks} ranks, and this run has"
            advice = f"start {' or '.join(map(str, near))} ranks ({argument('world', near[0])})"
            raise UserError(f"{problem} {world}: {advice}")
        inner = p.context * p.tensor
        groups = 0 if ranks_of_host % inner else ranks_of_host // inner
        data = strategy.sizes(world // p.model_ranks, p.shard_size, groups)
        return replace(data, pp=p.pipeline, cp=p.context, tp=p.tensor)

    def horizon(self, steps: int, samples_per_epoch: int) -> Horizon:
        """The length of a run with the recipe's batch."""
        return Horizon(steps, samples_per_epoch, self.train.global_batch)

    def batch(self, world: int, device: str = "cpu") -> BatchPlan:
        """How `world` ranks divide a step's samples; UserError names the sizes that would work."""
        t = self.train
        data_world = self.sizes(world).data_world
        context = self.model.context
        stages = self.parallel.pipeline
        batch = plan_batch(t.global_batch, t.micro_batch, data_world, context, device, stages)
        if batch.share // batch.micro_batch < stages:
            problem = f"parallel.pipeline = {stages} needs {stages} or more micro-batches in a step"
            present = f"here each stage has {batch.accumulation} of {batch.micro_batch} samples"
            too_few = "write a larger train.global_batch"
            advice = "write a smaller train.micro_batch" if batch.micro_batch > 1 else too_few
            raise UserError(f"{problem}, and {present}: {advice}")
        return batch

    @property
    def optimizer_state(self) -> str:
        kind = self.optim.kind
        return f"{kind} in bf16" if self.train.master == "bf16" else kind

    def check_packages(self) -> None:
        """Raise UserError if training this recipe needs an optional package that is missing."""
        if self.model.kind == "hf":
            for package in ("transformers", "accelerate"):
                require(package, 'model.kind = "hf"')
            if self.model.lora.rank:
                require("peft", 'model.kind = "hf" with model.lora')
            if self.model.lora.base == "4bit":
                require("bitsandbytes", 'model.lora.base = "4bit"')
            if self.model.kernels == "liger":
                require("liger_kernel", 'model.kernels = "liger"')
        if self.train.precision == "float8":
            require("torchao", 'train.precision = "float8"')
        if self.optim.kind.startswith("pytorch_optimizer."):
            require("pytorch_optimizer", f'optim.kind = "{self.optim.kind}"')
        for suite in self.eval.suites:
            if suite.startswith("lm-eval:"):
                require("lm_eval", f"eval.suites: {suite}")
            if suite == sections.HELLASWAG_SUITE and not self.eval.hellaswag_file:
                require("datasets", f"eval.suites: {suite}")
        for tracker in self.telemetry.trackers:
            require(tracker, f'telemetry.trackers = ["{tracker}"]')

    def toml(self) -> str:
        """The resolved recipe as TOML; loading it gives an equal recipe."""
        import tomli_w

        return tomli_w.dumps(self.tree())

    @staticmethod
    def load(recipe: str | Path, overrides: Changes = ()) -> Recipe:
        """Read a preset, a `.toml` file or a run directory, change settings, check everything.

        Args:
            recipe: The preset's name, or the path.
            overrides: A mapping (`{"train.steps": 5}`, nested or dotted), or text as on the command
                line (`["train.steps=5"]`).

        Raises:
            UserError: Every problem of the recipe, each with its key.
        """
        tree: dict[str, Any] = {}
        for layer in layering.read_layers(recipe, overrides):
            base = str(tree["run"].get("base", "")) if isinstance(tree.get("run"), dict) else ""
            _put(tree, layering.from_here(layer, base))
        return validate(tree, str(recipe))

    @staticmethod
    def from_dict(settings: Mapping[str, Any]) -> Recipe:
        """A recipe from a file's settings, nested or dotted, perhaps with `extends`."""
        changes = layering.dotted(settings)
        if "extends" in changes:
            return Recipe.load(changes.pop("extends"), changes)
        layering.check_preset(changes, "from_dict")
        tree = dict[str, Any]()
        _put(tree, changes)
        return validate(tree, str(changes.get("preset", "custom")))


def _put(tree: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Put dotted settings into nested ones: `{}` empties a table of values, as `data.columns`, and
    changes no section."""
    sections = {key for key, value in changes.items() if value == {}}
    sections -= settings().keys() if sections else set()
    layering.merge(tree, {key: value for key, value in changes.items() if key not in sections})


def as_recipe(source: Any) -> Recipe:
    """The recipe of a verb's argument: a `Recipe`, a run, a preset's name or a path."""
    if isinstance(source, str | Path):
        return Recipe.load(source)
    recipe = getattr(source, "recipe", source)
    if not isinstance(recipe, Recipe):
        advice = "give a Recipe, a preset's name or a .toml's path"
        if isinstance(source, Mapping):
            advice += ", or use Recipe.from_dict"
        raise UserError(f"{type(source).__name__} is not a recipe: {advice}")
    return recipe


def own_tokenizer(model: ModelSettings, default: str = "byte") -> str:
    """The tokenizer for `data.tokenizer = "auto"`: of the weights, of the model, else `byte`."""
    origin = model.init_from
    path = Path(origin.partition("@")[0]).expanduser()
    runs = (path, path.parent.parent) if origin else ()  # a run, or a checkpoint in one
    for run in runs:
        with contextlib.suppress(OSError, ValueError, KeyError):
            file = run / RECIPE
            saved = run / "tokenizer"
            recipe = layering.recorded(file) or tomllib.loads(file.read_text(encoding="utf-8"))
            name = str(recipe["data"]["tokenizer"])
            # trained on the corpus, or with more tokens than the named one
            if name in ("bpe", "char") or recipe["data"].get("add_tokens"):
                return f"hf:{saved}"
            if name != "byte" or saved.is_dir():  # a run of own data without text has none
                home = layering.home_of(recipe.get("run", {}).get("base", "")) or Path()
                return str(layering.located("data.tokenizer", name, home))
    files = ("tokenizer.json", "tokenizer_config.json")
    if origin and any((path / name).is_file() for name in files):
        return f"hf:{path}"
    return f"hf:{model.name}" if model.kind == "hf" else default


def settings(section: type[BaseModel] = Recipe, prefix: str = "") -> dict[str, Any]:
    """Every dotted key with its pydantic field, in the order of declaration."""
    fields: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            fields |= settings(inner, f"{prefix}{name}.")
        else:
            fields[prefix + name] = field
    return fields


def validate(tree: Mapping[str, Any], name: str) -> Recipe:
    """A recipe from nested settings; RecipeError with each bad key and value, else with each bad
    combination."""
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(name, problems_of(error.errors(), settings())) from None
    if problems := [problem for check in CHECKS for problem in check(recipe)]:
        raise RecipeError(name, problems)
    return recipe
