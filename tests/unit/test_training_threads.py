"""The number of threads of a run on a CPU: measured, given, recorded."""

import os
import subprocess
import sys
import time
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from helpers import curve, each_step, tiny_recipe, wait_for, write_corpus
from windlass import evaluate, train
from windlass.checkpoint.load import candidates, open_checkpoint
from windlass.training import setup, threads, trainer


@pytest.fixture(autouse=True)
def same_threads_afterwards():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("seconds", "expected", "tried"),
    [
        (lambda n: 0.002 * n, 1, [1, 2, 4, 8]),  # a tiny model: threads only wait for each other
        # scales: half the threads are clearly slower, and fewer are not tried
        (lambda n: 0.08 / n, 8, [4, 8]),
        (lambda n: 0.04 / min(n, 4), 4, [2, 4, 8]),  # scales up to four
    ],
)
def test_the_fewest_threads_that_are_as_fast_are_taken(monkeypatch, seconds, expected, tried):
    now = [0.0]

    def a_pass():
        now[0] += seconds(torch.get_num_threads())

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    measured = threads.probe(a_pass, 8)
    assert sorted(measured) == tried and threads.fewest(measured) == expected


def test_a_long_pass_keeps_all_threads_and_is_not_timed_again():
    passes = []

    def a_pass():
        passes.append(torch.get_num_threads())
        end = time.process_time() + 0.7
        while time.process_time() < end:
            pass

    assert threads.fewest(threads.probe(a_pass, 2)) == 2 and passes == [2, 2]


def test_the_choice_is_recorded_and_a_resume_takes_it_up(corpus, tmp_path, monkeypatch):
    recipe = tiny_recipe(corpus, tmp_path / "run", checkpoint__every=2, telemetry__every=2)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    torch.set_num_threads(2)
    monkeypatch.setattr(threads, "probe", lambda run, most: (run(), {1: 0.010, most: 0.020})[1])
    assert train(recipe, stop_at=4).state == "stopped"
    monkeypatch.setattr(threads, "probe", None)  # a resume does not measure
    torch.set_num_threads(2)
    used = set[int]()
    run = train(recipe, callbacks=[each_step(lambda now: used.add(torch.get_num_threads()))])
    assert used == {1}
    starts = [event for event in run.events if event["event"] in ("started", "resumed")]
    assert [event["threads"] for event in starts] == [1, 1]
    log = (run.path / "log.txt").read_text()
    assert "1 of 2 cores" in log and "1: 10 ms, 2: 20 ms" in log and "as in the run so far" in log
    newest = open_checkpoint(candidates(run.path)[0], deep=False)
    assert newest.meta["threads"] == 1
    given = train(tiny_recipe(corpus, tmp_path / "given", train__threads=2, train__steps=2))
    assert "2, by train.threads" in (given.path / "log.txt").read_text()


def test_a_training_and_an_evaluation_give_the_process_its_settings_back(corpus, tmp_path):
    def settings():
        exact = torch.are_deterministic_algorithms_enabled()
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        return torch.get_num_threads(), torch.get_float32_matmul_precision(), exact, warns

    network = os.environ.get("GLOO_SOCKET_IFNAME")
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("high")
    before, during = settings(), set()
    try:
        changed = {"train__threads": 1, "train__deterministic": True, "train__steps": 2}
        recipe = tiny_recipe(corpus, tmp_path / "run", **changed)
        run = train(recipe, callbacks=[each_step(lambda now: during.add(settings()))])
        assert during == {(1, "highest", True, False)} and settings() == before
        evaluate(run, overrides=["train.threads=1"], on_result=lambda *_: during.add(settings()))
        assert during == {(1, "highest", True, False), (1, "highest", False, False)}
        assert settings() == before

        def fail(now):
            raise ArithmeticError

        with pytest.raises(ArithmeticError):
            train(recipe, callbacks=[each_step(fail)], fresh=True)
        assert settings() == before
        train(tiny_recipe(corpus, tmp_path / "ddp", parallel__strategy="ddp", train__steps=1))
        assert os.environ.get("GLOO_SOCKET_IFNAME") == network
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)


def test_timing_changes_no_bit_of_the_training(corpus, tmp_path, monkeypatch):
    plain = train(tiny_recipe(corpus, tmp_path / "plain", train__threads=1, model__dropout=0.1))
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(2)
    monkeypatch.setattr(threads, "fewest", lambda seconds: 1)
    timed = train(tiny_recipe(corpus, tmp_path / "timed", model__dropout=0.1))
    assert curve(plain) == curve(timed)
    assert "a pass" in (timed.path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "")],
)
def test_the_command_line_has_threads_wait_a_short_while_unless_told_otherwise(given, expected):
    code = "import os; from windlass.cli import main\ntry: main(['--version'])\n"
    code += "finally: print(os.environ.get('GOMP_SPINCOUNT', ''))"
    ours = ("GOMP_", "OMP_WAIT")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(ours)} | given
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[1] == expected


@pytest.mark.parametrize(
    ("own_threads", "busy", "words"),
    [
        (2, 1.0, ["use 1.0 of 2 cores", "train.threads=1"]),
        (1, 1.0, []),
        (2, 0.2, []),
        (1, 2.0, ["use 2.0 of 2 cores", "stop them"]),
    ],
)
def test_busy_process_beside_training_is_warned_about_once(monkeypatch, own_threads, busy, words):
    own = min(own_threads, max(0.5, 2 - busy))  # cores that this process gets
    now = [0.0]

    def cpu_times(percpu):
        times = namedtuple("CPU", "user idle iowait")
        return [times(0, now[0] * max(0, 2 - own - busy), 0), times(0, 0, 0)]

    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(threads.psutil, "cpu_times", cpu_times)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "process_time", lambda: now[0] * min(own, 2 - busy))
    torch.set_num_threads(own_threads)
    watch = threads.Contention()
    texts = []
    for second in (2.0, 10.0, 20.0):
        now[0] = second
        texts.append(watch.poll())
    assert texts[0] == texts[2] == "", "too soon, and once"
    assert bool(texts[1]) == bool(words) and all(word in texts[1] for word in words)


@pytest.mark.parametrize(("context", "shape"), [(64, (8, 64)), (100_000, (1, 1024))])
def test_the_pass_that_is_timed_has_at_most_a_thousand_tokens(tmp_path, context, shape):
    """Attention over a long context would take minutes."""
    shapes = []

    class Model(torch.nn.Linear):
        def forward(self, tokens, labels):
            shapes.append(tuple(tokens.shape))
            return super().forward(tokens.float()[..., :2]).sum()

    recipe = tiny_recipe(tmp_path / "text.txt", tmp_path / "run", model__context=context)
    ranks = SimpleNamespace(device=torch.device("cpu"))
    threads.training_pass(recipe, Model(2, 2), 8, 50, ranks, None)()
    assert shapes == [shape]


def test_phase_of_start_that_lasts_says_what_it_does_in_log_too(tmp_path, monkeypatch, capsys):
    corpus = write_corpus(tmp_path / "text.txt", words=2000)
    log = tmp_path / "run" / "log.txt"
    waited = []
    monkeypatch.setattr("windlass.telemetry.console.LASTS_SECONDS", 0.05)

    def slow(module, name, words):
        real = getattr(module, name)

        def late(*args, **kwargs):
            if words not in waited:
                waited.append(words)
                wait_for(lambda: log.exists() and words in log.read_text(), 10)
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, late)

    for module, name, words in (
        (setup, "prepare_model", "model"),
        (trainer, "set_threads", "CPU threads"),
        (trainer, "set_lr", "first step: 1 x 8 x 32"),
    ):
        slow(module, name, words)
    train(tiny_recipe(corpus, tmp_path / "run", train__steps=2))
    assert len(waited) == 3 and "CPU threads" in capsys.readouterr().out
