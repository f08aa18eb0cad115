"""The call of an annotated model: one program, traced in global view, run on data shards.

From the outside in:

    region       a call of an annotated module: the outermost opens a region, one inside is a unit (`units`)
    trace, call  the call as a function of arrays, traced once, in global view
    program      traced programs, and their derivatives as programs
    program_call a call as one equation, whose rules give calls of new programs: of a region (`region_call`), of a unit
                 (`unit_call`)
    on_shards    a region's program in one `jax.shard_map` over the data axes; how arrays cross its border (`crossing`)
    partitioner  runs a program equation by equation on one data shard, by the records in `rules`
    schedule     its treatment of units: gathers them in time, reduces gradients (with `gathers` and `gradient_sums`)

In addition: `accumulate` for microbatches (`running_sums`: their gradients added in place), `per_example` for functions
declared to act on each example, `context` for the context of a call (global view, shapes only), and `mixing` for the
communication of mixing examples.

The core idea in one example, without units, loops and most rules:

    >>> import jax, jax.numpy as jnp, numpy as np, jshard as js
    >>> from jax import lax
    >>> from jax.extend.core import Literal
    >>> from jax.sharding import PartitionSpec as P
    >>> def loss(params, x):  # the user's, in global view
    ...     for w in params:
    ...         x = jnp.tanh(x @ w)
    ...     return (x * x).sum()
    >>> params = list(jax.random.normal(jax.random.key(0), (3, 16, 16)) / 4)
    >>> x = jax.random.normal(jax.random.key(1), (32, 16))
    >>> mesh = js.mesh(fsdp=8)
    >>> program = jax.make_jaxpr(jax.value_and_grad(loss))(params, x).jaxpr
    >>> def on_shard(*args):
    ...     rows = 32 // lax.axis_size("fsdp")
    ...     cut = lambda v: lax.dynamic_slice_in_dim(v, lax.axis_index("fsdp") * rows, rows)
    ...     env = dict(zip(program.invars, zip(args, ["stored"] * len(params) + ["split"])))
    ...     for e in program.eqns:
    ...         operands = [(a.val, "whole") if isinstance(a, Literal) else env[a] for a in e.invars]
    ...         gather = lambda v: (lax.all_gather(v, "fsdp", tiled=True), "whole")
    ...         operands = [gather(v) if s == "stored" else (v, s) for v, s in operands]
    ...         states = [s for _, s in operands]
    ...         summed = e.params.get("axes") or e.params.get("dimension_numbers", [((), ())])[0][0]
    ...         state = "split" if "split" in states else "whole"
    ...         if "partial" in states or (state == "split" and 0 in summed):
    ...             state = "partial"  # its sum over the shards is the value
    ...         if state == "split" and e.primitive.name != "dot_general":
    ...             operands = [(cut(v), s) if s == "whole" and v.ndim else (v, s) for v, s in operands]
    ...         env[e.outvars[0]] = e.primitive.bind(*(v for v, _ in operands), **e.params), state
    ...     value, *gradients = (env[v][0] for v in program.outvars)
    ...     return lax.psum(value, "fsdp"), [lax.psum_scatter(g, "fsdp", tiled=True) for g in gradients]
    >>> sharded = jax.shard_map(on_shard, mesh=mesh, in_specs=P("fsdp"), out_specs=(P(), P("fsdp")), check_vma=False)
    >>> results, expected = jax.jit(sharded)(*params, x), jax.value_and_grad(loss)(params, x)
    >>> for ours, one_device in zip(*map(jax.tree.leaves, (results, expected))):
    ...     np.testing.assert_allclose(ours, one_device, rtol=1e-4, atol=1e-5)
"""
