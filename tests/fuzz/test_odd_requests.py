"""Odd requests: topologies, files that describe devices, --set, --unit, --mesh, --config in JSON and in TOML."""

import dataclasses
import functools
import json
import tomllib
from pathlib import Path

import pytest

from jshard.cli import _recipe_request
from jshard.cli._arguments import TrainArgs, parse, parse_steps
from jshard.cli._config import with_config
from jshard.cli._devices import num_devices, open_mesh, parse_mesh
from jshard.cluster.topology import TopologyError, parse_topology
from jshard.errors import ShardingError
from jshard.facts.device_files import read_device
from jshard.recipes.model_file import load_model_file
from jshard.recipes.overrides import SettingError, _walk, override, parse_units
from jshard.recipes.recipe import RecipeError, check_recipe, tree
from tests.fuzz.odd_inputs import (
    NO_JSON,
    ODD_VALUES,
    Input,
    check,
    damaged,
    each_change,
    json_texts,
    some_changes,
)

TEXTS = (
    *(
        "",
        " ",
        "nan",
        "inf",
        "-inf",
        "1e999",
        "-1",
        "0",
        "1",
        "0.5",
        "-0.0",
        "1e6",
        "1e308",
        "0x10",
        "1_000",
        "1,2",
        ",",
    ),
    *("9" * 400, "9" * 5000, "2**63", "18446744073709551616", "-9223372036854775809", "\u0663", "\u00b2", "\u00e9"),
    *("\0", "\ud800", "\x1b[31m", "\n", "none", "null", "true", "yes", "full", "x", "a=b", "=", "lambda: 1"),
    *("()", "[]", "(1,", "[[1]]", "(" * 5000, "[" * 200 + "]" * 200, "{}", "{'a': 1}", "'a'", '"', "1+2j", "b'x'"),
    *("'\\d'", "1if 1else 2", "__import__('os')"),
)
SHAPES = ("64x8", "0x8", "8", "1x1x1x1", "-1x8", "+1x8", "1_0x8", "1x8\0", "999999999999x8", "2x2", "1x", "x", "1 x8")

DEVICE = b"""\
like = "h200"
title = "NVIDIA H20, 96 GB"
source = "NVIDIA H20 data sheet"
core_count = 78
flops_per_s = { bf16 = 148e12, tf32 = 74e12, fp8 = 296e12, f32 = 44e12 }
hbm_bytes = 102_625_181_696
hbm_bytes_per_s = 4.0e12
fast_group = 8
slow = { gb_per_s = 50, name = "one 400 Gb/s adapter", reached_percent = 84, least_percent = 30 }
matmul = { least = 60, stated = 70, most = 80, source = "measured" }
"""
NO_TOML = tuple(
    Input(name, raw)
    for name, raw in {
        "deep lists": b"a=" + b"[" * 20_000,
        "deep lists, closed": b"a=" + b"[" * 20_000 + b"]" * 20_000,
        "deep tables": b"a=" + b"{a=" * 10_000 + b"1" + b"}" * 10_000,
        "a long key": b".".join([b"a"] * 30_000) + b"=1",
        "a long key in quotes": b" . ".join([b'"a.b"'] * 9000) + b"=1",
        "a long head": b"[" + b".".join([b"a"] * 30_000) + b"]\n",
        "a very long key": b".".join([b"a"] * 500_000) + b"=1",
        "a long word": b"a" * 60_000,
        "a date": b"a=1979-05-27",
        "a zero byte": b"a=\0",
        "no UTF-8": b"\xff",
        "many digits": b"a=" + b"9" * 10_000,
        "many keys": b"".join(b"a%d=1\n" % number for number in range(6000)),
        "many tables": b"[[a]]\n" * 10_000,
    }.items()
)


def as_toml(value):
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(map(as_toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}={as_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value) if isinstance(value, str) else '"none"' if value is None else str(value)


def toml_texts(inputs):
    for each in inputs:
        if isinstance(each.value, dict):
            lines = [f"{json.dumps(key)} = {as_toml(item)}" for key, item in each.value.items()]
            yield Input(each.name, "\n".join(lines).encode("utf-8", "surrogatepass"))


def texts(*starts):
    for start in starts:
        for text in TEXTS:
            yield Input(f"{start}{text}"[:80], f"{start}{text}")


@functools.cache
def gpt():
    file = load_model_file(Path("gpt"))
    return file, file.recipe(None)[1]


def topology(text):
    found = parse_topology(text)
    return found.describe(), found.num_devices, found.fast_group


def device(raw):
    Path("d.toml").write_bytes(raw)
    found = read_device(Path("d.toml"))
    shape = "x".join("2" * found.dims) or "2x1"
    assert found.sources and found.product_flops_per_s("bf16") > 0
    topology(f"d.toml:{shape}")


def setting(text):
    recipe = override(gpt()[1], [text])
    check_recipe(recipe)
    json.dumps(tree(recipe), allow_nan=False).encode()
    hash(recipe)


def mesh(text):
    sizes = parse_mesh(text)
    open_mesh(sizes, devices=num_devices(sizes))


def config(name, raw):
    Path(name).write_bytes(raw)
    options = {field.name for field in dataclasses.fields(TrainArgs)}
    with_config(["gpt", "--config", name], options, known=options)
    args = dataclasses.replace(TrainArgs(Path("gpt")), config=Path(name))
    args = _recipe_request.without_config(args, gpt()[0])
    check_recipe(override(gpt()[1], args.set))


def whole_config():
    options = {"data": ["a.txt"], "unit": ["remat=full"], "mesh": {"fsdp": 8}, "stop_deadline": 3.0, "out": "runs/a"}
    return {"model_file": "gpt", "recipe_name": "tiny", "recipe": tree(gpt()[1]), **options, "track": None}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("h20.toml").write_bytes(DEVICE)


def test_topologies():
    starts = ("h100:", "v5p:", "h20.toml:", "gone.toml:", "", "h100:4x", "\0.toml:")
    shapes = (Input(f"{start}{shape}", f"{start}{shape}") for start in starts for shape in SHAPES)
    surveyed = check([*shapes, *texts(*starts)], topology)
    assert surveyed.returned > 3


def test_files_of_devices():
    device(DEVICE)
    some = list(each_change(tomllib.loads(DEVICE.decode())))[::11]
    check([*NO_TOML, *toml_texts(some)], device)


def test_settings_of_any_text_for_any_key():
    keys = [key for key, _ in _walk(gpt()[1])]
    some = list(texts("", *(f"{key}=" for key in keys)))[::17]  # no divisor of their number: every text, some keys
    check(some, setting)


def test_settings_of_units_degrees_and_steps():
    check(texts("", "=", "remat=", "prefetch=", "reshard_after_forward=", "x="), lambda text: parse_units([text]))
    check(texts("", "=", "fsdp=", "replica=2,fsdp=", "x="), mesh)
    check(texts("", ":", "1:", "0:"), lambda text: parse_steps(text, option="--profile"))


@pytest.mark.parametrize("name", ["c.json", "c.toml"])
def test_files_of_options(name):
    written = {"c.json": json_texts, "c.toml": toml_texts}[name]
    config(name, next(iter(written([Input("good", whole_config())]))).value)
    some = list(each_change(whole_config()))[::50]
    no_files = NO_JSON if name == "c.json" else NO_TOML
    check([*no_files, *written(some)], functools.partial(config, name))


@pytest.mark.wide
def test_every_odd_request():
    table = tomllib.loads(DEVICE.decode())
    check(toml_texts(each_change(table)), device)
    check(toml_texts(some_changes(table, seed=21, count=300)), device)
    check(damaged(DEVICE, seed=22, count=300), device)
    keys = [key for key, _ in _walk(gpt()[1])]
    check(list(texts("", *(f"{key}=" for key in keys)))[::4], setting)
    good = whole_config()
    for name, written in (("c.json", json_texts), ("c.toml", toml_texts)):
        check(written(list(each_change(good))[::13]), functools.partial(config, name))
        check(written(some_changes(good, seed=23, count=50)), functools.partial(config, name))
    check(damaged(json.dumps(good).encode(), seed=24, count=100), functools.partial(config, "c.json"))


# What failed first, by name.


@pytest.mark.parametrize("shape", ["1" * 4301 + "x8", "999999999999x8", "\u0663x8", "1x8x8x8", "1x9"])
def test_a_topology_of_enormous_or_foreign_numbers_is_refused(shape):
    with pytest.raises(TopologyError):
        parse_topology(f"h100:{shape}")


def test_a_key_of_thousands_of_parts_takes_no_time_and_no_memory():
    surveyed = check([each for each in NO_TOML if each.name.startswith("a long")], device)
    assert surveyed.refused == 4
    assert surveyed.slowest[0] < 1 and surveyed.largest[0] < 16 << 20


def test_a_recipe_whose_own_check_divides_by_zero_is_refused():
    with pytest.raises(SettingError, match=r"model.n_head=0(.|\n)*refuses it: integer modulo by zero"):
        setting("model.n_head=0")


def test_a_count_beyond_64_bits_is_refused():
    with pytest.raises(RecipeError, match=r"batch_size must be at most 2\*\*63 - 1"):
        setting("batch_size=99999999999999999999")


def test_a_value_of_a_file_is_no_option():
    Path("c.json").write_text(json.dumps({"out": "--dry-run"}))
    with pytest.raises(ShardingError, match="would be read as an option"):
        with_config(["gpt", "--config", "c.json"], ["out"], known=["out"])


def test_a_count_of_a_device_is_at_least_one():
    with pytest.raises(ShardingError, match=r"hbm_bytes(.|\n)*0\.5, and should be a number from 1"):
        device(DEVICE.replace(b"102_625_181_696", b"0.5"))


@pytest.mark.parametrize("words", ["--stop-deadline nan", "--peer-timeout inf", "--workers 99999999999999999999"])
def test_an_option_that_no_clock_and_no_process_can_have_is_refused(words):
    with pytest.raises(ShardingError, match=r"unusable number(.|\n)*" + words.split()[0]):
        parse(TrainArgs, ["gpt", *words.split()], command="jshard train")


@pytest.mark.parametrize("odd", ODD_VALUES[:-1])
def test_a_config_that_is_one_odd_value(odd):
    Path("c.json").write_text(json.dumps(odd))
    if odd == {} or odd == {"": None}:
        return
    with pytest.raises(ShardingError):
        with_config(["gpt", "--config", "c.json"], ["out"], known=["out"])
