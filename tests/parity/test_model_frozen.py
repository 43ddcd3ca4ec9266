"""Frozen weights in the precision of their files, beside `peft` on the same base."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_model_adapters import IDS, check_resume, opened, recipe_of

import hf_fixtures
from helpers import curve, refused
from windlass import train
from windlass.interop.export import export
from windlass.model.build import build_model, read_sizes
from windlass.parallel.precision import autocast
from windlass.recipe import RecipeError

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
KINDS = {
    "llama": {"hidden_size": 64, "head_dim": 16},
    "gpt2": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "gemma2": {},
}
LORA = {"rank": 4}


def save_base(folder: Path, kind: str) -> None:
    """A model whose files are in bf16, and a text."""
    hf_fixtures.save(kind, folder / "base", torch.bfloat16, **KINDS[kind])
    text = "the cat sat on the mat and the dog ran after the cat " * 40
    (folder / "text.txt").write_text(text)
    hf_fixtures.save_tokenizer([text], folder / "base")


@pytest.fixture
def base(tmp_path: Path) -> None:
    save_base(tmp_path, "llama")


def gradients_of_peft(base: Path, ids: torch.Tensor, mine: Any) -> Any:
    """Loss and gradients of the same adapters on the base in float32, then under autocast."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    transposed = network.config.model_type == "gpt2"
    config = LoraConfig(r=4, target_modules="all-linear", lora_alpha=16, fan_in_fan_out=transposed)
    model = get_peft_model(network, config)
    adapters = {n.removeprefix("base_model."): p for n, p in model.named_parameters()}
    adapters = {name: p for name, p in adapters.items() if p.requires_grad}
    assert adapters.keys() == mine.keys()
    for name, parameter in adapters.items():
        parameter.data.copy_(mine[name].data)
    for low in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            logits = model(ids).logits[:, :-1].float().flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
        loss.backward()
        yield loss.item(), torch.cat([p.grad.flatten() for p in adapters.values()])


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_peft(kind: str, tmp_path: Path) -> None:
    save_base(tmp_path, kind)
    recipe = recipe_of(tmp_path, lora=LORA)
    model: Any = build_model(recipe, 0, "cpu")
    model.fill_weights(1)
    layers = [m for block in model.blocks() for m in block.modules()]
    layers = [m for m in layers if type(m).__name__ in ("Linear", "Conv1D")]
    frozen = {m.weight.dtype for m in layers if not m.weight.requires_grad}
    assert frozen == {torch.bfloat16}
    mine = {name: p for name, p in model.named_parameters() if p.requires_grad}
    draw = torch.Generator().manual_seed(1)
    for parameter in mine.values():  # B is zero at first, and A would get no gradient
        parameter.data.normal_(0, 0.05, generator=draw)
    ids = torch.randint(0, 256, (2, 30), generator=draw)
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    found = []
    for precision in ("fp32", "bf16"):
        model.zero_grad()
        with autocast(recipe.replace(f"train.precision={precision}"), torch.device("cpu")):
            loss = model.train()(ids, labels) / 58
        loss.backward()
        found.append((loss.item(), torch.cat([p.grad.flatten() for p in mine.values()])))
    (exact, low), (ours, ours_low) = gradients_of_peft(tmp_path / "base", ids, mine), found
    assert ours[0] == pytest.approx(exact[0], rel=1e-6)
    torch.testing.assert_close(ours[1], exact[1], rtol=1e-4, atol=1e-6)
    assert ours_low[0] == pytest.approx(low[0], rel=2e-3)  # two roundings of the same arithmetic
    assert (ours_low[1] - exact[1]).norm() < 1.5 * (low[1] - exact[1]).norm()


def test_auto_takes_the_precision_of_the_files(base: None, tmp_path: Path) -> None:
    held, wide = (
        read_sizes(recipe_of(tmp_path, lora=LORA, frozen_precision=how)) for how in ("auto", "fp32")
    )
    assert (held.total, held.trained) == (wide.total, wide.trained) and not wide.in_bf16
    assert held.in_bf16 > 0.8 * (held.total - held.trained)
    assert wide.weight_bytes() - held.weight_bytes() == 2 * held.in_bf16
    assert not read_sizes(recipe_of(tmp_path)).in_bf16  # all of it is trained
    with refused("frozen_precision", "hf", error=RecipeError):
        recipe_of(tmp_path).replace("model.kind=gpt", "model.frozen_precision=bf16")


def test_a_run_resumes_bit_for_bit_and_is_exported(base: None, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    recipe = recipe_of(tmp_path, lora=LORA)
    straight = check_resume(recipe)
    losses = [loss for _, loss, *_ in curve(straight)]
    wide = curve(train(recipe_of(tmp_path, "wide", lora=LORA, frozen_precision="fp32")))
    assert losses == pytest.approx([loss for _, loss, *_ in wide], rel=1e-3)
    assert losses[-1] < losses[0]
    merged = AutoModelForCausalLM.from_pretrained(
        export(recipe.run_dir, tmp_path / "out"), dtype=torch.float32
    )
    with torch.no_grad():
        ours = opened(recipe.run_dir)(IDS)
        assert (merged.eval()(IDS).logits - ours).abs().max() < 0.2
