"""A fine-tuning run stands alone if its checkpoints hold all weights: it needs nothing of the model
that it began with.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint_base import TEXT, base, recipe  # noqa: F401

import hf_fixtures
from helpers import losses, refused, windlass
from windlass import train
from windlass.evaluation.api import evaluate
from windlass.evaluation.generate import Sampling, generate
from windlass.evaluation.passes import Passes
from windlass.evaluation.source import Source, find_source, load_model, open_model
from windlass.interop.export import export
from windlass.parallel.ranks import alone
from windlass.run import Run


def sources(base: Path, *overrides: str) -> Source:
    return find_source(str(base), list(overrides))


def change(base: Path, **fields: Any) -> None:
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | fields))


def test_a_run_resumes_and_is_used_where_its_base_is_gone(base):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    generation = {"temperature": 0.5, "do_sample": True, "eos_token_id": 0}
    (base / "generation_config.json").write_text(json.dumps(generation))
    whole, halves = (recipe(base, name, "eval.every=4") for name in ("whole", "halves"))
    train(whole)
    train(halves, stop_at=2)
    digest = hashlib.sha256((base / "config.json").read_bytes()).hexdigest()
    origin = {"name": str(base), "revision": "", "commit": "", "config_sha256": digest}
    origin |= {"precision": "fp32"}
    assert Run(halves.run_dir).environment["model"] == origin
    shutil.rmtree(base)
    train(halves)
    assert losses(halves.run_dir) == losses(whole.run_dir)
    moved = halves.run_dir.rename(base.parent / "moved")
    shutil.rmtree(whole.run_dir)
    source = find_source(str(moved))
    loss = evaluate(source, ["loss"]).results["loss"]["loss"]
    assert loss == pytest.approx(Run(moved).lines("eval")[-1]["loss"], rel=1e-5)
    model = open_model(source, alone("cpu"))
    ids = source.tokenizer.encode("the cat").tolist()
    assert len(generate(Passes(model), [ids], Sampling(max_tokens=8, temperature=0))[0]) == 8
    out = export(str(moved), base.parent / "out")
    exported, tokens = AutoModelForCausalLM.from_pretrained(out).eval(), torch.tensor([ids])
    with torch.no_grad():
        assert (exported(input_ids=tokens).logits - model(tokens)).abs().max() < 1e-5
    assert AutoTokenizer.from_pretrained(out)("the cat")["input_ids"] == ids
    assert json.loads((out / "generation_config.json").read_text())["temperature"] == 0.5
    card = (out / "README.md").read_text()
    assert "| loss | perplexity |" in card and "Trained further from `base`." in card
    assert "runtime" not in card and "base_model" not in card


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OddConfig(LlamaConfig):
    model_type = "odd"


class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output
"""
REMOTE = "model.trust_remote_code=true"


def test_code_that_comes_with_a_model_runs_where_it_is_asked_for_and_is_exported(base, monkeypatch):
    import transformers.dynamic_module_utils as dynamic
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(base.parent / "modules"))
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    auto = {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"}
    change(base, model_type="odd", architectures=["OddForCausalLM"], auto_map=auto)
    (base / "odd.py").write_text(CODE)
    with refused(REMOTE):
        sources(base)
    model, tokens = open_model(sources(base, REMOTE), alone("cpu")), torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert (model(tokens) - 2 * plain(tokens).logits).abs().max() < 1e-5
    output = windlass("sample", base, REMOTE, "--prompt", "the", "--max-tokens", "1").stdout
    assert output.startswith("the")
    with torch.no_grad():
        assert torch.equal(
            load_model(base, overrides=[REMOTE], device="cpu")(tokens), model(tokens)
        )
    run = recipe(base, "run", "train.steps=1", trust_remote_code=True)
    train(run)
    out = export(run.run_dir, base.parent / "out")
    assert (out / "odd.py").read_bytes() == (base / "odd.py").read_bytes()
    exported = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval()
    with torch.no_grad():
        ours = open_model(sources(run.run_dir), alone("cpu"))(tokens)
        assert (exported(tokens).logits - ours).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # from peft
@pytest.mark.parametrize("lora", [pytest.param(0, marks=pytest.mark.full), 4])
def test_text_alone_trains_a_model_of_images_and_leaves_the_rest_alone(lora, tmp_path):
    """On two ranks, because DDP rejects parameters without gradient."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = hf_fixtures.save_tokenizer([TEXT], hf_fixtures.save_gemma3(tmp_path / "base"))
    (tmp_path / "text.txt").write_text(TEXT)
    wanted = recipe(base, "run", "train.steps=2", lora={"rank": lora})
    (tmp_path / "recipe.toml").write_text(wanted.toml())
    output = windlass("train", tmp_path / "recipe.toml", "--world", "2").stdout
    assert "model.vision_tower, model.multi_modal_projector" in output
    halves = json.loads(
        (export(wanted.run_dir, tmp_path / "bf16", dtype="bf16") / "config.json").read_text()
    )
    parts = halves, halves["text_config"], halves["vision_config"]
    assert [part["dtype"] for part in parts] == ["bfloat16"] * 3
    out = export(wanted.run_dir, tmp_path / "out")
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    plain, exported = (AutoModelForCausalLM.from_pretrained(d).eval() for d in (base, out))
    after = exported.state_dict()
    changed = {n for n, value in plain.state_dict().items() if not torch.equal(value, after[n])}
    assert changed and not [n for n in changed if "vision" in n or "projector" in n]
    tokens, models = torch.tensor([[1, 2, 3]]), [exported]
    if lora:
        adapter = export(wanted.run_dir, tmp_path / "adapter", adapter=True)
        models += [PeftModel.from_pretrained(plain, adapter).eval()]
        assert not any(
            "vision" in name for name, _ in models[1].named_parameters() if "lora" in name
        )
    with torch.no_grad():
        places = [wanted.run_dir, out, *([adapter] if lora else [])]
        expected, *others = [open_model(sources(place), alone("cpu"))(tokens) for place in places]
        for logits in (*others, *(model(tokens).logits for model in models)):
            assert (logits - expected).abs().max() < 1e-5


def test_quantised_weights_are_refused_by_name(base):
    change(base, quantization_config={"quant_method": "gptq", "bits": 4})
    with refused("quantised"):
        sources(base)
