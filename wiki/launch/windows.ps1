# Two processes on one Windows machine, from the repository root (any flag of the script may follow):
#
#     .\wiki\launch\windows.ps1 --max-steps 20
#
# PyTorch for Windows is built without libuv, which the launcher would use for its store.
$env:USE_LIBUV = "0"
python -m torch.distributed.run --standalone --nproc_per_node=2 llm_ddp_parallel_training.py --cpu @args
exit $LASTEXITCODE
