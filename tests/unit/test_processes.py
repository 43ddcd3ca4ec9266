"""What every process of a launch does: reuse its memory, end with its parent, and leave its status
readable.
"""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers import TINY, gone, overrides, wait_for, write_corpus
from windlass.fileio import read_json
from windlass.launch.rank_status import REPORTS, first_to_show
from windlass.processes import visible_gpus

STEPS = """
import resource, sys
import numpy as np
from windlass.processes import keep_freed_memory
mode, blocks = sys.argv[1], int(sys.argv[2])
assert mode == "returned" or keep_freed_memory(every_size=mode == "every size")
for step in range(13):
    if step == 3:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [np.ones(10 * 2**20 // blocks) for _ in range(blocks)]  # 80 MB, as activations come
    while tensors:
        tensors.pop()  # and go, the last first
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)
"""
PARENT = """
import subprocess, sys, threading, time
child = "import os, time; from windlass.processes import exit_with_parent; exit_with_parent(os.getppid()); "
child += "print(os.getpid(), flush=True); time.sleep(60)"
thread = threading.Thread(target=lambda: subprocess.Popen([sys.executable, "-c", child]))
thread.start()
thread.join()
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has the setting")
def test_a_step_does_not_fetch_its_pages_again() -> None:
    """80 MB are 20,480 pages of 4 kB, or 40 huge ones; reused, a step needs next to none."""

    def faults(mode: str, blocks: int) -> float:
        return float(subprocess.check_output([sys.executable, "-c", STEPS, mode, str(blocks)]))

    assert faults("returned", 40) > 40 > faults("reused", 40)
    assert faults("reused", 2) > 40 > faults("every size", 2), "blocks of 40 MB"


def test_a_process_outlives_the_thread_that_started_it_but_not_the_process() -> None:
    words = [sys.executable, "-c", PARENT]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        time.sleep(0.3)
        assert not gone(child)
        parent.kill()
    wait_for(lambda: gone(child))


def test_ranks_of_a_job_show_the_same_message_once(tmp_path, monkeypatch) -> None:
    assert first_to_show("no file x") and first_to_show("no file x"), "no job"
    monkeypatch.setenv(REPORTS, str(tmp_path))
    texts = ("no file x", "no file y", "no file x")
    assert [first_to_show(text) for text in texts] == [True, True, False]
    monkeypatch.setenv(REPORTS, str(tmp_path / "gone"))
    assert first_to_show("no file x")


def nvml(gpus, instances=()):
    """NVML as far as it is used: GPUs by number with their UUIDs, and MIG instances."""

    def by_uuid(uuid):
        if uuid not in (*gpus, *instances):
            raise LookupError
        return gpus.index(uuid) if uuid in gpus else uuid

    return SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=int,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetUUID=lambda handle: gpus[handle] if isinstance(handle, int) else handle,
        nvmlDeviceGetName=lambda handle: f"NVIDIA {handle}",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=10**9),
    )


FOUR = ["GPU-aaaa", "GPU-bbbb", "GPU-bcbc", "GPU-dddd"]


@pytest.mark.parametrize(
    ("variable", "seen", "first"),
    [
        (None, ["0", "1", "2", "3"], "NVIDIA 0"),
        ("", [], "CPU"),
        ("-1", [], "CPU"),
        ("2,0", ["2", "0"], "NVIDIA 2"),
        ("0,-1,1", ["0"], "NVIDIA 0"),
        ("1,9,2", ["1"], "NVIDIA 1"),
        ("NoDevFiles", [], "CPU"),
        ("GPU-dddd,GPU-aa", ["GPU-dddd", "GPU-aa"], "NVIDIA 3"),
        ("MIG-2,MIG-1", ["MIG-2"], "NVIDIA MIG-2"),
    ],
)
def test_the_gpus_that_cuda_gives_a_process(monkeypatch, variable, seen, first) -> None:
    """As CUDA reads its variable: an entry that is not a device ends the list; a process gets one
    MIG instance. A plan is for the first GPU.
    """
    from windlass.estimate.devices import this_device

    monkeypatch.setitem(sys.modules, "pynvml", nvml(FOUR, ["MIG-1", "MIG-2"]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == seen and this_device().name == first


def test_no_process_imports_files_of_the_working_directory(tmp_path):
    """A cell of a sweep and its exporter, among namesakes of all of Python's modules; ranks start
    in the same way (`processes.MODULE`).
    """
    for name in sys.stdlib_module_names:
        trap = f"open('imported', 'a').write('{name} ')\nraise ImportError('{name} of the user')\n"
        (tmp_path / f"{name}.py").write_text(trap)
    settings = TINY | {"train.steps": 2, "telemetry.trackers": ["tensorboard"]}
    settings |= {"data.source": str(write_corpus(tmp_path / "corpus.txt")), "data.dir": "data"}
    words = [Path(sys.executable).with_name("windlass"), "sweep", "quickstart", "--dir", "study"]
    words += ["run.seed=1"] + [word for one in overrides(settings) for word in ("--set", one)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    imported = tmp_path / "imported"
    assert done.returncode == 0 and not imported.exists(), done.stdout + done.stderr
    (run, *_) = (tmp_path / "study" / "runs").glob("*/")
    assert list(run.glob("tensorboard/events*")), (run / "trackers/tensorboard.log").read_text()
    assert read_json(run / "environment.json")["command"][1:5] == ["-P", "-m", "windlass", "train"]
