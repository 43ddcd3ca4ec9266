"""Families of models of `transformers`: each is trained, adapted, sharded and exported, as
`docs/reference/models.md` says. The models are tiny and have random weights.
"""

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

import hf_fixtures
from helpers import losses
from rows import Rows
from windlass import Data, Recipe, Run, export, train
from windlass.launch.local import launch

EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
EXPERTS |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8)
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
LATENT |= {"num_key_value_heads": 4, "v_head_dim": 8, "n_group": 2, "topk_group": 1}
LINEAR = dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 2)
LINEAR |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
SHARED = {"shared_expert_intermediate_size": 16}
DENSE = """apertus arcee bloom cohere2 falcon gemma gemma2 gemma3_text glm4 gpt2 gpt_neox granite llama
mistral nemotron olmo2 olmo3 phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm starcoder2"""
MIXTURES = "glm4_moe gpt_oss mixtral olmoe qwen3_moe"
RECURRENT = "falcon_mamba jamba lfm2 mamba rwkv"
FAMILIES: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in f"{DENSE} {RECURRENT}".split()},
    "gptj": {"n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4},
    "mpt": {"d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 128},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    **dict.fromkeys(MIXTURES.split(), EXPERTS),
    "deepseek_v3": EXPERTS
    | LATENT
    | {"head_dim": 4, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "qwen2_moe": EXPERTS | SHARED,
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "qwen3_next": EXPERTS | LINEAR | SHARED | {"num_hidden_layers": 4},
}
ALWAYS = ("llama", "mixtral")  # the others take minutes
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
EQUAL = partial(pytest.approx, abs=2e-6)
TWO_RANKS = """
import sys
from test_model_families import DATA, recipe, train
for kind in sys.argv[2:]:
    for name, more in (("sharded", {}), ("sharded-lora", {"model.lora.rank": 4})):
        train(recipe(sys.argv[1], kind, name, {"parallel.strategy": "full_shard"} | more), data=DATA)
"""


ROWS = Rows([((np.arange(i, i + 17) % 500 + 5).tolist(), [True] * 17) for i in range(0, 448, 7)], 0)
DATA = Data(ROWS, ROWS, None, "rows", hf_fixtures.VOCAB)  # type: ignore[arg-type]


def recipe(folder: Path | str, kind: str, run: str, more: dict[str, Any]) -> Recipe:
    small = {"model.context": 16, "train.steps": 2, "train.global_batch": 4, "train.micro_batch": 2}
    small |= {"model.kind": "hf", "model.name": f"{folder}/{kind}", "optim.lr": 1e-3}
    small |= {"eval.batches": 1, "telemetry.every": 1, "train.threads": 1}
    return Recipe.from_dict({**small, "run.dir": f"{folder}/runs/{kind}-{run}", **more})


def exported_loss(run: Run, directory: Path) -> float:
    """The exported model's loss on the rows of the run's evaluations, through `transformers`."""
    model = AutoModelForCausalLM.from_pretrained(export(run, directory), dtype=torch.float32)
    batch = ROWS.read(np.arange(4)).map(torch.from_numpy)
    with torch.no_grad():
        logits = model.eval()(input_ids=batch.tokens, use_cache=False).logits
    return float(cross_entropy(logits.flatten(0, 1), batch.labels.flatten()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def saved(folder: Path, kind: str) -> None:
    if not (folder / kind).is_dir():
        hf_fixtures.save(kind, folder / kind, **FAMILIES[kind])
        hf_fixtures.save_tokenizer(["the cat sat on the mat"], folder / kind)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # peft's own
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.full] * (k not in ALWAYS)) for k in FAMILIES]
)
def test_a_family_is_trained_adapted_and_exported(kind, folder):
    saved(folder, kind)
    run_as = partial(recipe, folder, kind)
    plain = train(run_as("plain", {}), data=DATA)
    for word in ("full", "selective"):
        setting = {"parallel.activation_checkpointing": word}
        assert losses(train(run_as(word, setting), data=DATA)) == losses(plain), word
    adapted = train(run_as("lora", {"model.lora.rank": 4}), data=DATA)
    assert losses(adapted)[0] == losses(plain)[0] and losses(adapted)[1] != losses(plain)[1]
    for run in (plain, adapted):
        loss = exported_loss(run, run.path / "exported")
        assert loss == EQUAL(run.lines("eval")[-1]["loss"])


@pytest.mark.full
@pytest.mark.dist
def test_families_are_sharded_by_fsdp2(folder, monkeypatch):
    for kind in FAMILIES:
        saved(folder, kind)
    (folder / "rank.py").write_text(TWO_RANKS)
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{':'.join(sys.path)}")
    assert launch([sys.executable, str(folder / "rank.py"), str(folder), *FAMILIES], 2) == 0
    for kind in FAMILIES:
        for name, more in (("sharded", {}), ("sharded-lora", {"model.lora.rank": 4})):
            alone = train(recipe(folder, kind, f"{name}-alone", more), data=DATA)
            sharded = Run(folder / "runs" / f"{kind}-{name}")
            assert losses(sharded) == EQUAL(losses(alone)), (kind, name)


def test_the_page_names_the_families():
    [table] = re.findall(r"\| dense \|.*?\n\n", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert set(re.findall(r"`(\w+)`", table)) == set(FAMILIES)
