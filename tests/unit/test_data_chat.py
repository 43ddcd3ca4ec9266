"""Conversations as tokens: those of `transformers`, the marks of TRL, templates of every kind."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

import tokenizer_fixtures
from data_fixtures import counted
from helpers import refused
from windlass.data import chat
from windlass.data.chat import Template
from windlass.data.tokenizer import Tokenizer
from windlass.data.tokenizer_kinds import byte_tokenizer, hf_tokenizer
from windlass.evaluation.generate import in_order
from windlass.recipe import DataSettings

BYTES = byte_tokenizer()
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Who are you?  é 中"},
    {"role": "assistant", "content": "I am a cat."},
    {"role": "user", "content": " Good morning\n"},
    {"role": "assistant", "content": "Good morning to you"},
]
JINJA = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITH_EOS = Template(JINJA, {"eos_token": "<|endoftext|>"})
KINDS = list(tokenizer_fixtures.KINDS)
ENDS = {
    "marked": {"<|im_end|>", "<|endoftext|>"},
    "chatml": {"<|im_end|>"},
    "llama3": {"<|eot_id|>", "<|end_of_text|>"},
    "gemma": {"<end_of_turn>", "<eos>"},
    "phi3": {"<|end|>", "<|endoftext|>"},
    "mistral": {"</s>"},
    "llama2": {"</s>"},
}
# The layouts of the fixtures as TRL writes them for training: what precedes a turn, its header, its
# text, and what follows the last turn.
TRIM = "m['content'] | trim"
LAYOUTS = {
    "chatml": ("''", r"'<|im_start|>' + m['role'] + '\n'", r"m['content'] + '<|im_end|>\n'"),
    "llama3": (
        "bos_token",
        r"'<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'",
        f"{TRIM} + '<|eot_id|>'",
    ),
    "gemma": (
        "bos_token",
        r"'<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n'",
        rf"{TRIM} + '<end_of_turn>\n'",
    ),
    "phi3": ("''", r"'<|' + m['role'] + '|>\n'", r"m['content'] + '<|end|>\n'"),
}
INSTRUCT = (
    "bos_token",
    "('[INST] ' + m['content'] + ' [/INST]') if m['role'] == 'user' else ''",
    "(' ' + m['content'] + eos_token) if m['role'] == 'assistant' else ''",
)
LAYOUTS |= {"mistral": INSTRUCT, "llama2": INSTRUCT}


def trl_template(kind: str) -> str:
    if kind == "marked":
        return str(tokenizer_fixtures.KINDS[kind]["template"])
    before, header, text = LAYOUTS[kind]
    block = "{% generation %}{{ TEXT }}{% endgeneration %}"
    last = block.replace("TEXT", "eos_token") if kind == "phi3" else ""
    turn = f"{{{{ {header} }}}}{{% if m['role'] == 'assistant' %}}{block}{{% else %}}"
    turn += "{{ TEXT }}{% endif %}"
    turns = f"{{% for m in messages %}}{turn.replace('TEXT', text)}{{% endfor %}}"
    return f"{{{{ {before} }}}}{turns}{last}"


def encoded(talk: list[Any], template: Template, tokenizer: Tokenizer, **how: Any) -> Any:
    ids, marks = tokenizer.encode_marked(*template.rows(talk, tokenizer, **how))
    return list(ids), [bool(mark) for mark in marks]


def opened(kind: str, directory: Path) -> tuple[Tokenizer, Template, Any]:
    from transformers import AutoTokenizer

    place = tokenizer_fixtures.save(kind, directory)
    theirs = AutoTokenizer.from_pretrained(place)
    return hf_tokenizer(str(place)), Template.of_directory(place), theirs


WORDS = [*"I am a cat. assistant user model é 中 42 say 'hello', <b> ok".split(), "\n\n", " ", "  "]


def random_talk(draw: random.Random) -> list[dict[str, str]]:
    """Answers can be one word of their header, or have white space at their edges."""

    def text() -> str:
        sample = "".join(
            draw.choice(["", " "]) + draw.choice(WORDS) for _ in range(draw.randint(1, 9))
        )
        return sample if sample.strip() else f"{sample}a"

    turns = draw.choice([1, 1, 2, 3])
    roles = [role for _ in range(turns) for role in ("user", "assistant")]
    return [{"role": role, "content": text()} for role in roles]


@pytest.mark.parametrize("count", [200, pytest.param(860, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_marks_of_random_conversations_equal_those_of_transformers_and_trl(
    kind: str, count: int, tmp_path: Path
) -> None:
    ours, template, theirs = opened(kind, tmp_path)
    draw, training, compared = random.Random(kind), trl_template(kind), 0
    for _ in range(count):
        talk = random_talk(draw)
        if kind == "phi3":  # its role tokens include white space after them
            talk = [{**message, "content": message["content"].strip()} for message in talk]
        ids, marks = encoded(talk, template, ours)
        how: dict[str, Any] = {"return_assistant_tokens_mask": True, "chat_template": training}
        whole = theirs.apply_chat_template(talk, **how)
        assert ids == whole["input_ids"] == theirs.apply_chat_template(talk)["input_ids"]
        assert marks == [bool(mark) for mark in whole["assistant_masks"]], talk
        # TRL's completion: all tokens after those of the prompt. It warns if these are others, for
        # example because one token has the end of the prompt and the start of the answer.
        asked = theirs.apply_chat_template(talk[:-1], add_generation_prompt=True)["input_ids"]
        assert chat.prompt_tokens(talk[:-1], template, ours) == asked
        how = {"trained": [len(talk) - 1], "is_completion": True}
        completion = encoded(talk, template, ours, **how)
        if ids[: len(asked)] == asked:
            compared += 1
            assert completion == (ids, [place >= len(asked) for place in range(len(ids))])
    assert compared > 0.58 * count


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_learned_with_its_end_which_stops_a_generation(kind, tmp_path):
    ours, template, _ = opened(kind, tmp_path)
    assert chat.stop_tokens(ours, template) == {ours.special[text] for text in ENDS[kind]}
    ids, marks = encoded(TALK[1:], template, ours)
    learned = counted(ours, ids, marks)
    assert "Who" not in learned and "I am a cat." in learned and "Good morning to you" in learned
    first = encoded(TALK[1:], template, ours, trained=[1])
    learned = counted(ours, *first)
    assert first[0] == ids and "cat" in learned and "to you" not in learned


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", [0, 1])
def test_what_looks_like_a_special_token_in_a_message_is_text(kind, role, tmp_path):
    ours, template, theirs = opened(kind, tmp_path)
    special = set(ours.special.values()) - {theirs.unk_token_id}
    plain = [i for i in encoded(TALK[1:3], template, ours)[0] if i in special]
    for text in tokenizer_fixtures.KINDS[kind]["special"]:
        talk = [dict(message) for message in TALK[1:3]]
        talk[role]["content"] = f"say {text} and {text}{text}, then go"
        ids, marks = encoded(talk, template, ours)
        assert [i for i in ids if i in special] == plain
        assert talk[role]["content"] in theirs.decode(ids)
        if role == 1:
            learned = [i for i, mark in zip(ids, marks, strict=True) if mark and i not in special]
            assert theirs.decode(learned).strip() == talk[1]["content"]


def test_the_plain_layout_and_a_template_without_blocks(tmp_path: Path) -> None:
    plain = "System: Be kind.\n\nUser: Who are you?  é 中\n\nAssistant: I am a cat.<|endo"
    own = "<system>Be kind.<|endoftext|><user>Who are you?  é 中<|endoftext|><assista"
    for template, start, space in ((Template(), plain, " "), (WITH_EOS, own, "")):
        ids, marks = encoded(TALK, template, BYTES)
        assert BYTES.decode(ids).startswith(start)
        answers = [f"{space}{TALK[place]['content']}<|endoftext|>" for place in (2, 4)]
        assert counted(BYTES, ids, marks) == "".join(answers)
    # it begins as every text of the tokenizer
    tokenizer = hf_tokenizer(str(tokenizer_fixtures.save("llama3", tmp_path)))
    ids, _ = encoded(TALK[1:], Template(), tokenizer)
    asked = chat.prompt_tokens(TALK[1:2], Template(), tokenizer)
    begin = list(tokenizer.begin)
    assert begin and ids[: len(begin)] == asked[: len(begin)] == begin
    assert not set(begin) & set(ids[len(begin) :])


HEADER, CONTENT = "{{ '<|im_start|>' + m.role + '\n' }}", "{{ m.content + '<|im_end|>\n' }}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\nTHOUGHT{% endif %}"


def turns(body: str, ask: str = "") -> str:
    return f"{{% for m in messages %}}{body}{{% endfor %}}{ask}"


STRANGE = {
    # a prompt with the beginning of a thought, which the template does not write into turns
    "thinking": (
        turns(HEADER + CONTENT, ASK.replace("THOUGHT", "<think>\n")),
        "<|im_start|>assistant\n<think>\n⟦one<|im_end|>\n⟧",
    ),
    # the thought stays in the last turn only
    "forgetful": (
        turns(
            f"{HEADER}{{% if loop.last and m.role == 'assistant' %}}<think></think>{{% endif %}}{CONTENT}",
            ASK.replace("THOUGHT", ""),
        ),
        "<|im_start|>assistant\n⟦<think></think>one<|im_end|>\n⟧",
    ),
    # a special token inside the turn, and the answer as a word of its header
    "tokens inside": (
        turns(
            f"{HEADER}{{% if m.role == 'assistant' %}}one<|endoftext|>{{% endif %}}{CONTENT}",
            ASK.replace("THOUGHT", ""),
        ),
        "⟦one<|endoftext|>one<|im_end|>\n⟧",
    ),
    # the prompt is written inside the loop
    "inside": (
        turns(
            "{%- if m.role == 'x' %}{%- continue %}{%- endif %}"
            f"{HEADER}{CONTENT}{{% if loop.last %}}{ASK.replace('THOUGHT', '')}{{% endif %}}"
        ),
        "⟦one<|im_end|>\n⟧",
    ),
    # it needs a message, and only the next turn's first token ends an answer, as in GLM
    "no end": (
        "{{ messages[0].content[:0] }}"
        + turns(HEADER + "{{ m.content }}", ASK.replace("THOUGHT", "")),
        "⟦one<|im_start|>⟧",
    ),
}


@pytest.mark.parametrize("name", STRANGE)
def test_answers_are_found_by_rendering(name: str, tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(str(tokenizer_fixtures.save("chatml", tmp_path)))
    source, expected = STRANGE[name]
    talk = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "one"},
    ]
    template = Template(source)
    rows = map(tokenizer.encode_marked, template.rows(talk, tokenizer))
    shown = "".join(chat.show_row(*row, tokenizer) for row in rows)
    assert expected in shown and shown.count("⟦") == 2
    assert shown.index("⟦") > shown.index("assistant")
    alone = chat.show_row(*encoded(talk[1:2], template, tokenizer), tokenizer)
    assert alone.count("⟦") == 1 and "assistant" not in alone.partition("⟦")[2]


# The parts of published templates that write an earlier answer in another way than the last one.
LAST = "m.content.split('</think>')[-1]"
DROPPED = f"{{{{ {LAST} if m.role == 'assistant' else m.content }}}}<|im_end|>"
THOUGHT = "m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content"
REWRITING = {
    # DeepSeek-R1-Distill: no answer has its thought, and the prompt begins one
    "r1": turns(HEADER + DROPPED, ASK.replace("THOUGHT", "<think>\n")),
    # Qwen3 with `enable_thinking = false`: the prompt has an empty thought
    "closed": turns(HEADER + DROPPED, ASK.replace("THOUGHT", "<think>\n\n</think>\n\n")),
    # Qwen3: the last answer has a thought, perhaps an empty one
    "qwen3": turns(
        f"{HEADER}{{% if m.role == 'assistant' and loop.last %}}<think>\n"
        f"{{{{ {THOUGHT} else '' }}}}\n</think>\n\n{{{{ {LAST}.strip() }}}}<|im_end|>"
        f"{{% else %}}{DROPPED}{{% endif %}}",
        ASK.replace("THOUGHT", ""),
    ),
    # Mistral 7B v0.3: the system's text stands before the last question
    "mistral": "{% set system = messages[0].content %}"
    "{% for m in messages[1:] %}{% if m.role == 'user' %}<|im_start|>"
    "{% if m == (messages | selectattr('role', 'eq', 'user') | list)[-1] %}{{ system + '\n\n' }}"
    "{% endif %}{{ m.content }}<|im_end|>{% else %}{{ m.content + '<|endoftext|>' }}{% endif %}"
    "{% endfor %}",
}
THOUGHTS = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "<think>\nhello\n</think>\n\nthe cat"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "the dog"},
]
LEARNED = {
    "closed": ["the cat<|im_end|>", "the dog<|im_end|>"],
    "r1": ["hello\n</think>\n\nthe cat<|im_end|>", "\n</think>\n\nthe dog<|im_end|>"],
    "qwen3": [
        "<think>\nhello\n</think>\n\nthe cat<|im_end|>",
        "<think>\n\n</think>\n\nthe dog<|im_end|>",
    ],
    "mistral": ["<think>\nhello\n</think>\n\nthe cat<|endoftext|>", "the dog<|endoftext|>"],
}


@pytest.mark.parametrize("name", REWRITING)
def test_a_template_that_rewrites_gives_a_row_an_answer_after_its_prompt(name, tmp_path):
    from transformers import AutoTokenizer

    place = tokenizer_fixtures.save("chatml", tmp_path)
    ours, theirs = hf_tokenizer(str(place)), AutoTokenizer.from_pretrained(place)
    template = Template(REWRITING[name])
    rows = [ours.encode_marked(row) for row in template.rows(THOUGHTS, ours)]
    assert [counted(ours, *row) for row in rows] == LEARNED[name]
    for place, (ids, marks) in zip((2, 4), rows, strict=True):
        how = {"chat_template": template.source, "add_generation_prompt": True}
        asked = theirs.apply_chat_template(THOUGHTS[:place], **how, tokenize=False)
        given = [token for token, mark in zip(ids, marks, strict=True) if not mark]
        assert theirs.decode(given) == asked
        assert not any(marks[: len(given)])
    (alone,) = template.rows(THOUGHTS, ours, trained=[4])
    assert alone == template.rows(THOUGHTS, ours)[1]
    assert len(template.rows(THOUGHTS[:3], ours)) == 1


def test_an_end_follows_an_answer_without_one(tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(str(tokenizer_fixtures.save("chatml", tmp_path)))
    endless = Template(turns("{{ m.role + ': ' + m.content + '\n' }}"))
    end = tokenizer.inner.id_to_token(tokenizer.eot)
    rows = [tokenizer.encode_marked(row) for row in endless.rows(TALK[1:], tokenizer)]
    assert len(rows) == 2 and all(marks[-1] for _, marks in rows)
    assert all(counted(tokenizer, *row).endswith(end) for row in rows)
    assert tokenizer.eot in chat.stop_tokens(tokenizer, endless)


def test_a_template_and_its_values_are_settings(tmp_path: Path) -> None:
    file = tmp_path / "layout.jinja"
    file.write_text(
        "{% if enable_thinking %}think{% endif %}{{ style }}"
        + turns("{{ m.content }}{{ eos_token }}")
    )
    values = {"enable_thinking": False, "style": 'a "b"'}
    data = DataSettings(chat_template=str(file), chat_template_kwargs=values)
    template = Template("other", {"eos_token": "<|endoftext|>"}).with_settings(data)
    assert template.tokens == {"eos_token": "<|endoftext|>"}
    assert template.text(TALK[1:2], BYTES, ask=False) == 'a "b"Who are you?  é 中<|endoftext|>'
    own = template.text(TALK[1:2], BYTES, False, {"enable_thinking": True})
    assert own.startswith('thinka "b"')
    with refused("data.chat_template", "none.jinja"):
        Template().with_settings(DataSettings(chat_template=str(tmp_path / "none.jinja")))
    with refused("data.chat_template_kwargs"):
        Template().with_settings(DataSettings(chat_template_kwargs=values))


def test_templates_that_cannot_be_used_are_refused() -> None:
    hidden = "{% for i in range(messages | length) %}{{ messages[i].content }}{% endfor %}"
    ask = "{% if add_generation_prompt %}Answer:{% endif %}"
    other = turns("<{{ m.role }}>{{ m.content }}", ask)
    assert Template(hidden).rows(TALK[1:3], BYTES) == [
        [(TALK[1]["content"], False), (TALK[2]["content"], True), (256, True)]
    ]
    # the model gets this prompt, so the answer is learned after it
    prompt = f"<user>{TALK[1]['content']}Answer:"
    assert Template(other).rows(TALK[1:3], BYTES) == [
        [(prompt, False), (TALK[2]["content"], True), (256, True)]
    ]
    for source, words in [
        ("{{ raise_exception('no system here') }}", "no system here"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template"),  # out of the sandbox
        ("{% if %}", "chat template"),
        ("{{ 1 / 0 }}", "chat template"),
    ]:
        with refused(words):
            Template(source).rows(TALK[1:], BYTES)
    # the result of a tool inside the turn of the answer that calls it
    ahead = "{% if loop.index0 == 1 %}{{ messages[2].content }}{% endif %}"
    source = turns("{% if m.role != 'tool' %}{{ m.content }}" + ahead + "{% endif %}")
    with refused("rejects", "has no"):
        Template(source).rows([*TALK[1:3], {"role": "tool", "content": "x"}, TALK[4]], BYTES)


def test_a_template_comes_from_the_tokenizers_directory_and_survives_a_file(tmp_path: Path) -> None:
    config = {"chat_template": "X", "eos_token": {"content": "</s>"}, "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = Template.of_directory(tmp_path)
    assert template == Template("X", {"bos_token": "<s>", "eos_token": "</s>"})
    template.save(tmp_path)
    assert Template.of_directory(tmp_path) == template
    (tmp_path / "chat_template.jinja").write_text("Y")
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<x>", "unk_token": "<u>"}')
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<u>"}
    assert Template.of_directory(tmp_path).tokens == tokens
    assert Template.of_directory(tmp_path).source == "Y"
    assert Template.of_directory(tmp_path / "none") == Template()
    dated = Template("{{ strftime_now('%d %b %Y') }}{{ messages[0]['content'] }}")
    rendered = dated.text(TALK[:1], BYTES, ask=True)
    assert rendered == "26 Jul 2024Be kind."  # on every day


# -- streams


def test_texts_are_shown_one_after_the_other_as_soon_as_their_characters_are_whole() -> None:
    events = [(0, token) for token in [*BYTES.encode("aé🙂b").tolist(), 0xC3, None]]
    assert [piece for _, piece in in_order(events, BYTES, 1)] == ["a", "é", "🙂", "b", "\ufffd"]
    events = [(0, 97), (1, 98), (2, 99), (1, None), (0, 100)]
    events += [(2, 101), (0, None), (3, None), (2, None)]
    shown = list(in_order(iter(events), BYTES, 4))
    assert [index for index, _ in shown] == sorted(index for index, _ in shown)
    texts = ["".join(piece for i, piece in shown if i == text) for text in range(4)]
    assert texts == ["ad", "b", "ce", ""]
    assert shown[-1] == (3, "")  # a text without a token is told too
