"""The phases of a run, which its main thread reports; the text is what a report of a stall says."""

from __future__ import annotations

DATA = "waiting for data"
STEP = "in a step"
EVALUATION = "evaluating"
SAVE = "saving"
MEETING = "meeting the others between two steps"
OTHER = "at work between two steps"
PROFILE = "writing a profile"
SAMPLE = "writing the sample"
STARTING = "starting"
COMPILING = "compiling"

LONG = (SAVE, PROFILE, SAMPLE)
"""Phases that may take long, however fast the steps are."""
SHORT = (DATA, STEP, EVALUATION, MEETING, OTHER)
"""Phases whose limit follows from the steps before."""
