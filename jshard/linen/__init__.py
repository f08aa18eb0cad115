"""The adapter for Linen: annotation, layout, calls as arrays, optimizer state, deferred initialisation.

A Linen module is a frozen dataclass without parameters, and its submodules exist only while it runs. So an annotation
is a subclass made at run time, with settings; the units and their parameters are found by a trace of `init`; and a call
is split by Flax's own lifting, which passes all variables that it reads as trees of arrays.

Modules, from the bottom up:

    boxes              parameters that are stored padded, and read as logical arrays
    parameters         the variables of a module by path
    choices            the units that a user names, with their settings
    survey             the units and loops that a trace shows
    layout             where parameters are stored, and which unit gathers each
    annotation         the record of an annotated module
    call               one method call, split into arrays
    dispatch           where a call goes: to the engine, or to plain Flax
    trained            which parameters are trained
    annotated_class    the annotated module itself
    optimizer          optimizer state like its parameters
    train_state        the loss, and arrays initialised in place
"""
