"""`js.compiler_options`: profiles of options, and a compiler that is asked whether it knows them."""

import dataclasses
import unittest.mock

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jshard.cluster import options
from jshard.cluster.options import OptionError, compiler_options, options_for

LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
UNROLLING = "xla_gpu_enable_while_loop_unrolling"
DOUBLE_BUFFER = "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER"
ON = "COLLECTIVE_PIPELINING_MODE_ON"


def compiler(*known):
    """A compiler that knows these options and no others, in the words of XLA."""

    def try_compile(options):
        for name in options:
            if name not in known:
                raise RuntimeError(f"INVALID_ARGUMENT: No such compile option: '{name}'")

    return try_compile


def test_the_installed_jaxlib_knows_every_option_of_the_gpu_profiles():
    # The names are read by jaxlib whatever the backend is; a warning would be an error here.
    assert compiler_options("fastest", platform="gpu") == {LIMIT: 8, UNROLLING: DOUBLE_BUFFER}
    least = compiler_options("memory", platform="gpu")
    assert least.pop(LIMIT) == 8
    assert len(least) == 2 and set(least.values()) in ({True}, {ON})


def mesh_of(*hosts):
    """A mesh of two H100 of each of these processes, of which each has a host."""
    devices = [Device(process) for process in hosts for _ in range(2)]
    return unittest.mock.create_autospec(Mesh, instance=True, devices=np.array(devices), size=len(devices))


@dataclasses.dataclass(frozen=True)
class Device:
    process_index: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100 80GB HBM3"


def test_within_a_host_collectives_run_one_after_another():
    between = compiler_options("fastest", mesh=mesh_of(0, 1))
    assert between == {LIMIT: 8, UNROLLING: DOUBLE_BUFFER}
    assert compiler_options("fastest", mesh=mesh_of(0)) == {UNROLLING: DOUBLE_BUFFER}
    assert compiler_options("memory", mesh=mesh_of(0)) == compiler_options("memory", mesh=mesh_of(0, 1))
    assert compiler_options("fastest", mesh=mesh_of(0), **{LIMIT: 4})[LIMIT] == 4


def test_on_an_a100_the_scheduler_is_turned_on_that_xla_keeps_for_later_gpus():
    of_all, of_ampere = (compiler_options("fastest", platform=name) for name in ("h100", "a100-80"))
    estimator, early = "enable_analytical_latency_estimator", "experimental_collective_start_as_early_as_possible"
    names = ["enable_latency_hiding_scheduler", estimator if jax.__version_info__ < (0, 11) else early]
    scheduler = {f"xla_gpu_{name}": True for name in names}
    assert of_all == {LIMIT: 8, UNROLLING: DOUBLE_BUFFER}
    in_turn = {UNROLLING: DOUBLE_BUFFER}  # by that estimator, collectives side by side are waited for too early
    assert of_ampere == (in_turn if names[1] == estimator else of_all) | scheduler
    assert compiler_options(None, platform="a100-40") == {}
    early_start = {f"xla_gpu_{name}": True for name in (names[0], early)}
    for name in ("mi250x", "mi300x"):  # of any version: for them the estimator hides next to nothing
        assert compiler_options("fastest", platform=name) == of_all | early_start


def test_where_hosts_share_links_small_all_reduces_are_left_to_nccl():
    names = LIMIT, UNROLLING, "xla_gpu_experimental_use_collective_kernels"
    newer, older = (
        options_for("fastest", platform="gb200", overrides={}, try_compile=compiler(*known))
        for known in (names, names[:2])
    )
    assert newer == older | {names[2]: ""}  # an older version, which does not know it, is not warned about


def test_the_name_that_the_version_knows_is_taken():
    old, new = "xla_gpu_enable_pipelined_{}", "xla_gpu_pipeline_{}"
    kinds = ("all_gather", "reduce_scatter")
    for form, value in ((old, True), (new, ON)):
        names = [form.format(kind) for kind in kinds]
        found = options_for("memory", platform="gpu", overrides={}, try_compile=compiler(LIMIT, *names))
        assert found == {LIMIT: 8, **dict.fromkeys(names, value)}


def test_what_is_unknown_is_dropped_with_one_warning():
    with pytest.warns(UserWarning, match="does not know") as caught:
        found = options_for("memory", platform="gpu", overrides={}, try_compile=compiler("xla_gpu_pipeline_all_gather"))
    assert found == {"xla_gpu_pipeline_all_gather": ON}
    assert [str(one.message) for one in caught] == [
        "This version of the compiler does not know these options and runs without them: "
        f"{LIMIT}, xla_gpu_enable_pipelined_reduce_scatter or xla_gpu_pipeline_reduce_scatter."
    ]


def test_overrides_come_instead_of_the_profile_and_besides_it():
    name = "xla_gpu_all_gather_combine_threshold_bytes"
    assert compiler_options("fastest", platform="gpu", **{LIMIT: 2, name: 0}) == {
        UNROLLING: DOUBLE_BUFFER,
        LIMIT: 2,
        name: 0,
    }
    assert compiler_options("fastest", platform="gpu", **{LIMIT: None}) == {UNROLLING: DOUBLE_BUFFER}
    assert compiler_options(None, platform="gpu", **{name: 1}) == {name: 1}


def test_other_platforms():
    assert compiler_options("fastest", platform="cpu") == {}
    assert compiler_options("fastest") == {}  # this process's own
    assert compiler_options("memory", platform="v5p") == {}


def test_profiles_of_tpus():
    names = "v4 v5e v5p v6e tpu7x".split()
    v4, v5e, v5p, v6e, tpu7x = (compiler_options("fastest", platform=name) for name in names)
    # A v5e has no SparseCores; and what fuses gathers with products on it may give wrong results on others.
    assert len(v4) == 2 and v4["xla_enable_async_all_gather"] is True
    assert len(v5e) == 2 and v5e["xla_tpu_relayout_group_size_threshold_for_reduce_scatter"] == 1
    assert len(v5p) == 17 and v6e == v5p == v5p | tpu7x
    on_sparse_cores = {"xla_tpu_sparse_core_all_reduce_offload_min_size_in_bytes": 0}
    assert tpu7x == {"xla_tpu_prefer_async_allgather_to_allreduce": True} | on_sparse_cores | v5e
    assert v5p["xla_tpu_enable_sparse_core_collective_offload_all_reduce"] is True
    assert not any(value for name, value in v5p.items() if "async_collective_fusion" in name)


REFUSAL = "FAILED_PRECONDITION: Continuation fusion for AllGather is enabled on platform viperfish,\nbut not supported."


def refuses(*names):
    """A compiler that knows all options, but does not compile with some."""

    def try_compile(options):
        if not options.keys().isdisjoint(names):
            raise RuntimeError(REFUSAL)

    return try_compile


def test_a_profile_that_the_compiler_refuses_is_left_out_with_a_warning():
    gathers = "xla_tpu_enable_sparse_core_collective_offload_all_gather"
    with pytest.warns(UserWarning, match="refuses the options of the profile 'fastest' for v5p") as caught:
        chosen = options_for("fastest", platform="v5p", overrides={"x": 1}, try_compile=refuses(gathers))
    assert chosen == {"x": 1}
    [warning] = caught
    assert str(warning.message).endswith("enabled on platform viperfish, but not supported.")


def test_on_a_tpu_itself_a_refused_profile_is_a_warning_at_the_callers_line(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(options, "compile_nothing", lambda: refuses("xla_tpu_use_tc_device_shape_on_sc"))
    options._refused_here.cache_clear()
    with pytest.warns(UserWarning, match="refuses the options of the profile") as caught:
        assert compiler_options("fastest", platform="v5p") == {}
    assert caught[0].filename == __file__
    options._refused_here.cache_clear()


def test_options_of_the_caller_that_the_compiler_refuses_are_an_error():
    with pytest.raises(OptionError) as error:
        options_for(None, platform="v5p", overrides={"x": True}, try_compile=refuses("x"))
    assert str(error.value) == (
        "The compiler refuses these options.\n"
        "  where: js.compiler_options(x=True)\n"
        "  why:   the compiler says: FAILED_PRECONDITION: Continuation fusion for AllGather is enabled on platform"
        " viperfish, but not supported.\n"
        "  do:    js.compiler_options()  # the profile alone"
    )


def refused(*arguments, **named):
    with pytest.raises(OptionError) as error:
        compiler_options(*arguments, **named)
    return str(error.value)


def test_unknown_profile_and_platform():
    assert refused("fast") == (
        "There is no profile 'fast'.\n"
        "  where: js.compiler_options('fast')\n"
        "  why:   the profiles are 'fastest', 'memory', or None.\n"
        '  do:    js.compiler_options("fastest")'
    )
    assert refused(platform="npu") == (
        "There is no platform 'npu'.\n"
        "  where: js.compiler_options(platform='npu')\n"
        "  why:   it must be gpu, tpu, cpu, or a device: "
        "h100, h200, a100-40, a100-80, b200, gb200, mi250x, mi300x, v4, v5e, v5p, v6e, tpu7x.\n"
        '  do:    js.compiler_options(platform="gpu")'
    )


def test_a_value_that_an_option_cannot_have_is_refused_by_the_compiler():
    assert refused(platform="gpu", xla_gpu_enable_triton_gemm=1) == (
        "An option cannot have this value.\n"
        "  where: js.compiler_options(xla_gpu_enable_triton_gemm=1)\n"
        "  why:   the compiler says: While setting option xla_gpu_enable_triton_gemm, '1' is not a valid bool value.\n"
        "  do:    js.compiler_options(xla_gpu_enable_triton_gemm=None)  # leaves it out"
    )
