"""Open the data of a recipe: prepared tokens, divided into training and validation data, and cut
into samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from windlass.data.batch import Samples
from windlass.data.mixture import MixedSamples
from windlass.data.prepare import Prepared, prepare
from windlass.data.run_data import Data
from windlass.data.samples import BestFitSamples, ExampleSamples, PackedSamples, Tokens
from windlass.data.split import Part, divide
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.recipe import DataSettings, Recipe

if TYPE_CHECKING:
    from windlass.parallel.ranks import Ranks


def open_data(recipe: Recipe, ranks: Ranks | None = None, **how: Any) -> Data:
    """The data of a recipe, prepared and checked; arguments as `prepare`."""
    return open_samples(recipe, prepare(recipe, ranks, **how))


def open_samples(recipe: Recipe, prepared: Prepared) -> Data:
    """Prepared data, divided and cut; `train` is None without training data (`only_val`)."""
    data, tokenizer = recipe.data, prepared.tokenizer
    if recipe.model.is_new:
        tokenizer.start = None  # of the model that the tokenizer comes from
    division = divide(prepared.members, data.train_size, data.eval_size, recipe.run.seed)
    train = _open_set(recipe, prepared, division.train, is_val=False)
    val = _open_set(recipe, prepared, division.val, is_val=True)
    has_layout = any(member.data.format != "text" for member in prepared.members)
    return Data(
        train,  # type: ignore[arg-type]
        val,
        tokenizer,
        division.fingerprint(tokenizer),
        tokenizer.vocab,
        prepared.template if has_layout else None,
        prepared,
        division,
    )


def _open_set(
    recipe: Recipe, prepared: Prepared, parts: list[list[Part]], is_val: bool
) -> Samples | None:
    """The samples of the parts of each member; None without any."""
    opened = dict[str, Samples]()
    for member, own in zip(prepared.members, parts, strict=True):
        if not own:
            continue
        samples = _cut(member.data, own, prepared.tokenizer, recipe.model.context, is_val)
        if len(samples):
            opened[member.name] = samples
        elif not (recipe.data.mix and is_val):
            which = "val" if is_val else "train"
            which += f", {member.name}" if member.name else ""
            problem = f"{getattr(samples, 'tokens', 0):,} tokens ({which}) are too few"
            if isinstance(samples, ExampleSamples) and samples.left_out:
                problem = f"no item ({which}) fits, {samples.left_out:,} are left out: too few"
            places = ", ".join(map(str, prepared.directories))
            size = recipe.model.context + 1
            raise UserError(f"{places}: {problem} for a sample of model.context + 1 = {size:,}")
    if recipe.data.mix and opened:
        return MixedSamples(opened, spread=is_val)
    return opened.get("")


def _cut(
    data: DataSettings, parts: Sequence[Part], tokenizer: Tokenizer, context: int, is_val: bool
) -> Samples:
    """The samples of a member's parts."""
    tokens = Tokens(parts)
    if data.format != "text":
        examples = ExampleSamples(tokens, context, pad=tokenizer.eot or 0)
        is_packed = data.packing == "best-fit" and len(examples)
        return BestFitSamples(examples, context) if is_packed else examples
    is_one_text = len(parts) == 1 and parts[0].corpus.index.single_text
    are_named = all(part.documents for part in parts if part.tokens)
    apart = data.document_mask is not False and are_named and not is_one_text
    following = tokenizer.first[0] if tokenizer.first else 0  # begins the next document
    return PackedSamples(tokens, context, ragged=is_val, apart=apart, following=following)
