"""The runner on a CPU, the reference for the CUDA one."""
