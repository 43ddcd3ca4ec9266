"""What a plan is made for: recipe, ranks, device, and what the prepared data or a run's ledger says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from windlass.errors import UserError
from windlass.estimate.devices import Device, find_device, low_precision, this_device
from windlass.estimate.memory import Network
from windlass.estimate.optimum import known_vocab, vocab_of
from windlass.model.size import HfSizes, checkpoint_bytes, count, flops_per_token
from windlass.recipe import Recipe
from windlass.run import Run

PREPARE = "unknown until the data is prepared"


@dataclass(frozen=True)
class Facts:
    """What only the prepared data or a run's ledger says; None or 0 where it is not known."""

    vocab: int | None = None
    """Ids of the tokenizer."""
    samples_per_epoch: int = 0
    tokens_per_sample: float | None = None
    """Real tokens in a sample on average."""
    reason: str = PREPARE
    """Why they are not known."""


@dataclass(frozen=True)
class Subject:
    """What a plan is made for."""

    recipe: Recipe
    world: int
    device: Device
    precision: str
    """With `auto` resolved."""
    facts: Facts = Facts()
    done: int = 0
    """Steps done."""
    steps: int | None = None
    """Of a run that has begun."""
    hf: HfSizes | None = None
    """The sizes of a Hugging Face model, where its configuration could be read."""
    hf_reason: str = ""
    """Why it could not."""

    @property
    def vocab(self) -> int | None:
        """Rows of the embedding."""
        if self.recipe.model.kind == "hf":
            return self.hf.vocab if self.hf else None
        return self.recipe.model.vocab or self.facts.vocab or known_vocab(self.recipe)

    @property
    def network(self) -> Network | None:
        """What memory is computed for; None where the vocabulary or a Hugging Face model is not known."""
        if self.recipe.model.kind == "hf":
            return self.hf
        return self.recipe.model if self.vocab else None

    @property
    def parameters(self) -> int | None:
        """All parameters, N."""
        if isinstance(self.network, HfSizes):
            return self.network.total
        return count(self.network, self.vocab or 0).total if self.network else None

    @property
    def flops_per_token(self) -> int | None:
        """FLOPs of a token's forward and backward pass by the usual convention."""
        if isinstance(self.network, HfSizes):
            return self.network.flops_per_token()
        return flops_per_token(self.network, self.vocab or 0) if self.network else None

    @property
    def checkpoint_bytes(self) -> int | None:
        """Of one checkpoint."""
        if isinstance(self.network, HfSizes):
            return self.network.checkpoint_bytes()
        return checkpoint_bytes(self.network, self.vocab or 0, self.recipe.optim.kind) if self.network else None

    @property
    def tokens_per_sample(self) -> float:
        """Real tokens in a sample, or all of them where the data is not known."""
        return self.facts.tokens_per_sample or float(self.recipe.model.context)

    @property
    def tokens_per_step(self) -> float:
        """Real tokens in a step, over all ranks."""
        return self.recipe.train.global_batch * self.tokens_per_sample


def start_event(run: Run) -> dict[str, Any]:
    """The last start in a run's ledger; empty before the first."""
    return next((x for x in reversed(run.lines("event")) if "world" in x and "steps" in x), {})


def subject_of(
    recipe: Recipe,
    run: Run | None,
    world: int,
    device: str,
    memory_bytes: int | None,
    past: Sequence[Sequence[Run]],
    measure: bool,
) -> Subject:
    """Who trains what on what, from the recipe and from the run's ledger or the prepared data."""
    started = start_event(run) if run else {}
    ranks = world or int(started.get("world", 1))
    name = device or str(started.get("device") or "")
    if past and not name and not measure:
        name = _common_device([r for runs in past for r in runs])
    if name and name.lower() != "cpu":
        where = find_device(name, memory_bytes)
    else:
        where = this_device(ranks, memory_bytes, cpu=bool(name) or recipe.parallel.device == "cpu")
    recipe.batch(ranks, where.kind)  # raises where the global batch is not divisible by the world size
    if recipe.strategy(ranks) == "single" and ranks > 1:
        raise UserError(f'parallel.strategy = "single" is for one rank, not for {ranks}; use "auto" or "ddp"')
    precision = str(started.get("precision", "")) if not device else ""
    if not precision:
        auto = recipe.train.precision == "auto"
        precision = (low_precision(where) or "fp32") if auto else recipe.train.precision
    subject = Subject(recipe, ranks, where, precision)
    if recipe.model.kind == "hf":
        subject = _with_hf_sizes(subject)
    if run is None:
        return replace(subject, facts=_prepared_facts(recipe))
    train = run.lines("train")
    last = train[-1] if train else {}
    per_sample = last["tokens"] / last["samples"] if last.get("samples") and last.get("tokens") else None
    parameters = int(started["parameters"]) if "parameters" in started else None
    facts = Facts(vocab_of(recipe, parameters), int(started.get("samples_per_epoch", 0)), per_sample)
    done = int(last.get("step", started["step"]))
    return replace(subject, facts=facts, done=done, steps=int(started["steps"]))


def _common_device(runs: Sequence[Run]) -> str:
    """The one kind of device that runs were made on; raises UserError where there are several."""
    names = sorted({name for run in runs if (name := str(start_event(run).get("device") or ""))})
    if len(names) > 1:
        raise UserError(f"the runs were made on {' and on '.join(names)}; say which the plan is for with --device")
    return names[0] if names else ""


def _with_hf_sizes(subject: Subject) -> Subject:
    """The sizes of a Hugging Face model, or why they are not known; the rest of the plan does not need them."""
    try:
        from windlass.model.hf import read_sizes  # needs torch

        return replace(subject, hf=read_sizes(subject.recipe))
    except ImportError as error:
        reason = f"counting a Hugging Face model needs the package {error.name}: install windlass[hf]"
    except UserError as error:
        reason = str(error)
    return replace(subject, hf_reason=reason)


def _prepared_facts(recipe: Recipe) -> Facts:
    """What the prepared data says; or nothing, and the reason."""
    from windlass.data.dataset import open_samples
    from windlass.data.prepare import find_prepared

    try:
        prepared = find_prepared(recipe)
        if prepared is None:
            return Facts()
        samples: Any = open_samples(recipe, prepared)[0]
    except UserError as error:
        return Facts(reason=str(error))
    return Facts(prepared.vocab, len(samples), samples.sample_tokens())
