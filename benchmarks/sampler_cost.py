"""What the device sampler costs: CPU time of its thread as a share of one core, with a core kept
busy beside it.

    python benchmarks/sampler_cost.py [--seconds 60] [--every 1.0] [--device cpu|cuda:0]

The target is 0.2 % of a core at one sample a second.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from windlass.telemetry.devices import DeviceSampler

TARGET = 0.002


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=1.0)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    if given.device != "cpu":
        import torch

        torch.zeros(1, device=given.device)
    with tempfile.TemporaryDirectory() as folder:
        sampler = DeviceSampler(Path(folder), device=given.device, every=given.every)
        while not sampler.path.exists() or not sampler.path.read_text().count("\n"):
            time.sleep(given.every)  # imports and the first sample are paid once
        clock = time.pthread_getcpuclockid(sampler._thread.ident)
        begin, before = time.perf_counter(), time.clock_gettime(clock)
        while time.perf_counter() < begin + given.seconds:
            sum(
                range(10_000)
            )  # a main thread that holds the interpreter, as a training loop's does
        wall, spent = time.perf_counter() - begin, time.clock_gettime(clock) - before
        sampler.stop()
        lines = len(sampler.path.read_text().splitlines())
    share = spent / wall
    print(
        f"{lines} lines in {wall:.0f} s on {given.device}: {1e3 * spent:.1f} ms of CPU, {100 * share:.3f} % of a core"
    )
    print("under the target of 0.2 %" if share < TARGET else "OVER the target of 0.2 %")
    raise SystemExit(share >= TARGET)


if __name__ == "__main__":
    main()
