"""Every setting of a recipe with its type, default, meaning and check; one class for each
section."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from windlass.errors import did_you_mean
from windlass.recipe.section import Names, Section
from windlass.recipe.units import EPOCHS, Duration

IGNORE_INDEX = -100  # the label of a masked position, as in `torch.nn.functional.cross_entropy`

SQUAD_SUITE, HELLASWAG_SUITE, LOSS_SUITE = "squad", "hellaswag", "loss"
SUITE = r"^(loss|hellaswag|squad|lm-eval:.+)$"
OWN_SUITE = "own:"  # before the name of a suite that a user gives to `train`

# A measure that the best checkpoint has: a suite, and the field of its `eval` line.
BEST = (
    r"^(loss(\.average_loss)?|squad\.(f1|exact_match)"
    r"|hellaswag\.(acc|acc_norm|acc_per_token)|own:\w+\.\w+)$"
)

Beta = Annotated[float, Field(ge=0, lt=1)]

LIBRARY_OPTIMIZERS = {
    "torch.optim": "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop SGD",
    "pytorch_optimizer": "AdEMAMix AdaBelief Lion Tiger",
}
"""Each element's update follows from this element alone, so ranks may divide the parameters."""
OPTIMIZERS = ["adamw", "adamw8bit", "muon"]
OPTIMIZERS += [f"{of}.{name}" for of, names in LIBRARY_OPTIMIZERS.items() for name in names.split()]


class RunSettings(Section):
    """The run's directory, name and seed."""

    name: str = Field("", pattern=r"^[A-Za-z0-9._+=-]*$")
    """The run's name, in trackers and reports; empty: `<preset>-<config hash>`."""
    dir: str = ""
    """The run's directory; empty: `runs/<name>`. A run given as RECIPE has its own path."""
    base: str = ""
    """Directory that relative paths of the recipe start from; empty, or not on this machine: the
    working directory. The recipe of a run has the directory in which the run began."""
    seed: int = Field(1337, ge=0, lt=2**63)
    """Seed of initialisation, data order, dropout and sampling, each a pure function of it."""
    notes: str = ""
    """Free text, shown in the run's report and trackers."""


class TrainSettings(Section):
    """Length, batch and arithmetic of the training."""

    steps: int | str = 1000
    """Optimizer steps, `"3 epochs"` (rounded up), or `"compute-optimal"`."""
    tokens_per_parameter: float = Field(20.0, gt=0)
    """With `compute-optimal`: unpadded tokens for each parameter (arXiv 2203.15556). The number of
    steps is rounded down."""
    global_batch: int = Field(64, ge=1)
    """Sequences in one optimizer step, over all ranks."""
    micro_batch: int = Field(0, ge=0)
    """Sequences in one forward pass of one rank; 0: about 4,096 tokens on a CPU; on a GPU the
    largest that `windlass plan` fits into the free memory (16,384 tokens for your own module), less
    after memory ran out. A resumed run keeps it."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64", "float8"] = "auto"
    """Arithmetic of forward and backward pass; weights are fp32 (see `master`; `fp64`: float64, for
    proofs). `auto`: fp32 on a CPU, bf16 on a GPU that has it, else fp16. `float8`: bf16, but the
    blocks' linear layers multiply in float8 in training (`torchao`), for wide models on Ada, Hopper
    and later GPUs with `compile` (it slows GPT-2 124M); a CPU emulates it."""
    master: Literal["fp32", "bf16"] = "fp32"
    """Precision of trained weights, gradients and moments. `bf16`: 8 bytes a weight instead of 16,
    with `precision = "bf16"`; updates are rounded stochastically (arXiv 2010.06192)."""
    tf32: bool = False
    """On a GPU: round the inputs of float32 matrix products to TF32 (10 bits): much faster."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the blocks, as one graph, and the loss with `torch.compile`. `auto`: on a GPU, for
    Windlass's own GPT without `deterministic`, in a run of at least 1,000 steps."""
    grad_clip: float = Field(1.0, ge=0)
    """Largest norm of the whole gradient; 0: no clipping."""
    deterministic: bool = False
    """Use deterministic kernels: slower, and necessary for bit-exact repetition on CUDA."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """After a non-finite loss: `stop` before the update, or `skip` the step."""
    max_skips: int = Field(20, ge=1)
    """Skipped steps in a row that end the run (fp16 overflows, `on_nonfinite`)."""
    average: float = Field(0.0, ge=0, lt=1)
    """Decay of an exponential moving average of the weights, as 0.999; 0: none. After n steps it is
    at most (1 + n) / (10 + n) (as TensorFlow's `ExponentialMovingAverage`), so that the first
    weights are forgotten. The training itself does not change."""
    startup_checks: bool = True
    """Test on two samples whether your own module returns the sum of its loss."""
    threads: int = Field(0, ge=0)
    """CPU threads of a rank; 0: OMP_NUM_THREADS, else torch's, or cores / ranks of a host."""

    @field_validator("steps", mode="before")
    @classmethod
    def _steps(cls, value: object) -> object:
        if isinstance(value, float) and value.is_integer():  # 1e4
            value = int(value)
        is_length = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not is_length and value != "compute-optimal" and not EPOCHS.fullmatch(str(value)):
            raise ValueError('it takes steps (4576), epochs ("1 epoch") or "compute-optimal"')
        return value


class ScheduleSettings(Section):
    """The learning rate as a function of the step."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """`wsd`: warm-up, stable, decay (arXiv 2404.06395); others decay after the warm-up."""
    warmup: Duration = 0.01
    """Steps of the linear rise from 0 to `lr`; a fraction is a share of the schedule."""
    decay: Duration = 0.1
    """With `wsd`: steps of the linear decay at the schedule's end."""
    steps: Duration = 0
    """Length of the schedule, as nanoGPT's `lr_decay_iters`; 0: the run's. A longer run keeps the
    final learning rate. `--extend-to` does not change a length in steps or epochs."""
    final: float = Field(0.0, ge=0)
    """Learning rate at the end of the schedule, as a share of `lr`."""


class OptimSettings(Section):
    """The optimizer and its learning rate."""

    kind: str = "adamw"
    """`adamw` (arXiv 1711.05101); `adamw8bit` with moments in 8 bits; `muon` for the blocks'
    matrices, with AdamW for the rest; or by name, with the library's defaults and `options`, one of
    `torch.optim` (ASGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, SGD) or
    `pytorch_optimizer` (AdEMAMix, AdaBelief, Lion, Tiger), as `torch.optim.SGD`."""
    options: dict[str, bool | int | float | str | list[float]] = {}
    """With an optimizer of a library: its other arguments, as `optim.options.momentum = 0.9`."""
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate; by default 5e-5 for an `hf` model's weights, 2e-4 for its adapters."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment, as `optim.betas=[0.9,0.95]`."""
    eps: float = Field(1e-8, gt=0)
    """Added to AdamW's denominator."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of the tensors that `decay_on` selects."""
    decay_on: Literal["matrices", "all"] = "matrices"
    """`matrices`: tensors of two or more dimensions, also embeddings; `all`: also biases, norms."""
    muon_lr: float = Field(0.02, gt=0)
    """With `muon`: peak learning rate of the matrices; the schedule scales it as it scales `lr`."""
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    """With `muon`: momentum."""
    schedule: ScheduleSettings = ScheduleSettings()
    """`optim.schedule.kind`, `.warmup`, `.decay`, `.steps`, `.final`."""

    @field_validator("kind")
    @classmethod
    def _kind(cls, value: str) -> str:
        if value not in OPTIMIZERS:
            raise ValueError(did_you_mean(value, OPTIMIZERS))
        return value


class ParallelSettings(Section):
    """The division of the work among ranks."""

    strategy: Literal[
        "auto", "single", "ddp", "shard_optim", "full_shard", "shard_grad_op", "hybrid_shard"
    ] = "auto"
    """`auto`: `single` on one rank, `ddp` on several. `shard_optim` (ZeRO-1) is `ddp` with the
    optimizer state sharded. `full_shard` (ZeRO-3) shards parameters, gradients and optimizer state;
    `shard_grad_op` (ZeRO-2) keeps the parameters gathered between forward and backward;
    `hybrid_shard` shards inside a group of `shard_size` ranks and replicates between the groups."""
    shard_size: int = Field(0, ge=0)
    """With `hybrid_shard`: ranks in a sharding group; 0: a host's ranks, or half on one host."""
    reduce_each_micro_batch: bool | Literal["auto"] = "auto"
    """FSDP2: reduce gradients after each micro-batch and hold a shard of them: less memory, more
    traffic. `auto`: true except with `shard_grad_op`."""
    tensor: int = Field(1, ge=1)
    """Ranks that divide each matrix (arXiv 1909.08053): attention heads, feed-forward width and
    vocabulary. They also divide norms, dropout and the residual stream along the sequence (arXiv
    2205.05198), except in a model of transformers, which needs a `tp_plan`."""
    context: int = Field(1, ge=1)
    """Ranks that divide each sequence; attention exchanges heads (arXiv 2309.14509) if there are
    enough, else it gathers keys and values (arXiv 2407.21783)."""
    pipeline: int = Field(1, ge=1)
    """Stages of consecutive blocks, each on other ranks."""
    offload: bool = False
    """FSDP2: keep parameters, gradients and optimizer state in the host's memory between uses."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Recompute activations in the backward pass: all, or except matrix products and attention."""
    forward_prefetch: int = Field(0, ge=0)
    """FSDP2: units to gather ahead in the forward pass; 0: PyTorch's choice. A unit is a block, or
    several small ones."""
    backward_prefetch: int = Field(0, ge=0)
    """FSDP2: units to gather ahead in the backward pass; 0: PyTorch's choice, which is one."""
    bucket_mb: float = Field(25.0, gt=0)
    """DDP: size of a gradient bucket in MB."""
    find_unused_parameters: bool = False
    """DDP: for your own module that does not use all parameters on every rank and step; slower."""
    timeout_seconds: float = Field(600.0, gt=0)
    """Longest time of a collective; after it the run ends and names the rank and phase."""
    startup_timeout_seconds: float = Field(1800.0, gt=0)
    """The same until the end of the first step (loading, compiling)."""
    heartbeat_seconds: float = Field(5.0, gt=0)
    """Period of each rank's sign of life; the run ends if a rank is silent for 6 periods."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; `auto`: CUDA if torch finds it."""

    @property
    def model_ranks(self) -> int:  # that hold one copy of the model, apart from sharding
        return self.tensor * self.context * self.pipeline

    @property
    def layout(self) -> str:
        """The settings that divide one copy of the model, for messages."""
        names = [name for name in ("tensor", "context", "pipeline") if getattr(self, name) > 1]
        return ", ".join(f"parallel.{name} = {getattr(self, name)}" for name in names)


class CheckpointSettings(Section):
    """When Windlass saves the state, and which checkpoints it keeps."""

    every: Duration = 0.1
    """Period of saves; a share of the run means at least 20 steps."""
    keep_last: int = Field(10, ge=1)
    """Newest checkpoints to keep."""
    keep_every: Duration = 0
    """Period of additional saves that are kept for good; a share means at least 20 steps."""
    best: str = Field("loss", pattern=BEST)
    """Measure of the best checkpoint: the lowest validation `loss`, or `loss.average_loss` of the
    averaged weights; or the highest `squad.f1`, `squad.exact_match`, `hellaswag.acc`,
    `hellaswag.acc_norm`, `hellaswag.acc_per_token` or `own:SUITE.MEASURE` of your suite."""
    keep_best: bool = True
    """Keep the best checkpoint."""
    resume: str = Field("latest", pattern=r"^(latest|best|\d+)$")
    """The run's own checkpoint to resume from: `latest`, `best` or a step."""
    with_base: bool = False
    """With `hf`: hold frozen weights in each checkpoint. By default it refers to the model's files
    by their SHA-256, if the frozen weights come from these."""
    base: str = ""
    """With `hf`: the directory of these files after they left `model.name`."""
    background: bool = True
    """Write in the background while training continues; `false`: wait for the disk."""
    grace_seconds: float = Field(25.0, gt=0)
    """Seconds from a signal to the run's end; no longer save begins. torchrun kills after 30 s."""


class EvalSettings(Section):
    """Evaluations and samples during training."""

    every: Duration = 0.1
    """Period of evaluations; there is also one at step 0 and one at the end; a share of the run
    means at least 20 steps; 0: none at all."""
    batches: int = Field(100, ge=0)
    """Global batches of the validation set to use, always the same; 0: all."""
    at_end: Literal["auto", "all", "batches"] = "auto"
    """Data of the last evaluation: `all` validation data beside these `batches`, or the `batches`
    alone; `auto`: `all` if that takes at most a tenth of the run's work."""
    train_batches: int = Field(0, ge=0)
    """Global batches of the training set to measure too (`train_loss`), as nanoGPT's
    `estimate_loss`: always the same, spread over the set, without dropout; 0: none."""
    suites: Annotated[list[Annotated[str, Field(pattern=SUITE)]], Names] = [LOSS_SUITE]
    """Suites of every evaluation: `loss`, `hellaswag`, `squad`, `lm-eval:TASKS`."""
    hellaswag_file: str = ""
    """HellaSwag's validation items as JSONL; empty: download them with `datasets`."""
    hellaswag_items: int = Field(0, ge=0)
    """HellaSwag items to use; 0: all 10,042."""
    squad_file: str = ""
    """SQuAD v1.1 JSON for the suite `squad`; empty: the recipe's held-out questions, or a download
    with `datasets`."""
    lm_eval_few_shot: int = Field(-1, ge=-1)
    """With `lm-eval:TASKS`: solved examples before each question; -1: the task's number."""
    lm_eval_limit: float = Field(0, ge=0)
    """With `lm-eval:TASKS`: items of each task; below 1 a share of them; 0: all."""
    lm_eval_chat: bool = False
    """With `lm-eval:TASKS`: ask in the tokenizer's chat template."""
    lm_eval_tasks: str = ""
    """With `lm-eval:TASKS`: a directory with your task files (YAML)."""
    sample_every: Duration = 0
    """Period of samples generated from `prompt`; a share means at least 20 steps; 0: never."""
    prompt: str = ""
    """Beginning of the generated text; empty: the end-of-text token or a newline."""
    sample_tokens: int = Field(128, ge=1)
    """Tokens to generate."""
    sample_count: int = Field(1, ge=1)
    """Texts to generate."""


Tracker = Literal["tensorboard", "mlflow", "wandb"]


class TelemetrySettings(Section):
    """The ledger and the trackers."""

    every: int = Field(10, ge=1)
    """Steps between two `train` lines of the ledger; only these steps synchronise the device."""
    trackers: Annotated[list[Tracker], Names] = []
    """Trackers to export the ledger to, each from a separate process."""
    project: str = "windlass"
    """The project or experiment in the trackers."""
    profile: str = Field("", pattern=r"^([1-9]\d*:[1-9]\d*)?$")
    """`"100:3"` profiles steps 100 to 102 on rank 0: a trace for Perfetto and a table of operators
    in `RUN/profile`."""
