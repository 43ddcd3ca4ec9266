"""Whole trainings on CUDA: deterministic bits, ZeRO-1 over NCCL, and updates that the device skips."""

import sys
from typing import Any

import pytest

from helpers import curve, record_trainers

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_deterministic_run_repeats_and_resumes_bit_for_bit(recipe, precision):
    from windlass import train

    settings = (f"train.precision={precision}", "model.dropout=0.1", "train.micro_batch=4")
    whole = train(recipe("whole", *settings))
    train(recipe("parts", *settings), stop_at=5)
    assert curve(train(recipe("parts", *settings))) == curve(whole)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_sharded_optimizer_state_changes_no_bit(recipe, words, kind):
    """`shard_optim` against `ddp`: on one rank in this process, and on two ranks if there are two
    devices.
    """
    import torch

    from windlass import train
    from windlass.launch.local import launch
    from windlass.run import Run

    for world in range(1, 1 + min(2, max(1, torch.cuda.device_count()))):
        curves = []
        for strategy in ("ddp", "shard_optim"):
            name = f"{strategy}-{world}"
            settings = (f"parallel.strategy={strategy}", f"optim.kind={kind}")
            if world == 1:
                curves.append(curve(train(recipe(name, *settings))))
                continue
            command = [sys.executable, "-m", "windlass", "train", *words(name, *settings)]
            assert launch(command, world) == 0
            curves.append(curve(Run(recipe(name).run_dir)))
        # Muon shares the matrices out over the ranks otherwise, but each is orthogonalised whole.
        assert curves[0] == curves[1] and len(curves[0]) == 8


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [*((s, "adamw") for s in ("single", "full_shard", "shard_optim")), ("full_shard", "muon")],
)
def test_a_bad_step_is_skipped_on_the_device_and_seen_at_the_next_log(
    recipe, monkeypatch, device, strategy, kind
):
    import torch

    from windlass import Callback, train
    from windlass.errors import RunFailed
    from windlass.training import trainer

    trainers = record_trainers(monkeypatch)
    if device == "cpu":  # where the host looks at each step, unless it is told not to
        monkeypatch.setattr(trainer, "check_is_deferred", lambda *_: True)
    before = list[Any]()

    def local(parameters: Any) -> list[Any]:
        return [p.detach().to_local() if hasattr(p, "to_local") else p.detach() for p in parameters]

    class AtStep(Callback):
        def on_step(self, now: Any) -> None:
            first, *others = local(trainers[0].model.parameters())
            # the gradient of the next step is not finite, because one weight is not
            if now.step == 5:
                before.extend(p.clone() for p in others)
                first.fill_(float("nan"))

    settings = ["telemetry.every=4", "checkpoint.every=1000"]
    settings += [f"parallel.strategy={strategy}", f"optim.kind={kind}"]
    with pytest.raises(RunFailed) as error:
        train(recipe("run", *settings), callbacks=[AtStep()])
    assert "step 6: loss not finite on rank 0" in str(error.value)
    _, *after = local(trainers[0].model.parameters())
    no_update = [torch.equal(a, b) for a, b in zip(after, before, strict=True)]
    assert all(no_update), "no update follows the bad step"
