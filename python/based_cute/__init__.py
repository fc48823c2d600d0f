"""Based (second-order Taylor) linear attention and its backward: CuTe DSL kernels for Hopper, torch everywhere else.

Importing the package registers torch.ops.based.forward and torch.ops.based.backward; it initialises no CUDA context and does
not import the DSL.
"""

from importlib.metadata import PackageNotFoundError, version

from .launcher import based_attention, based_backward

__all__ = ["based_attention", "based_backward"]

try:
    __version__ = version("based-cute")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"
