"""Showing what a plan asks for and what a compiled program holds."""

from jshard.inspect.hlo.module import ProgramError as ProgramError
from jshard.inspect.hlo.walk import collectives as collectives
