"""Frozen weights in the precision of their files, beside `peft` on the same base."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_model_adapters import adapter_of_peft, base_of, distance, plain, recipe_of

from helpers import losses, refused, train_on_ranks
from windlass import train
from windlass.interop.export import export
from windlass.model.build import build_model, read_sizes, sizes_of
from windlass.parallel.parallelize import autocast, checkpoint_activations
from windlass.recipe import RecipeError

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning",
    "ignore:The following .*_pattern keys:RuntimeWarning",  # peft's own
)
BF16 = torch.bfloat16
KINDS: dict[str, Any] = {
    "llama": {},
    "gpt2": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "gemma2": {},
}
LORA = {"rank": 4}


def with_adapters(model: Any) -> dict[str, Any]:
    """The adapters of a model, with values: B is zero at first, and A would get no gradient."""
    draw = torch.Generator().manual_seed(1)
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for parameter in adapters.values():
        parameter.data.normal_(0, 0.05, generator=draw)
    return adapters


def gradients_of_peft(base: Path, transposed: bool, ids: torch.Tensor, mine: Any) -> Any:
    """Loss and gradients of the same adapters on the base in float32, then under autocast."""
    model = adapter_of_peft(base, target_modules="all-linear", fan_in_fan_out=transposed)
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
    base_of(tmp_path, kind, BF16, **KINDS[kind])
    recipe = recipe_of(tmp_path, lora=LORA)
    model: Any = build_model(recipe, 0, "cpu")
    model.fill_weights(1)
    layers = [m for block in model.blocks() for m in block.modules()]
    layers = [m for m in layers if type(m).__name__ in ("Linear", "Conv1D")]
    frozen = {m.weight.dtype for m in layers if not m.weight.requires_grad}
    assert frozen == {BF16}
    mine = with_adapters(model)
    ids = torch.randint(0, 256, (2, 30), generator=torch.Generator().manual_seed(2))
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    found = []
    for precision in ("fp32", "bf16"):
        model.zero_grad()
        with autocast(recipe.replace(f"train.precision={precision}"), torch.device("cpu")):
            loss = model.train()(ids, labels) / 58
        loss.backward()
        found.append((loss.item(), torch.cat([p.grad.flatten() for p in mine.values()])))
    reference = gradients_of_peft(tmp_path / "base", kind == "gpt2", ids, mine)
    (exact, low), (ours, ours_low) = reference, found
    assert ours[0] == pytest.approx(exact[0], rel=1e-6)
    torch.testing.assert_close(ours[1], exact[1], rtol=1e-4, atol=1e-6)
    assert ours_low[0] == pytest.approx(low[0], rel=2e-3)  # two roundings of the same arithmetic
    assert (ours_low[1] - exact[1]).norm() < 1.5 * (low[1] - exact[1]).norm()


EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
EXPERTS |= dict.fromkeys(("num_experts", "num_local_experts"), 4)
LOWERED = {
    "gemma3_text": ({}, ("embed_tokens.weight",)),  # with a factor, and the head's matrix
    "qwen3_moe": (EXPERTS, ("gate_up_proj", "down_proj")),
    "gpt_oss": (EXPERTS, ("gate_up_proj", "down_proj")),
}


@pytest.mark.parametrize("how", ["none", "selective"])
@pytest.mark.parametrize("kind", LOWERED)
def test_scaled_embeddings_and_experts_are_raised_to_the_same_numbers(
    kind: str, how: str, tmp_path: Path
) -> None:
    """The files are in bf16, so that nothing is rounded. Under autocast products are in bf16."""
    sizes, names = LOWERED[kind]
    base_of(tmp_path, kind, BF16, **sizes)
    ids, results = torch.randint(0, 256, (2, 30)), []
    for held in ("fp32", "bf16"):
        lora = LORA | {"targets": ["q_proj", "v_proj"]}
        recipe = recipe_of(tmp_path, lora=lora, frozen_precision=held)
        model: Any = build_model(recipe, 0, "cpu").train()
        model.fill_weights(1)
        checkpoint_activations(model.blocks(), how)
        lower = {name for name, p in model.named_parameters() if p.dtype == BF16}
        assert all(any(n.endswith(name) for n in lower) == (held == "bf16") for name in names)
        adapters = with_adapters(model)
        loss = model(ids, ids)
        loss.backward()
        gradients = [p.grad for p in adapters.values()]
        with torch.no_grad(), autocast(recipe.replace("train.precision=bf16"), ids.device):
            results.append((loss.detach(), gradients, model(ids), model(ids, ids)))
    (loss, gradients, logits, low), (ours, own, again, own_low) = results
    assert torch.equal(loss, ours)
    torch.testing.assert_close(gradients, own, rtol=1e-5, atol=1e-6)
    assert float(low) == pytest.approx(float(own_low), rel=1e-2) and logits.dtype == again.dtype


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_moe"])
def test_two_ranks_have_the_losses_of_one_process(kind: str, tmp_path: Path) -> None:
    base_of(tmp_path, kind, BF16, **LOWERED[kind][0])
    recipe = recipe_of(tmp_path, "one", lora=LORA | {"targets": ["q_proj"]})
    one = losses(train(recipe))
    two = recipe.replace("parallel.strategy=full_shard", f"run.dir={tmp_path}/two")
    assert losses(train_on_ranks(two)) == pytest.approx(one, rel=1e-5)


def test_experts_with_adapters_stay_in_float32(tmp_path: Path) -> None:
    """`peft` adds an adapter's product to the matrix, so bf16 would round each update away."""
    base_of(tmp_path, "mixtral", BF16, **EXPERTS)
    targets = ["q_proj", "w1", "w2", "w3"]
    model = build_model(recipe_of(tmp_path, lora=LORA | {"targets": targets}), 0)
    kinds = {name.rpartition(".")[2]: p.dtype for name, p in model.named_parameters()}
    assert kinds["gate_up_proj"] == kinds["down_proj"] == torch.float32
    assert any(p.dtype == BF16 for p in model.parameters())


def test_auto_takes_the_precision_of_the_files(tmp_path: Path) -> None:
    base_of(tmp_path, "llama", BF16)
    held, wide = (
        read_sizes(recipe_of(tmp_path, lora=LORA, frozen_precision=how)) for how in ("auto", "fp32")
    )
    assert (held.total, held.trained) == (wide.total, wide.trained) and not wide.in_bf16
    assert held.in_bf16 > 0.8 * (held.total - held.trained)
    assert wide.weight_bytes() - held.weight_bytes() == 2 * held.in_bf16
    assert not read_sizes(recipe_of(tmp_path)).in_bf16  # all of it is trained
    with refused("frozen_precision", "hf", error=RecipeError):
        recipe_of(tmp_path).replace("model.kind=gpt", "model.frozen_precision=bf16")


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_auto_reads_the_files_and_config_json_only_without_them(dtype: Any, tmp_path: Path) -> None:
    """A run remembers the answer. Its export has the precision of the files, too."""
    base, names = base_of(tmp_path, "llama", dtype), {"bfloat16", "float32"}
    own = str(dtype).removeprefix("torch.")
    (other,) = names - {own}
    config = base / "config.json"
    config.write_text(config.read_text().replace(f'"{own}"', f'"{other}"'))
    recipe = recipe_of(tmp_path, lora=LORA)
    is_low, run = dtype == BF16, train(recipe, stop_at=2)
    assert (read_sizes(recipe).in_bf16 > 0) == is_low
    exported = json.loads((export(run, tmp_path / "out") / "config.json").read_text())
    assert exported["dtype"] == own
    (tmp_path / "files").mkdir()
    for file in base.glob("*.safetensors"):
        file.rename(tmp_path / "files" / file.name)
    assert (read_sizes(recipe).in_bf16 > 0) != is_low
    assert (sizes_of(build_model(recipe, 0, run=run.path)).in_bf16 > 0) == is_low


def test_a_run_learns_as_in_float32_and_is_exported(tmp_path: Path) -> None:
    base_of(tmp_path, "llama", BF16)
    recipe = recipe_of(tmp_path, lora=LORA)
    wide = recipe_of(tmp_path, "wide", lora=LORA, frozen_precision="fp32")
    low, whole = losses(train(recipe)), losses(train(wide))
    assert low == pytest.approx(whole, rel=1e-3) and low[-1] < low[0]
    merged = plain(export(recipe.run_dir, tmp_path / "out"))
    assert distance(merged, recipe.run_dir) < 0.2
    # `peft` alone would add the adapters in bf16
    exact = plain(export(recipe.run_dir, tmp_path / "exact", dtype="fp32"))
    assert distance(exact, recipe.run_dir) < 2e-5
