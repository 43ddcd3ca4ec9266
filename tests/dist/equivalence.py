"""Five training steps, by the parts of `windlass train` and by a plain loop that shares only the
network with them.
"""

import dataclasses

import numpy as np
import torch
from harness import recipe as make_recipe

from bare_trainer import bare_trainer
from rows import Rows
from windlass.data.loader import Loader
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.model.share import cut_of
from windlass.optim.schedule import lr_multiplier
from windlass.parallel import collectives
from windlass.parallel.parallelize import parallelize, unwrap
from windlass.recipe import Horizon, dotted

STEPS, BATCH, CONTEXT, VOCAB = 5, 16, 12, 37


def rows() -> Rows:
    """Rows of 2 to 12 tokens with ragged marks.

    Four rows in a row of each 16, perhaps all rows of a rank, have no unmasked label.
    """
    draw = np.random.default_rng(0)
    examples = []
    for number in range(STEPS * BATCH):
        length = int(draw.integers(2, CONTEXT + 1))
        marks = draw.random(length) < 0.7
        if (number % BATCH) // 4 == 1:
            marks[:] = False
        examples.append((draw.integers(0, VOCAB, length).tolist(), marks.tolist()))
    return Rows(examples, pad=0)


def settings(
    precision: str = "fp64", strategy: str = "auto", world: int = 1, accumulation: int = 1, **more
):
    model = {"layers": 2, "heads": 2, "width": 16, "context": CONTEXT, "vocab": VOCAB}
    if "model__kind" in more:
        model = {"context": CONTEXT}
    train = {"steps": STEPS, "global_batch": BATCH, "grad_clip": 0.5, "precision": precision}
    train["micro_batch"] = BATCH // world // accumulation
    schedule = {"kind": "wsd", "warmup": 2, "decay": 2}
    sections = {
        "model": model,
        "data": {"source": "none", "order": "sequential", "tokenizer": "char"},
        "train": train,
        "optim": {"lr": 3e-3, "weight_decay": 0.1, "schedule": schedule},
        "parallel": {"strategy": strategy},
    }
    return make_recipe(**dotted(sections), **more)


def reference(frozen=(), **more):
    """Losses, gradient norms and final parameters of a plain loop over whole batches."""
    recipe = settings(**more)
    model = build_model(recipe, VOCAB, device="cpu").to(torch.float64)
    initialise(model, recipe.run.seed)
    parameters = model.named_parameters()
    trained = [p for name, p in parameters if not name.startswith(tuple(frozen))]
    decayed, others = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, fused=False)
    data, losses, norms = rows(), [], []
    for step, rate in enumerate([0.5, 1.0, 1.0, 1.0, 0.5]):
        tokens, labels, *_ = data.read(np.arange(step * BATCH, (step + 1) * BATCH))
        logits = model(torch.from_numpy(tokens))
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(labels).flatten()
        )
        model.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 0.5)))
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * rate
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, {n: p.detach().clone() for n, p in model.named_parameters()}


def built(ranks, recipe):
    """The model of a recipe on these ranks, with its first weights, and a trainer of it."""
    model = build_model(recipe, VOCAB, device="meta")
    if recipe.train.precision == "fp64":
        model = model.double()
    model = parallelize(model, ranks, recipe)
    initialise(unwrap(model), recipe.run.seed, ranks.mesh.loss_group)
    return model, bare_trainer(model, recipe, ranks)


def train(ranks, recipe, trainer, steps=range(STEPS), divisor: float = 1.0):
    """Losses and gradient norms of some steps; `divisor` falsifies the count of valid tokens."""
    batch, data = recipe.batch(ranks.world), rows()
    horizon, losses, norms = Horizon(STEPS, len(data), BATCH), [], []
    how = {"seed": 1, "kind": "sequential", "device": ranks.device, "prefetch": 1}
    loader = Loader(data, batch, ranks.mesh.data_rank, **how, first_step=steps.start)
    for number, micro_batches in zip(steps, loader, strict=False):
        valid = int(micro_batches.valid_tokens * divisor)
        micro_batches = dataclasses.replace(micro_batches, valid_tokens=valid)
        multiplier = lr_multiplier(recipe.optim.schedule, horizon, number)
        result = trainer.step(micro_batches, multiplier)
        losses.append(float(collectives.sum_over_ranks(result.loss, ranks)))
        norms.append(float(result.grad_norm))
    loader.close()
    return losses, norms


def trained(join, recipe, divisor: float = 1.0):
    """The outcome of all steps by the parts of `windlass train`."""
    with join(recipe) as ranks:
        model, trainer = built(ranks, recipe)
        losses, norms = train(ranks, recipe, trainer, divisor=divisor)
        whole = {n: gathered(p) for n, p in unwrap(model).named_parameters()}
        return losses, norms, whole


def each(join, recipes):
    return [trained(join, recipe) for recipe in recipes]


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
    """The largest relative difference of losses and norms, and absolute one of parameters."""
    losses, norms = (
        max(abs(a - b) / abs(b) for a, b in zip(outcome[i], wanted[i], strict=True)) for i in (0, 1)
    )
    own, expected = outcome[2], wanted[2]
    assert set(own) == set(expected)
    parameters = max(float((own[n].double() - p).abs().max()) for n, p in expected.items())
    return losses, norms, parameters
