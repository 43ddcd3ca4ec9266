"""Small real tokenizers of the kinds that language models have, trained here and saved as
`transformers` reads them.
"""

import json
from pathlib import Path
from typing import Any

TEXT = (
    "The cat sat on the mat, and the dog ran after the cat. Who are you? I am a cat; good morning to you. "
    "Žluťoučký kůň, é ü ö, naïve façade, über. Hello world, say hello! It's 3 o'clock.\n\n\tdef f(x): return x\n"
    "system user assistant model Answer Question Context "
)
CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for m in loop_messages %}{% set content = '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = m['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{'<|user|>\n' + m['content'] + '<|end|>\n'}}{% else %}"
    "{{'<|assistant|>\n' + m['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
MARKED = (
    "{%- for m in messages %}\n    {%- if m['role'] == 'assistant' %}\n        {{- '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}\n    {%- else %}\n"
    "        {{- '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}\n    {%- endif %}\n{%- endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHATML_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3_ROLES = ["<|start_header_id|>", "<|end_header_id|>"]
KINDS: dict[str, dict[str, Any]] = {
    "chatml": {"special": CHATML_SPECIAL, "eos": "<|im_end|>", "template": CHATML},
    "marked": {"special": CHATML_SPECIAL, "eos": "<|endoftext|>", "template": MARKED},
    "llama3": {
        "special": ["<|begin_of_text|>", "<|end_of_text|>", *LLAMA3_ROLES, "<|eot_id|>"],
        "bos": "<|begin_of_text|>",
        "eos": "<|end_of_text|>",
        "template": LLAMA3,
        "starts": True,
    },
    "gemma": {
        "special": ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
        "pieces": "replace",
        "bos": "<bos>",
        "eos": "<eos>",
        "template": GEMMA,
        "starts": True,
    },
    "mistral": {
        "special": ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
        "pieces": "first",
        "bos": "<s>",
        "eos": "</s>",
        "template": MISTRAL,
        "starts": True,
    },
    "llama2": {
        "special": ["<unk>", "<s>", "</s>"],
        "pieces": "prepend",
        "bos": "<s>",
        "eos": "</s>",
        "template": MISTRAL,
        "starts": True,
    },
    "phi3": {
        "special": ["<unk>", "<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"],
        "pieces": "prepend",
        "bos": "<s>",
        "eos": "<|endoftext|>",
        "template": PHI3,
        "rstrip": ["<|user|>", "<|assistant|>", "<|end|>"],
    },
}


def save(kind: str, directory: Path, vocab: int = 480) -> Path:
    """A tokenizer of `KINDS` with its configuration and chat template, as a directory."""
    import tokenizers
    from tokenizers import decoders, normalizers, pre_tokenizers

    spec = KINDS[kind]
    pieces, space = spec.get("pieces", "bytes"), "\u2581"
    in_bytes, alphabet = pieces == "bytes", sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None if in_bytes else "<unk>"))
    if in_bytes:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if kind == "llama3":
            cut = pre_tokenizers.Split(tokenizers.Regex(LLAMA3_PATTERN), behavior="isolated")
            letters = pre_tokenizers.ByteLevel(False, use_regex=False)
            inner.pre_tokenizer = pre_tokenizers.Sequence([cut, letters])
        inner.decoder = decoders.ByteLevel()
    else:
        if pieces == "first":
            inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        else:
            before = [normalizers.Prepend(space)] if pieces == "prepend" else []
            inner.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", space)])
        strip = [] if pieces == "replace" else [decoders.Strip(" ", 1, 0)]
        in_turn = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        inner.decoder = decoders.Sequence(in_turn)
    special = [
        tokenizers.AddedToken(t, normalized=False, rstrip=t in spec.get("rstrip", ()))
        for t in spec["special"]
    ]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=special,
        initial_alphabet=alphabet if in_bytes else [],
        show_progress=False,
        max_token_length=6,
    )
    lines = [line + "\n" for line in TEXT.split("\n")]
    inner.train_from_iterator(lines * 4 + TEXT.split(" ") * 4, trainer)
    if not in_bytes:  # what it does not know is written in bytes
        tree = json.loads(inner.to_str())
        ids = tree["model"]["vocab"]
        tree["model"] |= {"byte_fallback": True, "fuse_unk": True}
        ids |= {f"<0x{byte:02X}>": len(ids) + byte for byte in range(256)}
        inner = tokenizers.Tokenizer.from_str(json.dumps(tree))
    if spec.get("starts"):
        bos = spec["bos"]
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, inner.token_to_id(bos))],
        )
    directory.mkdir(parents=True, exist_ok=True)
    inner.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"eos_token": spec["eos"], "chat_template": spec["template"]}
    config |= {"bos_token": spec["bos"]} if "bos" in spec else {}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
