"""Reports on plans and compiled programs."""

from jshard.inspect.hlo.module import ProgramError as ProgramError
from jshard.inspect.hlo.walk import collectives as collectives
