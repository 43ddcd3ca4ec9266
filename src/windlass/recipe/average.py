"""The settings of averaged weights: `train.average`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from windlass.recipe.network import Section
from windlass.recipe.units import Duration, Horizon

Beta = Annotated[float, Field(ge=0, lt=1)]


class AverageSettings(Section):
    """An average of the trained weights, beside them."""

    kind: Literal["none", "ema", "tail"] = "none"
    """`ema`: exponential moving average of the weights; `tail`: their mean over the run's `last`
    part (arXiv 1803.05407, 2306.03241). The training itself does not change."""
    beta: Beta = 0.999
    """With `ema`: its decay, in the first steps (1 + n) / (10 + n) after n averaged ones if that is
    less (as TensorFlow's `ExponentialMovingAverage`), so that the first weights are forgotten."""
    last: Duration = 0.2
    """With `tail`: the part of the run at its end that is averaged."""

    @property
    def enabled(self) -> bool:
        return self.kind != "none"

    def begin(self, horizon: Horizon) -> int:
        """The steps of a run before the averaged ones."""
        if self.kind == "tail":
            return max(0, horizon.steps_before_last(self.last))
        return 0 if self.enabled else horizon.steps
