"""What kernels run on: CUDA graphs, padding, launch overlap, caches and versions."""
