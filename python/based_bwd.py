"""The entry point by its short name: `from based_bwd import based_backward`."""

from based_cute import based_backward

__all__ = ["based_backward"]
