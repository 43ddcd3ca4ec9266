"""`model.freeze`: what is matched, what is refused, and what plan, run and report say of the rest."""

import torch

import hf_fixtures
from helpers import refused, tiny_recipe, write_corpus
from windlass import train
from windlass.checkpoint.format import open_checkpoint
from windlass.estimate.plan import plan
from windlass.estimate.text import _facts
from windlass.model.build import build_model, read_sizes
from windlass.model.gpt import initialise
from windlass.model.size import count, describe_sizes
from windlass.recipe import Recipe
from windlass.reports.view import RunView


def test_frozen_weights_stay_and_have_no_state_and_every_report_says_how_many_are_trained(tmp_path):
    recipe = tiny_recipe(write_corpus(tmp_path / "text.txt"), tmp_path / "run", train__steps=3)
    recipe = recipe.replace('model.freeze=["embedding.*", "blocks.0.attn.qkv.*"]')
    run = train(recipe)
    total = count(recipe.model, 257).total
    trained = total - 257 * 32 - 3 * 32 * 32
    checkpoint = open_checkpoint(next(iter(run.checkpoints_dir.glob("step-00000003"))), deep=False)
    begun = build_model(recipe, 257, device="cpu")
    initialise(begun, recipe.run.seed)
    before = dict(begun.named_parameters())
    moved = {n for n, p in before.items() if not torch.equal(p, checkpoint.tensor(f"model/{n}"))}
    state = {name.removeprefix("optim/").rpartition("/")[0] for name in checkpoint.names("optim/")}
    assert moved == state == set(before) - {"embedding.weight", "blocks.0.attn.qkv.weight"}
    text = f"{trained:,} of {total:,} ({100 * trained / total:.1f} %)"
    assert f"trainable {text}" in run.log_path.read_text()
    assert RunView(run).values["trainable"] == text
    planned = plan(recipe)
    assert text in dict(_facts(planned))["trainable"]
    (row,) = [row for row in planned.memory if row.chosen]
    assert (row.memory.gradients, row.memory.optimizer) == (4 * trained, 8 * trained)


def test_a_pattern_that_matches_nothing_or_everything_is_one_message_and_leaves_no_run(tmp_path):
    recipe = tiny_recipe(write_corpus(tmp_path / "text.txt"), tmp_path / "run")
    for freeze, words in (
        (["embeding.*"], ("embeding.*", "embedding.weight")),
        (["*"], ("no parameter to train",)),
    ):
        with refused("model.freeze", *words):
            train(recipe.replace(**{"model.freeze": freeze}))
    assert not (tmp_path / "run").exists()


def test_a_hugging_face_model_is_described_as_it_is_and_frozen_by_its_own_names(tmp_path):
    shape = {"num_hidden_layers": 5, "tie_word_embeddings": True}
    base = hf_fixtures.save("llama", tmp_path / "base", **shape)
    words = ["model.kind=hf", f"model.name={base}", f"data.tokenizer=hf:{base}", "model.context=32"]
    recipe = Recipe.load("quickstart", words)
    sizes = describe_sizes(read_sizes(recipe))
    assert "llama, 5 layers, 4 heads, width 32, vocabulary 512" in sizes
    frozen = recipe.replace("model.freeze=lm_head.*,model.layers.[0-3].*")
    size, whole = read_sizes(frozen), read_sizes(recipe)
    assert whole.trained == whole.total and size.trained == 32 + (whole.total - 512 * 32 - 32) // 5
