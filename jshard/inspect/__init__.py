"""Showing what a plan asks for and what a compiled program holds."""

from jshard.inspect.hlo import full_bytes as full_bytes
from jshard.inspect.hlo import wire_bytes as wire_bytes
from jshard.inspect.hlo.module import ProgramError as ProgramError
from jshard.inspect.hlo.walk import collectives as collectives
