"""The run's last line: what came of it, how fast and on what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from windlass.checkpoint.retention import best, scores_by_step
from windlass.run import read_lines
from windlass.telemetry.timing import device_hours, throughput, wall_time

if TYPE_CHECKING:
    from windlass.training.session import Session


def write_summary(session: Session, last_loss: float | None) -> None:
    """Write the `summary` line on rank 0, from the effective ledger: a resume inflates nothing."""
    s, state = session, session.state
    if s.sampler is not None:
        s.sampler.stop()
    s.ranks.all_gather_object("summary", s.ranks.rank)  # every rank's samples are written
    if not s.ranks.main:
        return
    s.ledger.write("event", state.step, event="measured")  # a last stamp of the wall time
    raw = list(read_lines(s.run.metrics_path))
    evals = s.run.lines("eval", suite="loss")
    measure = s.recipe.checkpoint.best
    measured = scores_by_step(s.run.ledger(), measure)
    best_step = best(measured, measure)
    spent = wall_time(raw)
    s.ledger.write(
        "summary", state.step, steps=s.horizon.steps, tokens=state.tokens, samples=state.samples,
        epochs=state.samples / s.horizon.samples_per_epoch, final_loss=last_loss,
        final_eval_loss=evals[-1]["loss"] if evals else None, best_eval_loss=state.best_loss,
        best_measure=measure, best_score=None if best_step is None else measured[best_step], best_step=best_step,
        runtime_s=spent["total"], wall_time=spent, device_hours=device_hours(raw), world=s.ranks.world,
        parameters=s.parameters, updates_skipped=state.updates_skipped, attempts=s.attempt + 1,
        **_speeds(s), **_devices(s),
    )  # fmt: skip


def _speeds(session: Session) -> dict[str, Any]:
    """Work divided by the time of the steps, over the whole run."""
    speed = throughput(session.run.ledger())
    if speed is None:
        return {}
    return {
        "steps_per_s_mean": speed.steps_per_s, "samples_per_s_mean": speed.samples_per_s,
        "tokens_per_s_mean": speed.tokens_per_s, "mfu_mean": speed.mfu,
    }  # fmt: skip


def _devices(session: Session) -> dict[str, Any]:
    from windlass.telemetry.devices import summarise_devices

    return summarise_devices(session.run)
