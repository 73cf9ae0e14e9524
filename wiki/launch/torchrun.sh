#!/usr/bin/env bash
# Several nodes without a scheduler. The same line on every node, from the repository root:
#
#     bash wiki/launch/torchrun.sh HEAD NODES RANKS_PER_NODE [flags of the script]
#
# HEAD is the name or address of one of the nodes; the others must reach its port 29500. The run
# folder must lie on a disk that all nodes see, or rank 0's node is where to look for it.
set -euo pipefail
head=$1 nodes=$2 ranks=$3
shift 3
exec python -m torch.distributed.run --nnodes="$nodes" --nproc_per_node="$ranks" \
    --rdzv-backend=c10d --rdzv-endpoint="$head:${PORT:-29500}" --rdzv-id="${JOB:-job1}" \
    llm_ddp_parallel_training.py "$@"
