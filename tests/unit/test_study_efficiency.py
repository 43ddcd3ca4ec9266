"""The numbers of scaling studies on made-up ledgers with known answers."""

from datetime import UTC, datetime

import pytest
from report_fixtures import edit
from scaling_fixtures import SETTINGS, VOCAB, build_scaling, phases, worlds

from windlass.ledger import timestamp
from windlass.model.size import count, flops_per_token
from windlass.recipe import Recipe
from windlass.reports.study import scaling_charts
from windlass.run import Run
from windlass.study.grid import NODES, WORLD
from windlass.study.numbers import windows
from windlass.study.setups import read_setups
from windlass.study.study import Scaling
from windlass.telemetry.measures import SETUP, STEP_PARTS


@pytest.fixture
def build(tmp_path):
    def make(scaling, cells, took, **rest):
        def step(assignment):
            return phases(took[assignment[WORLD]] if isinstance(took, dict) else took)

        path = tmp_path / str(len(list(tmp_path.iterdir())))
        return build_scaling(path, scaling, cells, took if callable(took) else step, **rest)

    return make


MODEL = Recipe.load("quickstart", SETTINGS).model
PARAMETERS = count(MODEL, VOCAB).total


def column(table, name):
    return [row.values[name] for row in table]


def test_windows_that_begin_after_the_warm_up_of_each_start():
    start = {"kind": "event", "event": "started", "step": 0}
    lines = [{"kind": "train", "step": s, "step_ms": 1.0} for s in (1, 5, 10, 20)]
    resumed = start | {"event": "resumed", "step": 10}
    again = [*lines[:3], resumed, lines[3], lines[3] | {"step": 25}]
    timed = [line | {"time": f"2026-01-01T00:00:{line['step']:02}Z"} for line in lines]
    for ledger, since, steps in (
        (lines, 0.0, [10, 20]),  # the line of step 10 holds steps 6 to 10
        (again, 0.0, [10, 25]),  # a resume warms up again
        (timed, timestamp(timed[2]), [20]),
    ):
        assert [x["step"] for x in windows([start, *ledger], since)] == steps


def stamp_after(line, seconds):
    return datetime.fromtimestamp(timestamp(line) + seconds, UTC).isoformat()


def test_a_probe_counts_from_where_all_its_ranks_were_running(build):
    study = build(Scaling("strong"), worlds(1, 2), 60.0, probe=lambda a: phases(50.0))
    [directory] = (study.path / "probes").iterdir()
    first, late = (Run(directory / str(rank)) for rank in range(2))
    delay = 1.5 * (timestamp(first.lines("train")[1]) - timestamp(first.lines("train")[0]))

    def slow_alone(line):
        return line | phases(900.0) if line["step"] in (10, 15) else line

    edit(first, slow_alone)
    edit(late, lambda line: line | {"time": stamp_after(line, delay)})
    assert read_setups(study)[1].values["exposed_ms"] == pytest.approx(60 - 50)


def test_strong_speed_up_and_efficiency_against_the_smallest_world(build):
    took = {2: 100.0, 4: 60.0, 8: 50.0}
    study = build(Scaling("strong"), worlds(4, 2, 8), took)
    two, four, eight = table = read_setups(study)
    assert [row.name for row in table] == [f"1 host, {n} ranks" for n in (2, 4, 8)]
    assert two.values["step_ms"] == 100, "the warm-up steps took ten times that"
    assert column(table, "speedup") == pytest.approx([1, 100 / 60, 2])
    efficiencies = [1, 100 * 2 / (60 * 4), 100 * 2 / (50 * 8)]
    assert column(table, "efficiency") == pytest.approx(efficiencies)
    assert four.values["samples_per_s"] == pytest.approx(8 / 0.060)
    assert four.values["batch_per_device"] == 2
    assert four.values["tokens_per_s_per_device"] == pytest.approx(8 * 32 / 0.060 / 4)
    assert eight.values["runtime_factor"] == pytest.approx(1 / eight.values["ratio"])


def test_fixed_data_compares_times_of_a_sample(build):
    cells = worlds(1, 2, 4, train__global_batch=lambda n: 2 * n)
    study = build(Scaling("fixed-data"), cells, {1: 100.0, 2: 110.0, 4: 125.0})
    table = read_setups(study)
    assert column(table, "efficiency") == pytest.approx([1, 100 / 110, 0.8])
    assert column(table, "samples_factor") == column(table, "speedup")


@pytest.mark.parametrize("grow", ["batch", "model"])
def test_weak_efficiency_is_baseline_over_current_time_of_a_step(build, grow):
    more = {"batch": "train__global_batch", "model": "model__layers"}[grow]
    cells = worlds(1, 2, **{more: lambda n: 2 * n})
    study = build(Scaling("weak", grow), cells, {1: 100.0, 2: 125.0})
    one, two = read_setups(study)
    work = two.values["flops_per_device"] / one.values["flops_per_device"]
    assert two.values["efficiency"] == pytest.approx(0.8 * work)
    assert two.values["speedup"] == pytest.approx(1.6 * work)
    if grow == "batch":
        assert work == 1
    else:
        assert work < 1 and two.name == "1 host, 2 ranks, 4 layers"
        longer = two.values["runtime_s"] / one.values["runtime_s"]
        assert two.values["ratio"] == pytest.approx(longer), "as an exercise prints it"


def test_the_parts_of_a_step_sum_to_it_and_a_negative_difference_is_said_to_be_noise(build):
    took, probed = {1: 100.0, 2: 60.0, 4: 20.0}, {2: 50.0, 4: 25.0}
    steps = {"took": lambda a: phases(took[a[WORLD]], data=3.0)}
    steps["probe"] = lambda a: phases(probed[a[WORLD]])
    study = build(Scaling("strong"), worlds(1, 2, 4), **steps)
    one, two, four = table = read_setups(study)
    for row in table:
        parts = sum(row.values.get(name, 0.0) for name in STEP_PARTS)
        assert parts == pytest.approx(row.values["step_ms"])
    assert one.missing["exposed_ms"] == "one rank does not communicate"
    # the probe: 50 ms, of them 1 data, 45 forward to optimizer, 4 the rest; the step: 60 ms, of
    # them 3 data
    got = [two.values[name] for name in ("compute_ms", "exposed_ms", "data_ms", "host_ms")]
    assert got == pytest.approx([45, 57 - 49, 3, 4])
    assert four.values["exposed_ms"] == 0 and any("noise" in text for text in four.remarks)


def test_without_a_probe_communication_has_a_reason_and_no_number(build):
    study = build(Scaling("strong"), worlds(1, 2), 50.0, probe=lambda a: phases(25.0))
    probe = next((study.path / "probes").glob("*/probe.json"))
    probe.write_text('{"state": "failed", "reason": "exit code 1: out of memory"}')
    row = read_setups(study)[1]
    assert "exposed_ms" not in row.values
    assert row.missing["exposed_ms"] == "the probe failed: exit code 1: out of memory"


def test_every_number_is_there_or_has_a_reason_and_cells_that_wait_or_failed_are_rows(build):
    study = build(Scaling("strong"), worlds(1, 2, 4), 50.0, waiting=[2], failed=[1])
    _, failed, waiting = table = read_setups(study)
    for row in table:
        assert set(SETUP) == set(row.values) & set(SETUP) | set(row.missing)
        assert not set(row.values) & set(row.missing)
    assert table[0].missing["mfu"] == "a CPU has no published peak"
    assert failed.result.state == "failed"
    assert failed.missing["speedup"] == "failed: exit code 1: out of memory"
    assert (waiting.result.state, waiting.missing["step_ms"]) == ("waiting", "not run yet")
    assert waiting.values["world"] == 4
    alone = build(Scaling("strong"), worlds(1, 2), 50.0, waiting=[0])
    assert "1 host, 1 rank, lacks numbers" in read_setups(alone)[1].missing["efficiency"]
    short = build(Scaling("strong"), worlds(1), 50.0)
    run = short.run_of(short.cells[0])
    edit(run, lambda x: None if x["kind"] == "train" and x["step"] > 5 else x)
    assert "after 5 steps of warm-up" in read_setups(short)[0].missing["step_ms"]


def test_oversubscribed_cores_are_said(build):
    cells = [{WORLD: 2, NODES: 1}, {WORLD: 4, NODES: 2}, {WORLD: 8, NODES: 2}]
    study = build(Scaling("strong"), cells, 50.0, cores=4)
    two, four, eight = read_setups(study)
    assert not [text for text in two.remarks + four.remarks if "oversubscribed" in text]
    assert "8 threads of 4 ranks share the 4 cores of node-0" in " ".join(eight.remarks)
    assert four.name == "2 hosts, 4 ranks"


def test_the_ideal_line_and_the_efficiency_have_one_baseline(build):
    """The smallest number of ranks, though more hosts have it."""
    cells = [{WORLD: 4, NODES: 1}, {WORLD: 2, NODES: 2}, {WORLD: 8, NODES: 2}]
    study = build(Scaling("strong"), cells, {2: 100.0, 4: 60.0, 8: 50.0})
    table = read_setups(study)
    throughput, efficiency = scaling_charts(study.scaling, table)[:2]
    measured, ideal = (one.y for one in throughput.series)
    assert (measured / ideal * 100).tolist() == pytest.approx(efficiency.series[0].y.tolist())
    assert efficiency.series[0].y.tolist() == pytest.approx([100, 100 / 60 / 2 * 100, 50])
    assert measured[0] == 80, "by rising ranks, whatever the order of the table"


def test_one_strategy_is_recommended(build):
    took = {"ddp": (100.0, 900.0), "shard_grad_op": (101.0, 500.0), "full_shard": (150.0, 400.0)}

    def step(a):
        ms, mb = took[a["parallel.strategy"]]
        return phases(ms) | {"peak_mb": mb}

    cells = [{WORLD: 4, "parallel.strategy": name} for name in took]
    study = build(Scaling("strategies"), cells, step)
    table = {row.assignment["parallel.strategy"]: row for row in read_setups(study)}
    recommended = [name for name, row in table.items() if row.values["recommended"]]
    assert recommended == ["shard_grad_op"], "within 2 % of ddp"
    assert "44 % less memory" in table["shard_grad_op"].recommended_because
    assert table["ddp"].missing["efficiency"] == "all setups have the same number of ranks"


def test_a_model_with_spare_rows_computes_a_head_of_all_its_rows(build):
    """`model.vocab` is larger than the tokenizer's vocabulary, which the ledger has."""
    for settings, vocab in ([], VOCAB), (["model.vocab=4000"], 4000):
        [one] = read_setups(build(Scaling("strong"), worlds(1), 50.0, settings=settings))
        flops = flops_per_token(one.recipe.model, vocab)
        assert one.values["flops_per_device"] == flops * 8 * 32


def test_a_model_of_transformers_is_counted_by_its_parameters(build):
    study = build(Scaling("strong"), worlds(1), 50.0, device="NVIDIA X1")

    def other_model(line):
        if line.get("event") != "started":
            return line
        network = {"architecture": "bloom", "layers": 2, "heads": 2, "width": 64, "vocab": VOCAB}
        return line | {"network": network, "trained": 1000}

    edit(study.run_of(study.cells[0]), other_model)
    [row] = read_setups(study)
    flops = 4 * PARAMETERS + 2 * 1000  # frozen weights have no gradient
    assert row.values["flops_per_device"] == flops * 8 * 32 and not row.on_cpu
    assert row.missing["mfu"] == "the peak of NVIDIA X1 is unknown"


def test_a_probe_with_more_padding_counts_by_the_tokens_of_the_step(build):
    """A rank's step has 4 x 32 tokens, its probe's 160: forward and backward take 128/160 of the
    probe's, nothing else does.
    """
    probe = phases(40.0) | {"padded_tokens_per_s": 160 / 40e-3}
    study = build(Scaling("strong"), worlds(1, 2), 50.0, probe=lambda a: probe)
    values = read_setups(study)[1].values
    assert values["compute_ms"] == pytest.approx((0.3 + 0.5) * 40 * 128 / 160 + 0.1 * 40)
    assert values["host_ms"] == pytest.approx(40 - 1 - 0.9 * 40)
    assert values["exposed_ms"] == pytest.approx(50 - 1 - values["compute_ms"] - values["host_ms"])
