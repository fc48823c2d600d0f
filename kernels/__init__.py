"""The CuTe-DSL kernels of the Based backward. Nothing here imports torch."""
