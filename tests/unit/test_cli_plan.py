"""`windlass plan` from the outside."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from test_estimate_plan import write_run

from windlass.cli import main
from windlass.estimate.time import MEASURED
from windlass.recipe import Recipe
from windlass.run import Run
from windlass.study.measure import measuring_recipe, speed_of


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(["plan", *arguments])
    said = capsys.readouterr()
    return end.value.code, said.out, said.err


def as_json(capsys, *arguments):
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    return json.loads(out)


def test_c4_30m(capsys):
    made = as_json(capsys, "c4-30m", "--world", "4", "--device", "A100-80GB")
    assert made["model"]["parameters"] == 29_995_520 and made["length"]["steps"] == 4576
    assert made["length"]["optimal_tokens"] == 599_910_400 and made["length"]["optimal_steps"] == 4576
    assert made["time"]["basis"] == "assumed" and "assumed MFU" in made["time"]["detail"]
    assert made["precision"] == "bf16"


def test_the_table_fits_80_columns(capsys):
    code, out, _ = run(capsys, "gpt2-124m", "--world", "8", "--device", "H100")
    assert code == 0 and max(len(line.rstrip()) for line in out.splitlines()) <= 80
    assert "…" not in out
    for word in ("shard_grad_op", "Recommended", "device-hours", "warm-up ends", "assumed"):
        assert word in out


def test_an_unknown_device_is_unknown(capsys):
    made = as_json(capsys, "c4-30m", "--device", "Cerebras")
    assert made["time"] is None and made["device"]["usable_bytes"] is None
    assert made["recommendation"]["fits"] is None
    assert all(row["fits"] is None for row in made["memory"])
    _, out, _ = run(capsys, "c4-30m", "--device", "Cerebras")
    assert "unknown: nothing was measured" in " ".join(out.split()) and "--memory GB" in " ".join(out.split())
    assert as_json(capsys, "c4-30m", "--device", "Cerebras", "--memory", "40")["recommendation"]["fits"] is True


def test_a_device_without_bf16_takes_fp16(capsys):
    assert as_json(capsys, "c4-30m", "--device", "V100-32GB")["precision"] == "fp16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a recipe or a run"),
        (("c4-30m", "--device", "A100"), "there are several: A100-80GB"),
        (("c4-30m", "--world", "3"), "not divisible by world size 3"),
        (("quickstart", "parallel.strategy=single", "--world", "2"), "single"),
        (("quickstart", "--from", "nowhere"), "neither a run nor"),
        (("--compute", "nan"), "number of FLOPs"),
        (("nosuch",), "there is no preset"),
    ],
)
def test_bad_input_is_one_message(capsys, arguments, message):
    code, _, error = run(capsys, *arguments)
    assert code == 2 and message in error and "Traceback" not in error


def test_what_is_no_recipe_is_said_to_be_none(capsys, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.md").write_text("a = 1", encoding="utf-8")
    for name, words in {
        "model": "model.name=model", "model/config.json": "model.name=model", "empty": "is no run", "notes.md": "no recipe",
        "missing.toml": "there is no recipe file",
    }.items():  # fmt: skip
        code, _, error = run(capsys, name)
        assert code == 2 and words in error and "Traceback" not in error, name


@pytest.mark.parametrize("name", ["c4-30m", "gpt2-124m", "gpt-squad"])
@pytest.mark.parametrize("columns", [80, 120])
def test_every_line_fits_its_terminal(capsys, monkeypatch, name, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = run(capsys, name, "--world", "64", "--device", "A100-40GB", "train.global_batch=4096")
    assert code == 0 and "…" not in out and max(len(line.rstrip()) for line in out.splitlines()) <= columns


def test_compute(capsys):
    made = as_json(capsys, "--compute", "1e19")
    rule, fit, refit = made["compute"]["optima"]
    assert rule["tokens"] / rule["parameters"] == pytest.approx(20)
    assert all(6 * o["parameters"] * o["tokens"] == pytest.approx(1e19) for o in (rule, fit, refit))


def test_speed_from_a_past_run_and_two_worlds(capsys, tmp_path):
    write_run(tmp_path / "runs" / "one")
    two = write_run(tmp_path / "runs" / "two")
    text = two.metrics_path.read_text(encoding="utf-8")
    two.metrics_path.write_text(
        text.replace('"world": 1', '"world": 2')
        .replace('"step_ms": 100.0', '"step_ms": 62.5')
        .replace("20480.0", "32768.0"),
        encoding="utf-8",
    )
    made = as_json(capsys, "quickstart", "--from", "runs", "--world", "4")
    worlds = {w["world"]: w for w in made["worlds"]}
    assert worlds[1]["basis"] == worlds[2]["basis"] == "measured"
    assert worlds[4]["basis"] == "projected" and worlds[4]["tokens_per_s"] == pytest.approx(20_480 * 1.6**2)
    other = as_json(capsys, "quickstart", "model.layers=8", "--from", "runs/one")
    assert "scaled by the FLOPs" in other["time"]["detail"] and other["time"]["tokens_per_s"] < 20_480


def test_a_live_run_says_what_is_left(capsys, tmp_path):
    live = write_run(tmp_path / "runs" / "live")
    lines = [x for x in live.metrics_path.read_text(encoding="utf-8").splitlines() if json.loads(x)["step"] <= 40]
    live.metrics_path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    made = as_json(capsys, "runs/live")
    assert made["length"]["done"] == 40 and made["length"]["steps"] == 100
    assert made["time"]["train_seconds"] == pytest.approx(6.0)
    assert made["time"]["seconds"] == pytest.approx(6.0 + 3 * 2.0)  # evaluations at 50, 75 and 100
    assert made["device"]["kind"] == "cpu" and made["time"]["basis"] == "measured"
    first = {m["what"]: m for m in made["milestones"]}["evaluation"]
    assert first["first"] == 50 and first["first_seconds"] == pytest.approx(1.0 + 2.0)
    assert "step 40 of 100" in run(capsys, "runs/live")[1]


def test_a_finished_run_shows_prediction_and_measurement(capsys, tmp_path):
    write_run(tmp_path / "runs" / "done")
    code, out, _ = run(capsys, "runs/done")
    assert code == 0 and "Predicted beside measured" in out and "Milestones" not in out


def write_point(path, layers, loss):
    recipe = Recipe.load("quickstart", [f"model.layers={layers}"])
    path.mkdir(parents=True)
    (path / "recipe.toml").write_text(recipe.toml(), encoding="utf-8")
    size = {"parameters": layers * 200_000, "tokens": layers * 4_000_000}
    lines = [
        {"kind": "event", "event": "started", "step": 0},
        {"kind": "summary", "step": 9, "final_eval_loss": loss, **size},
        {"kind": "event", "event": "finished", "step": 9},
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")


def test_fit_scaling(capsys, tmp_path):
    for layers in (1, 2, 4, 8, 16):
        write_point(tmp_path / "study" / f"l{layers}", layers, 1.5 + 30 / (layers * 200_000) ** 0.25)
    write_point(tmp_path / "study" / "bad", 3, None)
    made = as_json(capsys, "--fit-scaling", "study")["scaling"]
    assert made["law"]["exponents"][0] == pytest.approx(0.25, abs=0.01) and made["along"] == "D = 20 N"
    assert [p["parameters"] for p in made["predictions"]] == [6.4e6, 12.8e6, 32e6]
    assert made["predictions"][0]["loss"] == pytest.approx(1.5 + 30 / 6.4e6**0.25, rel=1e-3)
    assert made["left_out"] == ["bad: no finite validation loss at its end"]
    code, out, _ = run(capsys, "--fit-scaling", "study")
    assert code == 0 and "back test" in out


def test_a_schedule_plot_that_cannot_be_written_is_one_message(capsys, tmp_path):
    (tmp_path / "file").touch()
    code, _, error = run(capsys, "quickstart", "--schedule-plot", str(tmp_path / "file" / "lr.png"))
    assert code == 2
    assert "name another file" in error


def test_schedule_plot(capsys, tmp_path):
    code, _, error = run(capsys, "quickstart", "--schedule-plot", "lr.png")
    assert code == 0 and (tmp_path / "lr.png").stat().st_size > 5000 and "lr.png" in error


def test_no_torch_is_imported():
    code = (
        "import sys; from windlass.cli import main\n"
        "try: main(['plan', 'gpt2-124m', '--world', '8', '--device', 'A100-40GB', '--json'])\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_measuring_cuts_a_recipe_down(tmp_path):
    recipe = Recipe.load("c4-30m", ["train.micro_batch=4"])
    cut = measuring_recipe(recipe, 2, "cpu", tmp_path)
    assert cut.batch(2).accumulation == 4 and cut.batch(2).micro_batch == 4 and cut.model == recipe.model
    assert cut.checkpoint.every == cut.eval.every == 0


def test_the_measured_steps_are_taken_times_the_accumulation(tmp_path):
    recipe = Recipe.load("quickstart", ["train.global_batch=64", "train.micro_batch=4"])
    cut = measuring_recipe(recipe, 1, "cpu", tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").write_text(cut.toml(), encoding="utf-8")
    tokens = 4 * 4 * 128
    lines = [
        {
            "kind": "train",
            "step": s,
            "step_ms": 50.0,
            "optimizer_ms": 8.0,
            "data_ms": 2.0,
            "tokens_per_s": tokens / 0.05,
        }
        for s in range(1, 9)
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")
    speed = speed_of(Run(tmp_path / "run"), recipe, cut, 1, "cpu")
    assert speed.basis == MEASURED
    assert speed.tokens_per_s == pytest.approx(4 * tokens / (4 * 0.040 + 0.010))
