#!/bin/bash
# Everything worth measuring on a machine with one GPU, in 28 minutes at most; writes one table, DIR/gpu.md.
#
#     bash benchmarks/gpu.sh DIR [PART ...]
#
# The parts, in order: versions tests speed profile memory saves verify. Without a PART all of them run; several calls with the
# same DIR fill one table. NANOGPT names a checkout of nanoGPT, whose train.py is timed beside Windlass; without it that
# column stays empty. MINUTES (28) is the limit of one call, PYTHON (python3) the interpreter. DEVICE=cpu SMALL=1 tries the
# script itself, with tiny sizes. It installs nothing (tests/gpu/README.md lists the packages), and needs no network.
set -eu
[ $# -ge 1 ] || { sed -n '4p' "$0"; exit 2; }
top=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$top/src:${PYTHONPATH:-} CUBLAS_WORKSPACE_CONFIG=:4096:8 HF_HUB_OFFLINE=1 WINDLASS_QUIET_END=1
exec "${PYTHON:-python3}" "$top/benchmarks/gpu.py" "$@"
