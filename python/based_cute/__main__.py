"""`python -m based_cute` is the command `based-cute`."""

from .cli import main

main(prog_name="based-cute")
