"""Liger's kernels against the code of `transformers`, on a CPU by Triton's interpreter.

The interpreter reads its variable when the kernels are imported, so the comparison is a process.
"""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_fixtures
from helpers import refused
from windlass import train
from windlass.errors import installed
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.model.hf import use_liger
from windlass.recipe import Recipe, RecipeError

GPU = torch.device("cuda")
KINDS = {"llama": {}, "qwen3": {}, "gemma2": {}}
LORA = {"lora": {"rank": 2}, "frozen_precision": "bf16"}


def recipe_of(base: Path, **model: Any) -> Recipe:
    source = {"source": str(base), "dir": str(base / "data")}
    tree: dict[str, Any] = {"model": {"kind": "hf", "name": str(base), "context": 16, **model}}
    tree |= {"data": source, "train": {"steps": 1}, "run.dir": str(base / "run")}
    return Recipe.from_dict(tree)


def test_kernels_of_liger_need_its_package_a_gpu_and_whole_layers(tmp_path: Path) -> None:
    base = hf_fixtures.save_tokenizer(["a b c"], hf_fixtures.save("llama", tmp_path / "base"))
    (base / "text.txt").write_text("the cat sat on the mat " * 400)
    recipe = recipe_of(base, kernels="liger").replace(f"data.source={base / 'text.txt'}")
    if not installed("liger_kernel"):
        with refused("model.kernels", "pip install liger_kernel"):
            train(recipe)
    elif not torch.cuda.is_available():
        with refused("model.kernels", "GPU", '"torch"'):
            train(recipe)
    assert not (base / "run").exists()
    for change in ("parallel.tensor=2", "train.precision=fp64"):
        with refused("model.kernels", change.partition("=")[0], error=RecipeError):
            recipe.replace(change)
    with refused("model.kernels", error=RecipeError):
        Recipe.from_dict({"model.kernels": "liger"})


@pytest.mark.skipif(not installed("liger_kernel"), reason="not run: liger-kernel is not installed")
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    hf_fixtures.save(kind, tmp_path / "base", num_hidden_layers=1)
    environ = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, __file__, str(tmp_path / "base")]
    child = subprocess.run(
        command, env=environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=True
    )
    results = json.loads(child.stdout.splitlines()[-1])
    assert set(results) == {"whole", "adapters"}
    for name, result in results.items():
        ours, reference = result["liger"], result["torch"]
        assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-5), name
        assert set(ours["gradients"]) == set(reference["gradients"])
        for key, gradient in ours["gradients"].items():
            expected = torch.tensor(reference["gradients"][key])
            distance = (torch.tensor(gradient) - expected).norm()
            assert distance <= 1e-5 * expected.norm(), (name, key)


def interpret() -> None:
    """Add what the interpreter lacks: floats as arguments, and functions of `libdevice`."""
    import liger_kernel.ops.geglu
    import liger_kernel.ops.rms_norm
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def with_floats(value: Any) -> Any:
        if isinstance(value, float):
            number = interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32)
            return tl.tensor(number, tl.float32)
        return convert(value)

    interpreter._implicit_cvt = with_floats
    liger_kernel.ops.rms_norm.rsqrt = lambda x: tl.math.rsqrt(x)
    liger_kernel.ops.geglu.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1


def measured(base: Path, kernels: str, settings: dict[str, Any]) -> dict[str, Any]:
    model: Any = build_model(recipe_of(base, **settings), 0, "cpu").train()
    layer, code = model.blocks()[0], sys.modules[type(model.model).__module__]
    before = dict(vars(code))
    with ExitStack() as stack:
        if kernels == "liger":
            use_liger(model, GPU, stack)
            assert layer.input_layernorm._get_name() == "LigerRMSNorm"
            changed = {name for name, value in before.items() if vars(code)[name] is not value}
            assert changed == {"apply_rotary_pos_emb"}
        initialise(model, 1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:  # zero at the start, so that A would have no gradient
                    parameter.fill_(0.01)
        generator = torch.Generator().manual_seed(5)
        tokens, labels = torch.randint(0, 512, (2, 1, 8), generator=generator)
        loss = model(tokens, labels)
        loss.backward()
    assert vars(code) == before
    gradients = {n: p.grad.tolist() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": float(loss.detach()), "gradients": gradients}


def main(base: Path) -> None:
    interpret()
    for kind, word, sizes in (("bloom", "bloom", {}), ("llama", "gelu", {"hidden_act": "gelu"})):
        folder = hf_fixtures.save(kind, base / kind, **sizes)
        other: Any = build_model(recipe_of(folder), 0, "cpu")
        with ExitStack() as stack, refused("model.kernels", word, '"torch"'):
            use_liger(other, GPU, stack)
    results = {
        name: {kernels: measured(base, kernels, settings) for kernels in ("torch", "liger")}
        for name, settings in {"whole": {}, "adapters": LORA}.items()
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
