"""The verbs of `js`: annotate, initialise, hold an optimizer, differentiate."""
