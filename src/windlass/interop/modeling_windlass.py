"""A GPT of Windlass: `AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)`.

Legend: B batch, T time (tokens of this pass), S time seen (T and the tokens in the cache), D model
width, H heads, K key and value heads, E = D / H width of a head, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import CausalLMOutputWithPast


class WindlassConfig(PretrainedConfig):
    """The settings `[model]` of a recipe, under their names there; config.json has all of them."""

    model_type = "windlass"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {  # noqa: RUF012
        "hidden_size": "width",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "intermediate_size": "ff_width",
        "max_position_embeddings": "context",
        "initializer_range": "init_std",
    }


def norm(config):
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.width, config.norm_eps)
    return nn.LayerNorm(config.width, config.norm_eps, bias=config.norm_bias)


class Attention(nn.Module):
    """Causal self-attention; if K < H, neighbouring heads share key and value heads."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.heads, self.kv_heads = layer, config.heads, config.kv_heads
        self.head_width = config.width // config.heads
        self.qk_norm, self.norm_eps, self.dropout = config.qk_norm, config.norm_eps, config.dropout
        rows = (config.heads + 2 * config.kv_heads) * self.head_width
        self.qkv = nn.Linear(config.width, rows, bias=config.attn_bias)
        self.out = nn.Linear(config.width, config.width, bias=config.attn_bias)

    def forward(self, x, rotary, mask, cache):
        H, K = self.heads, self.kv_heads
        qkv = self.qkv(x).unflatten(-1, (H + 2 * K, self.head_width))  # [B, T, H + 2K, E]
        qk, v = qkv.split([H + K, K], dim=2)
        if self.qk_norm:
            qk = F.rms_norm(qk, (self.head_width,), eps=self.norm_eps)
        if rotary is not None:
            cos, sin = rotary
            qk = qk * cos + qk.roll(self.head_width // 2, dims=-1) * sin
        q, k = qk.to(v.dtype).split([H, K], dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H or K, T, E]
        if cache is not None:
            k, v = cache.update(k, v, self.layer)  # [B, K, S, E]
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, mask is None, enable_gqa=H != K)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gated = config.activation == "swiglu"
        names = {"swiglu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
        self.activation = ACT2FN[names.get(config.activation, config.activation)]
        if self.gated:
            self.gate = nn.Linear(config.width, config.ff_width, bias=config.ff_bias)
        self.up = nn.Linear(config.width, config.ff_width, bias=config.ff_bias)
        self.down = nn.Linear(config.ff_width, config.width, bias=config.ff_bias)

    def forward(self, x):  # [B, T, D]
        if self.gated:
            return self.down(self.activation(self.gate(x)) * self.up(x))
        return self.down(self.activation(self.up(x)))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attn_norm, self.attn = norm(config), Attention(config, layer)
        self.ff_norm, self.ff = norm(config), FeedForward(config)
        self.dropout = config.dropout

    def forward(self, x, rotary, mask, cache):
        h = self.attn(self.attn_norm(x), rotary, mask, cache)
        x = x + F.dropout(h, self.dropout, self.training)
        return x + F.dropout(self.ff(self.ff_norm(x)), self.dropout, self.training)


class WindlassForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = WindlassConfig
    _input_embed_layer = "embedding"
    _no_split_modules = ["Block"]  # noqa: RUF012
    _tied_weights_keys = {"head.weight": "embedding.weight"}  # noqa: RUF012
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        if config.position == "learned":
            self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        if config.final_norm:
            self.norm = norm(config)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.head

    def set_output_embeddings(self, new_embeddings):
        self.head = new_embeddings

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        **_,
    ):
        """Logits [B, T, V] of the last `logits_to_keep` tokens (0: all); mean loss of `labels`."""
        m = self.config
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        start = past_key_values.get_seq_length() if past_key_values is not None else 0
        if position_ids is None:
            position_ids = torch.arange(start, start + x.shape[1], device=x.device).unsqueeze(0)
            if attention_mask is not None:  # padding takes no place
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -x.shape[1] :]
        mask = self._mask(attention_mask, start, x.shape[1], x.device)
        rotary = None
        if m.position == "learned":
            x = x + self.positions(position_ids)
        elif m.position == "rope":
            width, dtype = m.width // m.heads, torch.promote_types(x.dtype, torch.float32)
            half = torch.arange(0, width, 2, device=x.device, dtype=dtype) / width
            angles = position_ids.to(dtype).unsqueeze(-1) * m.rope_theta**-half
            cos, sin = angles.cos(), angles.sin()
            cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
            rotary = cos.unsqueeze(2), sin.unsqueeze(2)
        x = F.dropout(x, m.dropout, self.training)
        for block in self.blocks:
            x = block(x, rotary, mask, past_key_values)
        x = x[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else x[:, logits_to_keep]
        x = self.norm(x) if m.final_norm else x
        logits = self.head(x / m.width_multiple)
        if m.logit_cap:
            logits = m.logit_cap * torch.tanh(logits / m.logit_cap)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    @staticmethod
    def _mask(attention_mask, start, length, device):
        """The tokens that each token sees [B, 1, T, S]; None: causal, with an empty cache."""
        padded = attention_mask is not None and not bool(attention_mask.all())
        seen = torch.ones(length, start + length, dtype=torch.bool, device=device).tril(start)
        if not padded:
            return seen if start else None
        # A padding token sees itself, because each row must see a token.
        own = torch.eye(length, dtype=torch.bool, device=device)
        alone = torch.cat([own.new_zeros(length, start), own], dim=1)
        return (seen & attention_mask[:, None, None, :].bool()) | alone
