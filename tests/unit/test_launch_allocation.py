"""The allocation of a shell, by its variables, and the command that starts all ranks."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
from functools import partial
from pathlib import Path

import pytest

from helpers import command, programs, refused, windlass
from windlass.launch import allocation
from windlass.launch.allocation import (
    launch_command,
    launch_in_job,
    load_job,
    outcome,
    read_allocation,
    save_job,
    wait_for_ranks,
)
from windlass.launch.schedulers.base import Allocation
from windlass.launch.schedulers.slurm import expand_counts, expand_hosts
from windlass.processes import catch_signals

SLURM = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n[1-2]"}
SLURM |= {"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"}


def test_slurms_short_lists():
    for text, hosts in (
        ("a,b-1,c", "a b-1 c"),
        ("n[08-10,12],gpu07", "n08 n09 n10 n12 gpu07"),
        ("r[1-2]n[01-02]x", "r1n01x r1n02x r2n01x r2n02x"),
        ("h[9-10].site.org", "h9.site.org h10.site.org"),
    ):
        assert list(expand_hosts(text)) == hosts.split()
    assert expand_counts("4(x2),1") == (4, 4, 1)
    with refused("n[a-b]"):
        expand_hosts("n[a-b]")


@pytest.fixture
def pbs(tmp_path):
    (tmp_path / "nodes").write_text("x1\nx1\nx2\nx2\n")
    return {"PBS_JOBID": "7.server", "PBS_NODEFILE": str(tmp_path / "nodes")}


def test_allocations(pbs, tmp_path):
    """A host without a stated number of tasks has a rank for each GPU."""
    found = read_allocation(SLURM, 0)
    assert found == Allocation("slurm", "9", ("n1", "n2"), (4, 4))
    shell = {key: value for key, value in SLURM.items() if "TASKS" not in key}
    assert [read_allocation(shell, gpus).per_host for gpus in (0, 4)] == [(1, 1), (4, 4)]
    uneven = read_allocation(SLURM | {"SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "4,1"}, 0)
    assert uneven.per_host == (4, 1) and uneven.ranks == 5
    assert read_allocation(pbs, 0) == Allocation(
        "pbs", "7.server", ("x1", "x2"), (2, 2), pbs["PBS_NODEFILE"]
    )
    assert read_allocation({}, 3).ranks == 3
    with refused("SLURM_JOB_NODELIST"):
        read_allocation({"SLURM_JOB_ID": "9"}, 0)
    with refused("PBS_NODEFILE", "windlass env --save"):
        read_allocation({"PBS_JOBID": "7"}, 0)
    with refused("-n 3", "2 hosts"):
        found.with_ranks(3)
    assert found.with_ranks(2).per_host == (1, 1) and found.with_ranks(0, 3).ranks == 6


@pytest.mark.parametrize(
    ("openmpi", "options"),
    [(False, "-ppn 4"), (True, "--bind-to none --map-by ppr:4:node -x NCCL_DEBUG -x PATH")],
)
def test_mpiexec(openmpi, options):
    """Open MPI alone passes no variables on to other hosts."""
    environ = {"PATH": "/bin", "NCCL_DEBUG": "WARN", "HOME": "/root", "PBS_JOBID": "7"}
    even = Allocation("pbs", "7", ("a", "b"), (4, 4), "F")
    words = launch_command(even, ["x"], openmpi, environ)
    assert words == f"mpiexec -n 8 {options} --hostfile F x".split()
    uneven = launch_command(Allocation("pbs", "7", ("a", "b"), (4, 1), "F"), ["x"], openmpi, {})
    unbound = "--bind-to none " if openmpi else ""
    assert uneven == f"mpiexec -n 5 {unbound}--hostfile F x".split()


def test_srun():
    slurm = read_allocation(SLURM, 0)
    words = launch_command(slurm, ["x", "-y"], False, {})
    expected = "srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --kill-on-bad-exit=0".split()
    assert words[:5] == expected and words[-2:] == ["x", "-y"]
    words = launch_command(slurm, ["x"], False, {"SLURM_CPUS_PER_TASK": "3"}, "--exact -l")
    assert "--cpus-per-task=3" in words and words[-3:] == ["--exact", "-l", "x"]


def test_how_the_ranks_ended(tmp_path):
    """If all failures are lost contacts, or ranks that fell silent, a host was lost."""
    silent, late = ({"secondary": x, "lost": not x} for x in (False, True))
    assert outcome(1, tmp_path) == 1
    for rank, failure in enumerate((silent, late)):
        (tmp_path / f"failure-{rank}.json").write_text(json.dumps(failure))
    assert (outcome(0, tmp_path), outcome(137, tmp_path)) == (0, 69)
    (tmp_path / "failure-2.json").write_text(json.dumps({"secondary": False, "lost": False}))
    assert outcome(9, tmp_path) == 9, "one failed, and the others lost it"
    for code in (46, 2, 75):
        (tmp_path / f"code-n1-{code}").write_text(str(code))
        assert outcome(1, tmp_path) == code


@pytest.mark.parametrize(
    ("report", "code", "ended"),
    [("failure-0.json", "", True), ("code-n1-7", "1", True), ("code-n1-7", "75", False)],
)
def test_a_launcher_that_waits_for_ranks_after_a_failure_is_ended(
    tmp_path, monkeypatch, report, code, ended
):
    """Ranks that have stopped or finished are no failure, however long the others work."""
    monkeypatch.setattr(allocation, "POLL_SECONDS", 0.05)
    (tmp_path / report).write_text(code)
    child = subprocess.Popen(["sleep", "60" if ended else "0.5"])
    assert wait_for_ranks(child, tmp_path, seconds=0.1) == (-9 if ended else 0)


@pytest.mark.parametrize(
    ("end", "left_out"),
    [
        ("exit 137", ""),  # a rank was killed, for example for its memory, and the host is well
        ("exit 1", ""),  # the same with a launcher that changes the code
        ("exec sleep 60", "b"),  # no answer from the host
    ],
)
def test_a_host_is_left_out_only_if_the_launcher_waits_in_vain(
    tmp_path, monkeypatch, end, left_out
):
    report = """touch $WINDLASS_REPORTS/host-a
echo '{"secondary": true, "lost": false}' >$WINDLASS_REPORTS/failure-0.json
"""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(allocation, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(allocation, "wait_for_ranks", partial(wait_for_ranks, seconds=0.1))
    monkeypatch.setenv("WINDLASS_JOB_DIR", str(tmp_path))
    monkeypatch.setenv("WINDLASS_LOST_HOSTS", str(tmp_path / "lost"))
    two, messages = Allocation("slurm", "7", ("a", "b"), (1, 1)), list[str]()
    assert launch_in_job(two, ["bash", "-c", report + end], messages.append) == 69
    assert "lost b: no rank there" in messages[0]
    named = [path.read_text() for path in tmp_path.glob("lost")]
    assert named == ([left_out] if left_out else [])


@pytest.mark.parametrize(("stop", "starts"), [("true", 2), ("kill -USR1 $PPID; sleep 0.5", 1)])
def test_ranks_without_memory_start_again_unless_the_job_stops(tmp_path, monkeypatch, stop, starts):
    script = f"""echo >>{tmp_path}/starts
[ $(wc -l <{tmp_path}/starts) = 2 ] && exit 0
echo '{{"secondary": false, "lost": false, "again": true}}' >$WINDLASS_REPORTS/failure-0.json
trap 'exit 1' USR1; {stop}; exit 1
"""
    monkeypatch.setattr(allocation, "POLL_SECONDS", 0.05)
    monkeypatch.setenv("WINDLASS_JOB_DIR", str(tmp_path))
    one, messages = Allocation("slurm", "7", ("a",), (1,)), list[str]()
    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
    with catch_signals(signals, lambda number: None):
        code = launch_in_job(one, ["bash", "-c", script], messages.append)
    assert (code, len((tmp_path / "starts").read_text())) == (2 - starts, starts), messages


@pytest.mark.parametrize(
    ("version", "options"),
    [
        ("mpiexec (OpenRTE) 4.1.4", "--bind-to none --map-by ppr:4:node -x"),
        ("HYDRA build details:", "-ppn 4 --hostfile"),
        ("PALS 1.2", "-ppn 4 --hostfile"),
    ],
)
def test_the_tables_of_launch(tmp_path, monkeypatch, version, options):
    """8 ranks on two hosts of PBS; stdout holds the command alone."""
    (tmp_path / "nodes").write_text("x1\n" * 4 + "x2\n" * 4)
    programs(tmp_path, monkeypatch, mpiexec=f"echo '{version}'")
    job = {"PBS_JOBID": "7.server", "PBS_NODEFILE": str(tmp_path / "nodes")}
    done = windlass("launch", "--print", "--", "python", "train.py", cwd=tmp_path, env=job)
    assert done.stdout.startswith(f"mpiexec -n 8 {options} ")
    assert done.stdout.endswith(f" --hostfile {tmp_path}/nodes python train.py\n")
    rows = [line.split() for line in done.stderr.splitlines()]
    assert ["x1", "4", "0-3"] in rows and ["x2", "4", "4-7"] in rows and ["world", "8"] in rows
    assert ["host", "file", str(tmp_path / "nodes")] in rows and ["launcher", "mpiexec"] in rows


def test_print_needs_no_mpiexec(pbs, tmp_path):
    words = ("launch", "-n", "4")
    environ = pbs | {"PATH": str(tmp_path)}
    done = windlass(*words, "--print", "--", "train.py", env=environ)
    expected = ["mpiexec -n 4 -ppn 2 --hostfile", pbs["PBS_NODEFILE"], "train.py"]
    assert done.stdout.strip() == " ".join(expected)
    assert "mpiexec" in windlass(*words, "--", "train.py", env=environ, code=2).stderr


def test_a_second_shell_gets_the_jobs_variables(pbs, tmp_path):
    """An allow-list: nothing of one task, no secret; the host file even if only another host has it."""
    others = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "1", "SLURM_JWT": "x", "PBS_JOBCOOKIE": "x"}
    environ = {**pbs, **SLURM, **others, "HF_TOKEN": "x", "PATH": "/bin"}
    save_job(environ, tmp_path / "slurm")
    assert load_job(tmp_path / "slurm", "n1").keys() == {*pbs, *SLURM}
    store = tmp_path / "jobs"
    path = save_job(pbs | {"PBS_QUEUE": "a'b"}, store)
    assert path.stat().st_mode & 0o077 == 0 or store.stat().st_mode & 0o077 == 0
    (tmp_path / "nodes").unlink()
    loaded = load_job(store, "x2.site.org")
    assert loaded["PBS_QUEUE"] == "a'b" and read_allocation(loaded, 0).hosts == ("x1", "x2")
    with refused("host y", "pbs-7.server", "windlass env --save"):
        load_job(store, "y")
    with refused("not in a job", "PBS_JOBID"):
        save_job({}, store)


def test_the_printed_variables_are_shell(tmp_path, pbs):
    (tmp_path / "nodes").write_text(socket.gethostname() + "\n")
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    windlass("env", "--save", env=state | pbs | {"PBS_QUEUE": "a 'b'"})
    script = f'eval "$({shlex.join(command("env"))})"; echo "$PBS_JOBID $PBS_QUEUE"'
    shown = subprocess.check_output(["bash", "-c", script], env=os.environ | state, text=True)
    assert shown == "7.server a 'b'\n"


def test_no_other_file_names_a_schedulers_variables_or_commands():
    commands = "sbatch|squeue|scancel|scontrol|qsub|qstat|qdel|qsig|qrerun"
    name = re.compile(rf"\b(SLURMD?_[A-Z]\w*|PBS_[A-Z]\w*|{commands})\b")
    package = Path(allocation.__file__).parent.parent
    found = {
        (str(path.relative_to(package)), match[0])
        for path in package.rglob("*.py")
        if path.parent.name != "schedulers"
        for match in name.finditer(path.read_text())
    }
    assert found == set()
