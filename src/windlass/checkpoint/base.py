"""The base of adapters: files of frozen weights, to which the checkpoints of a run refer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from windlass import hub
from windlass.checkpoint.format import MODEL, Base, Checkpoint, FileInfo, hash_files
from windlass.errors import UserError
from windlass.model import hf_files
from windlass.model.quantised import Linear4bit
from windlass.model.sharding import is_fsdp
from windlass.recipe import Recipe

if TYPE_CHECKING:
    from windlass.parallel.ranks import Ranks


def base_of(
    model: nn.Module,
    recipe: Recipe,
    start: Checkpoint | None,
    initial: Checkpoint | None,
    ranks: Ranks,
) -> Base | None:
    """The base to which a run's checkpoints refer; None: they hold all weights. `model` is the
    recipe's, unwrapped, with its weights, perhaps from the checkpoint `start`, or from the
    checkpoint `initial` of `model.init_from`. Collective."""
    if recipe.checkpoint.with_base:
        return None
    if start is not None:
        return start.manifest.base
    weights = frozen_weights(model)
    if initial is not None:
        base = initial.manifest.base
        # The others were trained there, so that no file has them.
        same = tuple(name for name in weights if base and name in base.weights)
        return base.model_copy(update={"weights": same}) if base and same else None
    if not weights or not recipe.refers_to_base:
        return None
    origin = hf_files.describe_origin(model)
    files = identify(hf_files.weights_directory(model), ranks)
    return Base(name=origin["name"], commit=origin["commit"], files=files, weights=tuple(weights))


def frozen_weights(model: nn.Module) -> list[str]:
    """The tensors of an `HfModel` that stay as its files have them, by their names in a checkpoint:
    frozen parameters, and codes in 4 bits."""
    parameters = model.named_parameters()
    names = [name for name, p in parameters if not p.requires_grad and ".lora_" not in name]
    for path, module in model.named_modules():
        if isinstance(module, Linear4bit):
            names += [name for name, _ in module.named_buffers(path, recurse=False)]
    return [MODEL + name for name in names]


def fill_base(
    checkpoint: Checkpoint, model: Any, recipe: Recipe, ranks: Ranks | None = None
) -> None:
    """Fill an unwrapped model with the base of a checkpoint, if it has one, before `restore`.
    Collective over `ranks`. UserError if the base is gone, or its files have changed."""
    base = checkpoint.manifest.base
    if base is None:
        return
    if not hasattr(model, "fill_weights"):
        problem = f"{checkpoint.path} refers to its base {base.title}"
        raise UserError(f"{problem}, which {type(model).__name__} cannot read: pass no model")
    try:
        directory = open_base(base, recipe, ranks)
    except UserError as error:
        problem = f"{checkpoint.path} refers to its base {base.title}: {error.text}"
        advice = "put it back (a link is enough), or name its directory: checkpoint.base=DIR"
        raise UserError(f"{problem}; {advice}") from None
    for module in model.modules():
        if is_fsdp(module):
            module.reshard()  # it fills the shards, not gathered parameters
    model.fill_weights(recipe.run.seed, directory)


def open_base(
    base: Base, recipe: Recipe, ranks: Ranks | None = None, download: bool = True
) -> Path:
    """The directory of a base: `checkpoint.base`, or the origin of the recipe's model. Collective
    over `ranks`. UserError if it is gone, or any byte of its files has changed."""
    moved, name = recipe.checkpoint.base, recipe.model.name.removeprefix("hf:")
    directory = Path(moved or name).expanduser()
    if base.commit and not moved:
        directory = hub.directory(name, base.commit, weights=True, download=download)
    elif not directory.is_dir():
        raise UserError(f"the directory {directory} does not exist")
    files = identify(directory, ranks)
    for name, expected in base.files.items():
        if (present := files.get(name)) is None:
            raise UserError(f"{name} is missing")
        if present != expected:
            raise UserError(f"the SHA-256 of {name} is not {expected.sha256[:12]}…")
    return directory


def identify(directory: Path, ranks: Ranks | None = None) -> dict[str, FileInfo]:
    """Size and SHA-256 of each weight file in a directory; UserError if one cannot be read.

    Collective over `ranks`, which share the hashing.
    """
    sizes, digests, problem = dict[str, int](), dict[str, str](), ""
    rank, world = (ranks.rank, ranks.world) if ranks else (0, 1)
    try:
        sizes = {name: (directory / name).stat().st_size for name in hub.weight_files(directory)}
        digests = dict(hash_files(directory, sizes, rank, world))
    except OSError as error:
        problem = f"{error.filename} cannot be read: {error.strerror}"
    if ranks is not None:
        for other_problem, others in ranks.all_gather_object("base", [problem, digests]):
            problem = problem or other_problem
            digests |= others
    if problem:
        raise UserError(problem)
    here = {name: size for name, size in sizes.items() if name in digests}
    return {name: FileInfo(size=size, sha256=digests[name]) for name, size in here.items()}
