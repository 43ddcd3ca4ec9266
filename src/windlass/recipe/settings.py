"""Every setting of a recipe: its type, default, meaning and check, one class a section."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from windlass.recipe.network import Names, Section
from windlass.recipe.units import EPOCHS, Duration

IGNORE_INDEX = (
    -100
)  # the label of a position that counts in no loss, as in `torch.nn.functional.cross_entropy`

SHARDED = (
    "full_shard",
    "shard_grad_op",
    "hybrid_shard",
)  # values of `parallel.strategy`: those of FSDP2
REDUCED_EACH = (
    "full_shard",
    "hybrid_shard",
)  # those that by default reduce the gradients of each micro-batch
SHARD_OPTIM = "shard_optim"  # the one that is DDP with a sharded optimizer state
SQUAD_SUITE, HELLASWAG_SUITE, LOSS_SUITE = "squad", "hellaswag", "loss"
OWN_SUITE = "own:"  # before the name of a suite that a user gives to `train`

# What a model can be the best by: a suite, and the field of its `eval` line.
BEST = r"^(loss|squad\.(f1|exact_match)|hellaswag\.(acc|acc_norm|acc_per_token)|own:\w+\.\w+)$"

Beta = Annotated[float, Field(ge=0, lt=1)]


def _one_or_many(value: str | list[str]) -> str | list[str]:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _as_list(value: str | list[str]) -> list[str]:
    return [value] * bool(value) if isinstance(value, str) else value


Source = Annotated[str, Field(min_length=1)]
Sources = Annotated[
    str | Annotated[list[Source], Field(min_length=1)], AfterValidator(_one_or_many)
]


class RunSettings(Section):
    """Where a run lives, what it is called, and the seed of everything random in it."""

    name: str = Field("", pattern=r"^[A-Za-z0-9._+=-]*$")
    """The run's name, in trackers and reports; empty: `<preset>-<config hash>`."""
    dir: str = ""
    """The run's directory; empty: `runs/<name>`."""
    seed: int = Field(1337, ge=0, lt=2**63)
    """Seed of initialisation, data order, dropout and sampling, each a pure function of it."""
    notes: str = ""
    """Free text that travels with the run into its report and trackers."""


class DataSettings(Section):
    """The corpus, how it becomes tokens, and the order in which they are seen."""

    source: Sources = "stdlib"
    """`stdlib` (Python's own source), a path, glob or directory of .txt, .jsonl, .json, .parquet (.gz, .zst), `https://...`
    (with `sha256`), `hf:NAME[:CONFIG]` or `hf:DIR` (`datasets`), `squad` or `squad:FILE.json`, token shards of other
    tools: `shards:GLOB` (nanoGPT .bin, build-nanogpt .npy, llm.c .bin); or a list of them, read one after the other."""
    eval_source: Sources = ""
    """Validation corpus, as `source`; empty: held out from it. It has `val_fraction` of `max_documents` and `max_tokens`."""
    sha256: str = Field("", pattern=r"^([0-9a-f]{64})?$")
    """The SHA-256 that a downloaded `source` must have."""
    tokenizer: str = "auto"
    """`byte`, `char`, `gpt2`, `gpt2:DIR` (vocab.bpe, encoder.json), `hf:NAME_OR_DIR`, `bpe` (trained on the corpus);
    `auto`: the one that comes with the model (`model.name`, `model.init_from`), else `byte`."""
    tokenizer_vocab: int = Field(4096, ge=258)
    """With `bpe`: the size of the vocabulary to train."""
    text_key: str = "text"
    """The field that holds the text in jsonl, parquet and `hf:` sources."""
    split: str = "train"
    """With `hf:`: the split to train on."""
    eval_split: str = ""
    """With `hf:`: the split to validate on; empty: held out from `split`."""
    streaming: bool = False
    """With `hf:`: stream the documents instead of downloading the whole data set first."""
    max_documents: int = Field(0, ge=0)
    """Largest number of documents to read from each source; 0: all."""
    max_tokens: int = Field(0, ge=0)
    """Stop preparing after about this number of training tokens (at a document's end); several sources give the same share
    of their text each; 0: all."""
    val_fraction: float = Field(0.1, ge=0, lt=1)
    """Share held out at each source's end for validation, of the characters of one text or of many documents."""
    val_shards: int = Field(0, ge=0)
    """Number of first shards of each source to hold out for validation instead (build-nanogpt's convention);
    0: by `val_fraction`."""
    shard_tokens: int = Field(100_000_000, ge=1024)
    """Tokens in a shard."""
    packing: Literal["packed", "documents"] = "packed"
    """`packed`: documents end to end, cut into rows of `context` tokens; `documents`: one a row, padding masked out."""
    order: Literal["shuffled", "shards-shuffled", "sequential"] = "shuffled"
    """`shuffled`: all samples, another order each epoch; `shards-shuffled`: shards in file order in epoch 0 and
    shuffled from epoch 1 on, samples in order inside a shard; `sequential`: always in file order."""
    dir: str = ""
    """Directory of the prepared shards; empty: `data/<source>-<hash>`."""
    workers: int = Field(0, ge=0)
    """Threads that tokenize in parallel (the tokenizers release Python's lock); 0: one per core."""
    prefetch: int = Field(2, ge=0)
    """Steps whose batches are read ahead in the background."""
    format: Literal["text", "squad", "chat"] = "text"
    """`text`: documents; `squad`: question, context, answer (loss on the answer); `chat`: conversations (loss on the answers)."""
    train_size: int = Field(0, ge=0)
    """With `squad` and `chat`: number of training items, chosen by `run.seed`; 0: all."""
    eval_size: int = Field(0, ge=0)
    """With `squad` and `chat`: number of evaluation items; 0: all."""
    length_buckets: bool = True
    """With `squad` and `chat`: put items of like length into one micro-batch, inside one global batch only."""

    @property
    def vocab_(self) -> int:
        """The tokenizer's vocabulary with its end-of-text token, where it is fixed before there is any data; else 0."""
        return {"byte": 257, "gpt2": 50257, "bpe": self.tokenizer_vocab}.get(
            self.tokenizer.partition(":")[0], 0
        )

    @property
    def sources(self) -> list[str]:
        return _as_list(self.source)

    @property
    def eval_sources(self) -> list[str]:
        """`eval_source` as a list, empty where there is none."""
        return _as_list(self.eval_source)


class TrainSettings(Section):
    """How long, how much at once, in which arithmetic."""

    steps: int | str = 1000
    """Optimizer steps; `"compute-optimal"`: `tokens_per_parameter` tokens for each parameter; or `"3 epochs"`."""
    tokens_per_parameter: float = Field(20.0, gt=0)
    """With `compute-optimal`: D = this x N (arXiv 2203.15556); D counts real tokens, steps round down."""
    global_batch: int = Field(64, ge=1)
    """Sequences in one optimizer step, over all ranks: what the recipe fixes."""
    micro_batch: int = Field(0, ge=0)
    """Sequences in one forward pass of one rank; 0: chosen to hold about 4,096 tokens on a CPU, 16,384 on a GPU,
    and on one rank halved where memory runs out in the first step."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = "auto"
    """Arithmetic of forward and backward pass; master weights are fp32 (`fp64`: float64, for proofs). `auto`: bf16 where
    a GPU has it, else fp16 on a GPU, fp32 on a CPU."""
    tf32: bool = False
    """On a GPU: round the inputs of float32 matrix products to TF32 (10 bits), which is several times faster."""
    compile: bool = False
    """`torch.compile`, a block at a time."""
    grad_clip: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0: no clipping."""
    deterministic: bool = False
    """Deterministic kernels (on CUDA needed for bit-exact repetition; slower)."""
    on_nonfinite: Literal["stop", "skip", "rewind"] = "stop"
    """After a non-finite loss: stop before the update; skip the samples; or go back to a checkpoint and leave them out."""
    on_spike: Literal["ignore", "skip", "rewind", "stop"] = "ignore"
    """What a loss spike does (see `spike_sigmas`) before its update; but for `ignore` the host waits for each loss."""
    spike_sigmas: float = Field(6.0, gt=0)
    """A loss this many standard deviations above the mean of the last 128 steps is a spike."""
    max_skips: int = Field(20, ge=1)
    """The run ends after this number of skipped steps in a row (fp16 overflows, `on_nonfinite`, `on_spike`)."""
    early_stop: int = Field(0, ge=0)
    """The run ends after so many evaluations in a row without a better value of `checkpoint.best`; 0: never."""
    startup_checks: bool = True
    """Checks at step 1: master weights, ties, replicas, gradient norm, the first loss, that your own module sums its loss."""
    threads: int = Field(0, ge=0)
    """CPU threads of one rank; 0: chosen by measurement, or the cores shared among the ranks of a host."""

    @field_validator("steps", mode="before")
    @classmethod
    def _steps(cls, value: object) -> object:
        is_length = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not is_length and value != "compute-optimal" and not EPOCHS.fullmatch(str(value)):
            raise ValueError(
                'a run\'s length is steps (4576), epochs ("1 epoch") or "compute-optimal"'
            )
        return value


class ScheduleSettings(Section):
    """The learning rate over the run."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """`wsd`: warm-up, stable, decay (arXiv 2404.06395); `linear` and `cosine` fall from the end of the warm-up on."""
    warmup: Duration = 0.01
    """Steps of linear rise from `start` to `lr`; a fraction is one of the schedule's length."""
    decay: Duration = 0.1
    """With `wsd`: steps of linear fall at the schedule's end. (`cosine` and `linear` fall over its whole length.)"""
    steps: Duration = 0
    """The schedule's length where it is not the run's (0), as nanoGPT's `lr_decay_iters`: a shorter run stops on the way, a
    longer one stays at the end's learning rate. In steps or epochs, an extension (`--extend-to`) does not change it."""
    start: float = Field(0.0, ge=0)
    """Learning rate at step 0 of the warm-up, as a share of `lr`."""
    final: float = Field(0.0, ge=0)
    """Learning rate at the schedule's end, as a share of `lr`."""


class OptimSettings(Section):
    """The optimizer and its learning rate."""

    kind: str = "adamw"
    """`adamw` (arXiv 1711.05101, fused), `muon` on the blocks' matrices with AdamW on the rest, or an optimizer of torch
    by its name, `torch.optim.Adafactor`, with torch's own defaults and `options`."""
    options: dict[str, bool | int | float | str | list[float]] = {}
    """With `torch.optim...`: its arguments besides `lr` and `weight_decay`, as `optim.options.momentum = 0.9`."""
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate. Not set, it is 1e-3; on the weights of an `hf` model 5e-5, for adapters (`model.lora`) 2e-4."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to AdamW's denominator."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay, on what `decay_on` says."""
    decay_on: Literal["matrices", "all"] = "matrices"
    """`matrices`: tensors of two and more dimensions (embeddings too); `all`: also biases and norms."""
    muon_lr: float = Field(0.02, gt=0)
    """With `muon`: peak learning rate of the matrices; the schedule scales both alike."""
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    """With `muon`: momentum."""
    schedule: ScheduleSettings = ScheduleSettings()
    """`optim.schedule.kind`, `.warmup`, `.decay`, `.steps`, `.start`, `.final`."""

    @field_validator("kind")
    @classmethod
    def _kind(cls, value: str) -> str:
        if value not in ("adamw", "muon") and not value.startswith("torch.optim."):
            raise ValueError(
                'it is "adamw", "muon", or an optimizer of torch by its name, as "torch.optim.SGD"'
            )
        return value


class ParallelSettings(Section):
    """How the work is spread over ranks."""

    strategy: Literal[
        "auto", "single", "ddp", "shard_optim", "full_shard", "shard_grad_op", "hybrid_shard"
    ] = "auto"
    """`auto`: `single` on one rank, `ddp` on several. `shard_optim` (ZeRO-1) is `ddp` with the optimizer state sharded.
    `full_shard` (ZeRO-3) shards parameters, gradients and optimizer state; `shard_grad_op` (ZeRO-2) keeps the parameters
    gathered between forward and backward; `hybrid_shard` shards inside a group of `shard_size` ranks and replicates
    between the groups."""
    shard_size: int = Field(0, ge=0)
    """With `hybrid_shard`: ranks in a sharding group; 0: those of one host, or half of the ranks on one host."""
    reduce_each_micro_batch: bool | Literal["auto"] = "auto"
    """FSDP2: reduce the gradients after each micro-batch and hold only a shard of them: less memory, more traffic. `auto`:
    true with `full_shard` and `hybrid_shard`, false with `shard_grad_op`."""
    offload: bool = False
    """Keep parameters, gradients and optimizer state in the host's memory between uses (FSDP2)."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Recompute activations in the backward pass: of whole blocks, or all but the matrix products and attention."""
    forward_prefetch: int = Field(0, ge=0)
    """FSDP2: blocks whose parameters are gathered ahead in the forward pass; 0: PyTorch's own choice."""
    backward_prefetch: int = Field(0, ge=0)
    """FSDP2: likewise in the backward pass."""
    bucket_mb: float = Field(25.0, gt=0)
    """DDP: size of a gradient bucket, in MB."""
    timeout_seconds: float = Field(600.0, gt=0)
    """How long a collective may take before the run is ended, naming the rank and phase."""
    startup_timeout_seconds: float = Field(1800.0, gt=0)
    """The same until the first step is done (loading, compiling)."""
    heartbeat_seconds: float = Field(5.0, gt=0)
    """How often each rank reports that it is alive; one that is silent for 6 times as long ends the run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; `auto`: on CUDA where there is one."""


def reduces_each(setting: bool | str, strategy: str) -> bool:
    """`parallel.reduce_each_micro_batch` with `auto` resolved."""
    return strategy in REDUCED_EACH if setting == "auto" else bool(setting)


class CheckpointSettings(Section):
    """What is saved, how often, and what is deleted."""

    every: Duration = 0.1
    """How often the state is saved."""
    keep_last: int = Field(10, ge=1)
    """How many of the newest checkpoints stay."""
    keep_every: Duration = 0
    """One is saved at each multiple of this, too, and stays for good."""
    keep_signal: int = Field(0, ge=0)
    """How many of the newest that were saved because the run was stopped (Ctrl-C, a preemption) stay beside those; 0: such a
    one goes when there is a newer checkpoint, unless it is the best."""
    best: str = Field("loss", pattern=BEST)
    """Which one is the best: by the lowest validation `loss`, or the highest of `squad.f1`, `squad.exact_match`, `hellaswag.acc`,
    `hellaswag.acc_norm`, `hellaswag.acc_per_token`, or `own:SUITE.MEASURE` of a suite of your own."""
    keep_best: bool = True
    """The best one stays."""
    resume: str = "latest"
    """`latest`, `best`, a step, a checkpoint's path, or `never` (refuses where there is one)."""
    background: bool = True
    """Write in the background while training continues; `false`: wait for the disk."""
    max_failed_saves: int = Field(3, ge=1)
    """So many failed saves in a row end the run: it would train with nothing to resume from."""
    grace_seconds: float = Field(25.0, gt=0)
    """Seconds from a signal to the end of the run; a save that would take longer is not begun. torchrun kills after 30 s."""

    @field_validator("resume", mode="before")
    @classmethod
    def _step(cls, value: object) -> object:  # a step may be written as the number that it is
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class EvalSettings(Section):
    """What is measured while training."""

    every: Duration = 0.1
    """How often the validation loss is measured; also at step 0 and at the end."""
    batches: int = Field(100, ge=0)
    """Global batches of the validation set to use, always the same ones; 0: all of it."""
    at_end: Literal["auto", "all", "batches"] = "auto"
    """What a run's last evaluation measures beside these `batches`: `all` validation data, or nothing else (`batches`);
    `auto`: all, if that is at most a tenth of the run's work."""
    train_batches: int = Field(0, ge=0)
    """Global batches of the training set whose loss is measured too (`train_loss`), as nanoGPT's `estimate_loss` does: always the
    same ones, spread at random over the set, without dropout; 0: none."""
    suites: Annotated[
        list[Annotated[str, Field(pattern=r"^(loss|hellaswag|squad|lm-eval:.+)$")]], Names
    ] = [LOSS_SUITE]
    """Measured at every evaluation: `loss`, `hellaswag`, `squad`, `lm-eval:TASKS`."""
    hellaswag_file: str = ""
    """HellaSwag's validation items as JSONL; empty: through `datasets`."""
    hellaswag_items: int = Field(0, ge=0)
    """Number of HellaSwag's items to use; 0: all 10,042."""
    squad_file: str = ""
    """SQuAD v1.1 JSON for the suite `squad`; empty: the recipe's own held-out questions, or through `datasets`."""
    squad_items: int = Field(0, ge=0)
    """Number of its questions to use, chosen by `run.seed`; 0: `data.eval_size` of them."""
    sample_every: Duration = 0
    """How often a text is generated from `prompt`; 0: never."""
    prompt: str = ""
    """What the generated text begins with; empty: the end-of-text token or a newline."""
    sample_tokens: int = Field(128, ge=1)
    """Tokens to generate."""
    sample_count: int = Field(1, ge=1)
    """Texts to generate."""
    temperature: float = Field(0.8, ge=0)
    """Softmax temperature of the samples; 0: always the most likely token (greedy)."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most likely tokens; 0: from all."""


class TelemetrySettings(Section):
    """What is written down, how often, and where else it goes."""

    every: int = Field(10, ge=1)
    """Steps between two `train` lines of the ledger; the device is synchronised only then."""
    trackers: Annotated[list[Literal["tensorboard", "mlflow", "wandb"]], Names] = []
    """Trackers that get the ledger, each through an exporter process of its own."""
    project: str = "windlass"
    """The project or experiment in the trackers."""
    entity: str = ""
    """In W&B the user or team whose project it is; empty: the key's own."""
    group: str = ""
    """A group of runs: W&B's group, MLflow's tag `group`; empty: of a study's cells the study's name."""
    tags: Annotated[list[Annotated[str, Field(pattern=r"^[\w./ :-]{1,64}$")]], Names] = []
    """W&B's tags; in MLflow each is a tag with the value `true`."""
    sample_seconds: float = Field(1.0, gt=0)
    """Seconds between two samples of each rank's utilisation and memory; they never touch the step."""
    flush_seconds: float = Field(30.0, ge=0)
    """How long trackers may take to finish after the run's end."""
