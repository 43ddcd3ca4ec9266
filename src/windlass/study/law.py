"""Scaling laws: the validation loss of N parameters after D tokens, fitted to finished runs.

As in approach 3 of Hoffmann et al. (arXiv 2203.15556) L-BFGS minimises a Huber loss on log L.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windlass.errors import UserError, plural, require

Numbers = NDArray[np.float64]

# Residuals of log L above this count linearly: the noise of a small run's loss is about 1 %.
# Hoffmann et al. (appendix D.3) have 1e-3.
HUBER = 1e-2
SMOOTH = 0.1  # the threshold of a first descent, which has fewer local minima
SAMPLES = 100  # of the bootstrap
LOW, HIGH = 10, 90  # percentiles of a range
FAR = 10.0  # a prediction beyond this multiple of the fitted range is an extrapolation
QUARTER = 4  # with two sizes a law predicts the largest quarter of the runs
REPEATED = 15.4  # R* of arXiv 2305.16264, equation 5: repeated tokens lose value by it


class Form(NamedTuple):
    """A law as log L = g log(exp(a - p n) + exp(b - q d) + exp(e)), with n = log N and d = log D.

    `base` [6] has the values of (a, b, e, p, q, g) that are fixed, and `free` [6, k] adds the
    fitted ones.
    """

    formula: str
    base: Numbers
    free: Numbers


def _form(formula: str, base: Sequence[float], *places: Sequence[int]) -> Form:
    """A form; each fitted value stands at `places` in (a, b, e, p, q, g)."""
    free = np.zeros((6, len(places)))
    for column, rows in enumerate(places):
        free[list(rows), column] = 1.0
    return Form(formula, np.array(base, dtype=float), free)


NOTHING = -50.0  # the logarithm of a term that is left out
TERMS, EXPONENTS = (NOTHING, 50.0), (0.01, 3.0)  # the bounds of constants
CHINCHILLA = _form("E + A / N^α + B / D^β", (0, 0, 0, 0, 0, 1), [0], [1], [2], [3], [4])
ONE_EXPONENT = _form("E + A / N^α + B / D^α", (0, 0, 0, 0, 0, 1), [0], [1], [2], [3, 4])
KAPLAN = _form("(A / N^α + B / D)^γ", (0, 0, NOTHING, 0, 1, 0), [0], [1], [3], [5])
# From arXiv 2203.15556, 2403.08540 (Gadre et al.) and 2001.08361 (Kaplan et al.).
FORMS = {"chinchilla": CHINCHILLA, "one-exponent": ONE_EXPONENT, "kaplan": KAPLAN}


def effective_tokens(tokens: float, unique: float) -> float:
    """Tokens, of which repeated ones count less; `unique` 0: none is repeated."""
    if not 0 < unique < tokens:
        return float(tokens)
    repeats = tokens / unique - 1
    return unique * (1 + REPEATED * (1 - math.exp(-repeats / REPEATED)))


@dataclass(frozen=True)
class Observation:
    name: str
    parameters: int
    non_embedding: int  # parameters of the blocks and the final norm
    tokens: int
    loss: float  # nats per token, or bits per byte
    unique_tokens: int = 0  # of the training data; 0: no token was repeated
    in_fit: bool = True  # False: the law predicts it

    @property
    def effective_tokens(self) -> float:
        return effective_tokens(self.tokens, self.unique_tokens)

    def size(self, embeddings: bool) -> int:
        return self.parameters if embeddings else self.non_embedding


class Range(NamedTuple):
    """A predicted loss, and the range in which 80 % of the bootstrapped laws predict it."""

    loss: float
    low: float
    high: float
    beyond: float  # the factor by which N or D leaves the fitted range; 1: inside

    def __str__(self) -> str:
        text = f"{self.loss:.4f} ({self.low:.4f} to {self.high:.4f})"
        if self.beyond > 1:
            text += f", {self.beyond:.1f} times beyond the fitted runs"
        return text + (": too far to rely on" if self.beyond > FAR else "")


@dataclass(frozen=True)
class Law:
    """A fitted law. N counts all parameters, or without `embeddings` only the blocks'."""

    form: str
    embeddings: bool
    fitted: list[Observation]
    values: Numbers = field(repr=False)  # (a, b, e, p, q, g) [6] of the centred law
    resampled: Numbers = field(repr=False)  # the same of each bootstrapped law [SAMPLES, 6]
    centre: tuple[float, float] = field(repr=False)  # mean log N and log D of the fitted runs

    @property
    def counted(self) -> str:
        return "parameters" if self.embeddings else "parameters without embeddings"

    def flops(self, runs: Sequence[Observation]) -> Numbers:
        """6 N D of each run, with N as the law counts it and every token that was trained on."""
        return np.array([6.0 * one.size(self.embeddings) * one.tokens for one in runs])

    def of_run(self, run: Observation) -> float:
        return self.loss(run.size(self.embeddings), run.effective_tokens)

    def loss(self, size: float, tokens: float, values: Numbers | None = None) -> float:
        """`values`: of another law with this centre."""
        n, d = math.log(size) - self.centre[0], math.log(tokens) - self.centre[1]
        values = self.values if values is None else values
        return float(np.exp(log_loss(values, np.array([n]), np.array([d]))[0][0]))

    def predict(self, size: float, tokens: float) -> Range:
        losses = [self.loss(size, tokens, values) for values in self.resampled]
        low, high = np.percentile(losses, [LOW, HIGH])
        sizes = [one.size(self.embeddings) for one in self.fitted]
        amounts = [one.effective_tokens for one in self.fitted]
        beyond = [max(size / max(sizes), min(sizes) / size)]
        beyond.append(max(tokens / max(amounts), min(amounts) / tokens))
        return Range(self.loss(size, tokens), float(low), float(high), max(1.0, *beyond))

    def optimum(self, flops: float) -> tuple[float, float]:
        """The size and tokens with the lowest loss for C = 6 N D FLOPs, without repeated tokens."""
        a, b, _, p, q, _ = self.values
        both = math.log(flops / 6) - sum(self.centre)  # n + d of the law
        # There p exp(a - p n) = q exp(b - q d).
        n = (a - b + q * both + math.log(p / q)) / (p + q)
        size = math.exp(n + self.centre[0])
        return size, flops / 6 / size

    def constants(self) -> dict[str, tuple[float, float, float]]:
        values = np.vstack([self.values, self.resampled])
        a, b, e, p, q, g = values.T
        named = {"α": p, "A": np.exp(a + p * self.centre[0]), "B": np.exp(b + q * self.centre[1])}
        if self.form == "kaplan":
            named["γ"] = g
        else:
            named = {"E": np.exp(e), **named} | ({"β": q} if self.form == "chinchilla" else {})
        ranges = dict[str, tuple[float, float, float]]()
        for name, v in named.items():
            low, high = np.percentile(v[1:], [LOW, HIGH])
            ranges[name] = float(v[0]), float(low), float(high)
        return ranges

    def __str__(self) -> str:
        own = self.constants().items()
        numbers = ", ".join(f"{k} = {v:.4g} ({lo:.4g} to {hi:.4g})" for k, (v, lo, hi) in own)
        return f"L = {FORMS[self.form].formula}, N: {self.counted}; {numbers}"


def log_loss(values: Numbers, n: Numbers, d: Numbers) -> tuple[Numbers, Numbers]:
    """Log L of each run [R], and its derivatives by (a, b, e, p, q, g) [6, R]."""
    a, b, e, p, q, g = values
    terms = np.stack([a - p * n, b - q * d, np.full_like(n, e)])
    top = terms.max(axis=0)
    weights = np.exp(terms - top)
    total = weights.sum(axis=0)
    log_sum, (w, v, u) = top + np.log(total), weights / total
    return g * log_sum, np.stack([g * w, g * v, g * u, -g * w * n, -g * v * d, log_sum])


def fit_law(
    observations: Sequence[Observation],
    form: str = "chinchilla",
    embeddings: bool = True,
    samples: int = SAMPLES,
) -> Law:
    """Fit a form to the runs with `in_fit`, and bootstrap over these runs."""
    runs = [one for one in observations if one.in_fit]
    check(runs, form)
    n = np.log([float(one.size(embeddings)) for one in runs])
    d = np.log([one.effective_tokens for one in runs])
    y = np.log([one.loss for one in runs])
    centre = float(n.mean()), float(d.mean())
    n, d = n - centre[0], d - centre[1]
    solutions = _minimise(form, n, d, y, _starts(form, y))
    best, random = solutions[0], np.random.default_rng(0)
    resampled = list[Numbers]()
    while len(resampled) < samples:
        rows = random.integers(len(runs), size=len(runs))
        if len({*n[rows]}) > 1 and len({*d[rows]}) > 1:
            resampled.append(_minimise(form, n[rows], d[rows], y[rows], solutions[:1])[0])
    full = [FORMS[form].base + FORMS[form].free @ one for one in (best, *resampled)]
    return Law(form, embeddings, runs, full[0], np.array(full[1:]).reshape(-1, 6), centre)


def check(runs: Sequence[Observation], form: str) -> None:
    require("scipy", "the fit of a scaling law")
    constants = FORMS[form].free.shape[1]
    if len(runs) <= constants:
        problem = f"{plural(len(runs), 'run')} for {constants} constants ({form})"
        needs = "the law needs more runs than constants, without the largest, which it predicts"
        raise UserError(f"{needs}: {problem}; add sizes or tokens")
    if len({run.parameters for run in runs}) < 2:  # tokens differ with the sizes
        raise UserError("the law is fitted to runs of one size: add another, so that it shows")


def _starts(form: str, y: Numbers) -> list[Numbers]:
    if form == "kaplan":
        grid = itertools.product((0.5, 1.0, 2.0), (0.05, 0.1, 0.3))
        return [np.array([y.mean() / g - math.log(2)] * 2 + [p, g]) for p, g in grid]
    exponents = (0.2, 0.4)
    pairs = itertools.product(exponents, exponents) if form == "chinchilla" else zip(exponents)
    lowest, mean = math.exp(y.min()), math.exp(y.mean())
    starts = []
    for pair, part, share in itertools.product(pairs, (0.3, 0.7), (0.3, 0.7)):
        rest = mean - part * lowest
        logs = [math.log(rest * share), math.log(rest * (1 - share)), math.log(part * lowest)]
        starts.append(np.array([*logs, *pair]))
    return starts


def _minimise(
    form: str, n: Numbers, d: Numbers, y: Numbers, starts: Sequence[Numbers]
) -> list[Numbers]:
    """The minima of the Huber loss from each start, the lowest first."""
    from scipy.optimize import minimize

    chosen = FORMS[form]
    bounds = [EXPONENTS if column[3:].any() else TERMS for column in chosen.free.T]

    def objective(free: Numbers, threshold: float) -> tuple[float, Numbers]:
        logs, slopes = log_loss(chosen.base + chosen.free @ free, n, d)
        error = logs - y
        small = np.clip(error, -threshold, threshold)
        value = np.sum(small * (error - small / 2)) / threshold
        return float(value), chosen.free.T @ (slopes @ small) / threshold

    options = {"maxiter": 300}
    arguments = {"jac": True, "method": "L-BFGS-B", "bounds": bounds, "options": options}
    smooth = [minimize(objective, start, SMOOTH, **arguments).x for start in starts]
    ends = [minimize(objective, start, HUBER, **arguments) for start in (*starts, *smooth)]
    return [end.x for end in sorted(ends, key=lambda end: float(end.fun))]


class FormErrors(NamedTuple):
    """A form with its errors on runs that it was fitted without."""

    form: str
    embeddings: bool
    errors: dict[str, float]  # predicted / measured - 1, by the name of the run

    @property
    def mean(self) -> float:
        return float(np.mean([abs(error) for error in self.errors.values()]))


def held_out(observations: Sequence[Observation]) -> list[Observation]:
    """The runs that the forms predict: those without `in_fit`; else the largest of several sizes;
    else a quarter of the runs, the largest by compute.
    """
    if further := [one for one in observations if not one.in_fit]:
        return further
    sizes = {one.parameters for one in observations}
    if len(sizes) > 2:
        return [one for one in observations if one.parameters == max(sizes)]
    ordered = sorted(observations, key=lambda one: one.parameters * one.effective_tokens)
    return ordered[-max(1, len(ordered) // QUARTER) :]


def compare_forms(
    observations: Sequence[Observation], outside: Sequence[Observation] = ()
) -> list[FormErrors]:
    """Each form's errors on the runs `outside` (by default `held_out`), the lowest mean first."""
    outside = outside or held_out(observations)
    inside = [one for one in observations if one not in outside]
    compared = []
    for form, embeddings in itertools.product(FORMS, (True, False)):
        law = fit_law(inside, form, embeddings=embeddings, samples=0)
        errors = {one.name: law.of_run(one) / one.loss - 1 for one in outside}
        compared.append(FormErrors(form, embeddings, errors))
    return sorted(compared, key=lambda one: one.mean)
