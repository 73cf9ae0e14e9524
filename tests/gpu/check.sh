#!/usr/bin/env bash
# Checks and measures all that needs a CUDA GPU, in under eight minutes; arguments go to check.py.
# The table and a few files also go to the folder $OUT, where that is set.
set -uo pipefail
cd "$(dirname "$0")/../.."

export PYTHONUNBUFFERED=1 PYTHONUTF8=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export DDP_TIMEOUT_S=60 # a rank that hangs is found, and costs its own check only
# All ranks are on this machine, whose own name need not resolve: torchrun's --local-addr, and the
# interface that ranks talk through.
export PET_LOCAL_ADDR=localhost
if [ -e /sys/class/net/lo ]; then
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-lo}"
fi

if [ -n "${OUT:-}" ]; then
    mkdir -p "$OUT"
    "${PYTHON:-python3}" tests/gpu/check.py "$@" 2>&1 | tee "$OUT/gpu-check.txt"
else
    "${PYTHON:-python3}" tests/gpu/check.py "$@"
fi
