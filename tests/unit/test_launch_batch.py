"""Batch scripts run by a real shell, with tools that write down how they were called; and what a
job asks for.
"""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import time
from datetime import datetime
from pathlib import Path

import pytest

from helpers import programs, refused, wait_for, windlass, write_ledger
from windlass.errors import RunFailed
from windlass.estimate.rank import checkpoint_bytes
from windlass.fileio import read_json
from windlass.launch.job import INDEX, Job, Site, read_site
from windlass.launch.rank_status import job_grace, report_saved
from windlass.launch.submit import Resources, cancel, find_scheduler, queued, render, submit_run
from windlass.recipe import Recipe
from windlass.run import Run
from windlass.study.jobs import submit_study
from windlass.study.study import Study
from windlass.training.start import resolve_start

TRAINS = "trap 'SAVED; exit 75' TERM; touch up; while :; do sleep 0.05; done"
SAVES = TRAINS.replace("SAVED", "sleep 0.3; touch saved")
NODES = {"nodes": 2, "ranks_per_node": 4, "gpus_per_node": 4, "memory_gb": 40}
SITE = Site(
    partition="gpu",
    account="lab",
    constraint="a100",
    modules=["cuda/12.6"],
    time="01:00:00",
    environment={"NCCL_IB_HCA": "mlx5 0"},
    cpus_per_rank=8,
    directives=["--exclusive", "--job-name=mine"],
)


def job_of(folder: Path, *command: str, **more) -> Job:
    return Job("run", list(command), folder, folder / "logs", **more)


def header(script: str) -> list[str]:
    """The option lines of a script, without the scheduler's mark."""
    return re.findall(r"^#(?:SBATCH|PBS) (.*)$", script, re.MULTILINE)


def run_job(job: Job, scheduler: str, **environ: str) -> subprocess.Popen:
    """Start a job's script as bash; waits for the file `up` if its command makes one."""
    job.logs.mkdir(exist_ok=True)
    job.script.write_text(render(job, Site(), scheduler))
    process = subprocess.Popen(
        ["bash", str(job.script)], env=os.environ | environ, start_new_session=True
    )
    if "touch up" in job.command[-1]:
        wait_for((job.directory / "up").exists, 20)
    return process


def test_the_header_for_slurm(tmp_path):
    script = render(job_of(tmp_path, "train", **NODES, array=[0, 2]), SITE, "slurm")
    options = "--nodes=2 --ntasks-per-node=4 --cpus-per-task=8 --array=0,2 --gpus-per-node=4"
    options += " --mem=40G --time=01:00:00 --partition=gpu --account=lab --constraint=a100"
    options += f" --output={tmp_path}/logs/%x_%A_%a.out --open-mode=append --requeue"
    options += " --signal=B:USR1@120 --exclusive --job-name=mine"
    assert header(script) == options.split()
    shell = {"module load cuda/12.6 || exit 1", "export NCCL_IB_HCA='mlx5 0'"}
    assert shell <= set(script.splitlines())


def test_the_header_for_pbs(tmp_path):
    """An array of one task is none; the cells between those that are left end at once."""
    site = SITE.model_copy(update={"directives": [], "constraint": "system=polaris"})
    many, one, none = (
        render(job_of(tmp_path, "train", INDEX, **NODES, array=array), site, "pbs")
        for array in ([0, 2, 3], [3], [])
    )
    options = [
        "-N run",
        "-l select=2:ncpus=32:ngpus=4:mem=40gb:mpiprocs=4:system=polaris",
        *("-l place=scatter", "-l walltime=01:00:00", "-q gpu", "-A lab", "-r y", "-j oe"),
        f"-o {tmp_path}/logs/",
    ]
    assert header(none) == header(one) == options
    assert set(header(many)) - set(options) == {"-J 0-3"}
    assert 'case "$task" in 1) exit 0' in many
    assert "task=${WINDLASS_TASK:-${PBS_ARRAY_INDEX:-3}}" in one.splitlines()


def test_a_name_that_is_not_plain_is_quoted(tmp_path):
    """SLURM replaces `%j` in the path of a log."""
    odd = Job('a "5%j" #1', ["train"], tmp_path, tmp_path / 'a "5%j" #1')
    lines = header(render(odd, Site(), "slurm"))
    assert f'--output="{tmp_path}/a \\"5%%j\\" #1/%x_%j.out"' in lines
    assert "--job-name=a__5_j___1" in lines
    script = render(odd, Site(), "pbs")
    assert f'-o "{tmp_path}/a \\"5%j\\" #1/"' in header(script)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


QSUB = r"""#!/bin/bash
# What OpenPBS refuses (qsub(1B); Libcmds/parse_depend.c), and the ids that it gives.
refuse() { echo "qsub: illegal $1 value" >&2; exit 2; }
echo "$@" >>QUEUED
case "${@: -1}" in /*) script=$(<"${@: -1}");; *) script=$(cat);; esac
echo "$script" >>QUEUED
set -- $(sed -n 's/^#PBS //p' <<<"$script") "$@"
while [ $# -gt 0 ]; do
  case $1 in
    -W) [[ $2 =~ ^depend=[a-z]+:[^:]+$ ]] || refuse -W
        [[ $2 =~ \[[0-9-]+\] ]] && { echo "cannot have dependancy on subjob or range" >&2; refuse -W; };;
    -a) [[ $2 =~ ^(([0-9]{2})?[0-9]{4})?[0-9]{6}([.][0-9]{2})?$ ]] || refuse -a;;
    -v) [[ $2 =~ ^[A-Z_]+=[^,]*$ ]] || refuse -v;;
    -N) [[ $2 =~ ^[A-Za-z0-9_.+-]{1,15}$ ]] || refuse -N;;
    -l) [[ $2 =~ ^(select=[0-9]+(:[a-z]+=[^:]+)*|place=scatter|walltime=[0-9:]+)$ ]] || refuse -l;;
    -J) [[ $2 =~ ^[0-9]+-[0-9]+(:[0-9]+)?(%[0-9]+)?$ ]] || refuse -J;;
    -r) [[ $2 = [yn] ]] || refuse -r;;
    -j) [[ $2 = oe || $2 = eo || $2 = n ]] || refuse -j;;
    -m) [[ $2 =~ ^([abe]+|n)$ ]] || refuse -m;;
    -q|-A|-M|-o|-e) [ "$2" ] || refuse "$1";;
    -V) set -- -V "$@";;
    /*) [ $# = 1 ] || refuse script; break;;
    *) echo "qsub: invalid option $1" >&2; exit 2;;
  esac
  shift 2
done
range=$(sed -n 's/^#PBS -J //p' <<<"$script")
[ "$range" ] || { echo 8.server; exit; }
[[ $range =~ ^([0-9]+)-([0-9]+)(:[0-9]+)?(%[0-9]+)?$ ]] && [ "${BASH_REMATCH[1]}" -lt "${BASH_REMATCH[2]}" ] || refuse -J
echo "8[].server"
"""


@pytest.fixture
def run_script(tmp_path, monkeypatch):
    """Starts a PBS script; `qsub` writes its arguments and the script into `queued`."""
    rerun = f'[ -e {tmp_path}/operator ] && echo "rerun $@" >>{tmp_path}/queued'
    qsub = QSUB.replace("QUEUED", f"{tmp_path}/queued")
    programs(tmp_path / "tools", monkeypatch, qsub=qsub, qrerun=rerun)

    def start(body: str, **more) -> subprocess.Popen:
        job = job_of(tmp_path, "bash", "-c", body, **more)
        if not job.array:
            return run_job(job, "pbs", PBS_JOBID="7.server")
        task = str(job.array[-1])
        return run_job(job, "pbs", PBS_JOBID=f"7[{task}].server", PBS_ARRAY_INDEX=task)

    return start


@pytest.mark.parametrize(
    ("number", "send", "queued"),
    [
        (signal.SIGUSR1, os.kill, 1),
        (signal.SIGTERM, os.kill, 0),
        # qsig(1B): "sends a signal to all the processes"; mpiexec and a sweep have no handler
        (signal.SIGUSR2, os.killpg, 0),
    ],
)
def test_only_the_time_limit_puts_a_stopped_job_back(run_script, tmp_path, number, send, queued):
    process = run_script(SAVES)
    send(process.pid, number)
    send(process.pid, number)  # a scheduler may say it twice
    assert process.wait(20) == 75 and (tmp_path / "saved").exists()
    text = (tmp_path / "queued").read_text() if queued else ""
    assert (tmp_path / "queued").exists() == bool(queued)
    assert text.count("depend=afterany:7.server") == queued and "\n#PBS -J" not in text
    left = [path.name for path in (tmp_path / "logs").glob(".open*")]
    assert left == [".open-run.idle"] * queued, "it saved no checkpoint"


@pytest.mark.parametrize("saves", [True, False])
def test_two_starts_without_a_checkpoint_end_the_chain(run_script, tmp_path, saves):
    """A start that is too slow for its time limit would never come further."""
    body = TRAINS.replace("SAVED", 'echo 120 >"$WINDLASS_SAVED"' if saves else ":")
    for start in (1, 2):
        (tmp_path / "up").unlink(missing_ok=True)
        process = run_script(body)
        os.kill(process.pid, signal.SIGUSR1)
        last = start == 2 and not saves
        assert process.wait(20) == (1 if last else 75)
    assert (tmp_path / "queued").read_text().count("afterany:7.server") == (2 if saves else 1)
    log = (tmp_path / "logs" / "run_7.out").read_text()
    assert ("checkpoint.every" in log) == (not saves)


def test_a_slow_save_is_signalled_earlier(tmp_path, monkeypatch):
    """The training measures its saves, and the script counts the time to the limit of 10 minutes."""
    monkeypatch.setenv("WINDLASS_SAVED", str(tmp_path / "saved"))
    monkeypatch.setenv("WINDLASS_LIMIT", "600")
    expected = [(10, 120), (100, 230), (1000, 300)]  # at most half of the limit
    for seconds, lead in expected:
        report_saved(seconds)
        assert int((tmp_path / "saved").read_text()) == lead and job_grace() == lead - 10
    quick = "exec /bin/sleep 0.05"  # the script looks at its clock every 5 s
    programs(tmp_path / "tools", monkeypatch, qsub="", qrerun="exit 0", sleep=quick)
    # 118 of 120 seconds, written when the training can be signalled
    slow = SAVES.replace("touch up", 'touch up; echo 118 >"$WINDLASS_SAVED"')
    job = job_of(tmp_path, "bash", "-c", slow, time="00:02:00", lead=60)
    assert run_job(job, "pbs", PBS_JOBID="7.server").wait(30) == 75
    assert (tmp_path / "saved").exists()


def test_a_run_with_slow_saves_asks_for_an_earlier_signal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = Recipe.load("quickstart", ["parallel.device=cpu", "run.dir=run"])
    event = {"kind": "event", "event": "checkpoint", "write_s": 200.0, "blocked_s": 1.0}
    write_ledger(Run(tmp_path / "run"), event)
    options = header(script_of(recipe, Site(), time="01:00:00"))
    assert "--signal=B:USR1@432" in options
    with refused("--time 00:08:00", "00:14:00"):
        script_of(recipe, Site(), time="00:08:00")


def test_a_task_of_an_array_goes_on_in_a_job_of_its_own(run_script, tmp_path):
    """PBS refuses what depends on a subjob: the new job starts by the clock, and --cancel finds it
    by the task's record.
    """
    process = run_script(SAVES, array=[0, 3])
    process.send_signal(signal.SIGUSR1)
    assert process.wait(20) == 75
    call, *script = (tmp_path / "queued").read_text().splitlines()
    words = call.split()
    assert words[0] == "-a" and words[2:] == ["-v", "WINDLASS_TASK=3"]
    assert 0 < datetime.strptime(words[1], "%Y%m%d%H%M.%S").timestamp() - time.time() < 120
    assert not [line for line in script if line.startswith("#PBS -J")]
    followed = {"scheduler": "pbs", "job": "8.server", "array": [3]}
    assert read_json(tmp_path / "logs" / "job-3.json") == followed
    assert not (tmp_path / "logs" / "job.json").exists()
    assert (tmp_path / "logs" / "run_7[3].out").exists()


@pytest.mark.parametrize("code", [0, 1, 2, 75])
def test_any_other_end_is_an_end(run_script, tmp_path, code):
    assert run_script(f"exit {code}").wait(20) == code
    assert not (tmp_path / "queued").exists()


@pytest.mark.parametrize("operator", [False, True])
def test_a_lost_host_starts_the_job_again_so_often(run_script, tmp_path, operator):
    """By `qrerun` where PBS allows that, else by a job that follows; the count goes on in that job."""
    if operator:
        (tmp_path / "operator").touch()
    lost = {"max_restarts": 2}
    for times in (1, 2, 2):
        assert run_script("exit 69", **lost).wait(20) == 69
        text = (tmp_path / "queued").read_text()
        counts = text.count("rerun 7.server"), text.count("afterany:7.server")
        assert counts == ((times, 0) if operator else (0, times))
        # --cancel finds the job that follows
        followed = {} if operator else {"scheduler": "pbs", "job": "8.server", "array": []}
        assert read_json(tmp_path / "logs" / "job.json") == followed
    # after the job had ended, the count begins anew
    assert run_script("exit 69", **lost).wait(20) == 69
    process = run_script("trap 'exit 69' TERM; touch up; while :; do sleep 0.05; done")
    process.terminate()  # by a person
    assert process.wait(20) == 69 and (tmp_path / "queued").read_text().count("7.server") == 3


@pytest.fixture
def slurm_script(tmp_path, monkeypatch):
    """Starts the SLURM script of one task of an array; tools that write down how they were called,
    and leave `out` out.
    """

    def start(body: str, requeues: bool, out: str = "", others: bool = True) -> subprocess.Popen:
        ends = {
            "scontrol": f"exit {0 if requeues else 1}",
            "squeue": f"echo {out}",
            "sbatch": f'[ "$1" != --test-only ] || exit {0 if others else 1}',
        }
        called = {name: f'echo {name} "$@" >>{tmp_path}/queued\n{ends[name]}' for name in ends}
        programs(tmp_path / "tools", monkeypatch, **called)
        job = job_of(tmp_path, "bash", "-c", body, array=[4])
        return run_job(job, "slurm", SLURM_JOB_ID="9", SLURM_ARRAY_TASK_ID="4")

    return start


def asked_of_slurm(folder: Path) -> list[str]:
    lines = (folder / "queued").read_text().replace(f" {folder}/logs/submit.sh", "").splitlines()
    return [line for line in lines if not line.startswith("squeue") and "--test-only" not in line]


FOLLOWS = "sbatch --parsable --dependency=afterany:9"


@pytest.mark.parametrize("requeues", [True, False])
@pytest.mark.parametrize(("others", "left_out"), [(True, "x1,x7"), (False, "x1")])
def test_a_lost_host_is_left_out_if_others_are_left(
    slurm_script, tmp_path, requeues, others, left_out
):
    """Beside those that were left out before; `windlass launch` names it in a file."""
    lose = 'printf x7 >"$WINDLASS_LOST_HOSTS"; exit 69'
    assert slurm_script(lose, requeues, "x1", others).wait(20) == 69
    update = f"scontrol update JobId=9 ExcNodeList={left_out}"
    how = update if requeues else f"{FOLLOWS} --exclude={left_out} --array=4"
    assert asked_of_slurm(tmp_path) == ["scontrol requeue 9", how]
    assert "--test-only --exclude=x1,x7 --array=4" in (tmp_path / "queued").read_text()
    assert [path.name for path in (tmp_path / "logs").glob(".open*")] == [".open-4"]


def script_of(recipe: Recipe, site: Site, scheduler: str = "slurm", **asked) -> str:
    """The batch script of a recipe's training; nothing is written, nothing submitted."""
    resources = Resources(**asked)
    done = submit_run(recipe, scheduler=scheduler, site=site, asked=resources, dry_run=True)
    assert not done.job
    return done.script


@pytest.mark.parametrize("of_study", [False, True])
def test_ranks_run_in_the_sites_container(tmp_path, monkeypatch, of_study):
    """`srun` and `apptainer` write down their arguments: the launcher's own options, then the
    image, for the check and the training; a cell of a study is wrapped as well.
    """
    monkeypatch.chdir(tmp_path)
    record = f'echo "$(basename "$0") $@" >>{tmp_path}/called'
    srun = f'{record}; while [ "${{1#-}}" != "$1" ]; do shift; done; exec "$@"'
    tools = {"srun": srun, "apptainer": record, "sbatch": "echo 7", "squeue": ""}
    programs(tmp_path / "tools", monkeypatch, **tools)
    program = "apptainer exec --nv '/my images/w.sif' windlass"
    site = Site(launcher_options="--container-image=w.sqsh", program=program)
    recipe = Recipe.load("quickstart", ["parallel.device=cpu", "run.dir=run"])
    asked = Resources(nodes=1 if of_study else 2, min_busbw=1)
    how = {"site": site, "asked": asked}
    if of_study:
        study = Study.create(recipe, ["run.seed=1", "parallel.world=2"], tmp_path / "study")
        (done,) = submit_study(study, **how)
    else:
        done = submit_run(recipe, **how)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_ARRAY_TASK_ID": "0"}
    script = ["bash", str(done.directory / "submit.sh")]
    assert subprocess.run(script, env=os.environ | job, check=False).returncode == 0
    check, inner, *train = (tmp_path / "called").read_text().splitlines()
    image = "apptainer exec --nv /my images/w.sif windlass"
    launched = "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0"
    assert inner.startswith(f"{image} check ")
    assert check == f"{launched} --container-image=w.sqsh {inner}" or of_study
    if of_study:
        assert train == [f"{image} sweep {tmp_path}/study --only 0"]
    else:
        words = f"{image} train {tmp_path}/run/submit.toml"
        assert train == [f"{launched} --container-image=w.sqsh {words}", words]


def test_a_check_that_fails_ends_the_job(run_script, tmp_path):
    check = ["bash", "-c", "echo rates; echo the bandwidth; echo TOO SLOW; exit 46"]
    assert run_script("touch trained", before=check).wait(20) == 46
    assert not (tmp_path / "trained").exists()
    log, rates = (tmp_path / "logs" / "run_7.out").read_text(), tmp_path / "logs" / "check_7.out"
    assert "rates" in rates.read_text() and "rates" not in log
    assert "TOO SLOW" in log and str(rates) in log


def test_the_memory_of_a_host(tmp_path, monkeypatch):
    """A base for each rank, and twice the host's part of a checkpoint; on a CPU what trains as
    well. A site may say it.
    """
    from windlass.estimate.advice import host_memory_gb

    recipe = Recipe.load("c4-30m", ["model.vocab=50304"])
    disk = checkpoint_bytes(recipe, 50304) / 1e9
    assert host_memory_gb(recipe, 4, 4, on_cpu=False) == math.ceil(4 * 8 + 2 * disk)
    sharded = recipe.replace("parallel.strategy=full_shard", "model.layers=100")
    large = checkpoint_bytes(sharded, 50304) / 1e9
    assert host_memory_gb(sharded, 8, 4, on_cpu=False) == math.ceil(4 * 8 + large)
    assert host_memory_gb(recipe, 1, 1, on_cpu=True) > 3 + 2 * disk
    monkeypatch.chdir(tmp_path)
    for asked, line in ((5, "--mem=20G"), (0, "")):
        options = header(script_of(recipe, Site(gpus_per_node=4, memory_per_rank=asked)))
        assert [text for text in options if "--mem" in text] == [line] * bool(line)
    assert not list(tmp_path.iterdir()), "a dry run writes nothing"


def trained_recipe(script: Path) -> Recipe:
    line = next(line for line in script.read_text().splitlines() if " train " in line)
    words = shlex.split(line.removesuffix(" &"))
    return Recipe.load(words[words.index("train") + 1], words[words.index("train") + 2 :])


def test_a_job_trains_the_recipe_as_it_was_when_it_was_submitted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    over = "echo Unknown Job Id >&2; exit 153"
    programs(tmp_path / "bin", monkeypatch, qsub="echo 7.server", qstat=over)
    mine, script = tmp_path / "mine.toml", tmp_path / "run" / "submit.sh"

    def submitted(lr: float, *settings: str) -> Recipe:
        mine.write_text(f'extends = "quickstart"\n[optim]\nlr = {lr}\n')
        words = ("submit", "mine.toml", "run.dir=run", "parallel.device=cpu", *settings)
        windlass(*words, "--scheduler", "pbs", cwd=tmp_path)
        mine.write_text('extends = "quickstart"\n[optim]\nlr = 0.5\n')
        return trained_recipe(script)

    recipe = submitted(0.002, "train.steps=7")
    assert (recipe.optim.lr, recipe.train.steps, recipe.preset) == (0.002, 7, "mine")
    assert recipe.run_dir == tmp_path / "run"
    # what a job writes beside it does not keep a run from beginning
    for name in (".open-run", "mine_7.out", "check_7.out", "7.server.OU", "job-0.json"):
        (tmp_path / "run" / name).touch()
    assert not resolve_start(recipe).resuming
    assert submitted(0.9).optim.lr == 0.9
    # a run of another recipe, which the job would reject after its time in the queue
    (tmp_path / "run" / "recipe.toml").write_text(recipe.toml())
    words = ("submit", "mine.toml", "run.dir=run", "parallel.device=cpu", "--scheduler", "pbs")
    assert "optim.lr: 0.002 -> 0.5" in windlass(*words, cwd=tmp_path, code=2).stderr


@pytest.mark.parametrize(
    ("asked", "gpus", "words"),
    [
        ({}, 0, ["--gpus-per-node", "parallel.device=cpu"]),
        ({"time": "4h", "gpus_per_node": 1}, 0, ["--time", "04:00:00"]),
        ({"time": "00:03:00", "gpus_per_node": 1}, 0, ["--time 00:03:00", "00:10:00"]),
        ({"gpus_per_node": 3}, 0, ["global_batch"]),
    ],
)
def test_what_windlass_rejects(tmp_path, monkeypatch, asked, gpus, words):
    monkeypatch.chdir(tmp_path)
    with refused(*words):
        script_of(Recipe.load("quickstart"), Site(gpus_per_node=gpus), "pbs", **asked)


def test_what_the_scheduler_rejects_is_one_message(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    problem = "sbatch: error: invalid partition specified: nowhere"
    programs(tmp_path / "tools", monkeypatch, sbatch=f"echo '{problem}' >&2; exit 1", squeue="")
    words = ("submit", "quickstart", "run.dir=run", "parallel.device=cpu", "--scheduler", "slurm")
    error = windlass(*words, code=2).stderr
    assert problem in error and "--site" in error


def test_the_site_file(tmp_path, monkeypatch):
    path = tmp_path / "site.toml"
    for text, words in (
        ('queue = "x"', ["queue", "partition"]),
        ('time = "4h"', ["time", "HH:MM:SS"]),
        ("a =", ["site.toml"]),
        ('environment = {WANDB_API_KEY = "x"}', ["WANDB_API_KEY", "export it"]),
        ("modules = 'cuda'", ["modules", "list"]),
        ("directives = ['#SBATCH -x a']", ["directives", "#SBATCH -x a"]),
    ):
        path.write_text(text)
        with refused(*words):
            read_site(path)
    with refused("missing.toml"):
        read_site(tmp_path / "missing.toml")
    path.write_text('environment = {TOKENIZERS_PARALLELISM = "false"}')  # no secret
    assert read_site(path).environment
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused("sbatch", "qsub", "--dry-run"):
        find_scheduler("", Site())
    with refused("sbatch"):
        find_scheduler("slurm", Site())
    with refused("condor", "pbs"):
        find_scheduler("", Site(scheduler="condor"))
    assert find_scheduler("", Site(scheduler="pbs"), dry_run=True) == "pbs"


IDS = r"([0-9]+(\[[0-9]*\])?\.server ?)+"
STRICT = {"qdel": rf"^{IDS}$", "qsig": rf"^-s SIGUSR2 {IDS}$"}


def fake_pbs(folder: Path, patch: pytest.MonkeyPatch, states: dict[str, str], qsub: str) -> None:
    """A PBS with these jobs and their states, as `{"7[]": "B", "7[0]": "R"}`; other jobs are over.

    `qstat -t` lists the subjobs of an array. `qdel` and `qsig` write into `called` how they were
    called, and reject what the manual does not have.
    """
    head = "Job id  Name  User  Time Use S Queue\n------  ----  ----  -------- - -----"
    rows = {job: f"{job}.server run me 00:10:00 {state} gpu" for job, state in states.items()}
    cases = ""
    for job, row in rows.items():
        subjobs = [line for other, line in rows.items() if other.startswith(job[:-1])]
        shown = {f"{job}.server": [row], f"-t {job}.server": subjobs}
        for words, lines in shown.items():
            cases += f"'{words}') echo '{chr(10).join([head, *lines])}';;\n"
    over = 'echo "qstat: $1 Job has finished, use -x or -H" >&2; exit 35'
    tools = {"qstat": f'case "$*" in\n{cases}*) {over};;\nesac', "qsub": qsub}
    for tool, pattern in STRICT.items():
        usage = f'[[ "$*" =~ $pattern ]] || {{ echo "{tool}: usage" >&2; exit 2; }}'
        record = f'echo {tool} "$@" >>{folder}/called'
        tools[tool] = f"#!/bin/bash\npattern='{pattern}'\n{usage}\n{record}\n"
    programs(folder / "tools", patch, **tools)


@pytest.mark.parametrize(
    ("state", "called"),
    [
        ("R", "qsig -s SIGUSR2 7.server"),
        ("S", "qsig -s SIGUSR2 7.server"),
        ("Q", "qdel 7.server"),
        ("H", "qdel 7.server"),
        ("", ""),
    ],
)
def test_cancel_on_pbs_leaves_time_for_a_save(tmp_path, monkeypatch, state, called):
    """`qdel` of a running job kills it after some seconds: its script gets a signal instead, which
    it passes on.
    """
    fake_pbs(tmp_path, monkeypatch, {"7": state} if state else {}, "")
    (tmp_path / "job.json").write_text('{"scheduler": "pbs", "job": "7.server"}')
    if not state:
        with refused("7.server", "is over"):
            cancel(tmp_path)
        return
    assert cancel(tmp_path) == "7.server" and (tmp_path / "called").read_text().strip() == called


def test_cancel_of_an_array_on_pbs_and_of_the_jobs_that_follow(tmp_path, monkeypatch):
    """State B: `qdel` of the array would kill what runs. First what waits is deleted, so that it
    does not start. Job 9 continues subjob 0, which is over.
    """
    array = {"7[]": "B", "7[0]": "X", "7[1]": "R", "7[2]": "R", "7[3]": "Q", "7[10]": "Q"}
    fake_pbs(tmp_path, monkeypatch, array | {"9": "R"}, "")
    for name, job in (("job", "7[].server"), ("job-0", "9.server"), ("job-4", "8.server")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"scheduler": "pbs", "job": job}))
    assert queued(tmp_path) == ("7[].server", "begun")
    assert cancel(tmp_path) == "7[].server, 9.server"
    assert (tmp_path / "called").read_text().splitlines() == [
        "qdel 7[3].server 7[10].server",
        "qsig -s SIGUSR2 7[1].server 7[2].server",
        "qsig -s SIGUSR2 9.server",
    ]


def test_a_second_submission_leaves_the_cells_of_jobs_alone(tmp_path, monkeypatch):
    """Of an array that has begun, task 0 continues in job 9, 1 runs, 2 waits, 3 and 4 are over."""
    monkeypatch.chdir(tmp_path)
    states = {"8[]": "B", "8[0]": "X", "8[1]": "R", "8[2]": "Q", "9": "H"}
    fake_pbs(tmp_path, monkeypatch, states, QSUB.replace("QUEUED", f"{tmp_path}/queued"))
    recipe, path, messages = Recipe.load("quickstart"), tmp_path / "study", list[str]()
    how = {"scheduler": "pbs", "site": Site(gpus_per_node=1), "notify": messages.append}
    submit_study(Study.create(recipe, ["run.seed=1,2,3,4,5"], path), **how)
    [script] = path.rglob("submit.sh")
    first, marks = script.read_text(), [script.with_name(f".open-{task}") for task in (0, 1)]
    for mark in marks:
        mark.write_text("0")
    followed = {"scheduler": "pbs", "job": "9.server", "array": [0]}
    script.with_name("job-0.json").write_text(json.dumps(followed))
    study = Study.create(recipe, ["run.seed=6,7"], path)
    study.set_failure(study.cells[3], "bad input")
    [second] = submit_study(study, **how)
    assert "-J 4-6" in header(second.script) and " exit 0;; esac" not in second.script
    assert script.read_text() == first and all(mark.exists() for mark in marks)
    said = "\n".join(messages)
    for words in ("cell 1 is in job 9.server", "cell 4 failed", "cell 2, 3 is in job 8[].server"):
        assert words in said, said
    assert queued(path) == ("8[].server", "begun")
    with refused("qstat", "login node"):
        monkeypatch.setenv("PATH", str(tmp_path))
        cancel(path)


@pytest.mark.parametrize(
    ("slurm", "state"),
    [
        ("echo PENDING PartitionTimeLimit", "pending (PartitionTimeLimit)"),
        ("echo RUNNING None", "running"),
        ("echo; echo RUNNING None", "running"),  # an empty line is not a task
        ("echo PENDING Resources; echo RUNNING None", "running"),
        ("true", ""),
        ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", ""),
        ("echo Socket timed out >&2; exit 1", "unknown (Socket timed out)"),
    ],
)
def test_the_state_of_a_job(tmp_path, monkeypatch, slurm, state):
    """Why it waits; a job whose scheduler does not answer is not over."""
    programs(tmp_path / "tools", monkeypatch, sbatch="", squeue=slurm)
    (tmp_path / "job.json").write_text('{"scheduler": "slurm", "job": "7"}')
    assert queued(tmp_path) == ("7", state)
    if state.startswith("unknown"):
        with pytest.raises(RunFailed, match="timed out"):
            cancel(tmp_path)


def test_the_open_cells_of_a_study(tmp_path, monkeypatch):
    """Cells that are done, failed or running are left out; `parallel.world` as an axis gives each
    cell one host.
    """
    monkeypatch.chdir(tmp_path)
    grid = ["optim.lr=1e-2,1e-3", "run.seed=1,2"]
    study = Study.create(Recipe.load("quickstart"), grid, tmp_path / "study")
    study.set_failure(study.cells[1], "bad input")
    running = study.run_of(study.cells[2])
    write_ledger(running, {"kind": "event", "event": "started"})
    running.heartbeat_path.touch()
    messages = list[str]()
    how = {"scheduler": "slurm", "asked": Resources(2, gpus_per_node=4), "notify": messages.append}
    how |= {"site": Site(), "dry_run": True}
    [(_, script, _)] = submit_study(study, **how)
    assert {"--array=0,3", "--nodes=2", "--gpus-per-node=4"} <= set(header(script))
    assert f'sweep {study.path} --only "$task" --launch &' in script
    assert "cell 2 " in messages[0] and "--retry-failed" in messages[0] and "cell 3" in messages[1]
    [(_, script, _)] = submit_study(study, **how, retry_failed=True)
    assert "--array=0,1,3" in header(script)
    assert '"$task" --launch --retry-failed &' in script
    recipe = Recipe.load("quickstart", ["parallel.device=cpu"])
    cpu = Study.create(recipe, ["parallel.world=1,2"], tmp_path / "cpu")
    pbs = {"scheduler": "pbs", "site": Site(), "dry_run": True}
    [(_, script, _)] = submit_study(cpu, **pbs)
    assert any(line.startswith("-l select=1:ncpus=2:") for line in header(script))
    assert "--launch" not in script and "mpiprocs=2" in script
    for cell in cpu.cells:
        cpu.set_failure(cell, "bad input")
    assert submit_study(cpu, **pbs) == []
