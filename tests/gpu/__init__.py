"""All of this project that needs a CUDA GPU, checked and measured: `bash tests/gpu/check.sh`."""
