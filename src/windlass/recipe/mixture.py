"""The settings of a mixture: `[[data.mix]]`, a section for each source, and `[[data.stages]]`."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from windlass.recipe.network import Section
from windlass.recipe.units import Duration

PERCENT = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*%\s*")
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _share(value: Any) -> Any:
    """`"80 %"` as 0.8."""
    match = PERCENT.fullmatch(value) if isinstance(value, str) else None
    return float(match[1]) / 100 if match else value


class MixSource(Section):
    """A source of a mixture."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]+$")
    """Name of the source in reports, in `data.stages`, and on the command line: the setting
    `data.mix.web.weight=0.3` changes the weight of `web`."""
    source: str = Field(min_length=1)
    """One source, as `data.source`."""
    weight: Weight = 1.0
    """Share of the samples, relative to the other weights."""
    epochs: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Epochs of the source at most; then the others have its share. 0: no limit."""
    eval_source: str = ""
    """Validation corpus of the source; empty: held out from it."""
    max_tokens: int | None = Field(None, ge=0)
    """`data.max_tokens` of this source; left out: as set there."""
    val_fraction: float | None = Field(None, ge=0, lt=1)
    """`data.val_fraction` of this source; left out: as set there."""


class MixStage(Section):
    """Other weights of a mixture from a point of the run on."""

    start: Annotated[Duration, BeforeValidator(_share)] = Field(alias="from")
    """Where the stage begins: steps, a share of the run (0.8 or `"80 %"`), or epochs."""
    weights: dict[str, Weight]
    """New weights by name; a source that is left out keeps its weight."""
