"""Everything that can be said of a run before it begins, or while it goes on, as plain values for a table or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from windlass.estimate.devices import Device, low_precision
from windlass.estimate.disk import disk
from windlass.estimate.grid import memory_grid
from windlass.estimate.memory import Layout, Memory, Network, layout_of, memory, shard_size
from windlass.estimate.milestones import Milestone, clock, milestones, rows
from windlass.estimate.optimum import needed_vocab, optimal_tokens, resolve_steps, same_compute
from windlass.estimate.recommend import largest_micro_batch, recommend
from windlass.estimate.time import Duration, Speed, project, time_left
from windlass.model.size import HfSizes, checkpoint_bytes, count, flops_per_token, forward_flops
from windlass.recipe import Horizon

if TYPE_CHECKING:
    from windlass.recipe import Recipe

PARTS = ("parameters", "gradients", "moments", "activations", "logits", "buffers")


FOREIGN = (
    "A Hugging Face model: its parameters, memory and FLOPs are in its configuration, which was not read; nothing is "
    "guessed."
)
ESTIMATE = (
    "A Hugging Face model: parameters and FLOPs are counted on its own modules. Weights, gradients and moments follow from "
    "them; activations are those of our own GPT of the nearest shape: an estimate, and too high with adapters."
)


@dataclass(frozen=True)
class Facts:
    """What only the prepared data or a run knows; None or 0 where it is not known yet."""

    vocab: int | None = None
    """Ids of the tokenizer."""
    samples_per_epoch: int = 0
    tokens_per_sample: float | None = None
    """Real tokens in a sample on average."""
    source: str = ""
    """Where these are known from, in words, if not from prepared data or a run."""


@dataclass(frozen=True)
class Setting:
    """What a plan is made for."""

    recipe: Recipe
    world: int
    device: Device
    precision: str
    """With `auto` resolved."""
    facts: Facts
    now: int = 0
    """Steps done."""
    hf: HfSizes | None = None
    """The sizes of a model of `transformers`, where its configuration was read."""
    note: str = ""
    """Why it was not."""

    @property
    def network(self) -> Network | None:
        """What memory is reckoned for; None where nothing is known of it."""
        return self.recipe.model if self.recipe.model.kind == "gpt" else self.hf

    @property
    def parameters(self) -> int | None:
        """All parameters, N; None where they are not known."""
        if self.recipe.model.kind == "gpt":
            return count(self.recipe.model, self.vocab).total
        return self.hf.total if self.hf else None

    @property
    def flops_per_token(self) -> int | None:
        """FLOPs of a token by the usual convention; None where they are not known."""
        if self.recipe.model.kind == "gpt":
            return flops_per_token(self.recipe.model, self.vocab)
        return self.hf.flops_per_token() if self.hf else None

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        if self.hf is not None:
            return self.hf.vocab
        return self.recipe.model.vocab or self.facts.vocab or needed_vocab(self.recipe)

    @property
    def tokens_per_sample(self) -> float:
        """Real tokens in a sample, or all of them where the data is not known."""
        return self.facts.tokens_per_sample or float(self.recipe.model.context)


def horizon_of(setting: Setting, steps: int | None = None) -> Horizon:
    """The run's length; UserError where it follows from data that are not prepared."""
    facts = setting.facts
    if steps is None:
        foreign = setting.hf.total if setting.hf else None
        steps = resolve_steps(setting.recipe, facts.vocab, facts.tokens_per_sample, facts.samples_per_epoch, foreign)
    return Horizon(steps, facts.samples_per_epoch, setting.recipe.train.global_batch)


def plan(setting: Setting, speeds: Sequence[Speed], horizon: Horizon | None = None) -> dict[str, Any]:
    """The whole plan of a run; of a Hugging Face model whose configuration was not read without what is in that.

    Args:
        setting: recipe, ranks, device.
        speeds: measured or assumed speeds, on any worlds; empty where nothing is known of it.
        horizon: the run's length where it is known already.
    """
    horizon = horizon or horizon_of(setting)
    found = milestones(setting.recipe, horizon)
    speed = project(speeds, setting.world) if speeds else None
    known: dict[str, Any] = {} if setting.recipe.model.kind == "gpt" else {"note": setting.note or FOREIGN}
    if setting.network is not None:
        size = checkpoint_size(setting)
        known = ({"note": ESTIMATE} if setting.hf else {}) | {
            "model": model_part(setting),
            "flops": flops_part(setting, horizon),
            "memory": memory_part(setting),
            "memory_grid": memory_grid(setting),
            "recommendation": recommendation_part(setting),
            "disk": disk(setting.recipe, setting.vocab, setting.world, horizon, found, size),
        }
    return known | {
        "recipe": setting.recipe.preset,
        "digest": setting.recipe.config_hash,
        "run_dir": str(setting.recipe.run_dir),
        "world": setting.world,
        "device": asdict(setting.device) | {"usable_bytes": setting.device.usable_bytes},
        "precision": setting.precision,
        "length": length_part(setting, horizon),
        "time": time_part(setting, horizon, found, speed),
        "worlds": worlds_part(setting, horizon, found, speeds),
        "milestones": milestones_part(setting, horizon, found, speed),
    }


def checkpoint_size(setting: Setting) -> int:
    """Bytes of a checkpoint."""
    kind = setting.recipe.optim.kind
    return (
        setting.hf.checkpoint_bytes(kind) if setting.hf else checkpoint_bytes(setting.recipe.model, setting.vocab, kind)
    )


def model_part(setting: Setting) -> dict[str, Any]:
    """Parameters, in all and by part; `trained` where that is not all of them."""
    if setting.hf is not None:
        hf = setting.hf
        found = {"vocab": hf.vocab, "parameters": hf.total, "non_embedding": hf.non_embedding, "parts": hf.parts}
        return found | ({"trained": hf.trained} if hf.trained < hf.total else {})
    parts = count(setting.recipe.model, setting.vocab)
    names = ("embedding", "positions", "attention", "feed_forward", "norms", "head")
    return {
        "vocab": setting.vocab,
        "parameters": parts.total,
        "non_embedding": parts.non_embedding,
        "parts": {name: getattr(parts, name) for name in names},
    }


def length_part(setting: Setting, horizon: Horizon) -> dict[str, Any]:
    """Steps and tokens, beside the compute-optimal ones where the parameters are known."""
    recipe, per_sample = setting.recipe, setting.tokens_per_sample
    tokens = round(horizon.steps * recipe.train.global_batch * per_sample)
    samples = setting.facts.samples_per_epoch
    found = {
        "steps": horizon.steps,
        "done": setting.now,
        "tokens_per_step": recipe.train.global_batch * per_sample,
        "padded_tokens_per_step": recipe.train.global_batch * recipe.model.context,
        "tokens": tokens,
        "epochs": horizon.steps * recipe.train.global_batch / samples if samples else None,
        "data_is_prepared": bool(samples) and not setting.facts.source,
        "known_from": setting.facts.source,
        "taken_as_full": setting.facts.tokens_per_sample is None
        and (recipe.data.packing == "documents" or recipe.data.format != "text"),
    }
    parameters, ratio = setting.parameters, recipe.train.tokens_per_parameter
    if parameters is None:
        return found
    optimal = replace_steps(recipe, "compute-optimal")
    return found | {
        "tokens_per_parameter": tokens / parameters,
        "same_compute": same_compute(parameters, tokens) if tokens else None,
        "optimal_tokens": optimal_tokens(parameters, ratio),
        "optimal_ratio": ratio,
        "optimal_steps": resolve_steps(optimal, setting.vocab, per_sample, parameters=parameters),
    }


def replace_steps(recipe: Recipe, steps: int | str) -> Recipe:
    """The recipe with another length."""
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": steps})})


def flops_part(setting: Setting, horizon: Horizon) -> dict[str, Any]:
    """FLOPs of a token and of the run: by the 6N rule, with attention, and counted product by product.

    Of a Hugging Face model torch counts them; `per_token_counted` and `run_counted` are None where it could not.
    """
    model, batch = setting.recipe.model, setting.recipe.train.global_batch
    counted: float | None
    if setting.hf is not None:
        by_rule, with_attention = setting.hf.flops_by_rule, setting.hf.flops_per_token()
        counted = setting.hf.counted_flops
    else:
        by_rule = 6 * count(model, setting.vocab).total
        with_attention = flops_per_token(model, setting.vocab)
        counted = 3 * forward_flops(model, setting.vocab, 1, model.context) / model.context
    padded = horizon.steps * batch * model.context
    return {
        "per_token_6n": by_rule,
        "per_token": with_attention,
        "per_token_counted": counted,
        "per_step": with_attention * batch * model.context,
        "run": with_attention * padded,
        "run_counted": None if counted is None else counted * padded,
    }


def memory_part(setting: Setting) -> list[dict[str, Any]]:
    """A row for each strategy that the world allows, with the recipe's precision, checkpointing and micro-batch."""
    recipe, world = setting.recipe, setting.world
    base = layout_of(recipe, world, setting.device.kind, setting.precision)
    share = recipe.train.global_batch // world
    strategies = ["ddp", "shard_grad_op", "full_shard"] if world > 1 else ["single"]
    if world > 3 or base.strategy == "hybrid_shard":
        strategies.append("hybrid_shard")
    if base.strategy not in strategies:
        strategies.append(base.strategy)
    found = []
    for strategy in strategies:
        for checkpointing in ("none", "selective", "full"):
            offload = base.offload and strategy not in ("single", "ddp")
            layout = replace(
                base, strategy=strategy, shard=shard_size(strategy, world, recipe.parallel.shard_size),
                checkpointing=checkpointing, offload=offload,
            )  # fmt: skip
            chosen = strategy == base.strategy and checkpointing == base.checkpointing
            found.append(_row(setting, layout, share) | {"chosen": chosen})
    return found


def _row(setting: Setting, layout: Layout, share: int) -> dict[str, Any]:
    recipe, room, network = setting.recipe, setting.device.usable_bytes, setting.network
    assert network is not None
    taken = memory(network, setting.vocab, layout, recipe.optim.kind)
    largest = None
    if room is not None:
        largest = largest_micro_batch(network, setting.vocab, layout, share, room, recipe.optim.kind)
    return {
        **asdict(layout),
        **memory_dict(taken),
        "fits": None if room is None else taken.total <= room,
        "largest_micro_batch": largest,
    }


def memory_dict(taken: Memory) -> dict[str, Any]:
    """A memory as plain values: bytes by part, `total_bytes`, `host_bytes` and where in the step the peak lies."""
    parts = {f"{name}_bytes": getattr(taken, name) for name in PARTS}
    return parts | {"total_bytes": taken.total, "host_bytes": taken.host, "peak_at": taken.at}


def recommendation_part(setting: Setting) -> dict[str, Any]:
    """The cheapest layout that fits, or what to change."""
    recipe, network = setting.recipe, setting.network
    assert network is not None
    base = layout_of(recipe, setting.world, setting.device.kind, setting.precision)
    share = recipe.train.global_batch // setting.world
    base = replace(base, micro_batch=recipe.train.micro_batch)
    room, low = setting.device.usable_bytes, low_precision(setting.device)
    found = recommend(network, setting.vocab, base, share, room, recipe.optim.kind, low)
    if found.fit is None:
        return {"fits": False if setting.device.usable_bytes is not None else None, "why": found.why, "settings": {}}
    return {
        "fits": True,
        "why": found.why,
        "settings": found.fit.settings(),
        "accumulation": found.fit.layout.accumulation,
        **memory_dict(found.fit.memory),
    }


def time_part(setting: Setting, horizon: Horizon, found: list[Milestone], speed: Speed | None) -> dict[str, Any] | None:
    """How long it takes from now, and where the number comes from; None where nothing is known."""
    if speed is None:
        return None
    left = _left(setting, horizon, found, speed)
    return {
        **asdict(left),
        "tokens_per_s": speed.tokens_per_s,
        "seconds_per_step": setting.recipe.train.global_batch * setting.tokens_per_sample / speed.tokens_per_s,
        "detail": speed.detail,
        "costs": speed.costs,
    }


def _left(setting: Setting, horizon: Horizon, found: list[Milestone], speed: Speed) -> Duration:
    per_step = setting.recipe.train.global_batch * setting.tokens_per_sample
    return time_left(found, setting.now, horizon.steps, per_step, speed)


def worlds_part(
    setting: Setting, horizon: Horizon, found: list[Milestone], speeds: Sequence[Speed]
) -> list[dict[str, Any]]:
    """The same on other worlds: those measured, and doublings around them that the global batch can be dealt to."""
    if not speeds:
        return []
    worlds = {s.world for s in speeds} | {setting.world}
    worlds |= {2 * max(worlds), 4 * max(worlds)} | {w for w in (1, 2, 4, 8) if w < setting.world}
    table = []
    for world in sorted(w for w in worlds if setting.recipe.train.global_batch % w == 0):
        speed = project(speeds, world)
        left = _left(setting, horizon, found, speed)
        table.append(
            {
                "world": world, "tokens_per_s": speed.tokens_per_s, "seconds": left.seconds,
                "device_hours": left.device_hours, "basis": speed.basis, "detail": speed.detail,
            }
        )  # fmt: skip
    return table


def milestones_part(
    setting: Setting, horizon: Horizon, found: list[Milestone], speed: Speed | None
) -> list[dict[str, Any]]:
    """What is still to come, a row a kind, with the seconds from now to the first and the last of them."""
    seconds = None
    if speed is not None:
        per_step = setting.recipe.train.global_batch * setting.tokens_per_sample / speed.tokens_per_s
        seconds = clock(found, setting.now, per_step, speed.costs)
    return [
        asdict(row)
        | {
            "first_seconds": seconds(row.first) if seconds else None,
            "last_seconds": seconds(row.last) if seconds else None,
        }
        for row in rows(found, setting.now)
    ]
