import numpy as np
import pytest

from windlass.errors import UserError
from windlass.estimate.optimum import CHINCHILLA
from windlass.estimate.scaling import Point, back_test, fit_scaling

SIZES = [1e6, 2e6, 4e6, 8e6, 16e6, 32e6]


def points(law, *, sizes=SIZES, tokens=None, noise=0.0, seed=0, repeats=1):
    random = np.random.default_rng(seed)
    found = []
    for n in sizes:
        for d in tokens or [20 * n]:
            found += [Point(n, d, law(n, d) * (1 + noise * random.standard_normal())) for _ in range(repeats)]
    return found


def test_recovers_a_law_in_N_exactly():
    fit = fit_scaling(points(lambda n, d: 1.8 + 50 / n**0.25), samples=0)
    assert fit.law.variables == "N" and fit.along == "D = 20 N" and fit.determined
    assert pytest.approx(1.8, abs=2e-3) == fit.law.E
    assert fit.law.exponents[0] == pytest.approx(0.25, abs=1e-3)
    assert fit.predict(1e9, 20e9).loss == pytest.approx(1.8 + 50 / 1e9**0.25, rel=5e-4)


def test_recovers_the_published_law_from_a_grid():
    grid = points(CHINCHILLA.loss, sizes=[1e7, 1e8, 1e9, 4e9], tokens=[1e8, 1e9, 1e10, 1e11])
    fit = fit_scaling(grid, samples=0)
    assert fit.law.variables == "ND" and fit.along == "any N and D"
    assert fit.law.exponents == pytest.approx((0.34, 0.28), abs=3e-3)
    assert pytest.approx(1.69, abs=0.01) == fit.law.E
    assert fit.law.coefficients == pytest.approx((406.4, 410.7), rel=0.05)
    assert fit.predict(7e10, 1.4e12).loss == pytest.approx(CHINCHILLA.loss(7e10, 1.4e12), rel=2e-3)


def test_a_law_in_D_of_one_size():
    fit = fit_scaling(points(lambda n, d: 2 + 30 / d**0.2, sizes=[1e6], tokens=[1e6, 1e7, 1e8, 1e9]), samples=0)
    assert fit.law.variables == "D" and fit.along == "N = 1e+06 parameters"
    assert fit.law.exponents[0] == pytest.approx(0.2, abs=1e-3)


def test_fixed_tokens_are_said():
    fit = fit_scaling(points(lambda n, d: 2 + 30 / n**0.2, tokens=[5e8]), samples=0)
    assert fit.along == "D = 5e+08 tokens"


def test_three_sizes_give_a_law_without_uncertainty():
    fit = fit_scaling(points(lambda n, d: 2 + 30 / n**0.2, sizes=SIZES[:3]))
    assert fit.noise is None and fit.predict(1e8, 2e9).low is None and fit.interval("E") is None


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """60 studies of 5 sizes with 1 % noise: the 90 % interval for a run 8 times larger holds a new run's loss."""

    def law(n, d):
        return 1.5 + 80 / n**0.3

    random = np.random.default_rng(1)
    hits = 0
    for seed in range(60):
        fit = fit_scaling(points(law, sizes=SIZES[:5], noise=0.01, seed=seed, repeats=2), samples=60, seed=seed)
        guess = fit.predict(128e6, 2560e6)
        truth = law(128e6, 0) * (1 + 0.01 * random.standard_normal())
        hits += guess.low <= truth <= guess.high
    assert 48 <= hits <= 60


def test_more_noise_is_less_certain():
    def width(noise):
        fit = fit_scaling(points(lambda n, d: 1.5 + 80 / n**0.3, noise=noise, seed=3), samples=60)
        guess = fit.predict(1e9, 2e10)
        return guess.high - guess.low

    assert width(0.02) > 2 * width(0.002)


def test_back_test_holds_out_the_largest():
    def law(n, d):
        return 1.8 + 50 / n**0.25

    guess, truth = back_test(points(law, noise=0.001))
    assert guess.parameters == 32e6 and truth == pytest.approx(law(32e6, 0), rel=0.01)
    assert guess.loss == pytest.approx(truth, rel=0.02)
    assert back_test(points(law, sizes=SIZES[:3])) is None


def test_exponents_that_are_not_determined_are_said():
    flat = fit_scaling([Point(n, 20 * n, 3.0 + 1e-9 * i) for i, n in enumerate(SIZES)], samples=0)
    assert not flat.determined


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (points(lambda n, d: 3.0, sizes=SIZES[:2]), "at least 3 sizes"),
        ([Point(1e6, 2e7, float("nan")), *points(lambda n, d: 3.0)], "diverged"),
        ([Point(1e6, 1e8, 3), Point(2e6, 1e7, 3), Point(4e6, 5e8, 3), Point(8e6, 1e7, 3)], "independently"),
    ],
)
def test_what_cannot_be_fitted_is_refused(found, message):
    with pytest.raises(UserError, match=message):
        fit_scaling(found)
