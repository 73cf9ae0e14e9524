#!/usr/bin/env bash
# A Mac, from the repository root (any flag of the script may follow):
#
#     bash wiki/launch/mac.sh 1 --max-steps 20     # one process on the GPU, through Metal
#     bash wiki/launch/mac.sh 2 --max-steps 20     # two processes on the CPU, with DDP
set -euo pipefail
ranks=$1
shift
if [ "$ranks" = 1 ]; then
    exec python llm_ddp_parallel_training.py "$@"
fi
export GLOO_SOCKET_IFNAME=lo0  # the loopback: a laptop's own name may not resolve, above all offline
exec python -m torch.distributed.run --standalone --nproc_per_node="$ranks" --local-addr=localhost \
    llm_ddp_parallel_training.py --cpu "$@"
