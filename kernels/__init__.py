"""The CuTe-DSL kernels of Based attention and its backward. Nothing here imports torch."""
