"""Three training steps, by the parts of `windlass train` and by a plain loop that shares only the
network with them.
"""

import dataclasses
import math
from fnmatch import fnmatch

import numpy as np
import torch
from harness import recipe as make_recipe
from harness import run_ranks

from bare_trainer import bare_trainer
from rows import Rows
from windlass.data.loader import Loader
from windlass.evaluation.likelihood import evaluate_loss
from windlass.evaluation.passes import Passes
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.model.sharding import cut_of, unwrap
from windlass.optim.schedule import lr_multiplier
from windlass.parallel.parallelize import parallelize
from windlass.recipe import Horizon, Recipe, dotted

STEPS, BATCH, CONTEXT, VOCAB = 3, 16, 12, 37


def rows(count: int = STEPS * BATCH) -> Rows:
    """Rows of 2 to 12 tokens with ragged marks.

    Four rows in a row of each 16, perhaps all rows of a rank, have no unmasked label.
    """
    draw = np.random.default_rng(0)
    examples = []
    for number in range(count):
        length = int(draw.integers(2, CONTEXT + 1))
        marks = draw.random(length) < 0.7
        if (number % BATCH) // 4 == 1:
            marks[:] = False
        examples.append((draw.integers(0, VOCAB, length).tolist(), marks.tolist()))
    return Rows(examples, pad=0)


def settings(
    precision: str = "fp64", strategy: str = "auto", world: int = 1, accumulation: int = 1, **more
) -> Recipe:
    """The recipe of a training on `world` ranks; a name without `__` is a setting of `parallel`."""
    more = {key if "__" in key else f"parallel__{key}": value for key, value in more.items()}
    copy = math.prod(more.get(f"parallel__{d}", 1) for d in ("tensor", "context", "pipeline"))
    batch = more.get("train__global_batch", BATCH)
    model = {"layers": 2, "heads": 2, "width": 16, "context": CONTEXT, "vocab": VOCAB}
    if "model__kind" in more:
        model = {"context": CONTEXT}
    train = {"steps": STEPS, "global_batch": batch, "grad_clip": 0.5, "precision": precision}
    train["micro_batch"] = batch // max(1, world // copy) // accumulation
    schedule = {"kind": "wsd", "warmup": 1, "decay": 2}
    sections = {
        "model": model,
        "data": {"source": "none", "order": "sequential", "tokenizer": "char"},
        "train": train,
        "optim": {"lr": 3e-3, "weight_decay": 0.1, "schedule": schedule},
        "parallel": {"strategy": strategy},
    }
    return make_recipe(**dotted(sections) | more)


def reference(**more):
    """What `trained` returns, by a plain loop over whole batches.

    With muP, matrices of the blocks have other rates and decays, by the paper's table.
    """
    recipe = settings(**more)
    model = build_model(recipe, VOCAB, device="cpu").to(torch.float64)
    initialise(model, recipe.run.seed)
    trained, groups, average = {}, [], {}
    for name, p in model.named_parameters():
        if any(fnmatch(name, pattern) for pattern in recipe.model.freeze):
            continue
        wider = (
            4 if recipe.model.mup_base_width and name.startswith("blocks.") and p.dim() == 2 else 1
        )
        decay = 0.1 * wider if p.dim() >= 2 else 0.0
        groups.append({"params": [p], "lr": 3e-3 / wider, "weight_decay": decay})
        trained[name] = p
    eps = 1e-8 / (4 if recipe.model.mup_base_width else 1)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=eps, foreach=False, fused=False)
    rates = [group["lr"] for group in optimizer.param_groups]
    data, losses, norms = rows(), [], []

    def loss_of(step: int) -> torch.Tensor:
        batch = data.read(np.arange(step * BATCH, (step + 1) * BATCH)).map(torch.from_numpy)
        logits = model(batch.tokens).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, batch.labels.flatten())

    for step, multiplier in enumerate([1.0, 1.0, 0.5]):
        loss = loss_of(step)
        model.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), 0.5)))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * multiplier
        optimizer.step()
        losses.append(float(loss.detach()))
        beta = min(recipe.train.average, (1 + step) / (10 + step)) if step else 0.0
        for name, p in trained.items():
            average[name] = beta * average.get(name, 0.0) + (1 - beta) * p.detach()
    tensors = {n: p.detach().clone() for n, p in model.named_parameters()}
    if not recipe.train.average:
        return losses, norms, tensors
    losses.append(float(loss_of(0).detach()))
    with torch.no_grad():
        for name, p in trained.items():
            p.copy_(average[name])
    losses.append(float(loss_of(0).detach()))
    return losses, norms, tensors | {f"average/{name}": t for name, t in average.items()}


def built(ranks, recipe, network=None):
    """A model on these ranks with its first weights, and a trainer of it.

    `network`: makes a user's own model; otherwise it is the model of the recipe.
    """
    model = network() if network else build_model(recipe, VOCAB, device="meta")
    if recipe.train.precision == "fp64":
        model = model.double()
    model = parallelize(model, ranks, recipe)
    if not network:
        initialise(unwrap(model), recipe.run.seed)
    return model, bare_trainer(model, recipe, ranks)


def train(ranks, recipe, trainer, steps=range(STEPS), divisor: float = 1.0):
    """Losses and gradient norms of some steps; `divisor` falsifies the count of valid tokens."""
    batch, data = recipe.batch(ranks.world), rows()
    horizon, losses, norms = Horizon(STEPS, len(data), BATCH), [], []
    how = {"seed": 1, "kind": "sequential", "device": ranks.device}
    loader = Loader(data, batch, ranks.mesh.data_rank, **how, first_step=steps.start)
    for number, micro_batches in zip(steps, loader, strict=False):
        valid = int(micro_batches.valid_tokens * divisor)
        micro_batches = dataclasses.replace(micro_batches, valid_tokens=valid)
        multiplier = lr_multiplier(recipe.optim.schedule, horizon, number)
        result = trainer.step(micro_batches, multiplier)
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
    loader.close()
    return losses, norms


def trained(join, recipe, divisor: float = 1.0):
    """Losses, gradient norms and weights after all steps by the parts of `windlass train`; with
    `train.average` also the average and, after the losses of the steps, the losses with both.
    """
    with join(recipe) as ranks:
        model, trainer = built(ranks, recipe)
        losses, norms = train(ranks, recipe, trainer, divisor=divisor)
        averages = {f"average/{n}": gathered(t) for n, t in trainer.average.tensors.items()}
        if averages:
            losses.append(evaluated(model, ranks))
            with trainer.average.in_model():
                losses.append(evaluated(model, ranks))
        weights = {n: gathered(p) for n, p in unwrap(model).named_parameters()}
        return losses, norms, weights | averages


def evaluated(model, ranks) -> float:
    """The loss of the first step's rows."""
    return evaluate_loss(Passes(unwrap(model), ranks), rows(), BATCH, BATCH)["loss"]


def each(join, recipes):
    return [trained(join, recipe) for recipe in recipes]


def check(world, recipes, wanted) -> None:
    """Train by each recipe on `world` ranks: every rank logs what one process logs, and together
    the ranks hold its parameters, all to 1e-9.
    """
    per_rank = run_ranks(each, world, recipes, timeout=240)
    for recipe, *outcomes in zip(recipes, *per_rank, strict=True):
        layout, held = recipe.parallel.model_dump(exclude_defaults=True), set()
        for outcome in outcomes:
            assert max(distance(outcome, wanted)) < 1e-9, layout
            assert len(outcome[2]) == len(wanted[2]) or recipe.parallel.pipeline > 1, layout
            held |= outcome[2].keys()
        assert held == wanted[2].keys(), layout


def logits_of(join, recipes):
    """Logits of whole rows, and of the same rows by a cache in three passes."""
    tokens = torch.arange(2 * CONTEXT).view(2, CONTEXT) % VOCAB
    outcomes = []
    for recipe in recipes:
        with join(recipe) as ranks, torch.no_grad():
            model = unwrap(built(ranks, recipe)[0]).eval()
            cache = model.new_cache(2, CONTEXT)
            parts = [model(part, cache=cache) for part in tokens.split([5, 6, 1], 1)]
            outcomes.append((model(tokens), torch.cat(parts, 1)))
    return outcomes


def gathered(parameter) -> torch.Tensor:
    """A parameter from the pieces of all ranks."""
    cut = cut_of(parameter)
    full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return (cut.gather(full) if cut else full).detach().clone()


def distance(outcome, wanted) -> tuple[float, float, float]:
    """The largest relative difference of losses and norms, and absolute one of the parameters that
    the rank holds.
    """
    losses, norms = (
        max(abs(a - b) / abs(b) for a, b in zip(outcome[i], wanted[i], strict=True)) for i in (0, 1)
    )
    assert outcome[2]
    off = [(tensor.double() - wanted[2][name]).abs().max() for name, tensor in outcome[2].items()]
    return losses, norms, float(max(off))
