"""Showing what a plan asks for and what a compiled program holds."""

from jshard.inspect.hlo import Collective as Collective
from jshard.inspect.hlo import asked_collectives as asked_collectives
from jshard.inspect.hlo import collectives as collectives
from jshard.inspect.hlo import full_bytes as full_bytes
from jshard.inspect.hlo import wire_bytes as wire_bytes
from jshard.inspect.module import ProgramError as ProgramError
