"""Directories of `transformers` with random weights and GPT-2's tokenizer, for both sides.

python benchmarks/peers/models.py llama|llama-bf16 GPT2_DIR OUT LAYERS
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

# The assistant's turns count in the loss, as the marks of a generation tell TRL.
CHAT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}Assistant:{% generation %} "
    "{{ m.content }}<|endoftext|>{% endgeneration %}{% else %}User: {{ m.content }}{% endif %}"
    "\n\n{% endfor %}"
)


def main() -> None:
    kind, gpt2, out, layers = sys.argv[1:]
    torch.manual_seed(0)
    config = LlamaConfig(  # SmolLM2-135M
        vocab_size=50_304,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=int(layers) or 30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    end = "<|endoftext|>"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(Path(gpt2) / "gpt2-tokenizer.json"), eos_token=end, pad_token=end
    )
    tokenizer.chat_template = CHAT
    config.bos_token_id = config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    dtype = torch.bfloat16 if kind.endswith("bf16") else torch.float32
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
