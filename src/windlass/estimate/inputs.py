"""The inputs of a plan: recipe, ranks, device, and the sizes of data and model.

Torch only counts the parameters of a Hugging Face model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from windlass.errors import UserError, argument, first_line
from windlass.estimate.calendar import recipe_vocab
from windlass.estimate.devices import Device, find_device, peak_flops, table, this_device
from windlass.estimate.micro_batch import layout_on
from windlass.estimate.rank import Layout, checkpoint_bytes
from windlass.estimate.step import Links, Speeds, published_speeds
from windlass.hub import missing_package
from windlass.ledger import Line, last_start
from windlass.model.size import CountedSizes, count, flops_per_token
from windlass.recipe import Recipe
from windlass.run import Run

PER_HOST = 8  # assumed GPUs of a host
NETWORK = 25e9  # assumed bytes a second between hosts for each GPU: an adapter of 200 Gbit/s


@dataclass(frozen=True)
class Size:
    """The size of a model; None without the vocabulary or a Hugging Face model's configuration."""

    vocab: int | None = None
    parameters: int | None = None
    trained: int | None = None
    non_embedding: int | None = None  # in blocks and norms; None for a Hugging Face model
    flops_per_token: int | None = None  # with attention, but 6 N for a Hugging Face model
    checkpoint_bytes: int | None = None
    network: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanInputs:
    recipe: Recipe
    world: int
    device: Device
    precision: str  # with `auto` resolved
    vocab: int | None = None  # rows of the embedding, if the recipe leaves them to the tokenizer
    samples_per_epoch: int = 0  # 0: unknown
    tokens_per_sample: float | None = None  # the average without padding; None: unknown
    width: float = 0.0  # mean positions of a row as training pads it; 0: the context
    val_samples: int = 0  # of the validation set; 0: none, or unknown
    mixture: Any = None  # the samples of a mixture (`MixedSamples`), or a run's facts about it
    reason: str = "the data is not prepared (windlass prepare RECIPE)"  # why they are unknown
    done: int = 0  # steps
    steps: int | None = None  # of a run that has begun
    # Counted sizes of a Hugging Face model, or of a GPT with `freeze`.
    counted: CountedSizes | None = None
    hf_reason: str = ""  # why the count failed
    activations_reason: str = ""  # why the activations could not be measured
    per_host: int = 0  # ranks; 0: PER_HOST GPUs, or all ranks on a CPU

    @property
    def size(self) -> Size:
        recipe, model, counted = self.recipe, self.recipe.model, self.counted
        if counted is not None:
            return Size(
                counted.vocab,
                counted.total,
                counted.trained,
                flops_per_token=counted.flops_per_token(),
                checkpoint_bytes=checkpoint_bytes(recipe, counted.vocab, counted),
                network=counted.network,
            )
        if model.kind == "hf":
            return Size()
        vocab = model.vocab or self.vocab or recipe_vocab(recipe)
        if not vocab:
            return Size(non_embedding=count(model, 0).non_embedding)
        sizes, flops = count(model, vocab), flops_per_token(model, vocab)
        on_disk = checkpoint_bytes(recipe, vocab)
        return Size(vocab, sizes.total, sizes.total, sizes.non_embedding, flops, on_disk)

    @property
    def layout(self) -> Layout:
        recipe, vocab = self.recipe, self.size.vocab or 0
        of_hf = self.counted if recipe.model.kind == "hf" else None
        return layout_on(recipe, vocab, self.world, self.device, self.precision, counted=of_hf)

    @property
    def ranks_of_host(self) -> int:
        """Ranks of each of several hosts; 0 if there is one host."""
        per_host = self.per_host or (PER_HOST if self.device.kind == "cuda" else self.world)
        return per_host if per_host < self.world else 0

    @property
    def speeds(self) -> Speeds | None:
        """The speeds of a rank, by the device's data sheet and the published rates of links.

        None if the device's peak is unknown.
        """
        highest = peak_flops(self.device.name, self.precision, self.recipe.train.tf32)
        peak = peak_flops(self.device.name, "bf16") if self.precision == "float8" else highest
        if not highest or not peak:
            return None
        links = Links(self.device.link, NETWORK, self.ranks_of_host)
        speeds = published_speeds(self.device, peak, links)
        if self.precision == "float8":  # head and attention are in bf16
            return replace(speeds, float8=speeds.products * highest / peak)
        return speeds


def read_inputs(
    recipe: Recipe,
    run: Run | None = None,
    past: Sequence[Run] = (),
    world: int = 0,
    device: str = "",
    memory_bytes: int | None = None,
    activations: bool = False,
    per_host: int = 0,
) -> PlanInputs:
    """The inputs of a plan. Arguments as `plan`; `run`: has begun, and its ledger has the data's
    sizes; `activations`: measure the activations of a Hugging Face model."""
    ledger = run.ledger() if run else []
    started = last_start(ledger)
    ranks = world or int(started.get("world", 1))
    like = last_start(past[0].ledger()) if past and not run else started
    name = device or str(like.get("device") or "")
    if name and name.lower() != "cpu":
        target = find_device(name, memory_bytes)
        if device and not target.memory_bytes:
            size = argument("memory_bytes", "GB*1e9")
            advice = f"add its memory ({size}), or write cpu, {', '.join(table())}"
            raise UserError(f"{argument('device', device)} is not in the table; {advice}")
    else:
        target = this_device(ranks, memory_bytes, cpu=bool(name) or recipe.parallel.device == "cpu")
    recipe.batch(ranks, target.kind)  # raises if the ranks do not divide the global batch
    recipe.strategy(ranks)  # raises for `single` on several ranks
    precision = recipe.train.precision
    if started.get("precision") and not device:
        precision = started["precision"]
    if precision == "auto":
        fp16, bf16 = (peak_flops(target.name, kind) for kind in ("fp16", "bf16"))
        precision = "fp16" if fp16 is not None and bf16 is None else "bf16"
        if target.kind == "cpu":
            precision = "fp32"
    inputs = PlanInputs(recipe, ranks, target, precision, per_host=per_host)
    if run is None:
        return with_sizes(_with_prepared_data(inputs), activations)
    train, data = [x for x in ledger if x["kind"] == "train"], started.get("data", {})
    last: Line = train[-1] if train else {}
    counted = last.get("samples") and last.get("tokens")
    per_sample = last["tokens"] / last["samples"] if counted else None
    padded = [x for x in train if x.get("padded_tokens_per_s") and x.get("tokens_per_s")]
    growth = sum(x["padded_tokens_per_s"] / x["tokens_per_s"] for x in padded) / max(1, len(padded))
    if not (device or world or recipe.train.micro_batch):  # as the last start chose it
        recipe = recipe.replace({"train.micro_batch": started.get("micro_batch", 0)})
    inputs = replace(
        inputs,
        recipe=recipe,
        vocab=data.get("vocab"),
        samples_per_epoch=int(started.get("samples_per_epoch", 0)),
        tokens_per_sample=per_sample,
        width=growth * (per_sample or 0.0),
        done=ledger[-1]["step"],
        steps=int(started["steps"]),
        val_samples=data.get("val", {}).get("samples", 0),
        mixture=data.get("mixture"),
    )
    return with_sizes(inputs, activations)


def _with_prepared_data(inputs: PlanInputs) -> PlanInputs:
    """The inputs with sizes of the prepared data, or with the reason why they are unknown."""
    from windlass.data.batch import unpadded_tokens
    from windlass.data.open import open_samples
    from windlass.data.prepare import find_prepared

    recipe, width = inputs.recipe, 0.0
    try:
        prepared = find_prepared(recipe)
        if prepared is None:
            return inputs
        opened = open_samples(recipe, prepared)
    except UserError as error:
        return replace(inputs, reason=str(error))
    samples: Any = opened.train
    if hasattr(samples, "mean_width"):
        batch, data = recipe.batch(inputs.world, inputs.device.kind), recipe.data
        order = (data.order, recipe.run.seed, data.length_buckets)
        width = samples.mean_width(batch.global_batch, batch.micro_batch, *order)
    return replace(
        inputs,
        width=width,
        vocab=opened.vocab,
        samples_per_epoch=len(samples),
        tokens_per_sample=(unpadded_tokens(samples) or 0) / len(samples),
        val_samples=len(opened.val or ()),
        mixture=samples if recipe.data.mix else None,
    )


def with_sizes(inputs: PlanInputs, activations: bool = False, several: bool = True) -> PlanInputs:
    """The inputs with counted parameters, for a Hugging Face model or `model.freeze`.

    With `activations` also with the peaks of a step, by passes with fake tensors (seconds), which
    give the peak of any micro-batch (`several`) or only of the recipe's.
    """
    recipe, model = inputs.recipe, inputs.recipe.model
    vocab = 0
    if model.kind == "gpt":
        vocab = model.vocab or inputs.vocab or recipe_vocab(recipe) or 0
        if not model.freeze or not vocab:
            return inputs
    try:
        from windlass.model.build import build_model, sizes_of  # needs torch

        network = build_model(recipe, vocab)
        counted = sizes_of(network)
    except (ImportError, UserError) as error:
        if model.kind == "gpt":
            raise
        reason = str(error)
        if isinstance(error, ImportError):
            reason = f"counting a Hugging Face model {missing_package(error)}"
        return replace(inputs, counted=None, hf_reason=reason)
    if not activations:
        return replace(inputs, counted=counted)
    device = inputs.device.kind
    micro_batch = recipe.batch(inputs.world, device).micro_batch
    try:
        from windlass.estimate.activations import measure_peaks

        peaks = measure_peaks(network, recipe, inputs.precision, micro_batch, device, several)
    except Exception as error:  # code of `transformers`, or an operation without a fake kernel
        reason = f"{type(error).__name__}: {first_line(error)}"
        return replace(inputs, counted=counted, activations_reason=reason)
    return replace(inputs, counted=replace(counted, peaks=peaks))
