"""Batch scripts run by a real shell, with a `qsub` that only writes down how it was called; and what a job asks for."""

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from helpers import refused, wait_for, windlass, write_ledger
from windlass.fileio import read_json
from windlass.launch.batch import INDEX, Job, Site, render
from windlass.launch.submit import Resources, cancel, find_scheduler, make_job, queued, read_site, submit_run
from windlass.recipe import Recipe
from windlass.study.study import Study
from windlass.study.submit import submit_study

SITE = Site(
    partition="gpu", account="lab", constraint="a100", mail="me@site.org", modules=["cuda/12.6"], time="01:00:00",
    environment={"NCCL_IB_HCA": "mlx5 0"}, cpus_per_rank=8, directives=["--exclusive", "--job-name=mine"],
)  # fmt: skip


def job_of(folder: Path, *command: str, **more) -> Job:
    return Job("run", list(command), folder, folder / "logs", folder / "logs" / "submit.sh", **more)


def header(script: str) -> list[str]:
    return [line for line in script.splitlines() if line.startswith(("#SBATCH", "#PBS"))]


def test_the_header_for_slurm(tmp_path):
    script = render(job_of(tmp_path, "train", nodes=2, ranks_per_node=4, gpus_per_node=4, array=[0, 2]), SITE, "slurm")
    assert header(script) == [f"#SBATCH {x}" for x in (
        "--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=8", "--array=0,2", "--gpus-per-node=4", "--time=01:00:00",
        "--partition=gpu", "--account=lab", "--constraint=a100", "--mail-user=me@site.org", "--mail-type=END,FAIL",
        f"--output={tmp_path}/logs/%x_%A_%a.out", "--open-mode=append", "--requeue", "--signal=B:USR1@120",
        "--exclusive", "--job-name=mine",
    )]  # fmt: skip
    assert {"module load cuda/12.6 || exit 1", "export NCCL_IB_HCA='mlx5 0'"} <= set(script.splitlines())


def test_the_header_for_pbs(tmp_path):
    """An array of one task is none; the cells between those that are left end at once."""
    site = SITE.model_copy(update={"directives": [], "constraint": "system=polaris"})
    many, one, none = (
        render(job_of(tmp_path, "train", INDEX, nodes=2, ranks_per_node=4, gpus_per_node=4, array=array), site, "pbs")
        for array in ([0, 2, 3], [3], [])
    )
    assert header(none) == [f"#PBS {x}" for x in (
        "-N run", "-l select=2:ncpus=32:ngpus=4:mpiprocs=4:system=polaris", "-l place=scatter", "-l walltime=01:00:00", "-q gpu", "-A lab",
        "-M me@site.org", "-m ae", "-r y", "-j oe", "-o /dev/null",
    )]  # fmt: skip
    assert set(header(many)) - set(header(none)) == {"#PBS -J 0-3"} and header(one) == header(none)
    assert 'case "$task" in 1) exit 0' in many and "task=${WINDLASS_TASK:-${PBS_ARRAY_INDEX:-3}}" in one.splitlines()


def test_the_launcher_of_the_site_and_the_limit_of_an_array(tmp_path):
    site = Site(launcher="torchrun", cells_at_once=2)
    job = job_of(tmp_path, "train", INDEX, array=[0, 2])
    assert "export WINDLASS_LAUNCHER=torchrun" in render(job, site, "slurm").splitlines()
    assert "#SBATCH --array=0,2%2" in header(render(job, site, "slurm"))
    assert "#PBS -J 0-2%2" in header(render(job, site, "pbs"))
    spaced = Job("a run", ["train"], tmp_path, tmp_path / "a run", tmp_path / "submit.sh")
    assert f'#SBATCH --output="{tmp_path}/a run/%x_%j.out"' in header(render(spaced, site, "slurm"))
    assert "#PBS -N a_run" in header(render(spaced, site, "pbs"))


@pytest.fixture
def run_script(tmp_path, monkeypatch):
    """Starts a PBS script as bash; `qsub` writes its arguments and the script into `queued`."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "qsub").write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/queued\ncat >>{tmp_path}/queued\necho 8.server\n')
    (tools / "qrerun").write_text(f'#!/bin/sh\n[ -e {tmp_path}/operator ] && echo "rerun $@" >>{tmp_path}/queued\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    (tmp_path / "logs").mkdir()

    def start(body: str, **more) -> subprocess.Popen:
        job = job_of(tmp_path, "bash", "-c", body, **more)
        job.script.write_text(render(job, Site(), "pbs"))
        environ = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "PBS_JOBID": "7.server"}
        return subprocess.Popen(["bash", str(job.script)], env=environ, start_new_session=True)

    return start


SAVES = "trap 'sleep 0.3; exit 75' TERM; touch up; while :; do sleep 0.05; done"


@pytest.mark.parametrize(("number", "queued"), [(signal.SIGUSR1, 1), (signal.SIGTERM, 0), (signal.SIGUSR2, 0)])
def test_only_the_time_limit_puts_a_stopped_job_back(run_script, tmp_path, number, queued):
    process = run_script(SAVES, array=[0, 1])
    wait_for((tmp_path / "up").exists, 20)
    process.send_signal(number)
    process.send_signal(number)  # a scheduler may say it twice
    assert process.wait(20) == 75
    text = (tmp_path / "queued").read_text() if (tmp_path / "queued").exists() else ""
    assert text.count("depend=afterany:7.server") == queued and "\n#PBS -J" not in text
    assert not list((tmp_path / "logs").glob(".open*"))


def test_the_limit_is_seen_by_the_script_itself(run_script, tmp_path):
    """PBS sends no signal ahead of it: the script counts the time."""
    began = time.monotonic()
    assert run_script(SAVES, time="00:02:01").wait(30) == 75  # one second before the 120 of grace
    assert time.monotonic() - began < 20 and "depend" in (tmp_path / "queued").read_text()


@pytest.mark.parametrize("code", [0, 1, 2, 75])
def test_any_other_end_is_an_end(run_script, tmp_path, code):
    assert run_script(f"exit {code}").wait(20) == code
    assert not (tmp_path / "queued").exists() and (tmp_path / "logs" / ".exit").read_text().strip() == str(code)


@pytest.mark.parametrize("operator", [False, True])
def test_a_lost_host_starts_the_job_again_so_often(run_script, tmp_path, operator):
    """By `qrerun` where PBS allows that, else by a job that follows; the count goes on in that job."""
    if operator:
        (tmp_path / "operator").touch()
    for times in (1, 2, 2):
        assert run_script("exit 69", max_restarts=2).wait(20) == 69
        text = (tmp_path / "queued").read_text()
        assert (text.count("rerun 7.server"), text.count("afterany:7.server")) == (
            (times, 0) if operator else (0, times)
        )
        followed = {} if operator else {"scheduler": "pbs", "job": "8.server"}
        assert read_json(tmp_path / "logs" / "job.json") == followed, "--watch and --cancel find the job that follows"
    assert run_script("exit 69", max_restarts=2).wait(20) == 69, "the count began anew after the job had ended"
    process = run_script("trap 'exit 69' TERM; touch up; while :; do sleep 0.05; done", max_restarts=9)
    wait_for((tmp_path / "up").exists, 20)
    process.terminate()
    assert process.wait(20) == 69 and (tmp_path / "queued").read_text().count("7.server") == 3, "ended by a person"


@pytest.fixture
def slurm_script(tmp_path):
    """Starts the SLURM script of one task of an array; tools that write down how they were called, and leave `out` out."""

    def start(body: str, requeues: bool, out: str = "", others: bool = True) -> subprocess.Popen:
        tools, job = tmp_path / "tools", job_of(tmp_path, "bash", "-c", body, array=[4])
        ends = {
            "scontrol": f"exit {0 if requeues else 1}", "squeue": f"echo {out}",
            "sbatch": f'[ "$1" != --test-only ] || exit {0 if others else 1}',
        }  # fmt: skip
        for name, end in ends.items():
            tools.mkdir(exist_ok=True)
            (tools / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{tmp_path}/queued\n{end}\n')
            (tools / name).chmod(0o755)
        job.logs.mkdir()
        job.script.write_text(render(job, Site(), "slurm"))
        environ = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "4"}
        return subprocess.Popen(["bash", str(job.script)], env=os.environ | environ, start_new_session=True)

    return start


def asked_of_slurm(folder: Path) -> list[str]:
    """The calls that change something."""
    lines = (folder / "queued").read_text().replace(f" {folder}/logs/submit.sh", "").splitlines()
    return [line for line in lines if not line.startswith("squeue") and "--test-only" not in line]


@pytest.mark.parametrize("requeues", [True, False])
def test_slurm_without_requeueing_gets_a_dependent_job(slurm_script, tmp_path, requeues):
    process = slurm_script(SAVES, requeues)
    wait_for((tmp_path / "up").exists, 20)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(20) == 75
    follows = "sbatch --parsable --dependency=afterany:9 --array=4"
    assert asked_of_slurm(tmp_path) == ["scontrol requeue 9"] + [follows] * (not requeues)


@pytest.mark.parametrize("requeues", [True, False])
@pytest.mark.parametrize(("others", "left_out"), [(True, "x1,x7"), (False, "x1")])
def test_a_lost_host_is_left_out_where_others_are_left(slurm_script, tmp_path, requeues, others, left_out):
    """Beside those that were left out before; `windlass launch` names it in a file."""
    assert slurm_script('printf x7 >"$WINDLASS_LOST_HOSTS"; exit 69', requeues, "x1", others).wait(20) == 69
    how = f"scontrol update JobId=9 ExcNodeList={left_out}"
    how = how if requeues else f"sbatch --parsable --dependency=afterany:9 --exclude={left_out} --array=4"
    assert asked_of_slurm(tmp_path) == ["scontrol requeue 9", how]
    assert "--test-only --exclude=x1,x7 --array=4" in (tmp_path / "queued").read_text()
    assert [path.name for path in (tmp_path / "logs").glob(".open*")] == [".open-4"]


@pytest.mark.parametrize(("code", "done"), [(0, True), (1, True), (69, False), (75, False)])
def test_commands_at_the_end_change_nothing(run_script, tmp_path, code, done):
    """As the synchronisation of offline trackers; not before the run has ended."""
    assert run_script(f"exit {code}", after=[["bash", "-c", "touch after; exit 3"]]).wait(20) == code
    assert (tmp_path / "after").exists() == done


def test_offline_trackers_are_synchronised(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = Recipe.load("quickstart", ['telemetry.trackers=["wandb", "mlflow", "tensorboard"]'])
    for mode, uri in (("offline", "sqlite:///x.db"), ("online", "http://127.0.0.1:5000")):
        site = Site(gpus_per_node=1, environment={"WANDB_MODE": mode, "MLFLOW_TRACKING_URI": uri})
        script, _ = submit_run(recipe, "quickstart", [], scheduler="slurm", site=site, dry_run=True)
        assert ("WANDB_MODE=online" in script and "--to wandb" in script) == (mode == "offline")
        assert ("--to mlflow" in script) == (mode == "online") and "--to tensorboard" not in script


def test_a_check_that_fails_ends_the_job(run_script, tmp_path):
    assert run_script("touch trained", before=["bash", "-c", "exit 46"]).wait(20) == 46
    assert not (tmp_path / "trained").exists()


def test_lost_hosts_restart_a_job_so_often(run_script, tmp_path):
    for attempt in range(4):
        process = run_script("touch up; sleep 60", max_restarts=2)
        if attempt == 3:  # the fourth start would be the third restart
            assert process.wait(20) == 1
            assert "--max-restarts is 2" in (tmp_path / "logs" / "run_7.out").read_text()
            break
        wait_for((tmp_path / "up").exists, 20)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        (tmp_path / "up").unlink()
    assert not list((tmp_path / "logs").glob(".open*"))


def test_what_a_job_asks_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gpu, site = Recipe.load("quickstart"), Site(gpus_per_node=4)
    script, job = submit_run(gpu, "quickstart", [], scheduler="slurm", site=site, asked=Resources(2), dry_run=True)
    assert {"#SBATCH --gpus-per-node=4", "#SBATCH --ntasks-per-node=4"} <= set(script.splitlines()) and not job
    cpu = Recipe.load("quickstart", ["parallel.device=cpu"])
    script, _ = submit_run(cpu, "quickstart", [], scheduler="slurm", site=site, asked=Resources(2), dry_run=True)
    assert "gpu" not in script and "#SBATCH --ntasks-per-node=1" in script
    checked = Resources(2, min_busbw=5)
    script, _ = submit_run(cpu, "quickstart", ["a.b=1"], scheduler="slurm", site=site, asked=checked, dry_run=True)
    check, train = (next(line for line in script.splitlines() if f" {verb} " in line) for verb in ("check", "train"))
    assert check.partition(" check ")[2] == train.partition(" train ")[2].replace(" &", " --min-busbw 5")
    assert list(tmp_path.iterdir()) == []


def test_a_job_trains_into_its_run_directory_whatever_the_path(tmp_path, monkeypatch):
    (place := tmp_path / "it's").mkdir()
    monkeypatch.chdir(place)
    recipe = Recipe.load("quickstart", ["parallel.device=cpu", "run.dir=here"])
    script, _ = submit_run(recipe, "quickstart", [], scheduler="slurm", site=Site(), dry_run=True)
    train = next(line for line in script.splitlines() if " train " in line)
    override = next(word for word in shlex.split(train.partition(" train ")[2]) if word.startswith("run.dir"))
    assert Recipe.load("quickstart", [override]).run_dir == place / "here"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (Resources(), ["--gpus-per-node", "parallel.device=cpu"]), (Resources(time="4h", gpus_per_node=1), ["--time", "04:00:00"]),
        (Resources(gpus_per_node=3), ["global_batch"]),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, monkeypatch, asked, words):
    monkeypatch.chdir(tmp_path)
    with refused(*words):
        submit_run(Recipe.load("quickstart"), "quickstart", [], scheduler="pbs", site=Site(), asked=asked, dry_run=True)
    with refused("8", "4", "gpus_per_node"):
        make_job("run", [], [], tmp_path, Site(gpus_per_node=4), Resources(gpus_per_node=8), on_cpu=False)


def test_the_site_file(tmp_path, monkeypatch):
    path = tmp_path / "site.toml"
    for text, words in (
        ('queue = "x"', ["queue", "partition"]), ('time = "4h"', ["time", "HH:MM:SS"]), ("a =", ["site.toml"]),
        ('environment = {WANDB_API_KEY = "x"}', ["WANDB_API_KEY", "netrc"]), ('scheduler = "lsf"', ["scheduler", "lsf"]),
        ('launcher = "ssh"', ["launcher", "ssh", "mpiexec"]), ("modules = 'cuda'", ["modules", "list"]),
        ("directives = ['#SBATCH -x a']", ["directives", "#SBATCH -x a"]),
    ):  # fmt: skip
        path.write_text(text)
        with refused(*words):
            read_site(path)
    with refused("cannot be read"):
        read_site(tmp_path / "missing.toml")
    path.write_text('environment = {TOKENIZERS_PARALLELISM = "false"}')  # no secret
    assert read_site(path).environment
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused("sbatch", "qsub", "--dry-run"):
        find_scheduler("", Site())
    with refused("sbatch"):
        find_scheduler("slurm", Site())
    assert find_scheduler("", Site(scheduler="pbs"), dry_run=True) == "pbs"
    with refused("launcher", "mpiexec or torchrun"):
        find_scheduler("pbs", Site(launcher="srun"), dry_run=True)


@pytest.mark.parametrize(("state", "called"), [("R", "qsig -s SIGUSR2 7.server"), ("Q", "qdel 7.server"), ("", "")])
def test_cancel_on_pbs_leaves_time_for_a_save(tmp_path, monkeypatch, state, called):
    """`qdel` of a running job kills it after some seconds: its script gets a signal instead, which it passes on."""
    for tool in ("qsub", "qstat", "qsig", "qdel"):
        told = (
            f"echo 'Job id\n---\n7.server run me 0 {state} gpu'"
            if tool == "qstat"
            else f'echo {tool} "$@" >{tmp_path}/called'
        )
        (tmp_path / tool).write_text(
            f"#!/bin/sh\n{told if state else 'echo qstat: 7.server Job has finished >&2; exit 35'}\n"
        )
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "job.json").write_text('{"scheduler": "pbs", "job": "7.server"}')
    if not state:
        with refused("7.server", "is over"):
            cancel(tmp_path)
        return
    assert cancel(tmp_path) == "7.server" and (tmp_path / "called").read_text().strip() == called


@pytest.mark.parametrize(
    ("slurm", "state"),
    [
        ("echo PENDING PartitionTimeLimit", "pending (PartitionTimeLimit)"), ("echo RUNNING None", "running"), ("true", ""),
        ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", ""),
        ("echo Socket timed out >&2; exit 1", "unknown (Socket timed out)"),
    ],
)  # fmt: skip
def test_the_state_of_a_job(tmp_path, monkeypatch, slurm, state):
    """Why it waits; and a scheduler that does not answer is no job that is over."""
    for tool, body in (("sbatch", ""), ("squeue", slurm)):
        (tmp_path / tool).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "job.json").write_text('{"scheduler": "slurm", "job": "7"}')
    assert queued(tmp_path) == ("7", state)


def test_dry_run_and_cancel_in_the_terminal(tmp_path):
    done = windlass("submit", "quickstart", "parallel.device=cpu", "--scheduler", "pbs", "--dry-run", cwd=tmp_path)
    assert done.stdout.startswith("#!/bin/bash") and list(tmp_path.iterdir()) == []
    checked = subprocess.run(["bash", "-n"], input=done.stdout, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr


def test_the_open_cells_of_a_study(tmp_path, monkeypatch):
    """Cells that are done, failed or running are left out; `parallel.world` as an axis gives each cell one host."""
    monkeypatch.chdir(tmp_path)
    study = Study.create(Recipe.load("quickstart"), ["optim.lr=1e-2,1e-3", "run.seed=1,2"], tmp_path / "study")
    study.set_status(study.cells[1], "failed", "bad input")
    running = study.run_of(study.cells[2])
    write_ledger(running, {"kind": "event", "event": "started"})
    running.heartbeat_path.touch()
    messages, asked = list[str](), Resources(2, gpus_per_node=4)
    how = {"scheduler": "slurm", "site": Site(), "asked": asked, "dry_run": True, "notify": messages.append}
    script, _ = submit_study(study.path, **how)
    assert {"#SBATCH --array=0,3", "#SBATCH --nodes=2", "#SBATCH --gpus-per-node=4"} <= set(header(script))
    assert f'sweep {study.path} --only "$task" --launch &' in script
    assert "cell 1;" in messages[0] and "--retry-failed" in messages[0] and "cell 2" in messages[1]
    script, _ = submit_study(study.path, **how, retry_failed=True)
    assert "#SBATCH --array=0,1,3" in header(script) and '"$task" --launch --retry-failed &' in script
    cpu = Study.create(Recipe.load("quickstart", ["parallel.device=cpu"]), ["parallel.world=1,2"], tmp_path / "cpu")
    script, _ = submit_study(cpu.path, scheduler="pbs", site=Site(), asked=Resources(2), dry_run=True)
    assert "#PBS -l select=1:ncpus=2:mpiprocs=2" in header(script) and "--launch" not in script
    for cell in cpu.cells:
        cpu.set_status(cell, "failed")
    assert submit_study(cpu.path, scheduler="pbs", site=Site(), dry_run=True) == ("", "")
