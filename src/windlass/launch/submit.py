"""Submits a run to SLURM or PBS, cancels it, and follows it. No torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from windlass.errors import RunFailed, UserError
from windlass.fileio import read_json, write_atomic
from windlass.launch.batch import EXIT_CODE, GRACE_SECONDS, SCHEDULERS, SUBMITTED, TIME, Job, Site, render
from windlass.processes import WINDLASS
from windlass.recipe import Recipe, typed
from windlass.run import Run
from windlass.variables import SECRET_NAME

SCRIPT = "submit.sh"  # beside it
WATCH_SECONDS = 5.0
OVER = re.compile(
    "invalid job|unknown job|has finished", re.IGNORECASE
)  # what squeue and qstat say of a job that is over


@dataclass(frozen=True)
class Resources:
    """What a job asks for: hosts, ranks and GPUs of each (-1: the site's), the time limit, and how often it may restart."""

    nodes: int = 1
    per_host: int = 0  # ranks of a host; 0: one for each GPU, and one where there is none
    gpus_per_node: int = -1
    time: str = ""
    max_restarts: int = 3
    min_busbw: float = 0.0  # GB/s that `windlass check` has to measure first; 0: no check


def site_file() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "windlass" / "site.toml"


def read_site(path: Path | None = None) -> Site:
    """The site file; the defaults where there is none. UserError for a file that is not one."""
    chosen = path or site_file()
    if path is None and not chosen.is_file():
        return Site()
    try:
        site = Site(**tomllib.loads(chosen.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"the site file {chosen} cannot be read: {error}") from None
    except ValidationError as error:
        wrong = [f"{chosen}:"]
        for e in error.errors():
            name, key = ".".join(map(str, e["loc"])), Site.model_fields.get(str(e["loc"][0]))
            what = f"= {e['input']!r}: {e['msg']}. {key.description}" if key else "is no key of it"
            wrong.append(f"  {name} {what}")
        raise UserError("\n".join([*wrong, f"  Its keys are {', '.join(sorted(Site.model_fields))}"])) from None
    if secret := [name for name in site.environment if SECRET_NAME.search(name)]:
        raise UserError(
            f"{chosen}: environment has {', '.join(secret)}, and a batch script is a file that others may read: leave it out; "
            "SLURM passes the variables of the shell that submits (PBS: `directives = [\"-V\"]`), and W&B reads ~/.netrc"
        )  # fmt: skip
    return site


def find_scheduler(asked: str, site: Site, dry_run: bool = False) -> str:
    """`slurm` or `pbs`, as asked, as the site says, or the one that is installed; UserError where there is none."""
    installed = [name for name, program in SCHEDULERS.items() if shutil.which(program)]
    chosen = asked or site.scheduler or next(iter(installed), "")
    if chosen and chosen not in SCHEDULERS:
        raise UserError(f"--scheduler {chosen}: there are {' and '.join(SCHEDULERS)}")
    if not chosen:
        raise UserError(
            "neither sbatch (SLURM) nor qsub (PBS) is on this machine: submit from a login node; --scheduler NAME --dry-run "
            "prints the script"
        )
    if chosen == "pbs" and site.launcher == "srun":
        raise UserError("launcher = srun in the site file is SLURM's, and PBS has none: write mpiexec or torchrun")
    if chosen not in installed and not dry_run:
        raise UserError(f"there is no {SCHEDULERS[chosen]} here: submit from a login node, or look with --dry-run")
    return chosen


def make_job(
    name: str, command: Sequence[str], recipe: Sequence[str], logs: Path, site: Site, asked: Resources, on_cpu: bool
) -> Job:
    """A job that asks for these resources; UserError where they are not what the site has. A check before it is of `recipe`."""
    gpus = 0 if on_cpu else asked.gpus_per_node if asked.gpus_per_node >= 0 else site.gpus_per_node
    if not gpus and not on_cpu:
        raise UserError(
            f"how many GPUs has a node? Write --gpus-per-node N (or gpus_per_node in {site_file()}), or train on the CPU with "
            "parallel.device=cpu"
        )
    if site.gpus_per_node and gpus > site.gpus_per_node:
        raise UserError(f"--gpus-per-node {gpus}: a node of this site has {site.gpus_per_node} (gpus_per_node)")
    if asked.time and not re.fullmatch(TIME, asked.time):
        raise UserError(f"--time {asked.time}: write hours, minutes and seconds, as 04:00:00")
    check = (*WINDLASS, "launch", "--", *WINDLASS, "check", *recipe, "--min-busbw", f"{asked.min_busbw:g}")
    return Job(
        name, command, Path(site.scratch or Path.cwd()), logs, logs / SCRIPT, asked.nodes, asked.per_host or max(1, gpus),
        gpus, asked.time, max_restarts=asked.max_restarts, before=check if asked.min_busbw else (),
    )  # fmt: skip


def submit_run(
    recipe: Recipe, name: str, overrides: Sequence[str], *, scheduler: str = "", site: Site | None = None,
    asked: Resources = Resources(), dry_run: bool = False,
) -> tuple[str, str]:  # fmt: skip
    """Submit the training of a recipe; returns the script and the job's id (empty with `dry_run`, which writes nothing).

    `name` and `overrides` are the recipe as it was typed, which is what the job trains. The run directory is created, for the
    script and the log `<run>_<id>.out`.

    Raises UserError for what the site has not, the recipe cannot do, or the scheduler refuses.
    """
    site = site or read_site()
    scheduler = find_scheduler(scheduler, site, dry_run)
    run = Run((Path(site.scratch or Path.cwd()) / recipe.run_dir).resolve())
    source = str(Path(name).resolve()) if Path(name).exists() else name
    given = [text for text in overrides if text.partition("=")[0].strip() != "run.dir"]
    if not any(text.startswith("checkpoint.grace_seconds") for text in given):  # the default is that of torchrun
        given.append(f"checkpoint.grace_seconds={GRACE_SECONDS - 10}")
    words = [source, *given, f"run.dir={typed(str(run.path))}"]
    command = [*WINDLASS, "launch", "--", *WINDLASS, "train", *words]
    job = make_job(run.name, command, words, run.path, site, asked, recipe.parallel.device == "cpu")
    recipe.batch(job.nodes * job.ranks_per_node)  # UserError where the global batch cannot be divided
    # W&B offline is sent when the run has ended, and so is what an MLflow server did not get. Local files need nothing.
    environ = os.environ | site.environment
    behind = {
        "wandb": environ.get("WANDB_MODE") == "offline", "mlflow": environ.get("MLFLOW_TRACKING_URI", "").startswith("http"),
    }  # fmt: skip
    track = ("env", "WANDB_MODE=online", "timeout", "600", *WINDLASS, "track", str(run.path), "--to")
    job = replace(job, after=[(*track, name) for name in recipe.telemetry.trackers if behind.get(name)])
    if run.path.exists() and not dry_run:
        job_id, state = queued(run.path)
        if state:
            ends = f"`windlass submit --watch {run.path}` follows it, --cancel in place of --watch ends it"
            raise UserError(f"job {job_id} of {run.path} is {state}: {ends}")
    return submit(job, site, scheduler, dry_run)


def submit(job: Job, site: Site, scheduler: str, dry_run: bool = False) -> tuple[str, str]:
    """Write a job's script and give it to the scheduler; returns the script and the id of the job."""
    script = render(job, site, scheduler)
    if dry_run:
        return script, ""
    try:
        job.logs.mkdir(parents=True, exist_ok=True)
        for mark in (*job.logs.glob(".open-*"), job.logs / EXIT_CODE):  # of an earlier job, which does not count here
            mark.unlink(missing_ok=True)
        job.script.write_text(script, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{job.script} cannot be written: {error.strerror}; give another run.dir") from None
    program = ["sbatch", "--parsable"] if scheduler == "slurm" else ["qsub"]
    done = subprocess.run([*program, str(job.script)], capture_output=True, text=True, check=False, cwd=job.directory)
    if done.returncode:
        why = (done.stderr or done.stdout).strip()
        raise UserError(
            f"{program[0]} refused {job.script}: {why}. Change what is asked for: --nodes, --gpus-per-node, --time, or "
            f"partition, account and constraint in {site_file()} or --site FILE"
        )
    job_id = done.stdout.split()[-1].partition(";")[0]  # SLURM adds `;cluster` where there are several
    write_atomic(job.logs / SUBMITTED, json.dumps({"scheduler": scheduler, "job": job_id}) + "\n")
    return script, job_id


def queued(directory: Path) -> tuple[str, str]:
    """The id of a directory's last job, and its state in words; empty where it is over or there was none."""
    submitted = read_json(directory / SUBMITTED)
    job = str(submitted.get("job", ""))
    if not job or shutil.which(SCHEDULERS[submitted["scheduler"]]) is None:
        return job, ""
    query = ["squeue", "--noheader", "-o", "%T %r", "-j", job] if submitted["scheduler"] == "slurm" else ["qstat", job]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    if done.returncode and not OVER.search(done.stderr):  # a scheduler that is busy
        return job, f"unknown ({(done.stderr or query[0]).strip()})"
    words = done.stdout.split()
    if done.returncode or not words:
        return job, ""
    if submitted["scheduler"] == "slurm":
        why = f" ({words[1]})" if words[0] == "PENDING" and words[1] != "None" else ""
        return job, words[0].lower() + why
    return job, {"Q": "pending", "R": "running"}.get(words[-2], words[-2])


def cancel(directory: Path) -> str:
    """End the job of a run or study; what runs saves first. Returns the job's id; UserError where there is none."""
    submitted = read_json(directory / SUBMITTED)
    if not submitted:
        raise UserError(f"{directory} has no {SUBMITTED}: it was not submitted with `windlass submit`")
    job, state = queued(directory)
    if not state:
        raise UserError(f"job {job} of {directory} is over: there is nothing to cancel")
    # The batch shell gets the signal, too: it passes it on to the ranks, which save, and requeues nothing.
    program = ["scancel", "--full"] if submitted["scheduler"] == "slurm" else ["qdel"]
    if program == ["qdel"] and state == "running":  # qdel kills after some seconds, by default 10: too soon for a save
        program = ["qsig", "-s", "SIGUSR2"]
    done = subprocess.run([*program, job], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunFailed(f"{program[0]} {job}: {done.stderr.strip()}")
    return job


def watch(directory: Path, show: Callable[[str], None], seconds: float = WATCH_SECONDS) -> None:
    """Show state and logs of a directory's job until it is over."""
    shown, last, since = dict[Path, int](), "", (directory / SCRIPT).stat().st_mtime
    while True:
        job, state = queued(directory)
        if state and state != last:
            show(f"[{job}: {state}]")
        for log in sorted(log for log in directory.glob("*.out") if log.stat().st_mtime >= since):
            with log.open(errors="replace") as file:
                file.seek(shown.get(log, 0))
                if text := file.read():
                    show(text.rstrip("\n"))
                shown[log] = file.tell()
        if not state:
            break
        last = state
        time.sleep(seconds)
