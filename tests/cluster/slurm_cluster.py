"""A real SLURM cluster of two nodes or more on this machine: munged, slurmctld and the slurmd, all
below one temporary directory.
"""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from helpers import wait_for
from windlass.processes import kill_with_parent

NODES = ("127.0.0.1", "127.0.0.2")
"""The nodes' names. Loopback addresses: names that every machine resolves, as a cluster resolves
its hosts' names.
"""
DAEMONS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
SYSTEM = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
CONFIGURATION = """\
ClusterName=windlass
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
SlurmdTimeout=30
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP
"""
NODE = "NodeName={node} NodeHostname={host} NodeAddr={node} Port={port} CPUs=2 RealMemory=200000\n"


def missing() -> list[str]:
    """The programs that a cluster needs and this machine has not."""
    return [name for name in DAEMONS if shutil.which(name, path=SYSTEM) is None]


@dataclass
class Cluster:
    """What is needed to use it: an environment for the commands, and the directory of its logs."""

    root: Path
    nodes: tuple[str, ...] = NODES
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """Of a login node: SLURM's programs find this cluster, and nothing says that we are in a
        job already.
        """
        outside = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
        return outside | {"SLURM_CONF": str(self.root / "slurm.conf"), "PATH": SYSTEM}

    def call(
        self, *command: str, seconds: float = 90, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A command on the login node, to its end; the output with the errors is in `.stdout`."""
        return subprocess.run(
            ["timeout", "-k", "5", str(seconds), *command],
            env=self.environment,
            cwd=cwd,
            check=False,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def submit(self, script: Path, *options: str) -> str:
        """The number of a new job."""
        done = self.call("sbatch", "--parsable", *options, str(script), cwd=script.parent)
        assert done.returncode == 0, done.stdout
        return done.stdout.split()[-1]

    def wait(self, job: str, seconds: float = 200) -> dict[str, str]:
        """The job's state (JobState, ExitCode, Restarts) once all of it is over, an array's tasks
        too.
        """
        wait_for(lambda: not self.call("squeue", "--noheader", "-j", job).stdout.split(), seconds)
        text = self.call("scontrol", "show", "job", "--oneliner", job).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def logs(self) -> str:
        """The last lines of every daemon, for the message of a failure."""
        return "\n".join(
            f"--- {p.name}\n{p.read_text(errors='replace')[-3000:]}"
            for p in self.root.glob("*.log")
        )

    def start(self) -> None:
        """Bring it up; fails when the nodes are not idle within 30 s."""
        host, user = socket.gethostname().split(".")[0], getpass.getuser()
        port, *ports = free_ports(1 + len(self.nodes))
        text = CONFIGURATION.format(root=self.root, host=host, user=user, port=port)
        for node, own in zip(self.nodes, ports, strict=True):
            text += NODE.format(node=node, host=host, port=own)
        (self.root / "slurm.conf").write_text(text)
        (self.root / "state").mkdir()
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        munge = [f"--socket={self.root}/munge.socket"]
        for file in ("key", "pid", "log", "seed"):
            munge.append(f"--{file}-file={self.root}/munge.{file}")
        self.spawn("munged", "--foreground", "--force", "--num-threads=2", *munge)
        wait_for((self.root / "munge.socket").exists, 10)
        self.spawn("slurmctld", "-D", "-c")
        for node in self.nodes:
            (self.root / node).mkdir()
            self.spawn("slurmd", "-D", "-N", node)
        states, idle = ("sinfo", "--noheader", "-N", "-o", "%t"), ["idle"] * len(self.nodes)
        wait_for(lambda: self.call(*states).stdout.split() == idle, 30)

    def spawn(self, name: str, *arguments: str) -> None:
        """A daemon in the foreground that dies with this process, however that ends."""
        program = shutil.which(name, path=SYSTEM)
        assert program
        with (self.root / f"{name}-{len(self.daemons)}.out.log").open("wb") as out:
            self.daemons.append(
                subprocess.Popen(
                    [program, *arguments],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    preexec_fn=kill_with_parent,
                )
            )

    def kill_node(self, node: str) -> None:
        """As a host that loses its power: its slurmd, its steps and their processes are gone at
        once.
        """
        number = 2 + self.nodes.index(node)  # munged, slurmctld, one slurmd for each node
        self.daemons[number].kill()
        self.kill_processes(node)

    def kill_processes(self, node: str = "") -> None:
        """Kill what was started with this cluster's configuration, on one node or on any."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environ = process.environ()
                here = node in ("", environ.get("SLURMD_NODENAME"))
                own = environ.get("SLURM_CONF") == str(self.root / "slurm.conf")
                if here and own and process.pid != os.getpid():
                    keepers = [one for one in process.parents() if one.name() == "slurmstepd"]
                    for one in (process, *keepers):
                        one.kill()

    def stop(self) -> None:
        """Cancel what runs, end the daemons, and kill what was started with this cluster's
        configuration.
        """
        with contextlib.suppress(AssertionError):  # it took too long
            self.call("scancel", "--full", "--user", getpass.getuser(), seconds=10)
            wait_for(lambda: not self.call("squeue", "--noheader", seconds=5).stdout.split(), 15)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
        self.kill_processes()
        for daemon in self.daemons:
            daemon.wait()
        shutil.rmtree(self.root, ignore_errors=True)


def log_of(directory: Path) -> str:
    """The logs of the jobs of a run or a study."""
    return "\n".join(path.read_text(errors="replace") for path in directory.glob("*.out"))


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def cluster(nodes: tuple[str, ...] = NODES) -> Iterator[Cluster]:
    """The cluster, running; gone, with its directory, when the block is left."""
    root = Path(tempfile.mkdtemp(prefix="windlass-slurm-"))
    root.chmod(0o755)
    running = Cluster(root, nodes)
    try:
        try:
            running.start()
        except AssertionError as error:
            raise RuntimeError(f"no cluster: {error}\n{running.logs()}") from error
        yield running
    finally:
        running.stop()
