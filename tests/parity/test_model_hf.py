"""Models of `transformers` through our protocol: the same logits, loss and greedy text as
`transformers` gives by itself.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save
from test_model_adapters import base_of, plain, recipe_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hf_fixtures
from helpers import curve, refused, train_on_ranks
from windlass import train
from windlass.errors import UserError
from windlass.evaluation.generate import Sampling, generate
from windlass.evaluation.passes import Passes
from windlass.model.attention import Documents
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.model.hf import HfModel, open_hf
from windlass.model.hf_network import head_form
from windlass.model.sharding import materialise
from windlass.model.size import CHUNK_BYTES
from windlass.recipe import Recipe
from windlass.recipe.settings import IGNORE_INDEX

KINDS = ("bloom", "gpt2", "llama", "gemma2")
HEADS = {"gemma2": (1.0, 30.0), "cohere": (0.0625, 0.0), "granite": (1 / 6, 0.0)}
"""Scale and soft cap of the logits."""
PROMPTS = [[5, 6, 7], [9] * 9, [17, 4]]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hf")
    changes = {"granite": {"logits_scaling": 6.0}}
    kinds = dict.fromkeys([*KINDS, *HEADS])
    return {kind: hf_fixtures.save(kind, root / kind, **changes.get(kind, {})) for kind in kinds}


def recipe(directory: Path, **model: Any) -> Recipe:
    return Recipe.model_validate(
        {"model": {"kind": "hf", "name": str(directory), "context": 64, **model}}
    )


def built(directory: Path, seed: int = 1, **model: Any) -> HfModel:
    ours = build_model(recipe(directory, **model), vocab=100, device="cpu")
    initialise(ours, seed)
    assert isinstance(ours, HfModel)
    return ours.eval()


def check_gradients(ours: HfModel, reference: Any, smallest: float) -> None:
    """The gradients are equal to 1e-4 of a tensor's largest entry, or of `smallest`."""
    expected = dict(reference.named_parameters())
    assert {name for name, _ in ours.model.named_parameters()} == set(expected)
    for name, parameter in ours.model.named_parameters():
        scale = max(float(expected[name].grad.abs().max()), smallest)
        assert (parameter.grad - expected[name].grad).abs().max() < 1e-4 * scale, name


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, hf_fixtures.VOCAB, (3, 20), generator=generator)
    labels = torch.randint(1, hf_fixtures.VOCAB, (3, 20), generator=generator)
    labels[torch.rand(3, 20, generator=generator) < 0.3] = -100
    return tokens, labels


@pytest.mark.parametrize("kind", dict.fromkeys([*KINDS, *HEADS]))
@pytest.mark.parametrize("chunk_bytes", [CHUNK_BYTES["cpu"], 4 * hf_fixtures.VOCAB * 7])
def test_numbers_are_those_of_transformers(kind, chunk_bytes, directories, monkeypatch):
    monkeypatch.setitem(CHUNK_BYTES, "cpu", chunk_bytes)
    ours, reference = built(directories[kind]), plain(directories[kind])
    tokens, labels = batch()
    assert ours.vocab == hf_fixtures.VOCAB
    assert head_form(ours.model) == pytest.approx(HEADS.get(kind, (1.0, 0.0)), rel=1e-5)
    logits = reference(input_ids=tokens).logits
    assert (ours(tokens) - logits).abs().max() < 1e-5
    loss = F.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), reduction="sum")
    with Calls() as calls:
        mine = ours(tokens, labels)
    assert chunk_bytes == CHUNK_BYTES["cpu"] or calls.most_logits <= 7
    assert float(mine.detach()) == pytest.approx(float(loss.detach()), rel=1e-6)
    mine.backward()
    loss.backward()
    check_gradients(ours, reference, smallest=1e-3)


class Calls(TorchDispatchMode):
    """Counts reads of values, for which the host waits, and the tokens with logits at a time."""

    waits = most_logits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.waits += func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal")
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.shape[-1:] == (hf_fixtures.VOCAB,):
            self.most_logits = max(self.most_logits, result.numel() // hf_fixtures.VOCAB)
        return result


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("kind", ["bloom", "gpt2", "llama", "gemma2", "qwen3", "mistral"])
def test_a_micro_batch_reads_no_value_of_the_device(
    kind: str, lora: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `transformers` does to find documents in the positions."""
    monkeypatch.setattr(Documents, "several", True)  # the host's own numbers
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 4 * hf_fixtures.VOCAB * 7)
    ours = built(hf_fixtures.save(kind, tmp_path / kind), lora={"rank": lora}).train()
    tokens, labels = batch()
    numbers = torch.arange(20).div(6, rounding_mode="floor").expand(3, 20)
    given = {"documents": Documents(numbers, torch.arange(20).remainder(6).expand(3, 20))}
    for documents in ({}, given) if kind != "bloom" else ({},):
        with Calls() as calls:
            ours(tokens, labels, **documents).backward()
        assert calls.waits == 0


@pytest.mark.parametrize("kind", [*KINDS, "mistral", "mamba", "rwkv", "jamba"])
@torch.no_grad()
def test_text_is_the_same_with_and_without_a_cache(kind: str, tmp_path: Path) -> None:
    """Also of recurrent networks and with sliding windows."""
    ours, (tokens, _) = built(hf_fixtures.save(kind, tmp_path)), batch()
    cache, parts = ours.new_cache(3, 20), [tokens[:, :4], *tokens[:, 4:].split(1, dim=1)]
    logits = torch.cat([ours(part, cache=cache) for part in parts], 1)
    assert (logits - ours(tokens)[:, 3:]).abs().max() < 1e-5
    # it takes its state under a name of its own: read again
    assert (not cache.name) == (kind == "rwkv")
    texts = generate(Passes(ours), PROMPTS, Sampling(max_tokens=12, temperature=0))
    for prompt, text in zip(PROMPTS, texts, strict=True):
        whole = list(prompt)
        for token in text:
            assert token == int(ours(torch.tensor([whole]))[0, -1].argmax())
            whole.append(token)


@torch.no_grad()
def test_buffers_that_are_saved_are_read_and_missing_ones_refused(tmp_path: Path) -> None:
    directory = hf_fixtures.save("glm4_moe", tmp_path)
    ours, reference, (tokens, _) = built(directory), plain(directory), batch()
    buffers = dict(ours.model.named_buffers())
    biases = [buffers[name] for name in buffers if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2 and all(bias.abs().max() > 0.1 for bias in biases)
    assert (ours(tokens) - reference(input_ids=tokens).logits).abs().max() < 1e-5
    # a layout that needs no converting: read slice by slice
    llama = hf_fixtures.save("llama", tmp_path / "llama")
    model = open_hf(llama, recipe(llama).model)
    model.model.register_buffer("shift", torch.zeros(3))
    with pytest.raises(UserError, match="shift"):
        materialise(model, torch.device("cpu"), torch.device("cpu"))
        model.fill_weights(1)


def test_masters_are_fp32_and_names_may_lack_the_prefix(directories, tmp_path):
    from transformers import AutoModel

    directory = hf_fixtures.save("bloom", tmp_path, dtype=torch.bfloat16)
    assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"
    ours, (tokens, _) = built(directory), batch()
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert ours.model.lm_head.weight is ours.model.transformer.word_embeddings.weight
    with torch.no_grad():
        assert (ours(tokens) - plain(directory)(input_ids=tokens).logits).abs().max() < 1e-5
        for kind in ("bloom", "gpt2"):
            bare = AutoModel.from_pretrained(directories[kind], dtype=torch.float32)
            bare.save_pretrained(tmp_path / kind)
            assert torch.equal(built(tmp_path / kind)(tokens), built(directories[kind])(tokens))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_from_scratch_with_a_seed_and_the_usual_spread(kind, directories):
    from transformers import AutoModelForCausalLM

    first, again, other = (built(directories[kind], seed, from_scratch=True) for seed in (1, 1, 2))
    reference = dict(AutoModelForCausalLM.from_config(hf_fixtures.config(kind)).named_parameters())
    named = first.model.named_parameters()
    for (name, a), b, c in zip(named, again.parameters(), other.parameters(), strict=True):
        expected = reference[name]
        assert torch.equal(a, b), name
        if expected.std() == 0:
            assert torch.equal(a, expected), name
        else:
            assert not torch.equal(a, c), name
            assert float(a.std()) == pytest.approx(float(expected.std()), rel=0.15), name
    tensors = [p for p in first.parameters() if p.dim() > 1 and p.std() > 0]
    assert len({float(p.flatten()[0]) for p in tensors}) == len(tensors)  # no two blocks alike


@pytest.mark.parametrize("kind", ["bloom", "mamba"])
def test_linear_layers_get_adapters_unless_a_kernel_reads_their_weight(kind, tmp_path):
    """`test_model_frozen.py` compares the names for other models with peft's."""
    model = built(hf_fixtures.save(kind, tmp_path), lora={"rank": 2}).model
    layers = {name for name, part in model.named_modules() if hasattr(part, "base_layer")}
    linear = {
        n.removesuffix(".base_layer")
        for n, m in model.named_modules()
        if type(m) is torch.nn.Linear and ".lora_" not in n
    }
    assert linear - layers == {name for name in linear if name.endswith(("lm_head", "out_proj"))}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"name": "./nowhere"}, ["model.name", "./nowhere"]),
        ({"name": "some/model", "revision": "abc"}, ["some/model@abc", "local directory"]),
        ({"name": "EMPTY"}, ["model.name", "no causal language model"]),
        ({"name": "llama", "context": 300}, ["model.context = 300", "128"]),
    ],
)
def test_what_cannot_be_had_is_told_by_its_key(model, words, directories, tmp_path):
    places = {**directories, "EMPTY": tmp_path}
    with refused(*words):
        built(Path("."), **{**model, "name": str(places.get(model["name"], model["name"]))})


def test_bad_weights_are_refused(directories, tmp_path):
    (tmp_path / "config.json").write_bytes((directories["llama"] / "config.json").read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    lacking = save({"model.norm.weight": torch.ones(32)})
    for content, word in ((None, "pickled"), (lacking, "lacks"), (b"\x10", "cannot be read")):
        if content:
            (tmp_path / "model.safetensors").write_bytes(content)
        with refused(word):
            built(tmp_path)


MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16}
    | {"shared_expert_intermediate_size": 16},
}
COEFFICIENT = 0.5


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_the_gradient_has_the_balancing_loss_of_transformers(kind, tmp_path):
    """The last tokens of each row are padding; evaluation and the returned loss are without it."""
    sizes = {"num_experts_per_tok": 2, "router_aux_loss_coef": COEFFICIENT}
    directory = hf_fixtures.save(kind, tmp_path, **MIXTURES[kind], **sizes)
    ours, reference = built(directory).train(), plain(directory).train()
    tokens, labels = batch()
    labels[0, 12:] = labels[1, 17:] = IGNORE_INDEX
    mask = torch.ones_like(tokens)
    mask[0, 12:] = mask[1, 17:] = 0
    for row, length in enumerate((12, 17, 20)):
        labels[row, length - 1] = 5
    output = reference(input_ids=tokens, attention_mask=mask, output_router_logits=True)
    flat = output.logits.flatten(0, 1), labels.flatten()
    entropy = F.cross_entropy(*flat, ignore_index=IGNORE_INDEX)
    (entropy + COEFFICIENT * output.aux_loss).backward()
    loss = ours(tokens, labels)
    (loss / (labels != IGNORE_INDEX).sum()).backward()
    mean = float(loss.detach() / (labels != IGNORE_INDEX).sum())
    assert mean == pytest.approx(float(entropy.detach()), rel=1e-5)
    gradients = {name: p.grad for name, p in ours.model.named_parameters()}
    for name, parameter in reference.named_parameters():
        assert (gradients[name] - parameter.grad).abs().max() < 2e-5, name
    without = built(directory).train()
    without.balance = None
    (without(tokens, labels) / (labels != IGNORE_INDEX).sum()).backward()
    others = {name: p.grad for name, p in without.model.named_parameters()}
    routers = [name for name in gradients if name.endswith(".gate.weight")]
    assert len(routers) == 3
    assert all((gradients[name] - others[name]).abs().max() > 1e-4 for name in routers)
    with torch.no_grad():
        assert torch.equal(ours.eval()(tokens, labels), without.eval()(tokens, labels))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_noise_of_neftune_is_that_of_transformers(kind, directories):
    """With a tied head and a separate one, and in training alone."""
    from transformers.integrations.neftune import neftune_post_forward_hook

    alpha, (tokens, labels) = 7.0, batch()
    ours, reference = built(directories[kind], neftune_alpha=alpha), plain(directories[kind])
    for module in [*ours.modules(), *reference.modules()]:
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        quiet = float(ours(tokens, labels))
        assert quiet == float(built(directories[kind])(tokens, labels))
    table = reference.get_input_embeddings()
    table.neftune_noise_alpha = alpha
    table.register_forward_hook(neftune_post_forward_hook)
    torch.manual_seed(3)
    logits = reference.train()(input_ids=tokens).logits
    flat = logits.flatten(0, 1), labels.flatten()
    expected = F.cross_entropy(*flat, ignore_index=IGNORE_INDEX, reduction="sum")
    expected.backward()
    torch.manual_seed(3)
    loss = ours.train()(tokens, labels)
    loss.backward()
    noisy = float(loss.detach())
    assert noisy == pytest.approx(float(expected.detach()), rel=1e-5) and noisy != quiet
    check_gradients(ours, reference, smallest=1.0)


@pytest.mark.dist
def test_noise_and_routers_are_the_same_on_two_ranks_and_after_a_resume(tmp_path):
    base_of(tmp_path, "mixtral", **MIXTURES["mixtral"])
    one = recipe_of(tmp_path, "one", neftune_alpha=5.0).replace("train.micro_batch=2")
    train(one, stop_at=2)
    alone = curve(train(one))
    whole = curve(train(one.replace(f"run.dir={tmp_path}/whole")))
    assert alone == whole
    for strategy in ("ddp", "full_shard"):
        two = one.replace(f"run.dir={tmp_path}/{strategy}", f"parallel.strategy={strategy}")
        for line, expected in zip(curve(train_on_ranks(two)), alone, strict=True):
            assert line == pytest.approx(expected, rel=2e-5)
