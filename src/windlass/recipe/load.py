"""From a preset's name or a TOML file, and overrides, to a checked recipe.

A name, a file's `extends` and the overrides are merged as plain TOML first, and validated once. Each setting is checked
where it is declared (`settings.py`); here are the combinations that cannot work, which no single setting can know. All
problems of a recipe are reported together, each with its key and the nearest valid name.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

import windlass.recipe.settings as sections
from windlass.errors import UserError, require
from windlass.recipe.keys import problems_of
from windlass.recipe.units import BatchPlan, plan_batch

NON_SEMANTIC = (
    "run.name", "run.dir", "run.notes", "data.dir", "data.workers", "data.prefetch", "train.micro_batch",
    "train.threads", "train.startup_checks", "train.compile", "train.deterministic",
    "parallel.", "checkpoint.", "eval.", "telemetry.",
)  # fmt: skip
"""Settings that change where and how a run computes, but not what: not in the config hash, free to differ on resume."""


CONFIGS = (".yaml", ".yml", ".py")
"""Files in which other tools have their settings."""


class RecipeError(UserError):
    """All that is wrong with a recipe; `problems` holds (key, message) pairs."""

    def __init__(self, name: str, problems: list[tuple[str, str]]):
        self.problems = problems
        many = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
        super().__init__("\n".join([f"recipe {name} has {many}:", *(f"  {key}: {text}" for key, text in problems)]))


class Recipe(BaseModel):
    """Everything that defines a run. Frozen: `with_overrides` makes a changed copy."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    preset: str = Field("custom", pattern=r"^[A-Za-z0-9._+-]+$")
    """The preset or file this recipe came from: the first half of the run's name."""
    run: sections.RunSettings = sections.RunSettings()
    model: sections.ModelSettings = sections.ModelSettings()
    data: sections.DataSettings = sections.DataSettings()
    train: sections.TrainSettings = sections.TrainSettings()
    optim: sections.OptimSettings = sections.OptimSettings()
    parallel: sections.ParallelSettings = sections.ParallelSettings()
    checkpoint: sections.CheckpointSettings = sections.CheckpointSettings()
    eval: sections.EvalSettings = sections.EvalSettings()
    telemetry: sections.TelemetrySettings = sections.TelemetrySettings()

    @model_validator(mode="after")
    def _resolve_lr(self) -> Recipe:
        if "lr" not in self.optim.model_fields_set:  # nor is it afterwards: it follows from `model`
            optim = self.optim.model_copy(update={"lr": default_lr(self.model)})
            optim.model_fields_set.discard("lr")
            self.__dict__["optim"] = optim
        return self

    @model_validator(mode="after")
    def _resolve_tokenizer(self) -> Recipe:
        if self.data.tokenizer == "auto" or "tokenizer" not in self.data.model_fields_set:  # as the learning rate
            data = self.data.model_copy(update={"tokenizer": own_tokenizer(self.model)})
            data.model_fields_set.discard("tokenizer")
            self.__dict__["data"] = data
        return self

    def with_overrides(self, *overrides: str, **values: Any) -> Recipe:
        """A checked copy with dotted overrides, as text (`"optim.lr=3e-4"`) or as `{"optim.lr": 3e-4}` in keywords."""
        tree = self.model_dump(mode="json", exclude_unset=True)
        merge(tree, dict(map(parse_override, overrides)) | values)
        return validate(tree, self.preset)

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
            for package in ("transformers", "accelerate", *(("peft",) if self.model.lora.rank else ())):
                require(package, f'model.kind = "hf"{" with model.lora" * (package == "peft")}')
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
    def load(recipe: str | Path, overrides: Iterable[str] = ()) -> Recipe:
        """Read a preset by name, a `.toml` file or a run directory, apply overrides, check everything; UserError."""
        tree: dict[str, Any] = {}
        for _, layer in layers(recipe, overrides):
            merge(tree, layer)
        return validate(tree, str(recipe))


def default_lr(model: sections.ModelSettings) -> float:
    """The peak learning rate where a recipe sets none."""
    if model.kind == "gpt" or model.from_scratch:
        return 1e-3
    return 2e-4 if model.lora.rank else 5e-5


def own_tokenizer(model: sections.ModelSettings) -> str:
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


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def settings(section: type[BaseModel] = Recipe, prefix: str = "") -> dict[str, Any]:
    """Every dotted key with its pydantic field, in the order of declaration."""
    fields: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        inner = field.annotation
        is_section = isinstance(inner, type) and issubclass(inner, sections.Section)
        fields |= settings(inner, f"{prefix}{name}.") if is_section else {prefix + name: field}  # type: ignore[arg-type]
    return fields


def presets() -> dict[str, Path]:
    """The recipes that ship with the package, by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent.parent / "presets").glob("*.toml"))}


def parse_override(text: str) -> tuple[str, Any]:
    """`a.b=value` as key and TOML value; a value that is no TOML is taken as the text it is."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"{text!r} is no override; write KEY=VALUE, for example optim.lr=3e-4")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def typed(value: Any) -> str:
    """A setting's value as it is typed after the `=`, so that `parse_override` reads the same value."""
    if isinstance(value, str) and value == value.strip() and parse_override(f"key={value}")[1] == value:
        return value
    return json.dumps(value, ensure_ascii=False)


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *path, last = dotted.split(".")
    for part in path:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise UserError(f"{dotted}: {part} is a setting, not a section")
    tree[last] = value


def merge(tree: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Put dotted settings into nested ones; another `model.kind` first takes out what was set for the old one's network."""
    model = tree.get("model")
    kind = changes.get("model.kind")
    if isinstance(model, dict) and kind and kind != model.get("kind", "gpt"):
        for key in set(model) - {"context"}:
            del model[key]
        if isinstance(optim := tree.get("optim"), dict):
            optim.pop("lr", None)
    for key, value in changes.items():
        _put(tree, key, value)


def _find(recipe: str | Path) -> Path:
    """The file behind a preset's name, a path or a run directory; raises UserError with what was meant."""
    shipped, path, name = presets(), Path(recipe), str(recipe)
    for file in (path / "recipe.toml", path if path.suffix == ".toml" else None, shipped.get(name)):
        if file and file.is_file():
            return file
    if path.is_dir():
        inside = [str(file.parent) for file in sorted(path.glob("*/recipe.toml"))]
        instead = "a run directory, a .toml file or a preset's name"
        if (path / "config.json").is_file():
            instead = f"a recipe, and the model in it: model.kind=hf model.name={name}"
        raise UserError(f"{name} is a directory without a recipe (recipe.toml); give {' or '.join(inside) or instead}")
    if path.is_file():
        what = "a recipe is a TOML file (`windlass init` writes one)" if path.suffix in CONFIGS else "it is no recipe"
        train = "" if path.suffix in CONFIGS else f"; to train on it: windlass train quickstart data.source={name}"
        raise UserError(f"{name}: {what}{train}")
    if "=" in name:
        raise UserError(f"{name} is a setting; name a recipe before it, as quickstart {name}")
    if name.endswith(".toml") or "/" in name:
        raise UserError(f"there is no recipe or run {name}; `windlass recipe --list` shows the presets")
    near = difflib.get_close_matches(name, shipped, n=1, cutoff=0.6)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise UserError(f"there is no preset {name}{hint}; there are {', '.join(shipped)}, or give a path to a .toml")


def layers(recipe: str | Path, overrides: Iterable[str] = ()) -> list[tuple[str, dict[str, Any]]]:
    """Where a recipe's settings come from, in the order in which they apply: name and dotted settings of each place."""
    path = _find(recipe)
    shipped, preset = presets().values(), path.stem if path.stem != "recipe" else path.resolve().parent.name
    files = [(f"preset {p.stem}" if p in shipped else str(p), own) for p, own in _files(path)]
    return [("file's name", {"preset": preset}), *files, ("command line", dict(map(parse_override, overrides)))]


def _files(path: Path, seen: tuple[Path, ...] = ()) -> list[tuple[Path, dict[str, Any]]]:
    """A recipe's file after the files that it extends, each with its own settings under dotted keys."""
    if path.resolve() in seen:
        raise UserError(f"{path}: extends itself by way of {', '.join(str(p) for p in seen)}")
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{path}: a byte in line {line} is not UTF-8; save the file as UTF-8") from None
    except (OSError, tomllib.TOMLDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"{error}; texts need quotation marks"
        raise UserError(f"{path} cannot be read as TOML: {why}") from None
    base = tree.pop("extends", None)
    own = [(path, flatten(tree))]
    if base is None:
        return own
    beside = path.parent / str(base)
    return _files(beside if beside.is_file() else _find(str(base)), (*seen, path.resolve())) + own


def validate(tree: Mapping[str, Any], name: str) -> Recipe:
    """A recipe from nested settings; RecipeError names every unknown key, wrong value and impossible combination."""
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(name, problems_of(error.errors(), settings())) from None
    if problems := list(_impossible(recipe)):
        raise RecipeError(name, problems)
    return recipe


def _impossible_model(m: sections.ModelSettings, vocab: int) -> Iterator[tuple[str, str]]:
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
    if d.source.startswith(("http://", "https://")) and not d.sha256:
        yield "data.sha256", "a source that is downloaded needs the SHA-256 it must have"
    if d.format == "text" and d.source.split(":")[0] == "squad":
        yield "data.format", 'the source squad needs data.format = "squad"'
    if d.source.startswith("shards:") and d.packing == "documents":
        yield "data.packing", 'shards that others wrote are streams of tokens: write "packed"'
    if d.streaming and not d.source.startswith("hf:"):
        yield "data.streaming", "only sources hf:... are streamed"
    best, suites = recipe.checkpoint.best, recipe.eval.suites
    if (suite := best.partition(".")[0]) not in ("loss", *suites):
        more = json.dumps([*suites, suite], separators=(",", ":"))
        write = f'write eval.suites={more}, or checkpoint.best="loss"'
        yield "checkpoint.best", f'it is "{best}", and eval.suites does not measure {suite}: {write}'
    try:
        recipe.batch(1)
    except UserError as error:
        yield "train.micro_batch", str(error)
    if p.offload and p.strategy not in ("full_shard", "shard_grad_op", "hybrid_shard"):
        yield "parallel.offload", f'offload belongs to FSDP2; parallel.strategy is "{p.strategy}"'
    if p.shard_size and p.strategy != "hybrid_shard":
        yield "parallel.shard_size", 'a sharding group\'s size goes with parallel.strategy = "hybrid_shard"'
    if optim.kind == "muon" and m.lora.rank:
        yield "optim.kind", "muon orthogonalises whole matrices; adapters are trained with adamw"
    warmup, decay = optim.schedule.warmup, optim.schedule.decay if optim.schedule.kind == "wsd" else 0
    steps = sum(part for part in (warmup, decay) if isinstance(part, int))
    share = sum(part for part in (warmup, decay) if isinstance(part, float))
    if share > 1 or (isinstance(t.steps, int) and steps > t.steps):
        key = "decay" if decay else "warmup"
        yield f"optim.schedule.{key}", f"warm-up {warmup} and decay {decay} are longer than the run ({t.steps} steps)"
