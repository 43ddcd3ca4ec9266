"""Pipeline parallelism (arXiv 1811.06965): stages of consecutive blocks, each on other ranks.

torch's schedules fix the shapes of a stage at its first pass, but micro-batches differ in length.
`timetable` puts the tasks of all ranks into ticks. After each tick a rank posts the messages of
this tick as one batch, so no order of messages can block the ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from windlass.errors import UserError
from windlass.model.attention import Documents, LayerCache
from windlass.model.gpt import GPT
from windlass.model.loss import SourceSums
from windlass.model.sharding import become, local_part
from windlass.model.size import stage_layers
from windlass.parallel.collectives import sum_together
from windlass.parallel.context import DividedGPT
from windlass.parallel.ranks import Ranks
from windlass.recipe import Recipe

TICKS_KEPT = 8  # a message sent this many ticks ago is waited for, so that its memory is freed


class Task(NamedTuple):
    backward: bool
    stage: int
    micro: int


def order(stage: int, stages: int, micro_batches: int, train: bool = True) -> list[Task]:
    """The tasks of a stage, in order; in training 1F1B (one forward, one backward)."""
    forward = [Task(False, stage, micro) for micro in range(micro_batches)]
    if not train:
        return forward
    backward = [Task(True, stage, micro) for micro in range(micro_batches)]
    warmup = min(stages - 1 - stage, micro_batches)
    tasks = forward[:warmup]
    for pair in zip(forward[warmup:], backward, strict=False):
        tasks += pair
    return tasks + backward[len(forward) - warmup :]


@functools.cache
def timetable(
    stages: int, micro_batches: int, train: bool = True
) -> tuple[tuple[Task | None, ...], ...]:
    """For each tick the task of each stage; a task follows the tick of its inputs."""
    left = [deque(order(stage, stages, micro_batches, train)) for stage in range(stages)]
    done, ticks = set[Task](), list[tuple[Task | None, ...]]()
    while any(left):
        tick = [t[0] if t and needs(t[0], stages) <= done else None for t in left]
        assert any(tick), f"{micro_batches} micro-batches in {stages} stages are stuck"
        for task in filter(None, tick):
            left[task.stage].popleft()
            done.add(task)
        ticks.append(tuple(tick))
    return tuple(ticks)


def needs(task: Task, stages: int) -> set[Task]:
    backward, stage, micro = task
    if not backward:
        return {Task(False, stage - 1, micro)} if stage else set()
    above = {Task(True, stage + 1, micro)} if stage + 1 < stages else set()
    return above | {Task(False, stage, micro)}


def receiver(task: Task, stages: int) -> Task | None:
    stage = task.stage - 1 if task.backward else task.stage + 1
    return task._replace(stage=stage) if 0 <= stage < stages else None


def wait(works: list[Any]) -> None:
    """Wait for works and forget them; a second wait for one of gloo's would not end."""
    while works:
        works.pop().wait()


class Pipeline:
    """The stages of a model, of which this rank holds number `stage`, and their messages."""

    def __init__(self, model: GPT, ranks: Ranks, recipe: Recipe):
        mesh = ranks.mesh
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
        self.device = ranks.device
        # The stream and the loss are not in bf16, even if the weights are.
        self.dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
        self.width = recipe.model.width
        self.bucket_bytes = recipe.parallel.bucket_mb * 2**20
        self.replicas = mesh.replicas.get_group() if mesh.replicas is not None else None
        if self.ties_head:
            mesh.connect_ends(timedelta(seconds=recipe.parallel.startup_timeout_seconds))
        self.ends = mesh.ends
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

    def run(
        self,
        shapes: Sequence[Sequence[int]],
        work: Callable[[Task, Tensor | None], Tensor | None],
        train: bool = True,
    ) -> None:
        """This stage's tasks; `work(task, what arrived for it)` returns what the next stage gets.

        `shapes`: of the hidden states and the gradients of each micro-batch.
        """
        arriving: dict[Task, tuple[Tensor, list[Any]]] = {}
        on_the_way: deque[tuple[list[list[Any]], Any]] = deque()  # works, and the sent tensors
        for tick in timetable(self.stages, len(shapes), train):
            sent, received = list[tuple[Tensor, int]](), list[tuple[Tensor, int]]()
            results = dict[Task, Tensor]()
            if (task := tick[self.stage]) is not None:
                arrived, works = arriving.pop(task, (None, []))
                wait(works)
                output, to = work(task, arrived), receiver(task, self.stages)
                if output is not None and to is not None:
                    sent = [(output.to(self.dtype).contiguous(), to.stage)]
            for other in filter(None, tick):
                to = receiver(other, self.stages)
                if to is not None and to.stage == self.stage:
                    shape = tuple(shapes[to.micro])
                    results[to] = torch.empty(shape, dtype=self.dtype, device=self.device)
                    received.append((results[to], other.stage))
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

    def train(
        self,
        model: StagedGPT,
        micro: Sequence[Any],
        forward: Callable[..., Tensor],
        backward: Callable[[Tensor, Tensor | None], None],
        sync: Callable[[bool], AbstractContextManager[None]],
        loss: Tensor,
    ) -> None:
        """Run a step's passes through this stage, then sum gradients and `loss` over ranks.

        `forward(micro, hidden=..., staged=True)` returns hidden states, or the loss;
        `backward(result, its gradient)` runs in `sync(whether it is the stage's last one)`.
        """
        held: dict[Task, tuple[Tensor | None, Tensor]] = {}

        def work(task: Task, arrived: Tensor | None) -> Tensor | None:
            if not task.backward:
                hidden = None if arrived is None else arrived.requires_grad_()
                result = forward(micro[task.micro], hidden=hidden, staged=True)
                held[task] = hidden, result
                return result.detach()
            hidden, result = held.pop(task._replace(backward=False))
            if result.requires_grad:  # else nothing up to here is trained
                with sync(task.micro == len(micro) - 1):
                    backward(result, arrived)
            return None if hidden is None else hidden.grad

        self.run([self.shape(model, m.batch.tokens) for m in micro], work)
        self.sum_gradients(model)
        dist.all_reduce(loss, group=self.group)  # zero except on the last stage

    def shape(self, model: GPT, tokens: Tensor, has_labels: bool = True) -> tuple[int, int, int]:
        rows, length = tokens.shape
        if isinstance(model, DividedGPT):
            length = len(model.part(length, has_labels, torch.device("cpu")).stream)
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

    With `staged` it computes this stage from the `hidden` states of the one before. Otherwise it
    evaluates: every rank gets the result.
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
        staged: bool = False,
    ) -> Tensor:
        if not staged:
            return self.evaluate(tokens, labels, cache, by_source, documents)
        layers = self.pipeline.layers[self.pipeline.stage]
        here = self.prepare(tokens, labels, cache[layers.start].length if cache else 0, documents)
        x = self.begin(here)[0] if hidden is None else hidden
        x = self.through(x, layers, here, cache)
        if not self.pipeline.is_last:
            return x
        table = self.embedding.weight if self.settings.tie_head else None
        return self.end(x, here, table, cache, by_source)

    def evaluate(
        self, tokens: Tensor, labels: Any, cache: Any, by_source: Any, documents: Any
    ) -> Tensor:
        """The result of a batch that passes through the stages of all ranks, without a gradient."""
        assert not torch.is_grad_enabled(), "training passes of a pipeline need its schedule"
        pipe = self.pipeline
        results = list[Tensor]()

        def work(_: Task, arrived: Tensor | None) -> Tensor:
            result = StagedGPT.forward(
                self, tokens, labels, cache, by_source, documents, arrived, staged=True
            )
            if pipe.is_last:
                results.append(result)
            return result

        pipe.run([pipe.shape(self, tokens, labels is not None)], work, train=False)
        if results:
            whole = results[0].to(pipe.dtype).contiguous()
        else:
            logits = [len(tokens), 1 if cache else tokens.shape[1], self.vocab]
            shape = logits if labels is None else []
            whole = torch.empty(shape, dtype=pipe.dtype, device=pipe.device)
        dist.broadcast(whole, group=pipe.group, group_src=pipe.stages - 1)
        return whole


def keep_stages(model: nn.Module, ranks: Ranks, recipe: Recipe) -> None:
    """Keep this rank's stage of a model, in place. Parameters keep their names. UserError if
    nothing is trained in a stage."""
    assert isinstance(model, GPT)  # the recipe rejects others
    pipe = Pipeline(model, ranks, recipe)
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
    become(model, StagedGPT)
    model.pipeline = pipe  # type: ignore[assignment]


def stage_of(model: nn.Module) -> Pipeline | None:
    """The pipeline of a model that holds one of its stages."""
    return model.pipeline if isinstance(model, StagedGPT) else None
