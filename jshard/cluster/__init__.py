"""Planning for a cluster you do not have: its devices, its compiler, an estimate of its step.

Modules, from the bottom up:

    options          the compiler options that were shown to help
    target_config    the description of an absent GPU for its compiler
    elf              shared libraries: what one needs is read, small ones are written
    rocm_stubs       what the compiler for AMD GPUs needs on a machine without ROCm, and cannot compile there
    topology         clusters as text, and as devices to compile for
    assumptions      what an estimate assumes of a device and its links
    replay           simulates a compiled schedule
    estimate         the times of a step by the replay, with ranges
    machine          the devices that an estimate is for
    child_process    a separate process that compiles
    compile          requests to compile a step, and its result
    compile_process  the program of that process
    strategies       sharding strategies as configurations
    costs            estimates of a configuration before it is compiled
    search           ranks all configurations by these
    cases            a figure as stated, at its best and at its worst
    goals            targets and budgets as text
    sizing           the best configurations on clusters of growing size
    failures         the time that failures and checkpoints take
    outlook          what is expected of a run on a cluster
    timeline         the parts of a step by the replay, as bars to draw
    report           one compiled configuration, as text and as a page
    comparison       several, side by side
    choose           `--auto`: decides among the first of a search
    suggest          configurations with less memory
    answer           the answer to a target or a budget
"""
