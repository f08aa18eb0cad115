"""`--set key=value`: values are read by their annotation, and a bad one is refused with the key that was meant."""

import dataclasses
import enum
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NewType

import pytest

from jshard.recipes.overrides import SettingError, override, read_value
from jshard.train import Recipe, load_model_file

if TYPE_CHECKING:
    pass  # pyright: ignore[reportMissingImports]


class Color(enum.Enum):
    RED = 1
    BLUE = 2


Width = NewType("Width", int)


@dataclasses.dataclass(frozen=True)
class Head:
    kind: Literal["linear", "mlp"] = "linear"
    sizes: tuple[int, ...] = (8, 8)


@dataclasses.dataclass(frozen=True)
class Net:
    width: int = 64
    heads: int = 4
    dropout: float | None = None
    color: Color = Color.RED
    window: tuple[int, int] = (3, 3)
    head: Head = Head()
    note: str = "none"
    free: Any = None
    init: object = len
    made: int = dataclasses.field(init=False, default=7)

    def __post_init__(self):
        if self.width % self.heads:
            raise ValueError(f"width={self.width} does not split into heads={self.heads}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(Recipe):
    ema: float = 0.0
    resume_from: Path | None = None

    def __post_init__(self):
        if not self.ema < 1:
            raise AssertionError  # as `assert` does outside of tests


MINE = Mine(model=Net(), sequence_length=8, batch_size=4, num_steps=10, learning_rate=0.1, warmup_steps=2)


def refused(*settings, recipe=MINE):
    with pytest.raises(SettingError) as caught:
        override(recipe, settings)
    return caught.value


def test_values_reach_the_recipe_and_its_parts():
    new = override(
        MINE,
        ["learning_rate=1e-3", " num_steps = 1e6", "model.width=1_000", "model.head.kind=mlp", "model.color=BLUE"]
        + ["ema=0.5", "resume_from=runs/a=b", "model.dropout=0.1", "model.head.sizes=1,2,3", "model.window=(5, 7)"],
    )
    assert type(new) is Mine
    assert (new.learning_rate, new.num_steps, new.ema, new.resume_from) == (1e-3, 1_000_000, 0.5, Path("runs/a=b"))
    assert type(new.num_steps) is int
    head = Head("mlp", (1, 2, 3))
    assert new.model == Net(width=1000, head=head, color=Color.BLUE, dropout=0.1, window=(5, 7))
    assert MINE.model == Net()
    assert override(MINE, []) is MINE


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (int, "-3", -3),
        (int, "4.0", 4),
        (int, "12345678901234567890", 12345678901234567890),
        (Width, "3", 3),
        (Annotated[int, "steps"], "3", 3),
        (float, "3", 3.0),
        (float, "inf", math.inf),
        (bool, "YES", True),
        (bool, "off", False),
        (bool, "0", False),
        (str, "none", "none"),
        (str, "", ""),
        (int | None, "None", None),
        (str | None, "none", None),
        (str | int, "3", 3),
        (Literal["none", "dots"] | None, "none", "none"),
        (Literal[1, 2], "2", 2),
        (tuple[int, ...], "", ()),
        (tuple[int, ...], "1,", (1,)),
        (tuple[str, float], "a, 1e-2", ("a", 0.01)),
        (list[int], "[1,2]", [1, 2]),
        (dict[str, int], "{'a': 1}", {"a": 1}),
        (Any, "1e-3", 1e-3),
        (Any, "false", False),
        (Any, "bfloat16", "bfloat16"),
        (Any, "(1, 'a')", (1, "a")),
    ],
)
def test_reading(kind, text, value):
    read = read_value(text, kind)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (int, "1.5"),
        (int, "1e999999999"),
        (int, "inf"),
        (int, ""),
        (int, "true"),
        (float, "nan"),
        (float, "1,5"),
        (bool, "2"),
        (bool, ""),
        (int | None, "many"),
        (Literal["none", "dots"], "dot"),
        (Color, "red"),
        (tuple[int, int], "1,2,3"),
        (tuple[int, ...], "1,,2"),
        (dict, "[1]"),
        (Head, "Head()"),
    ],
)
def test_text_that_is_no_such_value(kind, text):
    with pytest.raises(ValueError, match=r"\S"):
        read_value(text, kind)


@pytest.mark.parametrize(
    ("setting", "do"),
    [
        ("width=32", "--set model.width=32"),
        ("model.widht=32", "--set model.width=32"),
        ("model.kind=mlp", "--set model.head.kind=mlp"),
        ("widht=32", "--set model.width=32"),
        ("batchsize=many", "--print-config"),
        ("zzzzzzzz=1", "--print-config"),
        ("model.vvv=1", "--print-config"),
    ],
)
def test_nearest_key(setting, do):
    assert refused(setting).do.startswith(do)


def test_value_that_the_dataclass_refuses():
    assert str(refused("model.heads=3", "model.width=100")) == (
        "A setting cannot be used.\n"
        "  where: --set model.heads=3 --set model.width=100\n"
        "  why:   Net refuses it: width=100 does not split into heads=3\n"
        "  do:    --print-config  # shows the keys and their values"
    )
    assert override(MINE, ["model.heads=3", "model.width=99"]).model.width == 99
    assert refused("ema=1").why == "Mine refuses it: one of its assertions failed."


@pytest.mark.parametrize(
    ("settings", "where", "why"),
    [
        (["foo"], "--set foo", "the recipe has no key 'foo'."),
        (["batch_size"], "--set batch_size", "it is not key=value."),
        (["batch_size=many"], "--set batch_size=many", "batch_size takes int, not 'many'."),
        (["seed=1", "seed=2"], "--set seed=1 --set seed=2", "seed is set twice."),
        (["model=small"], "--set model=small", "model is set field by field."),
        (["model.color=light blue"], "--set 'model.color=light blue'", "model.color takes Color, not 'light blue'."),
    ],
)
def test_what_is_refused(settings, where, why):
    error = refused(*settings)
    assert (error.where, error.why.splitlines()[0]) == ((where,), why)


def test_types_of_a_users_own_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\n"
        "import dataclasses\nfrom typing import Literal\nfrom jshard.train import Recipe\n"
        "Kind = Literal['a', 'b']\n"
        "@dataclasses.dataclass(frozen=True)\nclass Config:\n    kind: Kind = 'a'\n    width: int | None = None\n"
        "def tiny(): return Recipe(model=Config(), sequence_length=8, batch_size=4, num_steps=1, learning_rate=1,\n"
        "                          warmup_steps=0)\n"
        "RECIPES = {'tiny': tiny}\nbuild = annotate = print\n"
    )
    _, recipe = load_model_file(path).recipe()
    new = override(recipe, ["model.kind=b", "model.width=3"])
    assert (new.model.kind, new.model.width) == ("b", 3)
    assert refused("model.kind=c", recipe=recipe).why == "model.kind takes {a,b}, not 'c'."
    assert refused("model.width=c", recipe=recipe).why == "model.width takes int|none, not 'c'."
