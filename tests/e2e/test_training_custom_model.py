"""`train` as a function: a model, samples and a callback of the user's own, as `docs/guides/extend.md`
shows them.
"""

import os
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModel

from forked import launch
from helpers import curve, each_step, refused
from hf_fixtures import config
from windlass import Callback, Recipe, evaluate, export, load_model, sample, train
from windlass.data.batch import Batch
from windlass.data.open import Data
from windlass.run import Run

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "extend.md"


@pytest.fixture
def page() -> dict:
    """What the page's longest example defines before it trains."""
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    example, names = max(examples, key=len), dict[str, Any]()
    exec(example[: example.index("recipe =")], names)
    return names


# the recipe's own, on the page's data
PAGE_MODEL = ["model.vocab=0", "model.layers=1", "model.width=16", "model.heads=2"]


def recipe(folder: Path, *more: str) -> Recipe:
    small = "train.steps=6 train.global_batch=8 model.context=16 eval.every=3 telemetry.every=1"
    return Recipe.load("quickstart", [*small.split(), f"run.dir='{folder}'", *more])


class Counting:
    """Samples of three tokens, which need no tokenizer."""

    def __len__(self) -> int:
        return 64

    def read(self, indices: np.ndarray) -> Batch:
        rows = (np.arange(17) + indices[:, None]) % 3
        return Batch(rows[:, :-1], rows[:, 1:])


def test_a_run_of_the_recipes_model_on_samples_of_ones_own_loads_again(tmp_path):
    """The run records the vocabulary, because there is no tokenizer."""
    data = Data(train=Counting(), val=Counting(), tokenizer=None, fingerprint="counting", vocab=3)
    run = train(recipe(tmp_path / "run", *PAGE_MODEL), data=data)
    model = load_model(run)
    assert model(torch.tensor([[0, 1, 2]])).shape == (1, 3, 3)
    [scores] = evaluate(run, data=data).results.values()
    assert scores["loss"] == pytest.approx(run.lines("eval")[-1]["loss"], rel=1e-6)
    with refused("tokenizer"):
        export(run, tmp_path / "export")


def modes(model: torch.nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def test_training_uses_training_mode_and_the_user_gets_the_module_back_as_it_was(tmp_path, page):
    """`from_pretrained` returns models in evaluation mode; a part may be in it on purpose."""

    class Model(page["MyModel"]):
        def __init__(self):
            super().__init__()
            self.frozen = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout())
            self.frozen.requires_grad_(False)
            self.batch_norm = torch.nn.BatchNorm1d(16)
            self.pretrained = llama(attention_dropout=0.5).eval()

    def forget(now):
        seen.append(modes(now.model))
        now.model.eval()  # and no `train()` after it

    model, seen = Model(), list[dict[str, bool]]()
    model.frozen.eval()
    model.batch_norm.eval()
    before = modes(model)
    train(recipe(tmp_path / "run"), model, page["data"], callbacks=[each_step(forget)])
    assert modes(model) == before
    kept = {name for name in before if name.startswith(("frozen", "batch_norm"))}
    expected = {name: name not in kept for name in before}
    assert len(seen) == 6 and all(each == expected for each in seen)

    model.eval()  # nobody can tell which parts are in evaluation mode on purpose
    train(recipe(tmp_path / "other"), model, page["data"], callbacks=[each_step(forget)])
    assert all(seen[-1].values()) and not any(modes(model).values())


def assert_like(run: Run, other: Run) -> None:
    for line, expected in zip(run.lines("train"), other.lines("train"), strict=True):
        for number in ("loss", "grad_norm"):
            assert line[number] == pytest.approx(expected[number], rel=1e-9), (run, number)


STRATEGIES = ("ddp", "shard_optim", "full_shard", "shard_grad_op", "hybrid_shard")


def dropping(base):
    """A module with dropout that no module and no name betrays."""

    class Dropping(base):
        def forward(self, tokens, labels):
            kept = torch.nn.functional.dropout(self.head.bias, 0.5, self.training)
            return super().forward(tokens, labels) + kept.sum()

    return Dropping()


@pytest.mark.dist
def test_the_pages_model_trains_under_every_strategy_on_two_ranks(tmp_path, page):
    """Also with random numbers: a step has the same ones on any number of ranks."""
    small = "train.steps=3 train.micro_batch=2 train.precision=fp64 eval.batches=1".split()

    def train_at(name: str, *more: str, stops: tuple[int, ...] = (0,)) -> Run:
        torch.manual_seed(0)
        for stop in stops:
            model = dropping(page["MyModel"])
            run = train(recipe(tmp_path / name, *small, *more), model, page["data"], stop_at=stop)
        return run

    def rank() -> None:
        for strategy in STRATEGIES:
            train_at(strategy, f"parallel.strategy={strategy}", stops=(2, 0))

    assert launch([rank], 2) == 0
    alone = train_at("alone")
    for strategy in STRATEGIES:
        run = Run(tmp_path / strategy)
        assert run.state == "finished", strategy
        assert run.environment["own_model"] == "Dropping", strategy
        assert_like(run, alone)
        losses = [one.lines("eval")[-1]["loss"] for one in (run, alone)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-9), strategy


class Buffered(torch.nn.Module):
    """Buffers of all kinds, some of which the training uses."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner, self.batch_norm = inner, torch.nn.BatchNorm1d(16)
        self.register_buffer("mask", torch.ones(16, 16, dtype=torch.bool).tril())
        self.register_buffer("code", torch.zeros(16))
        self.register_buffer("replaced", torch.zeros(3, dtype=torch.float16))
        self.register_buffer("late", torch.zeros(()))

    def blocks(self):
        return self.inner.blocks()

    def forward(self, tokens, labels):
        hidden = self.inner.embedding(tokens).transpose(1, 2)
        if self.training:
            # past the counters of torch, as many quantisers do it
            self.code.data.mul_(0.9).add_(hidden.detach().mean((0, 2)), alpha=0.1)
            self.replaced = self.replaced + tokens[0, 0]
            self.late += float(self.batch_norm.num_batches_tracked > 6) * tokens[0, 0]
        extra = (self.batch_norm(hidden) * (self.code[:, None] + self.replaced.sum())).square()
        keep = (labels != -100).unsqueeze(1)
        return self.inner(tokens, labels) + 1e-3 * (extra * keep).sum()


@pytest.mark.dist
def test_buffers_are_equal_on_all_ranks_and_a_resume_is_exact(tmp_path, page):
    strategies = ("ddp", "full_shard")
    small = "train.steps=5 train.micro_batch=2 train.grad_clip=0 eval.batches=1 eval.every=2"

    class Equal(Callback):
        def on_evaluation(self, now):
            own, every = {name: b.tolist() for name, b in now.model.named_buffers()}, [None] * 2
            dist.all_gather_object(every, own)
            assert every[0] == every[1], every

    def rank() -> None:
        for strategy in strategies:
            for name, stops in (("whole", [0]), ("parts", [3, 0])):
                wanted = recipe(tmp_path / f"{strategy}-{name}", *small.split())
                wanted = wanted.replace(f"parallel.strategy={strategy}")
                for stop in stops:
                    torch.manual_seed(0)
                    model = Buffered(page["MyModel"]())
                    train(wanted, model, page["data"], callbacks=[Equal()], stop_at=stop)

    assert launch([rank], 2) == 0
    for strategy in strategies:
        states = []
        for name in ("whole", "parts"):
            run = tmp_path / f"{strategy}-{name}"
            model = load_model(run, model=Buffered(page["MyModel"]()))
            states.append(model.state_dict())
        assert curve(tmp_path / f"{strategy}-whole") == curve(tmp_path / f"{strategy}-parts")
        assert all(value.equal(states[1][name]) for name, value in states[0].items()), strategy
        assert states[0]["batch_norm.num_batches_tracked"] == 10, "of one rank: 5 steps x 2"
        assert states[0]["late"] > 0


class Branching(torch.nn.Module):
    """Rows with an odd first token use a part that others do not; nobody uses another part."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50)
        self.always, self.branch, self.never = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, tokens, labels):
        x = self.always(self.table(tokens))
        if tokens[0, 0] % 2:
            x = x + self.branch(x)
        logits = self.head(x).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")


@pytest.mark.dist
def test_parameters_that_only_some_ranks_or_steps_use(tmp_path):
    """DDP would update with gradients that differ between ranks, then fail with its own advice."""
    small = "train.steps=4 train.micro_batch=1 eval.every=0 train.precision=fp64 model.vocab=0"
    rows = torch.randint(0, 50, (64, 17), generator=torch.Generator().manual_seed(2))

    def train_at(strategy: str, *more: str) -> None:
        wanted = recipe(tmp_path / strategy, *small.split(), f"parallel.strategy={strategy}", *more)
        train(wanted, Branching(), list(rows))

    def refuses() -> None:
        with refused("never.weight, never.bias", "parallel.find_unused_parameters=true"):
            train_at("ddp")
        assert not Run(tmp_path / "ddp").lines("train")

    def rank() -> None:
        for strategy in ("ddp", "shard_optim"):
            train_at(strategy, "parallel.find_unused_parameters=true")

    assert launch([refuses], 2) == 2
    assert launch([rank], 2) == 0
    train_at("single")
    for strategy in ("ddp", "shard_optim"):
        assert_like(Run(tmp_path / strategy), Run(tmp_path / "single"))


@pytest.mark.dist
def test_callbacks_of_rank_0_only(tmp_path, capfd):
    """Every rank adds up the loss of the steps that they see."""
    words = "train.steps=4 eval.every=0 model.layers=1 model.width=32 data.max_tokens=100_000"
    small = recipe(tmp_path / "run", *words.split())

    def rank() -> None:
        show = each_step(lambda now: print("loss", now.step, now.loss))
        watch = [show] if os.environ["RANK"] == "0" else []
        train(small.replace("telemetry.every=10", "parallel.strategy=ddp"), callbacks=watch)

    assert launch([rank], 2) == 0
    shown = re.findall(r"^loss (\d+) (.*)$", capfd.readouterr().out, re.MULTILINE)
    alone = train(small.replace(f"run.dir='{tmp_path / 'alone'}'"))
    losses = [line["loss"] for line in alone.lines("train")]
    assert [int(step) for step, _ in shown] == [1, 2, 3, 4]
    assert [float(loss) for _, loss in shown] == pytest.approx(losses, rel=1e-5)


def test_what_cannot_be_with_a_model_of_ones_own_is_refused(tmp_path, page):
    model = page["MyModel"]()
    table = next(m for m in model.modules() if isinstance(m, torch.nn.Embedding))
    assert not hasattr(model, "vocab")
    table.weight, table.num_embeddings = torch.nn.Parameter(table.weight[:3].detach().clone()), 3
    with refused("3 token embeddings", "vocab"):
        train(recipe(tmp_path / "run"), model, page["data"])
    with refused("is for a recipe's own model"):
        train(recipe(tmp_path / "other", 'train.steps="compute-optimal"'), model, page["data"])
    with refused("world=2", "torchrun"):
        train(recipe(tmp_path / "other"), model, page["data"], world=2)
    with refused("32 bits", "model.float()", "train.master"):
        train(recipe(tmp_path / "other"), page["MyModel"]().bfloat16(), page["data"])
    with refused("requires_grad"):
        train(recipe(tmp_path / "frozen"), page["MyModel"]().requires_grad_(False), page["data"])


def llama(**changes):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config("llama", vocab=50, **changes))


def test_a_model_of_transformers_is_trained_as_it_is(tmp_path, page):
    """As the same weights train by name; it is evaluated, and has its new weights in place."""
    model = llama()
    model.save_pretrained(tmp_path / "base")
    before = model.lm_head.weight.detach().clone()
    small = {"train.steps": 6, "train.global_batch": 8, "model.context": 16, "optim.lr": 2e-3}
    own = Recipe().replace({**small, "telemetry.every": 1, "run.dir": str(tmp_path / "run")})
    run = train(own, model, page["data"])
    by_name = {"model.kind": "hf", "model.name": str(tmp_path / "base"), "optim.lr": 2e-3}
    named = train(own.replace({**by_name, "run.dir": str(tmp_path / "named")}), data=page["data"])
    losses = [[line["loss"] for line in one.lines("train")] for one in (run, named)]
    assert run.state == "finished" and losses[0] == losses[1]
    assert not model.lm_head.weight.equal(before)
    assert run.environment["own_model"] == "LlamaForCausalLM"
    again = evaluate(run, model=llama(), data=page["data"])
    assert again.results["loss"]["loss"] == pytest.approx(run.lines("eval")[-1]["loss"], rel=1e-6)


def test_a_model_that_cannot_be_trained_leaves_no_run_behind(tmp_path, page):
    class Mean(torch.nn.Linear):
        def forward(self, tokens):
            return super().forward(tokens.float()).mean()

    cases = [
        (Mean(16, 2), ["forward(tokens, labels)", "TypeError", "summed"]),
        (AutoModel.from_config(config("llama", vocab=50)), ["AutoModelForCausalLM"]),
        (llama(max_position_embeddings=8), ["model.context = 16", "write 8"]),
    ]
    for model, words in cases:
        with refused(*words):
            train(recipe(tmp_path / "run"), model, page["data"])
        assert not (tmp_path / "run" / "recipe.toml").exists()
    # the directory is free
    assert train(recipe(tmp_path / "run"), llama(), page["data"]).state == "finished"


def test_a_module_that_draws_its_own_noise_resumes_and_is_measured_exactly(tmp_path, page):
    class Noisy(page["MyModel"]):
        def forward(self, tokens, labels):
            return super().forward(tokens, labels) * (1 + 0.1 * torch.rand(()))

    def numbers(name, *stops):
        for stop in (*stops, 0):
            torch.manual_seed(0)
            model = Noisy()
            torch.manual_seed(stop)
            run = train(recipe(tmp_path / name), model, page["data"], stop_at=stop)
        measured = evaluate(run, model=model, data=page["data"]).results["loss"]["loss"]
        return curve(run), [line["loss"] for line in run.lines("eval")], measured

    assert numbers("whole") == numbers("halves", 3)


def test_callbacks_log_a_measure_and_stop_the_run(tmp_path, page):
    seen = []
    best = "checkpoint.every=2 checkpoint.best=own:even.score checkpoint.keep_last=1".split()
    changed = recipe(tmp_path / "run", *PAGE_MODEL, *best)

    class AtStep(Callback):
        def on_step(self, now):
            [group] = {g["lr"] for g in now.optimizer.param_groups}
            seen.append((now.lr, group, now.epoch, now.batch.micro[0].batch.tokens.shape[1]))
            now.log("loss", -1.0)  # a name of ours
            now.log("norm", sum(p.detach().square().sum() for p in now.model.parameters()).sqrt())
            if now.step == 3:
                now.stop("enough")

    class Others(Callback):
        def on_evaluation(self, now):
            seen.append((now.step, sorted(now.results)))

        def on_save(self, now):
            seen.append((now.step, now.path.name))

    def even(model, step):
        return {"score": float(step % 2 == 0 and not model.training) + step / 100}

    def train_on(callbacks=()):
        return train(changed, data=page["data"], suites={"even": even}, callbacks=callbacks)

    run = train_on([AtStep(), Others()])
    assert run.state == "stopped"
    assert [e["reason"] for e in run.events if e["event"] == "stopped"] == ["enough"]
    # it ends after the next step, as at any world size
    for kind in ("train", "log"):
        assert [line["step"] for line in run.lines(kind)] == [1, 2, 3, 4]
    assert run.to_pandas()["log.norm"].count() == 4
    assert run.to_pandas()["log.loss"].tolist()[1:] == [-1.0] * 4
    assert min(run.to_pandas()["loss"].dropna()) > 0
    assert (0, ["loss", "own:even"]) in seen and (4, "step-00000004") in seen
    done = train_on()
    assert done.state == "finished"
    assert done.lines("eval", suite="own:even")[-1]["score"] == pytest.approx(1.06)
    assert done.summary["best_step"] == 6
    untouched = train(recipe(tmp_path / "whole", *PAGE_MODEL), data=page["data"])
    assert curve(untouched) == curve(done)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"suites": {"x y": print}}, ("suites", "x y")),
        ({"suites": {"x": lambda model, step: 3}}, ("suites['x']", "dictionary")),
        ({"callbacks": [each_step(lambda now: now.log("x", "a"))]}, ("log('x'", "not a number")),
        ({"callbacks": [print]}, ("callbacks", "windlass.Callback")),
    ],
)
def test_what_a_callback_may_not_do_is_one_message(tmp_path, page, more, words):
    with refused(*words):
        train(recipe(tmp_path / "run", *PAGE_MODEL), data=page["data"], **more)


def test_stop_at_returns_run_and_second_training_leaves_nothing_behind(tmp_path, page, capsys):
    def open_things():
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    settings = [*PAGE_MODEL, "parallel.strategy=ddp"]
    for _ in range(2):  # the second call finds the run where it is to stop
        run = train(recipe(tmp_path / "run", *settings), data=page["data"], stop_at=3)
        assert run.state == "stopped" and run.lines("train")[-1]["step"] == 3
    shown = capsys.readouterr().out
    # it may have been typed as --stop-at
    assert "after step 3, all saved" in shown and "stop_at=" not in shown
    before = open_things()
    assert train(recipe(tmp_path / "run", *settings), data=page["data"]).state == "finished"
    assert open_things() == before
    capsys.readouterr()
    assert train(recipe(tmp_path / "run", *settings), data=page["data"]).state == "finished"
    assert "has done its 6 steps" in capsys.readouterr().out


def test_a_loss_that_is_no_sum_is_refused_before_the_first_step(tmp_path, page):
    class Mean(page["MyModel"]):
        def forward(self, tokens, labels):
            return super().forward(tokens, labels) / max(1, int((labels != -100).sum()))

    where, model = recipe(tmp_path / "run"), Mean()
    with refused("forward(tokens, labels)", 'reduction="sum"', "train.startup_checks=false"):
        train(where, model, page["data"])
    assert not Run(where.run_dir).lines("train")
    train(where.replace("train.startup_checks=false", "train.steps=1"), model, page["data"])


def test_a_model_and_samples_of_ones_own(tmp_path, page):
    losses = []
    watch = each_step(lambda now: losses.append((now.step, now.loss)))
    small = recipe(tmp_path / "run", 'eval.at_end="all"')
    run = train(small, page["MyModel"](), page["data"], callbacks=[watch])
    lines, evaluated = run.lines("train"), run.lines("eval")
    assert run.state == "finished" and losses == [(line["step"], line["loss"]) for line in lines]
    assert evaluated[-1]["loss"] < evaluated[0]["loss"]
    assert run.lines("sample") == [], "there is no tokenizer, and the model has no cache"
    assert all("mfu" not in line for line in lines), "its FLOPs are not known"
    for verb in (evaluate, sample):
        with refused("MyModel", "model=MyModel("):
            verb(run)
    fresh = page["MyModel"]()
    measured = evaluate(run, model=fresh, data=page["data"]).results["loss"]["loss"]
    assert measured == pytest.approx(run.lines("eval")[-1]["full_loss"], rel=1e-6)
    with refused("without a tokenizer"):
        sample(run, model=fresh)
    with refused("MyModel", "load_model"):
        export(run, tmp_path / "weights")


class Rows(torch.utils.data.Dataset):
    def __init__(self, length: int, first: int = 0):
        self.length, self.first = length, first

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.arange(self.first + index, self.first + index + self.length) % 20


def test_a_pair_of_datasets_has_validation_and_a_module_of_ones_own_needs_no_vocabulary(
    tmp_path, page
):
    small, model, sets = recipe(tmp_path / "run"), page["MyModel"](), (Rows(17), Rows(17, 7))
    assert small.model.vocab > 50, "the recipe's own model is another"
    run = train(small, model, sets)
    losses = [line["loss"] for line in run.lines("eval")]
    assert len(losses) == 3 and losses[-1] < losses[0]
    for data in (sets, sets[1]):
        measured = evaluate(run, model=model, data=data).results["loss"]
        assert measured["loss"] == pytest.approx(losses[-1], rel=1e-6)
    assert evaluate(run, model=model, data=Rows(17, 9)).results["loss"]["tokens"] == 40 * 16
    with refused("your data", "data="):
        evaluate(run, model=model)
    with refused("the data is not what"):  # other validation data
        train(small, model, (Rows(17), Rows(17, 8)), extend_to=9)
    with refused("data", "pair", "(training, validation)"):
        train(recipe(tmp_path / "other"), model, (*sets, sets[0]))
    with refused("item 0 of the dataset", "integers [17]"):
        train(recipe(tmp_path / "other"), model, list(sets))
