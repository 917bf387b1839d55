"""The engine on a CUDA device: static buffers, captured graphs, asynchronous steps."""
