"""Reports on plans, compiled programs and profiles.

Each report is an object that prints itself: `explain` (of a plan), `audit` (of a compiled program, compared with its
plan), `read_profile` (of a profile), `check` (of a call, compared with one device).

    tables, timelines   tables that fit the terminal; bars in lanes as a trace or a picture
    timeline_page       the same bars as a page of HTML, with figures
    hlo/                reads compiled programs
    profile/            reads profiles: `read_profile`
    communication/      the collectives of a plan, and how a program differs from them
    activations         the arrays that autodiff saves
    memory              the bytes of a plan on one device
    explain             with plan_tables
    audit               with compiled_traffic
    check               runs a call both ways
"""

from jshard.inspect.hlo.module import ProgramError as ProgramError
from jshard.inspect.hlo.walk import collectives as collectives
