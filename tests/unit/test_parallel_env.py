import itertools
from dataclasses import replace

import pytest
import torch

from helpers import refused
from windlass.parallel.env import DistEnv, by_hosts, detect_env
from windlass.parallel.ranks import address_to, choose_device


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


TORCHRUN = variables(
    "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2 "
    "MASTER_ADDR=host-a MASTER_PORT=29400 TORCHELASTIC_RUN_ID=x TORCHELASTIC_RESTART_COUNT=2"
)
OURS = variables(
    "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=4711 "
    "WINDLASS_LAUNCHED=1 WINDLASS_ATTEMPT=3 SLURM_PROCID=0 PMI_RANK=0"
)
OPEN_MPI = variables("OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4")
BY_HAND = variables("RANK=1 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=29500")
OPEN_MPI_HERE = OPEN_MPI | variables(
    "OMPI_COMM_WORLD_LOCAL_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_NAMESPACE=ns-1"
)
OPEN_MPI_PBS = OPEN_MPI | variables(
    "OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 PBS_JOBID=77.pbs"
)
MPICH = variables("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
PALS = variables(
    "PALS_RANKID=5 PMI_RANK=5 PMI_SIZE=8 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=4 PALS_NODEID=1 "
    "PALS_APID=aa-1"
)


def slurm(rank: int, **more: str) -> dict[str, str]:
    """As `srun` of SLURM 22.05 sets it: 3 hosts with 2, 2 and 1 tasks."""
    node, local_rank = divmod(rank, 2)
    text = (
        f"SLURM_PROCID={rank} SLURM_LOCALID={local_rank} SLURM_NODEID={node} SLURM_JOB_ID=812 "
        "SLURM_STEP_ID=3 SLURM_NTASKS=5 SLURM_STEP_NUM_TASKS=5 SLURM_NNODES=3 "
        "SLURM_STEP_NUM_NODES=3 SLURM_STEP_TASKS_PER_NODE=2(x2),1 "
        "SLURM_STEP_NODELIST=gpu[07-08,12] SLURM_JOB_NODELIST=gpu[05-12]"
    )
    return variables(text) | more


@pytest.mark.parametrize(
    "environ",
    [
        "",
        "MASTER_PORT=29500 PATH=/bin",
        "PMI_RANK=0 PMI_SIZE=1",  # the only task of mpiexec
        # the shell of `sbatch -n 4`, started without srun
        "SLURM_JOB_ID=9 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=4",
        # a shell of `salloc -n 4`
        "SLURM_JOB_ID=9 SLURM_NTASKS=4 SLURM_NNODES=2 SLURM_JOB_NODELIST=a[1-2]",
        # a shell of `salloc` with an interactive step
        "SLURM_JOB_ID=9 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_STEP_ID=4294967290",
        # `srun -n 1`, and `srun --pty bash` in an allocation of more
        "SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1",
        "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1",
    ],
)
def test_a_plain_process(environ: str):
    assert detect_env(variables(environ)) == DistEnv()


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK is missing"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "MASTER_PORT is missing"),
        (BY_HAND | {"RANK": "2"}, "rank 2 of 2"),
        (BY_HAND | {"RANK": "x"}, "RANK='x'"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "rank 4 of 4"),
        ({"WINDLASS_LAUNCHED": "1"}, "RANK is missing"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE"),
        ({"PMI_RANK": "1"}, "PMI_SIZE"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "MASTER_ADDR"),
        (variables("PMI_RANK=0 PMI_SIZE=2 PMI_LOCAL_SIZE=1 PBS_NODEFILE=/no/file"), "MASTER_ADDR"),
        (slurm(0, SLURM_STEP_NODELIST="n[a-b]"), "MASTER_ADDR"),
    ],
)
def test_half_an_environment_is_refused(environ: dict[str, str], says: str):
    with refused(says):
        detect_env(environ)


def test_srun_inside_and_around_other_launchers():
    envs = [detect_env(slurm(rank)) for rank in range(5)]
    assert len({env.port for env in envs}) == 1 and 15_000 <= envs[0].port < 30_000
    assert detect_env(slurm(3, PMI_RANK="3", PMI_SIZE="5")) == envs[3]  # PMI of srun's own
    # srun started mpiexec's proxies, one a host
    mpich = detect_env(slurm(0, PMI_RANK="0", PMI_SIZE="10", PMI_LOCAL_SIZE="4"))
    assert (mpich.launcher, mpich.world, mpich.local_world) == ("mpi", 10, 4)


def test_ports_differ_between_jobs_and_steps_and_can_be_chosen():
    places = itertools.product("123", "01")
    envs = [slurm(0, SLURM_JOB_ID=job, SLURM_STEP_ID=step) for job, step in places]
    ports = {detect_env(environ).port for environ in envs}
    assert len(ports) == 6
    other = OPEN_MPI_HERE | {"PMIX_NAMESPACE": "ns-2"}
    assert detect_env(OPEN_MPI_HERE).port != detect_env(other).port
    chosen = detect_env(slurm(0, MASTER_PORT="31000", MASTER_ADDR="login", SLURM_RESTART_COUNT="2"))
    assert (chosen.addr, chosen.port, chosen.attempt) == ("login", 31000, 2)


ON_TORCHRUN = DistEnv(5, 8, 1, 4, 1, 2, "torchrun", "host-a", 29400, 2)
ON_SRUN = [(rank, rank // 2, rank % 2, 2 if rank < 4 else 1) for rank in range(5)]


@pytest.mark.parametrize(
    ("environ", "hosts", "env"),
    [
        (TORCHRUN, "", ON_TORCHRUN),
        (TORCHRUN | slurm(1), "", ON_TORCHRUN),
        (OURS, "", DistEnv(1, 2, 1, 2, 0, 1, "windlass", "127.0.0.1", 4711, 3)),
        (BY_HAND, "", DistEnv(1, 2, 1, 2, 0, 1, "environment", "h", 29500)),
        (OPEN_MPI_HERE, "", DistEnv(3, 4, 3, 4, 0, 1, "openmpi", "127.0.0.1")),
        (OPEN_MPI_PBS, "x1003 x1003 x1004 x1004", DistEnv(3, 4, 1, 2, 1, 2, "openmpi", "x1003")),
        (MPICH, "", DistEnv(1, 2, 1, 2, 0, 1, "mpi", "127.0.0.1")),
        (PALS, "polaris-1 polaris-2", DistEnv(5, 8, 1, 4, 1, 2, "mpi", "polaris-1")),
        *(
            (slurm(rank), "", DistEnv(rank, 5, local, ranks, node, 3, "slurm", "gpu07"))
            for rank, node, local, ranks in ON_SRUN
        ),
    ],
)
def test_the_numbers_of_each_launcher(environ, hosts, env, tmp_path):
    if hosts:
        (tmp_path / "nodes").write_text("".join(f"{host}\n" for host in hosts.split()))
        environ = environ | {"PBS_NODEFILE": str(tmp_path / "nodes")}
    found = detect_env(environ)  # a derived port is tested below
    assert found == replace(env, port=env.port or found.port)


@pytest.mark.parametrize(
    ("tasks", "local_world"), [("2(x2),1", 2), ("1,2(x2)", 1), ("4(x2),1", 2), ("", 2), ("?", 2)]
)
def test_tasks_per_node_are_used_where_they_add_up(tasks: str, local_world: int):
    assert detect_env(slurm(0, SLURM_STEP_TASKS_PER_NODE=tasks)).local_world == local_world


def test_numbers_by_hosts_with_unequal_numbers_of_ranks():
    """With 2, 1 and 1 ranks `rank // local_world` would be wrong; MPI's variables name no hosts."""
    hosts = ["n1", "n1", "n2.site.org", "n3"]
    envs = [by_hosts(DistEnv(rank, 4, 0, 1, 0, 4, "mpi"), hosts) for rank in range(4)]
    places = [(env.node, env.local_rank, env.local_world) for env in envs]
    assert places == [(0, 0, 2), (0, 1, 2), (1, 0, 1), (2, 0, 1)]
    assert {env.nodes for env in envs} == {3}


def test_ranks_by_hand_on_two_hosts_take_the_gpus_of_their_host(monkeypatch):
    """RANK and WORLD_SIZE alone say nothing of hosts."""
    devices = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    hosts = ["a", "b"] * 4
    for rank in range(8):
        env = detect_env(BY_HAND | {"RANK": str(rank), "WORLD_SIZE": "8"})
        choose_device("auto", by_hosts(env, hosts))
    assert [device.index for device in devices] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_no_address_on_the_way_to_this_host_or_to_none():
    assert address_to("127.0.0.1") == address_to("no.such.host.invalid") == ""
