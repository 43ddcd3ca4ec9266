"""A loss law fitted to runs of several sizes, and what it says of a larger one, with its uncertainty.

    L(N, D) = E + A / N^alpha + B / D^beta        (arXiv 2203.15556, approach 3)

or one of its halves, where the runs only vary N, only vary D, or tie D to N (then the law holds along that line). For
given exponents the law is linear in E, A and B, so the fit searches the exponents alone and solves for the rest, with
none of them negative, by least squares of the relative residuals.

The uncertainty is that of noise in the runs, under the assumption that the law is true: losses are drawn anew around
the fit, with a noise whose own size is uncertain when runs are few (chi-squared), and refitted. That the law is true
far outside the sizes it was fitted to is not known; `back_test` says how well it did for the largest size at hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.run import Run

Array = NDArray[np.float64]

EXPONENTS = (0.01, 3.0)
"""Where exponents are searched; a fit at an edge says that the runs do not determine it."""
COARSE, FINE, ROUNDS = 40, 9, 4
"""Points of the search along each exponent: the first grid, then so many rounds on the interval around the best."""
TIED = 0.05
"""Scatter of log D around a straight line in log N under which D counts as tied to N."""


@dataclass(frozen=True)
class Point:
    """One finished run."""

    parameters: float
    tokens: float
    loss: float
    name: str = ""


@dataclass(frozen=True)
class Prediction:
    """A loss at one size, and the interval in which a run's loss lies with probability `level`, if the law holds."""

    parameters: float
    tokens: float | None
    loss: float
    low: float | None
    high: float | None
    level: float


@dataclass(frozen=True)
class Law:
    """E, and coefficient and exponent of each variable of the law: N, D or both."""

    variables: str
    E: float
    coefficients: tuple[float, ...]
    exponents: tuple[float, ...]

    def loss(self, parameters: float, tokens: float) -> float:
        """The law at one size; a variable that is not in the law is not looked at."""
        values = {"N": parameters, "D": tokens}
        terms = zip(self.variables, self.coefficients, self.exponents, strict=True)
        return self.E + sum(c / values[v] ** e for v, c, e in terms)


@dataclass(frozen=True)
class ScalingFit:
    """A fitted law with what can be said about its reliability."""

    law: Law
    points: tuple[Point, ...]
    along: str
    """Where the law holds: what the runs kept fixed or tied together."""
    noise: float | None
    """Standard deviation of the relative residuals, freedom taken into account; None without any freedom left."""
    samples: tuple[tuple[Law, float], ...]
    """Laws refitted to redrawn losses, each with its noise."""
    determined: bool
    """Whether the exponents were found inside the range searched."""

    def predict(self, parameters: float, tokens: float, level: float = 0.9) -> Prediction:
        """The loss of a run of so many parameters and tokens, with the interval of probability `level`."""
        low = high = None
        if self.samples:
            draw = np.random.default_rng(0).standard_normal(len(self.samples))
            drawn = [s.loss(parameters, tokens) * (1 + n * z) for (s, n), z in zip(self.samples, draw, strict=True)]
            low, high = (float(x) for x in np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2]))
        return Prediction(parameters, tokens, self.law.loss(parameters, tokens), low, high, level)

    def grows(self) -> float:
        """The power of N with which the runs' tokens grow; a larger size is looked for along it (1: D in proportion to N)."""
        return _slope(self.points)

    def interval(self, what: str, level: float = 0.9) -> tuple[float, float] | None:
        """The interval of one constant of the law: `"E"`, `"N"` or `"D"` (the exponent of that variable)."""
        if not self.samples:
            return None
        values = [s.E if what == "E" else s.exponents[s.variables.index(what)] for s, _ in self.samples]
        low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)


def _slope(points: Iterable[Point]) -> float:
    points = list(points)
    n, d = np.log([p.parameters for p in points]), np.log([p.tokens for p in points])
    return float(np.polyfit(n, d, 1)[0]) if np.ptp(n) > 0 else 1.0


def fit_scaling(points: list[Point], samples: int = 300, seed: int = 0) -> ScalingFit:
    """Fit a loss law to finished runs of several sizes.

    Args:
        points: the runs; several seeds of one size are welcome, they tell the noise.
        samples: redrawn fits for the uncertainty; 0: none.
        seed: of the redrawing.

    Raises:
        UserError: where the runs cannot determine a law.
    """
    if any(not (p.loss > 0 and np.isfinite(p.loss)) for p in points):
        raise UserError("a loss law needs finite losses above 0; leave diverged runs out of the study")
    variables, along = _variables(points)
    x = np.array([[getattr(p, {"N": "parameters", "D": "tokens"}[v]) for v in variables] for p in points], float)
    y = np.array([p.loss for p in points])
    free = len(points) - 1 - 2 * len(variables)
    law, determined = _fit(variables, x, y)
    fitted = np.array([law.loss(p.parameters, p.tokens) for p in points])
    noise = float(np.sqrt(np.sum((y / fitted - 1) ** 2) / free)) if free > 0 else None
    drawn: list[tuple[Law, float]] = []
    if noise is not None:
        random = np.random.default_rng(seed)
        for _ in range(samples):
            spread = noise * np.sqrt(free / random.chisquare(free))
            redrawn = fitted * (1 + np.clip(spread * random.standard_normal(len(y)), -0.9, None))
            drawn.append((_fit(variables, x, redrawn)[0], float(spread)))
    return ScalingFit(law, tuple(points), along, noise, tuple(drawn), determined)


def back_test(points: list[Point]) -> tuple[Prediction, float] | None:
    """The largest size predicted from the others, and its true mean loss; None where the others are too few."""
    largest = max(p.parameters * p.tokens for p in points)
    held = [p for p in points if p.parameters * p.tokens == largest]
    try:
        fit = fit_scaling([p for p in points if p not in held])
    except UserError:
        return None
    return fit.predict(held[0].parameters, held[0].tokens), float(np.mean([p.loss for p in held]))


def _variables(points: list[Point]) -> tuple[str, str]:
    """Which variables the runs let one fit, and along what line the law then holds."""
    n, d = np.log([p.parameters for p in points]), np.log([p.tokens for p in points])
    sizes, lengths = len(np.unique(n.round(9))), len(np.unique(d.round(9)))
    if sizes >= 3 and lengths >= 3 and len(points) >= 6:
        line = np.polyfit(n, d, 1)
        if np.std(d - np.polyval(line, n)) > TIED:
            return "ND", "any N and D"
    if sizes >= 3:
        if lengths == 1:
            return "N", f"D = {points[0].tokens:.3g} tokens"
        slope, shift = np.polyfit(n, d, 1)
        if np.std(d - (slope * n + shift)) > TIED:
            raise UserError(
                f"{len(points)} runs vary N and D independently, which takes at least 6 runs of 3 sizes and 3 lengths; "
                'add runs, or let D follow N as train.steps = "compute-optimal" does'
            )
        ratio = np.exp(d - n)
        tied = (
            f"D = {ratio.mean():.3g} N"
            if ratio.std() < 0.02 * ratio.mean()
            else f"D = {np.exp(shift):.3g} N^{slope:.2f}"
        )
        return "N", tied
    if lengths >= 3 and sizes == 1:
        return "D", f"N = {points[0].parameters:.3g} parameters"
    raise UserError(
        f"a loss law has three unknowns and needs finished runs of at least 3 sizes (or 3 lengths of one size); "
        f"there are {len(points)} with {sizes} sizes and {lengths} lengths"
    )


def _fit(variables: str, x: Array, y: Array) -> tuple[Law, bool]:
    """The best law of the relative residuals: exponents by search, the rest by non-negative least squares."""
    scale = np.exp(np.log(x).mean(axis=0))  # so that the columns of the linear problem are of size one
    lowest, highest = float(np.log(EXPONENTS[0])), float(np.log(EXPONENTS[1]))
    ranges = [(lowest, highest)] * len(variables)
    best: tuple[Any, ...] = ()
    for round_ in range(ROUNDS + 1):
        count = FINE if round_ else COARSE
        axes = [np.linspace(low, high, count) for low, high in ranges]
        grid = np.stack([a.ravel() for a in np.meshgrid(*axes, indexing="ij")], axis=-1)
        best = _solve(np.exp(grid), x / scale, y)
        centre = np.log(best[0])
        steps = [(high - low) / (count - 1) for low, high in ranges]
        ranges = [(max(c - s, lowest), min(c + s, highest)) for c, s in zip(centre.tolist(), steps, strict=True)]
    exponents, linear = best
    inside = bool(np.all((exponents > EXPONENTS[0] * 1.05) & (exponents < EXPONENTS[1] / 1.05)))
    coefficients = tuple(float(c) for c in linear[1:] * scale**exponents)
    return Law(variables, float(linear[0]), coefficients, tuple(float(e) for e in exponents)), inside


def _solve(exponents: Array, x: Array, y: Array) -> tuple[Array, Array]:
    """Of all exponents [grid, variables] those with the least squared relative residual, and their linear part."""
    columns = np.concatenate([np.ones((len(exponents), len(y), 1)), x[None] ** -exponents[:, None, :]], axis=-1)
    columns = columns / y[None, :, None]
    k = columns.shape[-1]
    least, chosen, linear = np.inf, 0, np.zeros(k)
    for size in range(1, k + 1):
        for used in combinations(range(k), size):
            part = columns[..., used]
            gram = np.swapaxes(part, 1, 2) @ part + 1e-13 * np.eye(size)
            solution = np.linalg.solve(gram, part.sum(axis=1)[..., None])[..., 0]
            residual = ((part @ solution[..., None])[..., 0] - 1) ** 2
            sums = np.where((solution >= 0).all(axis=-1), residual.sum(axis=-1), np.inf)
            i = int(np.argmin(sums))
            if sums[i] < least:
                least, chosen, linear = float(sums[i]), i, np.zeros(k)
                linear[list(used)] = solution[i]
    return exponents[chosen], linear


def points_of(runs: Iterable[Run]) -> tuple[list[Point], list[str]]:
    """The runs that a loss law is to be fitted to, and in words what was left out.

    Those are the finished runs with the best setting of each size and length, all seeds of it: a law of what a size can
    reach says nothing of a study's bad learning rates. The best setting is that with the lowest median loss over its
    seeds. Lengths within 2 % of each other count as one, for batches round steps down.
    """
    found, left_out = [], []
    for run in runs:
        summary = run.summary
        parameters, tokens, loss = (summary.get(k) for k in ("parameters", "tokens", "final_eval_loss"))
        if run.state != "finished" or not parameters or not tokens:
            left_out.append(f"{run.name}: {run.state}, not finished")
        elif not isinstance(loss, int | float) or not np.isfinite(loss):
            left_out.append(f"{run.name}: no finite validation loss at its end")
        else:
            point = Point(float(parameters), float(tokens), float(loss), run.name)
            found.append((point, _settings(run)))
    points = []
    for group in _of_one_size(found):
        best, said = _best_setting(group)
        points += best
        left_out += [said] if said else []
    return points, left_out


def _settings(run: Run) -> dict[str, str]:
    """All settings of a run but its seed, its name and its place."""
    flat: dict[str, str] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flat[prefix] = str(value)

    add("", run.recipe.model_dump(exclude={"run"}))
    return flat


_Run = tuple[Point, dict[str, str]]


def _of_one_size(found: list[_Run]) -> list[list[_Run]]:
    """The runs in groups of the same N and of D within 2 %, in the order of N and D."""
    groups: list[list[_Run]] = []
    for item in sorted(found, key=lambda x: (x[0].parameters, x[0].tokens)):
        first = groups[-1][0][0] if groups else None
        if first and first.parameters == item[0].parameters and item[0].tokens <= 1.02 * first.tokens:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _best_setting(group: list[_Run]) -> tuple[list[Point], str]:
    """The points of the setting with the lowest median loss, and what is to be said of the others."""
    by_setting: dict[tuple[tuple[str, str], ...], list[Point]] = {}
    for point, settings in group:
        by_setting.setdefault(tuple(sorted(settings.items())), []).append(point)
    best = min(by_setting, key=lambda setting: float(np.median([p.loss for p in by_setting[setting]])))
    points = by_setting[best]
    if len(by_setting) == 1:
        return points, ""
    differ = [key for key, value in best if any(dict(other).get(key) != value for other in by_setting)]
    named = " ".join(f"{key}={dict(best)[key]}" for key in differ)
    others = [p.loss for setting, kept in by_setting.items() if setting != best for p in kept]
    left = f"{len(others)} run{'s' * (len(others) > 1)} with loss {min(others):.4f} to {max(others):.4f}"
    size = f"N = {points[0].parameters:.4g}, D = {points[0].tokens:.4g}"
    return points, f"{size}: {left}; the best setting is {named}, median loss {np.median([p.loss for p in points]):.4f}"
