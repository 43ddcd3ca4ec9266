"""The settings of the data: the corpus, its tokens, the order of its samples, and mixtures."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from windlass.recipe.section import Names, Section
from windlass.recipe.units import Duration

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class MixSource(Section):
    """A source of a mixture."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]+$")
    """Name of the source, also on the command line: `data.mix.web.weight=0.3` changes `web`."""
    source: str = Field(min_length=1)
    """One source, as `data.source`."""
    weight: Weight = 1.0
    """Share of the samples, relative to the other weights."""
    eval_source: str = ""
    """Validation corpus of the source; empty: held out from it."""
    format: Literal["text", "squad", "chat"] | None = None
    """`data.format` of this source; left out: as set there."""
    max_tokens: int | None = Field(None, ge=0)
    """`data.max_tokens` of this source; left out: as set there."""
    val_fraction: float | None = Field(None, ge=0, lt=1)
    """`data.val_fraction` of this source; left out: as set there."""


class MixStage(Section):
    """Other weights of a mixture from a point of the run on."""

    start: Duration = Field(alias="from")
    """Beginning of the stage: steps, a share of the run (0.8), or epochs."""
    weights: dict[str, Weight]
    """New weights by name; a source that is left out keeps its weight."""


def _as_list(source: str | list[str]) -> list[str]:
    if isinstance(source, list):
        return source
    return [source] if source else []


Source = Annotated[str, Field(min_length=1)]
Sources = Annotated[
    str | Annotated[list[Source], Field(min_length=1)],
    AfterValidator(lambda x: x[0] if isinstance(x, list) and len(x) == 1 else x),
]


class DataSettings(Section):
    """The corpus, its tokens, and the order of its samples."""

    source: Sources = "stdlib"
    """`stdlib` (Python's own source); a path, glob or directory of .txt, .jsonl, .json, .parquet,
    .csv, .tsv (.gz, .zst, .bz2, .xz); `https://...` (with `sha256`); `hf:NAME[:CONFIG]` or `hf:DIR`
    (`datasets`); `squad` or `squad:FILE.json`; token shards of other tools, as `shards:GLOB` or
    `shards:URL` (nanoGPT .bin, build-nanogpt .npy, llm.c .bin); or a list of these."""
    eval_source: Sources = ""
    """Validation corpus, as `source` but not `https://...`; empty: held out from it. Its limit is
    `val_fraction` of `max_tokens`. A training text that it also has is left out."""
    mix: list[MixSource] = []
    """A mixture instead of `source`: sources that are sampled by weight."""
    stages: list[MixStage] = []
    """Other weights of the mixture from a point of the run on, as for annealing."""
    sha256: str = Field("", pattern=r"^([0-9a-f]{64})?$")
    """SHA-256 of a downloaded `source`."""
    tokenizer: str = Field("auto", pattern=r"^(auto|byte|char|bpe|gpt2(:.+)?|hf:.+)$")
    """`byte`, `char`, `gpt2`, `gpt2:DIR` (vocab.bpe, encoder.json), `hf:NAME_OR_DIR`, `bpe`
    (trained on the corpus); `auto`: from `model.name` or `model.init_from`, else `byte`."""
    tokenizer_vocab: int = Field(4096, ge=258)
    """With `bpe`: size of the vocabulary to train."""
    add_tokens: Annotated[list[str], Names] = []
    """Special tokens to add to the tokenizer, as `<|im_start|>,<|im_end|>`. Only a chat template
    writes them. A model of `transformers` gets rows for them, which begin as the mean row."""
    text_key: str = "text"
    """Field that holds the text in jsonl, csv, parquet and `hf:` sources; `doc.text`: a field in a
    field."""
    columns: dict[str, str] = {}
    """With `squad` and `chat`: fields with other names, as `data.columns.instruction=question`."""
    special_tokens: bool = False
    """Whether the text of a special token, as `<|im_start|>`, is this token in documents and in
    prompts with completions; else it is plain text. In messages it always is plain text."""
    separator: str = ""
    """Text between two documents of a text file, as `<|endoftext|>`; empty: each file is one."""
    on_bad_item: Literal["stop", "skip"] = "stop"
    """An item that cannot be read: `stop` the preparation, or `skip`, count and list it."""
    changed: Literal["stop", "keep", "prepare"] = "stop"
    """A source that has changed since it was prepared: `stop`, `keep` the prepared tokens, or
    `prepare` it again. A run that resumes keeps them."""
    split: str = "train"
    """With `hf:`: the split to train on."""
    eval_split: str = ""
    """With `hf:`: the split to validate on; empty: held out from `split`."""
    streaming: bool = False
    """With `hf:`: stream the documents instead of downloading the whole data set."""
    revision: str = ""
    """With `hf:`: commit, tag or branch of `source` on the Hub; empty: the newest commit."""
    shards_dtype: Literal["auto", "uint16", "uint32"] = "auto"
    """With `shards:`: type of the ids in files that do not name it; `auto`: `uint32` if the
    vocabulary has more than 65,536 ids."""
    cache_gb: float = Field(20.0, gt=0)
    """With `shards:URL`: size of the cache on this machine's disk, in GB."""
    max_tokens: int = Field(0, ge=0)
    """Read documents until they have this number of tokens; at least 100 documents. Several sources
    have equal parts; 0: all."""
    val_fraction: float = Field(0.1, ge=0, lt=1)
    """Validation share of the documents, chosen by a hash of their texts; of each text in a source
    with fewer than 100 documents, and of each text over 400,000 characters, its last characters."""
    val_shards: int = Field(0, ge=0)
    """Hold out this number times `shard_tokens` of each source's first tokens instead, or this
    number of another tool's shards, as build-nanogpt does; 0: `val_fraction`."""
    shard_tokens: int = Field(100_000_000, ge=1024)
    """Tokens per shard."""
    packing: Literal["packed", "best-fit"] = "packed"
    """With text: documents lie end to end, cut into rows. Else: `packed`: one item a row,
    masked padding; `best-fit`: whole items in each row, hardly any padding, and each attends to
    itself alone (arXiv 2404.10830)."""
    document_mask: bool | Literal["auto"] = "auto"
    """With text: each document of a row attends to itself alone, from position 0
    (arXiv 2407.21783, section 3.2). `auto`: true for prepared documents, false for one text and for
    shards of other tools, which do not say where documents begin."""
    order: Literal["shuffled", "shards-shuffled", "sequential"] = "shuffled"
    """`shuffled`: all samples, in a new order each epoch; `shards-shuffled`: shards in file order
    in epoch 0 and shuffled from epoch 1 on, samples in order inside a shard; `sequential`: always
    in file order."""
    dir: str = ""
    """Directory of downloads, and of the tokens of each source; empty: `data`."""
    workers: int = Field(0, ge=0)
    """Threads or processes that tokenize in parallel; 0: one per core."""
    format: Literal["text", "squad", "chat"] = "text"
    """`text`: documents; `squad`: question, context and answer; `chat`: conversations. With the
    last two only answers have a loss."""
    answers: Literal["auto", "all", "last", "everything"] = "auto"
    """With `chat`: the answers that have a loss: `all`, or the `last`; `auto`: all, but of a prompt
    with a completion only the completion's, as TRL. `everything`: prompts have a loss, too."""
    chat_template: str = ""
    """With `chat`: file of a chat template; empty: the tokenizer's."""
    chat_template_kwargs: dict[str, Any] = {}
    """With `chat`: values that the template reads, as `{enable_thinking = false}`."""
    train_size: int = Field(0, ge=0)
    """With `squad` and `chat`: training items, chosen by `run.seed`; 0: all."""
    eval_size: int = Field(0, ge=0)
    """With `squad` and `chat`: evaluation items; 0: all."""
    length_buckets: bool = True
    """With `squad` and `chat`, not `best-fit`: sort the items of each global batch into
    micro-batches by length."""

    @property
    def vocab_(self) -> int:
        """Size of the vocabulary with the end-of-text token; 0 if it depends on the data."""
        sizes = {"byte": 257, "gpt2": 50257, "bpe": self.tokenizer_vocab}
        size = sizes.get(self.tokenizer.partition(":")[0], 0)
        return size + len(self.add_tokens) if size else 0

    @property
    def ragged_(self) -> bool:
        """Whether the rows of one step are longer than the rows of another."""
        return self.formats != {"text"} and self.packing == "packed"

    @property
    def unused(self) -> list[str]:
        return ["source", "eval_source"] if self.mix else ["mix", "stages"]

    @property
    def sources(self) -> list[str]:
        return [part.source for part in self.mix] if self.mix else _as_list(self.source)

    @property
    def eval_sources(self) -> list[str]:
        """The validation corpora, which may be none; of a mixture one for each source, or empty."""
        return [part.eval_source for part in self.mix] if self.mix else _as_list(self.eval_source)

    @property
    def formats(self) -> set[str]:
        """The formats of all sources."""
        return {self.part(number).format for number in range(len(self.mix) or 1)}

    def part(self, number: int) -> DataSettings:
        """These settings for one source of a mixture (from 0), as if it were the only one."""
        if not self.mix:
            return self
        own = self.mix[number].model_dump(exclude={"name", "weight"}, exclude_none=True)
        return self.model_copy(update=own | {"mix": []})
