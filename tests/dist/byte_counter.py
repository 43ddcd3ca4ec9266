"""The bytes that a rank gives to collectives and messages in a real step."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.attention import bias
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from bare_trainer import bare_trainer, full_rows
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.model.sharding import unwrap
from windlass.parallel.parallelize import parallelize
from windlass.parallel.ranks import Ranks
from windlass.recipe import Recipe
from windlass.training.trainer import Trainer

FEW = 3  # numbers: losses, norms and counts, which the plan leaves out
NOT_SENT = ("wait_tensor", "recv_", "barrier", "monitored_barrier_")


class ByteCounter(TorchDispatchMode):
    """Adds up the whole buffers of collectives, and messages at their sender, by process group.

    It sees c10d's operators and the functional ones, whoever calls them: DDP, FSDP2, Windlass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent = Counter[str]()  # bytes by the group's name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and name not in NOT_SENT:
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            # The larger of input and output; a functional gather has its input alone.
            largest = max(tensors, key=lambda tensor: tensor.nbytes)
            copies = args[1] if name == "all_gather_into_tensor" else 1
            if largest.numel() > FEW:
                self.sent[self.group(args)] += largest.nbytes * copies
        return func(*args, **(kwargs or {}))

    @staticmethod
    def group(args: Any) -> str:
        """The name of the process group of an operator: its last text, or its only such object."""
        names = [arg for arg in args if isinstance(arg, str)]
        if names:
            return names[-1]
        for arg in args:
            if isinstance(arg, torch.ScriptObject):
                with contextlib.suppress(RuntimeError):  # a reduction's kind is an object, too
                    return str(dist.ProcessGroup.unbox(arg).group_name)
        raise AssertionError(args)


@contextlib.contextmanager
def counting(ranks: Ranks, trainer: Trainer) -> Iterator[Counter[str]]:
    """The bytes of a rank by dimension: `tp`, `cp`, `pp`, and `dp` for all other groups."""
    groups = {name: getattr(ranks.mesh, name) for name in ("tp", "cp", "pp")}
    names = {group.group_name: name for name, group in groups.items() if group is not None}
    ends = getattr(getattr(trainer.model, "pipeline", None), "ends", None)
    if ends is not None:  # the gradient of a tied head
        names[ends.group_name] = "pp"
    sent, mask = Counter[str](), bias.causal_lower_right

    def causal_lower_right(*sizes: int) -> Any:
        with _disable_current_modes():  # no mode can see this kind of tensor
            return mask(*sizes)

    replaced = mock.patch.object(bias, "causal_lower_right", causal_lower_right)
    with replaced, ByteCounter() as counter:
        yield sent
    for group, size in counter.sent.items():
        sent[names.get(group, "dp")] += size


def sent_in_a_step(join: Any, recipe: Recipe, vocab: int) -> tuple[int, dict[str, int]]:
    """On one rank, for `harness.run_ranks`: its pipeline stage, and its bytes by dimension."""
    with join(recipe) as ranks:
        model = parallelize(build_model(recipe, vocab, device="meta"), ranks, recipe)
        initialise(unwrap(model), 0)
        trainer, plan = bare_trainer(model, recipe, ranks), recipe.batch(ranks.world)
        batch = full_rows(recipe, vocab, plan.micro_batch, plan.accumulation)
        for _ in range(2):  # DDP builds its buckets again at the second
            trainer.step(batch, 1.0)
        with counting(ranks, trainer) as sent:
            trainer.step(batch, 1.0)
        return ranks.mesh.at["pp"], dict(sent)
