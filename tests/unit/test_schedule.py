import math
import subprocess
import sys

import pytest
import torch

from windlass.optim.schedule import factor, phases
from windlass.recipe import Horizon, ScheduleSettings


def horizon(steps, samples_per_epoch=1000, samples_per_step=10):
    return Horizon(steps, samples_per_epoch, samples_per_step)


def curve(steps, **settings):
    return [factor(ScheduleSettings(**settings), horizon(steps), i) for i in range(steps)]


def test_wsd_by_hand():
    got = curve(10, kind="wsd", warmup=2, decay=4)
    assert got == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


def test_wsd_with_start_and_final_by_hand():
    got = curve(8, kind="wsd", warmup=4, decay=2, start=0.2, final=0.5)
    assert got == pytest.approx([0.4, 0.6, 0.8, 1, 1, 1, 1, 0.75])


def test_linear_by_hand():
    assert curve(6, kind="linear", warmup=2) == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25])
    assert curve(4, kind="linear", warmup=0, final=0.2) == pytest.approx([1, 0.8, 0.6, 0.4])


def test_cosine_by_hand():
    got = curve(6, kind="cosine", warmup=2, final=0.1)
    assert got == pytest.approx(
        [0.5, 1, 1, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, 0.55, 0.1 + 0.9 * (1 - math.sqrt(0.5)) / 2]
    )


def test_constant_stays_at_the_peak_after_its_warmup():
    assert curve(5, kind="constant", warmup=2) == [0.5, 1, 1, 1, 1]
    assert factor(ScheduleSettings(kind="constant", warmup=2), horizon(5), 99) == 1


def test_gpt2_124m():
    """The schedule of the GPT-2 reproductions: 715 steps of warm-up, cosine from 6e-4 to 6e-5 over 19,073 steps."""
    s, h, lr = ScheduleSettings(kind="cosine", warmup=715, final=0.1), horizon(19073), 6e-4

    def build_nanogpt(it):
        if it < 715:
            return lr * (it + 1) / 715
        ratio = (it - 715) / (19073 - 715)
        return 6e-5 + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (lr - 6e-5)

    for it in [0, 1, 100, 713, 714, 715, 716, 5000, 9894, 19071, 19072]:
        assert lr * factor(s, h, it) == pytest.approx(build_nanogpt(it), rel=1e-12), it
    assert lr * factor(s, h, 0) == pytest.approx(8.391608e-07, rel=1e-6)


def test_c4_30m():
    s, h = ScheduleSettings(kind="wsd", warmup=0.01, decay=0.1), horizon(4576)
    at = phases(s, h)
    assert (at.warmup, at.fall, at.steps) == (46, 4576 - 458, 4576)
    assert factor(s, h, 0) == pytest.approx(1 / 46)
    assert factor(s, h, 45) == factor(s, h, 46) == factor(s, h, 4118) == 1
    assert factor(s, h, 4575) == pytest.approx(1 / 458)


def test_durations_in_epochs():
    s = ScheduleSettings(kind="wsd", warmup="0.1 epochs", decay="1 epoch")
    assert phases(s, horizon(300)) == phases(ScheduleSettings(kind="wsd", warmup=10, decay=100), horizon(300))


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 3, 0.5, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 3, 50])
def test_no_update_is_wasted_and_the_shape_is_a_hill(kind, warmup, steps):
    warmup = min(warmup, steps) if isinstance(warmup, int) else warmup
    got = curve(steps, kind=kind, warmup=warmup, decay=0.4)
    assert all(0 < f <= 1 for f in got)
    top = got.index(max(got))
    assert got[:top] == sorted(got[:top]) and got[top:] == sorted(got[top:], reverse=True)
    assert max(got) == 1


def test_overlapping_warmup_and_decay_shorten_the_decay():
    got = curve(10, kind="wsd", warmup=8, decay=6)
    assert got == pytest.approx([1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8, 6 / 8, 7 / 8, 1, 1, 0.5])


def test_the_end_stays():
    for kind in ("linear", "cosine", "wsd"):
        s = ScheduleSettings(kind=kind, warmup=0, final=0.25)
        assert factor(s, horizon(7), 7) == factor(s, horizon(7), 70) == pytest.approx(0.25)


def torch_values(make, steps):
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = make(optimizer)
    values = []
    for _ in range(steps):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


def test_against_torch_schedulers():
    sched = torch.optim.lr_scheduler
    cosine = torch_values(lambda o: sched.CosineAnnealingLR(o, T_max=40, eta_min=0.1), 40)
    assert curve(40, kind="cosine", warmup=0, final=0.1) == pytest.approx(cosine, rel=1e-12)
    linear = torch_values(lambda o: sched.LinearLR(o, start_factor=1.0, end_factor=0.3, total_iters=40), 40)
    assert curve(40, kind="linear", warmup=0, final=0.3) == pytest.approx(linear, rel=1e-9)
    # torch's warm-up is one update behind: its update 0 is at start_factor itself, ours one update up the line
    rise = torch_values(lambda o: sched.LinearLR(o, start_factor=0.2, end_factor=1.0, total_iters=8), 9)
    assert curve(20, kind="constant", warmup=8, start=0.2)[:8] == pytest.approx(rise[1:], rel=1e-9)


def test_needs_no_torch():
    code = "import windlass.optim.schedule, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
