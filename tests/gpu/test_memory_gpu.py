"""Memory on CUDA: the peak is what `plan` says; a micro-batch that is too large is halved."""

from collections.abc import Callable
from typing import Any

import pytest

from helpers import curve

pytestmark = pytest.mark.gpu


def cublas_workspaces() -> int:
    """Bytes of the allocator that cuBLAS holds for its handles, which it frees for this count."""
    import torch

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return int(before - torch.cuda.memory_allocated())


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_peak_is_what_the_plan_says(recipe, precision, recompute, dropout):
    """Within 10 % of the allocator's peak, in which a cuBLAS workspace for each handle counts."""
    import torch

    from windlass import plan, train

    cublas_workspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    settings = (f"train.precision={precision}", f"parallel.activation_checkpointing={recompute}")
    run = train(recipe("run", *settings, f"model.dropout={dropout}"))
    workspaces = cublas_workspaces()
    assert 0 < workspaces < 300e6
    predicted = next(row.memory for row in plan(run).memory if row.chosen)
    peak = run.summary["peak_mem_mb"] * 1e6 - before
    assert predicted.total == pytest.approx(peak, rel=0.1), (predicted, workspaces)


@pytest.mark.usefixtures("cuda")
def test_a_second_run_in_a_process_has_a_peak_of_its_own(recipe: Callable[..., Any]) -> None:
    from windlass import train

    large, small = (train(recipe(f"run-{size}", f"train.micro_batch={size}")) for size in (32, 2))
    assert small.summary["peak_mem_mb"] < 0.7 * large.summary["peak_mem_mb"]


@pytest.fixture
def limit(device: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`limit(recipe, fits, too_large)`: from now on memory is enough for micro-batches of `fits`
    sequences only.
    """
    import torch

    from windlass import train
    from windlass.model.gpt import GPT

    forward = GPT.forward

    def peak(recipe: Callable[..., Any], size: int) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        train(recipe(f"peak-{size}", f"train.micro_batch={size}"))
        reserved = torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()
        return int(reserved)

    def limited(self: GPT, tokens: Any, *rest: Any, **more: Any) -> Any:
        if self.training and len(tokens) > limited.most:  # type: ignore[attr-defined]
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(self, tokens, *rest, **more)

    def set_limit(recipe: Callable[..., Any], fits: int, too_large: int) -> None:
        if device == "cpu":
            limited.most = fits  # type: ignore[attr-defined]
            monkeypatch.setattr(GPT, "forward", limited)
            return
        small, large = peak(recipe, fits), peak(recipe, too_large)
        assert small < 0.8 * large
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((0.4 * small + 0.6 * large) / total)

    yield set_limit
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_smaller_micro_batch_when_memory_runs_out(
    recipe: Callable[..., Any], limit: Any, computes: bool
) -> None:
    """The same bits as a run with that micro-batch, and a resume keeps it."""
    from windlass import train

    chosen = recipe("chosen").batch(1, recipe("chosen").parallel.device).micro_batch
    expected = train(recipe("expected", f"train.micro_batch={chosen // 2}"))
    limit(recipe, chosen // 2, chosen)
    train(recipe("run"), stop_at=4)
    run = train(recipe("run"))
    assert [e["micro_batch"] for e in run.events if e["event"] == "out_of_memory"] == [chosen // 2]
    if not computes:
        pytest.skip("the micro-batch is halved once; the device computes no losses to compare")
    assert curve(run) == curve(expected)
