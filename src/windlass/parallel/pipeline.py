"""Pipeline parallelism (arXiv 1811.06965): stages of consecutive blocks, each on other ranks.

torch's schedules fix the shapes of a stage at its first pass, but micro-batches differ in length.
Here every task has its tick (`timetable`). After each tick a rank posts the messages of this tick as
one batch, so no order of messages can block the ranks.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from windlass.errors import UserError
from windlass.model.attention import Documents, LayerCache
from windlass.model.gpt import GPT
from windlass.model.loss import SourceSums
from windlass.model.sharding import add_mixin, local_part
from windlass.model.size import stage_layers
from windlass.parallel.collectives import sum_together
from windlass.parallel.context import DividedGPT
from windlass.parallel.mesh import Mesh
from windlass.recipe import Recipe

TICKS_KEPT = 8  # a message sent this many ticks ago is waited for, so that its memory is freed


class Task(NamedTuple):
    backward: bool
    stage: int
    micro: int

    def next(self, stages: int) -> Task | None:
        """The task that gets this one's result; None at either end of the pipeline."""
        stage = self.stage - 1 if self.backward else self.stage + 1
        return self._replace(stage=stage) if 0 <= stage < stages else None


def timetable(stages: int, micro_batches: int) -> list[list[Task]]:
    """The tasks of each tick, at most one a stage: 1F1B (one forward, one backward).

    After its first forward passes a stage has one of every two ticks for forward passes. The last
    stage follows each with the backward pass, and the others have that one tick a stage later.
    """
    ticks: list[list[Task]] = [[] for _ in range(2 * (micro_batches + stages - 1))]
    for stage, micro in itertools.product(range(stages), range(micro_batches)):
        is_warmup = micro < stages - stage
        ticks[stage + (micro if is_warmup else 2 * micro)].append(Task(False, stage, micro))
        ticks[2 * (stages + micro) - 1 - stage].append(Task(True, stage, micro))
    return ticks


def wait(works: list[Any]) -> None:
    """Wait for works and forget them; a second wait for one of gloo's would not end."""
    while works:
        works.pop().wait()


class Pipeline:
    """The stages of a model, of which this rank holds number `stage`, and their messages."""

    def __init__(self, model: GPT, mesh: Mesh, device: torch.device, recipe: Recipe):
        assert mesh.pp is not None
        self.group: dist.ProcessGroup = mesh.pp
        self.stage, self.stages = mesh.at["pp"], mesh.sizes.pp
        self.is_last = self.stage == self.stages - 1
        blocks = stage_layers(recipe.model, model.vocab, self.stages)
        ends = itertools.accumulate(blocks, initial=0)
        self.layers = list(itertools.starmap(range, itertools.pairwise(ends)))  # of all stages
        self.ties_head = recipe.model.tie_head
        names = [name for name, _ in model.named_parameters()]
        self.elsewhere = {name for name in names if not name.startswith(self.parts(self.stage))}
        # Parameters here that count, and are saved, on another rank.
        self.copies = {"embedding.weight"} if self.is_last and self.ties_head else set[str]()
        self.device = device
        # The stream and the loss are not in bf16, even if the weights are.
        self.dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
        self.width = recipe.model.width
        self.bucket_bytes = recipe.parallel.bucket_mb * 2**20
        self.replicas = mesh.replicas.get_group() if mesh.replicas is not None else None
        self.ends = mesh.ends if self.ties_head else None
        # NCCL needs a collective of all ranks before the first batch of messages.
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)

    def parts(self, stage: int) -> tuple[str, ...]:
        """The beginnings of the names of a stage's parameters."""
        parts = [f"blocks.{i}." for i in self.layers[stage]]
        if stage == 0:
            parts += ["embedding.", "positions."]
        if stage == self.stages - 1:
            parts += ["norm.", "head."]
            if self.ties_head:
                parts.append("embedding.")
        return tuple(parts)

    def post(self, sent: list[tuple[Tensor, int]], received: list[tuple[Tensor, int]]) -> list[Any]:
        """Begin to send and receive tensors, each with the stage of the other rank."""
        operations = [
            dist.P2POp(how, tensor, group=self.group, group_peer=stage)
            for how, messages in ((dist.isend, sent), (dist.irecv, received))
            for tensor, stage in messages
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def train(
        self,
        model: StagedGPT,
        micro: Sequence[Any],
        forward: Callable[..., Tensor],
        backward: Callable[[Tensor, Tensor | None], None],
        sync: Callable[[bool], AbstractContextManager[None]],
    ) -> None:
        """Run a step's passes through this stage, then sum gradients over ranks.

        `forward(micro, hidden=...)` returns hidden states, or the loss; `backward(result, its
        gradient)` runs in `sync(whether it is the stage's last one)`.
        """
        held: dict[int, tuple[Tensor | None, Tensor]] = {}  # a micro-batch's input and result
        arriving: dict[Task, tuple[Tensor, list[Any]]] = {}
        on_the_way: deque[tuple[list[list[Any]], Any]] = deque()  # works, and the sent tensors
        for tick in timetable(self.stages, len(micro)):
            sent, received = list[tuple[Tensor, int]](), list[tuple[Tensor, int]]()
            results = dict[Task, Tensor]()
            for task in tick:
                to = task.next(self.stages)
                if to is not None and to.stage == self.stage:
                    results[to] = self.empty(self.shape(model, micro[to.micro].batch.tokens))
                    received.append((results[to], task.stage))
                if task.stage != self.stage:
                    continue
                arrived, works = arriving.pop(task, (None, []))
                wait(works)
                if not task.backward:
                    hidden = None if arrived is None else arrived.requires_grad_()
                    result = forward(micro[task.micro], hidden=hidden)
                    held[task.micro] = hidden, result
                    output: Tensor | None = result.detach()
                else:
                    hidden, result = held.pop(task.micro)
                    if result.requires_grad:  # else nothing up to here is trained
                        with sync(task.micro == len(micro) - 1):
                            backward(result, arrived)
                    output = None if hidden is None else hidden.grad
                if output is not None and to is not None:
                    sent = [(output.to(self.dtype).contiguous(), to.stage)]
            # One work for each message; NCCL has one for all of a batch.
            posted = [[work] for work in self.post(sent, received)]
            for number, (to, tensor) in enumerate(results.items(), len(sent)):
                arriving[to] = tensor, posted[min(number, len(posted) - 1)]
            on_the_way.append((posted[: len(sent)], sent))
            if len(on_the_way) > TICKS_KEPT:
                for works in on_the_way.popleft()[0]:
                    wait(works)
        for works in itertools.chain.from_iterable(works for works, _ in on_the_way):
            wait(works)
        self.sum_gradients(model)

    def empty(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def shape(self, model: GPT, tokens: Tensor, has_labels: bool = True) -> tuple[int, int, int]:
        rows, length = tokens.shape
        if isinstance(model, DividedGPT):
            length = len(model.part(length, has_labels, torch.device("cpu")).stream_columns)
        return rows, length, self.width

    def sum_gradients(self, model: StagedGPT) -> None:
        """Add up the gradients of replicas, and of a table that two stages hold."""
        group = self.replicas
        if group is not None and group.size() > 1:
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            buckets, size = list[list[Tensor]](), 0.0
            for grad in grads:
                if not buckets or size + grad.nbytes > self.bucket_bytes:
                    buckets.append([])
                    size = 0.0
                buckets[-1].append(grad)
                size += grad.nbytes
            for bucket in buckets:  # a copy of one bucket at a time
                sum_together(bucket, group)
        grad = model.embedding.weight.grad if self.ends is not None else None
        if grad is not None and self.ends is not None:
            dist.all_reduce(local_part(grad), group=self.ends)


class StagedGPT(GPT):
    """A GPT of which this rank holds one stage.

    A pass with gradients computes this stage from the `hidden` states of the one before. A pass
    without goes through the stages of all ranks, and every rank gets the result.
    """

    shares_gradient = False  # lookup and head are in different stages
    pipeline: Pipeline

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        cache: list[LayerCache] | None = None,
        by_source: SourceSums | None = None,
        documents: Documents | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        pipe, trains = self.pipeline, torch.is_grad_enabled()
        if not trains and pipe.stage > 0:
            hidden = pipe.empty(pipe.shape(self, tokens, labels is not None))
            wait(pipe.post([], [(hidden, pipe.stage - 1)]))
        layers = pipe.layers[pipe.stage]
        inputs = self.prepare(tokens, labels, cache[layers.start].length if cache else 0, documents)
        x = self.embed(inputs)[0] if hidden is None else hidden
        x = self.run_blocks(x, layers, inputs, cache)
        if pipe.is_last:
            table = self.embedding.weight if self.settings.tie_head else None
            x = self.apply_head(x, inputs, table, cache, by_source)
        if trains:
            return x
        x = x.to(pipe.dtype).contiguous()
        if not pipe.is_last:
            wait(pipe.post([(x, pipe.stage + 1)], []))
            logits = [len(tokens), 1 if cache else tokens.shape[1], self.vocab]
            x = pipe.empty(logits if labels is None else [])
        dist.broadcast(x, group=pipe.group, group_src=pipe.stages - 1)
        return x


def keep_stages(model: nn.Module, mesh: Mesh, device: torch.device, recipe: Recipe) -> None:
    """Keep this rank's stage of a model, in place. Parameters keep their names. UserError if
    nothing is trained in a stage."""
    assert isinstance(model, GPT)  # the recipe rejects others
    pipe = Pipeline(model, mesh, device, recipe)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    for stage in range(pipe.stages):
        if not any(name.startswith(pipe.parts(stage)) for name in trained):
            problem = f"it leaves nothing to train in stage {stage} of {pipe.stages}"
            raise UserError(f"model.freeze: {problem} (parallel.pipeline): use fewer stages")
    present = pipe.parts(pipe.stage)
    for name, _ in list(model.named_children()):
        if name != "blocks" and f"{name}." not in present:
            setattr(model, name, None)
    for number in range(recipe.model.layers):
        if f"blocks.{number}." not in present:
            delattr(model.blocks, str(number))
    add_mixin(model, StagedGPT)
    model.pipeline = pipe  # type: ignore[assignment]


def stage_of(model: nn.Module) -> Pipeline | None:
    """The pipeline of a model that holds one of its stages."""
    return model.pipeline if isinstance(model, StagedGPT) else None
