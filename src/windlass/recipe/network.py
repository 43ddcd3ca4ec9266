"""The section `[model]` of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from windlass.recipe.section import Names, Section


class LoraSettings(Section):
    """Low-rank adapters on a Hugging Face model (arXiv 2106.09685), through `peft`."""

    rank: int = Field(0, ge=0)
    """Rank of the adapters; 0: none, all weights are trained."""
    alpha: float = Field(16.0, gt=0)
    """Scale of the adapters' output: alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before the adapters."""
    targets: Annotated[list[str], Names] = []
    """Names of the layers to adapt, or regular expressions for the ends of their paths, as
    `layers.[67].*_proj`; empty or `all-linear`: all linear layers except the head."""
    modules_to_save: Annotated[list[str], Names] = []
    """Names, or regular expressions, of modules to train whole beside the adapters, as
    `embed_tokens,lm_head`."""
    base: Literal["fp32", "4bit"] = "fp32"
    """Format of the blocks' frozen matrices: `4bit` is NF4 (arXiv 2305.14314; `bitsandbytes`)."""


# keys of `[model]` for every kind of model, and keys for `kind = "hf"` alone
ALL_KINDS = ("kind", "context", "init_from", "freeze")
HF_ONLY = (
    *("name", "revision", "trust_remote_code", "from_scratch", "lora"),
    *("frozen_precision", "neftune_alpha", "kernels"),
)


class ModelSettings(Section):
    """The network."""

    kind: Literal["gpt", "hf"] = "gpt"
    """`gpt`: Windlass's GPT, shaped by the keys below; `hf`: a causal LM of `transformers`."""
    name: str = ""
    """With `hf`: a model's name on the Hub or a local directory."""
    revision: str = ""
    """With `hf`: the Hub commit, tag or branch; empty: the default branch."""
    trust_remote_code: bool = False
    """With `hf`: whether code that comes with the model may run here."""
    from_scratch: bool = False
    """With `hf`: take only the architecture from the model, and fresh weights from the seed."""
    kernels: Literal["torch", "liger"] = "torch"
    """With `hf`: `liger` trains with Liger's kernels for norms, rotary embeddings and gated layers,
    on a GPU (`liger-kernel`)."""
    layers: int = Field(6, ge=1)
    """Number of transformer blocks."""
    heads: int = Field(6, ge=1)
    """Attention heads; they divide the width."""
    kv_heads: int = Field(0, ge=0)
    """Key and value heads (arXiv 2305.13245); they divide `heads`; 0: equal to `heads`."""
    width: int = Field(384, ge=1)
    """Size of the residual stream."""
    ff_width: int = Field(0, ge=0)
    """Hidden size of the feed-forward layer; 0: 4 x width."""
    context: int = Field(256, ge=1)
    """Longest sequence, in tokens: the length of a training sample."""
    vocab: int = Field(0, ge=0)
    """Rows of the embedding, at least the tokenizer's vocabulary (more may be faster); 0: equal."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation before each sub-layer."""
    final_norm: bool = True
    """A normalisation between the last block and the head."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the variance in every normalisation."""
    position: Literal["learned", "rope", "none"] = "learned"
    """Position encoding: a learned table, rotary embedding (arXiv 2104.09864), or none."""
    rope_theta: float = Field(10_000.0, gt=0)
    """Base of the rotary embedding's wavelengths."""
    activation: Literal["gelu", "gelu_tanh", "relu", "relu2", "swiglu"] = "gelu"
    """`gelu_tanh`: as in GPT-2; `relu2`: squared (arXiv 2109.08668); `swiglu`: arXiv 2002.05202."""
    attn_bias: bool = True
    """Biases in the attention's projections."""
    ff_bias: bool = True
    """Biases in the feed-forward layer."""
    norm_bias: bool = True
    """A bias in each LayerNorm (RMSNorm never has one)."""
    tie_head: bool = True
    """The head is the embedding's transpose, one tensor."""
    qk_norm: bool = False
    """RMS normalisation of queries and keys, without weights (arXiv 2302.05442)."""
    logit_cap: float = Field(0.0, ge=0)
    """Softcap of the logits: `cap * tanh(logits / cap)`; 0: none."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """After the embedding, in attention, and at the end of each sub-layer."""
    init_std: float = Field(0.02, gt=0)
    """Standard deviation of initial weights; of output projections / sqrt(2 x layers), as GPT-2."""
    zero_init_output: bool = False
    """Each sub-layer's output projection starts at zero, so each block starts as the identity."""
    init_from: str = ""
    """Initial weights: a run (its newest checkpoint), or an adapter to train further; empty:
    seed."""
    freeze: Annotated[list[str], Names] = []
    """Frozen parameters: patterns of names, as `"embedding.*"` or (`hf`) `"model.layers.0.*"`."""
    frozen_precision: Literal["auto", "bf16", "fp32"] = "auto"
    """With `hf`: how frozen matrices are held; `auto`: bf16 if most numbers in the model's files
    are bf16. Trained weights are fp32."""
    neftune_alpha: float = Field(0.0, ge=0)
    """With `hf`: noise on the embedded tokens in training, uniform up to this / sqrt(length x
    width) (NEFTune, arXiv 2310.05914); 0: none."""
    mup_base_width: int = Field(0, ge=0)
    """muP (arXiv 2203.03466): the width for which `optim.lr`, `init_std` and the rest are right; a
    wider model has all its widths in proportion, and equally wide heads. 0: no muP. With m = width
    / this, the initial variance and AdamW's learning rate of the blocks' matrices, AdamW's eps, and
    the logits are divided by m."""
    lora: LoraSettings = LoraSettings()
    """`model.lora.rank`, `.alpha`, `.dropout`, `.targets`, `.modules_to_save`, `.base`."""

    @property
    def unused(self) -> list[str]:
        """The keys without an effect for this `kind`."""
        keys = [key for key in type(self).model_fields if key not in ALL_KINDS]
        return [key for key in keys if (key in HF_ONLY) == (self.kind == "gpt")]

    @property
    def is_new(self) -> bool:
        """Whether the training begins with random weights."""
        return not self.init_from and (self.kind == "gpt" or self.from_scratch)

    @property
    def kv_heads_(self) -> int:  # with 0 resolved
        return self.kv_heads or self.heads

    @property
    def ff_width_(self) -> int:  # with 0 resolved
        return self.ff_width or 4 * self.width

    @property
    def width_multiple(self) -> float:
        """How often the width has muP's base width; 1 without muP."""
        return self.width / (self.mup_base_width or self.width)
