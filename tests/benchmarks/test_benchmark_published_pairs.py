"""The file of published pairs: its form, and that each configuration is one of ours; a small file, planned."""

import json

import pytest

from benchmarks import published, published_pairs
from benchmarks.ranking import REMATS
from jshard.cluster.compile import Variant
from jshard.cluster.costs import Costs
from jshard.cluster.topology import traced_for_device
from jshard.plans.mesh import data_shards
from jshard.recipes.model_file import load_model_file
from jshard.recipes.overrides import override

FILE = json.loads(published_pairs.PAIRS.read_text())
GROUPS = FILE["groups"]
ENTRIES = published_pairs.read_pairs(published_pairs.PAIRS)


def tiny_group(*configurations, **changes):
    shared = {
        "id": "lab_tiny",
        "source": "a table",
        "framework": "a framework",
        "cluster": "two H100",
        "assumed": "nothing",
        "differs": "nothing known",
        "model": "llama.py",
        "recipe": "tiny",
        "topology": "h100:1x2",
        "units": {},
        "assume": {},
        "settings": ["model.scan=true"],
    }
    return {**shared, **changes, "configurations": list(configurations)}


def tiny(name, rate, *, fsdp=2, tensor=1, batch=8, **more):
    measured = {"oom": True} if rate is None else {"tokens_per_s_per_device": rate}
    return {
        "id": f"lab_tiny_{name}",
        "row": "a row",
        "published": "a figure",
        "mesh": {"fsdp": fsdp, "tensor": tensor},
        "settings": [f"batch_size={batch}", "accumulate=1", "model.remat=full"],
        "knobs": {"remat": "full", "tensor": tensor, "pipe": 1, "microbatch": batch // fsdp},
        **measured,
        **more,
    }


@pytest.fixture
def file(tmp_path):
    """A file of four configurations: one is faster, one ran out of memory, and one cannot be planned."""
    group = tiny_group(
        tiny("a", 200.0),
        tiny("b", 100.0, fsdp=1, tensor=2),
        tiny("c", None, batch=16),
        tiny("d", 50.0, differs="three data shards", mesh={"fsdp": 2, "tensor": 3}),
    )
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps({"groups": [group]}))
    return path


def test_there_are_pairs_of_many_sources():
    assert len({group["id"].partition("_")[0] for group in GROUPS}) >= 8
    assert len({entry["id"] for entry in ENTRIES}) == len(ENTRIES)
    assert sum("oom" in entry for entry in ENTRIES) >= 20
    for group in GROUPS:
        assert len(group["configurations"]) >= 2
        for configuration in group["configurations"]:
            assert configuration["id"].startswith(group["id"])


def test_every_configuration_says_where_it_was_published_and_what_is_assumed():
    for entry in ENTRIES:
        assert entry["source"] and entry["row"] and entry["published"] and entry["framework"] and entry["cluster"]
        assert entry["assumed"] and entry["differs"]
        assert ("oom" in entry) != ("tokens_per_s_per_device" in entry)
        devices = {published_pairs.cluster_of(member).topology.num_devices for member in ENTRIES if same(member, entry)}
        assert len(devices) == 1 or entry["normalised"]


def same(entry, other):
    return entry["group"] == other["group"]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group["id"])
def test_every_configuration_is_one_of_ours(group):
    for entry in ENTRIES:
        if entry["group"] != group["id"]:
            continue
        model_file = load_model_file(str(published_pairs._MODELS / entry["model"]))
        recipe = override(model_file.recipe(entry["recipe"])[1], entry["settings"])
        num_devices = 1
        for degree in entry["mesh"].values():
            num_devices *= degree
        assert num_devices == published_pairs.cluster_of(entry).topology.num_devices
        shards = data_shards(entry["mesh"])
        assert recipe.batch_size % (shards * recipe.accumulate) == 0
        knobs = entry["knobs"]
        assert knobs["remat"] in REMATS
        assert knobs["microbatch"] == recipe.batch_size // recipe.accumulate // shards
        for axis in ("tensor", "pipe"):
            assert knobs[axis] == entry["mesh"].get(axis, 1)


def test_a_group_says_once_what_its_configurations_share(file):
    entry = published_pairs.read_pairs(file, "lab_tiny_d")[0]
    assert entry["settings"] == ["model.scan=true", "batch_size=8", "accumulate=1", "model.remat=full"]
    assert entry["differs"] == "nothing known; three data shards"
    assert entry["group"] == "lab_tiny"


def test_a_file_is_planned_before_compiling_and_counted(file):
    result = published.run(quick=False, pairs=file)
    rates = {entry["id"]: entry["planned_tokens_per_s_per_device"] for entry in result["configurations"]}
    assert set(rates) == {"lab_tiny_a", "lab_tiny_b", "lab_tiny_c"} and min(rates.values()) > 0
    assert list(result["refused"]) == ["lab_tiny_d"]
    said = "\n".join(published.table(result))
    assert "| **more than 10 % apart** | 1 |" in said
    assert "2 configurations ran, of which 2 are planned to fit. 1 ran out of memory" in said
    assert "- lab_tiny_d: " in said and "- a table" in said


def test_configurations_share_what_is_traced_and_are_planned_as_alone(tmp_path):
    settings = ["batch_size=8", "accumulate=2", "model.remat=full"]
    configurations = tiny("a", 200.0), tiny("b", 100.0, fsdp=1, tensor=2, settings=settings)
    group = tiny_group(*configurations, framework="JAX")  # in PyTorch there would be more to it
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps({"groups": [group]}))
    published_pairs._traces.cache_clear()
    together = published_pairs.plan_pairs(path, by="estimate")["configurations"]
    assert published_pairs._traces.cache_info().misses == 1
    entry = together[1]
    model_file = load_model_file(str(published_pairs._MODELS / entry["model"]))
    recipe = override(model_file.recipe(entry["recipe"])[1], entry["settings"])
    cluster = published_pairs.cluster_of(entry)
    with traced_for_device(cluster.topology.device):
        costs = Costs(model_file, recipe, cluster.machine)
        units = {"prefetch": "compiler"}
        alone = costs.of(Variant(name="alone", mesh={"replica": 1, **entry["mesh"]}, units=units))
    assert entry["step_s"] == alone.step_s
    assert entry["planned_gib"] == alone.memory.step_bytes / 2**30


def test_attention_is_that_of_the_published_device(tmp_path):
    """Flash attention reads and writes no scores: on a GPU long sequences take less memory than in plain form."""
    settings = ["batch_size=2", "accumulate=1", "model.remat=minimal_flash"]
    long = ["model.scan=true", "model.compute_dtype=bfloat16", "model.block_size=4096", "sequence_length=4096"]
    group = tiny_group(
        tiny("auto", 200.0, settings=settings),
        tiny("plain", 100.0, settings=[*settings, "model.attention=xla"]),
        settings=long,
    )
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps({"groups": [group]}))
    auto, plain = published_pairs.plan_pairs(path, by="estimate")["configurations"]
    assert auto["planned_gib"] < 0.7 * plain["planned_gib"]
    assert auto["step_s"] < plain["step_s"]


@pytest.mark.parametrize(
    ("entry", "sync"),
    [
        ({"units": {}}, "each"),
        ({"units": {"reshard_after_forward": False}}, "last"),
        ({"units": {"reshard_after_forward": False}, "sync": "each"}, "each"),
        ({"units": {}, "sync": "last"}, "last"),
    ],
    ids=["ZeRO-3", "ZeRO-1", "ZeRO-2", "asked"],
)
def test_gradients_are_reduced_once_a_step_where_parameters_stay(entry, sync):
    assert published_pairs._sync(entry) == sync


@pytest.mark.parametrize(
    ("framework", "units", "planned"),
    [
        ("JAX MaxText", {}, {"prefetch": "compiler"}),
        ("JAX MaxText", {"prefetch": 2}, {"prefetch": 2}),
        ("JAX MaxText", {"reshard_after_forward": False}, {"prefetch": "compiler", "reshard_after_forward": False}),
        ("PyTorch FSDP2", {}, {}),
    ],
)
def test_programs_in_jax_leave_the_order_of_gathers_to_the_compiler(framework, units, planned):
    assert published_pairs._units({"framework": framework, "units": units}) == planned


def test_a_program_in_jax_gathers_no_layer_ahead(tmp_path):
    settings = ["batch_size=2", "accumulate=1", "model.remat=full"]
    group = tiny_group(
        tiny("own", 200.0, settings=settings),
        tiny("ahead", 100.0, settings=settings, units={"prefetch": 2}),
        framework="JAX",
    )
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps({"groups": [group]}))
    own, ahead = published_pairs.plan_pairs(path, by="estimate")["configurations"]
    assert own["planned_gib"] < ahead["planned_gib"]


def test_logits_that_stay_and_whole_sums_are_said_by_the_file(tmp_path):
    """Of a group, as all that PyTorch does."""
    settings = ["batch_size=16", "accumulate=2", "model.remat=full", "model.vocab_size=64000"]
    zero1 = {"reshard_after_forward": False}
    group = tiny_group(
        tiny("plain", 200.0, settings=settings),
        tiny("kept", 100.0, settings=settings, kept_logits=True),
        tiny("whole", 50.0, settings=settings, whole_sums=True),
        framework="PyTorch",
        units=zero1,
    )
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps({"groups": [group]}))
    plain, kept, whole = published_pairs.plan_pairs(path, by="estimate")["configurations"]
    assert plain["planned_gib"] < kept["planned_gib"] and plain["step_s"] == kept["step_s"]
    assert plain["step_s"] < whole["step_s"] and plain["planned_gib"] == whole["planned_gib"]


def test_only_some_of_a_file_are_planned(file):
    result = published.run(quick=False, pairs=file, only="lab_tiny_a")
    assert [entry["id"] for entry in result["configurations"]] == ["lab_tiny_a"]
    said = "\n".join(published.table(result))
    assert "| **more than 10 % apart** | 0 | - | - |" in said


def test_compiled_pairs_have_the_time_of_the_compiled_step(file, monkeypatch):
    asked = []

    def compiled(entry):
        asked.append(entry["id"])
        return {"planned_tokens_per_s_per_device": 1.0, "fits": True, "not_in_the_estimate": []}

    monkeypatch.setattr(published_pairs, "_compiled", compiled)
    result = published.run(quick=False, pairs=file, by="compiled", only="lab_tiny_a,lab_tiny_b")
    assert asked == ["lab_tiny_a", "lab_tiny_b"]
    assert "compiled for its cluster" in "\n".join(published.table(result))
