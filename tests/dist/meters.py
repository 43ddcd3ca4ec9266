"""What a rank sends and what memory its tensors take in real steps, for `harness.run_ranks`."""

import contextlib
import gc
import threading
import weakref
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


def trainer_of(ranks: Ranks, recipe: Recipe, vocab: int) -> Trainer:
    model = parallelize(build_model(recipe, vocab, device="meta"), ranks, recipe)
    initialise(unwrap(model), 0)
    return bare_trainer(model, recipe, ranks)


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
    """This rank's pipeline stage, and the bytes that it sends in a step, by dimension."""
    with join(recipe) as ranks:
        trainer, plan = trainer_of(ranks, recipe, vocab), recipe.batch(ranks.world)
        batch = full_rows(recipe, vocab, plan.micro_batch, plan.accumulation)
        for _ in range(2):  # DDP builds its buckets again at the second
            trainer.step(batch, 1.0)
        with counting(ranks, trainer) as sent:
            trainer.step(batch, 1.0)
        return ranks.mesh.at["pp"], dict(sent)


class MemoryMeter(TorchDispatchMode):
    """Counts the live bytes of all storages made inside of it, and the most of them.

    What a kernel allocates and frees again within one operation is not seen. FSDP2 frees parameters
    by resizing their storage, which is not an operation and is watched by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.total = self.peak = 0
        self._lock = threading.RLock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(getattr(leaf, "_local_tensor", leaf))
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.device.type != "meta" and storage._cdata not in self.live:
            self._set(storage._cdata, storage.nbytes())
            weakref.finalize(storage, self._set, storage._cdata, 0)

    def _set(self, key: int, size: int) -> None:
        with self._lock:
            self.total += size - self.live.pop(key, 0)
            if size:
                self.live[key] = size
            self.peak = max(self.peak, self.total)

    def __enter__(self) -> "MemoryMeter":
        original = self._resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if storage._cdata in self.live:
                with self._lock:
                    self.total += size - self.live[storage._cdata]
                    self.live[storage._cdata] = size
                    self.peak = max(self.peak, self.total)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)


def measured(join: Any, r: Recipe, vocab: int, micro: int, accumulation: int) -> tuple[int, int]:
    """Bytes at rest after two steps, and at the peak of the three after them.

    The lowest peak of the three: gloo's threads let go of a buffer some time after the collective
    has ended, and later where the machine is busy, so a peak can only be too high.
    """
    with join(r) as ranks, MemoryMeter() as meter:
        trainer, batch = trainer_of(ranks, r, vocab), full_rows(r, vocab, micro, accumulation)
        rest, peaks = 0, list[int]()
        for _ in range(5):
            gc.collect()
            rest = meter.peak = meter.total
            trainer.step(batch, 1.0)
            peaks.append(meter.peak)
        # The first two make the optimizer's state, and what is kept from step to step.
        return rest, min(peaks[2:])
