"""Small scheduled programs, written by hand: the forms that compilers print, with sizes that make round numbers."""

DOT_FLOPS = 1_000_000_000  # of `dot`
GATHERED = 8_000_000  # bytes of the whole array of `gather` and `scatter`
EIGHT = "replica_groups={{0,1,2,3,4,5,6,7}}"


def program(*lines: str, computations: str = "", devices: int = 8) -> str:
    """The text of a scheduled module with these instructions in its entry."""
    head = f"HloModule step, is_scheduled=true, num_partitions={devices}"
    return f"{head}\n\n{computations}\n{_computation('ENTRY %main', '(p: f32[8]) -> f32[8]', *_INPUTS, *lines)}"


def computation(name: str, *lines: str) -> str:
    """A computation that others call."""
    return _computation(f"%{name}", "(p: f32[8]) -> f32[8]", *lines)


def body(name: str, *lines: str, state: str = "s32[], f32[250000]{0}", results: str = "%next") -> str:
    """A loop's body: `%i` counts, `%shard` is what it gathers, `results` are the other parts of the next state."""
    return computation(
        name,
        f"%state = ({state}) parameter(0)",
        "%i = s32[] get-tuple-element(%state), index=0",
        "%one = s32[] constant(1)",
        "%next = s32[] add(%i, %one)",
        "%shard = f32[250000]{0} get-tuple-element(%state), index=1",
        "%left = bf16[1000,1000]{1,0} constant({...})",
        "%right = bf16[1000,500]{1,0} constant({...})",
        "%gradient = f32[2000000]{0} constant({...})",
        *lines,
        f"ROOT %out = ({state}) tuple({results})",
    )


def loop(name: str, rounds: int, *operands: str, state: str = "s32[], f32[250000]{0}") -> tuple[str, ...]:
    """The instructions of a loop over the body `name`."""
    parts = ", ".join(["%zero", *operands])
    return (
        f"%{name}_start = ({state}) tuple({parts})",
        f"%{name}_loop = ({state}) while(%{name}_start), condition=%condition, body=%{name},"
        f' backend_config={{"known_trip_count":{{"n":"{rounds}"}}}}',
    )


def dot(name: str, left: str = "left", right: str = "right") -> str:
    """A matrix product of `DOT_FLOPS`."""
    contracted = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    return f"%{name} = bf16[1000,500]{{1,0}} dot(%{left}, %{right}), {contracted}"


def half_dot(name: str) -> str:
    """A matrix product of half as many."""
    return f"%{name} = bf16[500,500]{{1,0}} dot(%half, %right), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"


def gather(name: str, channel: int, operand: str = "shard", *, unit: str = "blocks/0", groups: str = EIGHT) -> str:
    """An all-gather of `GATHERED` bytes begins."""
    return (
        f"%{name} = (f32[250000]{{0}}, f32[2000000]{{0}}) all-gather-start(%{operand}), channel_id={channel}, {groups},"
        f' dimensions={{0}}, metadata={{op_name="jit(step)/jshard[{unit}]/all_gather"}}'
    )


def gathered(name: str, start: str) -> str:
    """An all-gather ends."""
    return f"%{name} = f32[2000000]{{0}} all-gather-done(%{start})"


def scatter(name: str, channel: int, operand: str = "gradient", *, unit: str = "blocks/0") -> str:
    """A reduce-scatter of `GATHERED` bytes begins."""
    return (
        f"%{name} = ((f32[2000000]{{0}}), f32[250000]{{0}}) reduce-scatter-start(%{operand}), channel_id={channel},"
        f' {EIGHT}, to_apply=%add, metadata={{op_name="jit(step)/jshard[{unit}]/backward/reduce_scatter"}}'
    )


def scattered(name: str, start: str) -> str:
    """A reduce-scatter ends."""
    return f"%{name} = f32[250000]{{0}} reduce-scatter-done(%{start})"


_INPUTS = (
    "%zero = s32[] constant(0)",
    "%shard = f32[250000]{0} parameter(0)",
    "%left = bf16[1000,1000]{1,0} constant({...})",
    "%half = bf16[500,1000]{1,0} constant({...})",
    "%right = bf16[1000,500]{1,0} constant({...})",
    "%gradient = f32[2000000]{0} constant({...})",
)


def _computation(name: str, signature: str, *lines: str) -> str:
    return "\n".join([f"{name} {signature} {{", *(f"  {line}" for line in lines), "}", ""])
