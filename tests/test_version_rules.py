"""Rules that hold over the whole source: one package knows versions, no machine is named, the public face is small."""

import ast
import doctest
import importlib
import inspect
import pathlib
import re
import shutil
import subprocess
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.plans import wires

ROOT = pathlib.Path(js.__file__).parents[1]
SOURCES = sorted((ROOT / "jshard").rglob("*.py"))
COMPAT = sorted((ROOT / "jshard" / "_compat").glob("*.py"))

PUBLIC = {
    name: value
    for name, value in ((name, getattr(js, name)) for name in dir(js))
    if not isinstance(value, types.ModuleType)
}
FUNCTIONS = {name: f for name, f in PUBLIC.items() if inspect.isfunction(f)}


def test_there_are_sources_to_look_at():
    assert len(COMPAT) > 3 and len(SOURCES) > 25 and len(FUNCTIONS) > 8


@pytest.mark.parametrize("path", [p for p in SOURCES if p not in COMPAT], ids=lambda p: str(p.relative_to(ROOT)))
def test_only_compat_knows_versions(path):
    assert not version_checks(path.read_text())


def version_checks(text: str) -> list[str]:
    version = r"\b(?:jax|flax|jaxlib|optax|orbax)\.(?:__)?version\w*|importlib\.metadata\.version"
    presence = r"\bhasattr\((?:jax|flax|nnx|lax)[\w.]*, *['\"]"
    of_scan = r"params\[['\"]num_(?:consts|carry)['\"]\]"  # other names since jax 0.12: `_compat.scan_arguments`
    return re.findall(f"{version}|{presence}|{of_scan}", text)


def test_the_rules_can_fail():
    assert version_checks("if jax.__version__ > '0.11': pass")
    assert version_checks("if jax.version.__version_info__ > (0, 11): pass")
    assert version_checks("hasattr(jax.lax, 'pcast')")
    assert version_checks('eqn.params["num_consts"]')
    assert not version_checks("mesh.axis_sizes; hasattr(nnx.Module, name)")
    assert machine_paths('open("/' + 'home/someone/file")')


def machine_paths(text: str) -> list[str]:
    """Absolute paths of some machine; /tmp and the like are left to the eye."""
    return re.findall(r"(?<![\w.:/])/(?:work|root|home|Users|mnt|data|opt)/[\w.-]+", text)


def tracked_files() -> list[pathlib.Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def test_no_path_of_a_machine_in_tracked_files():
    found = {}
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            if path.is_relative_to(ROOT / "tests" / "fixtures"):  # a checkpoint as an older version wrote it
                continue
            pytest.fail(f"{path.relative_to(ROOT)} is not text")
        if paths := machine_paths(text):
            found[str(path.relative_to(ROOT))] = paths
    assert not found


NAMES = """
    LossScale MixedPrecision PartialGradients PlacementPolicy ReshardPlan ShardPlan ShardingError WeightedMean
    abstract_init audit check checkpoint compiler_options data errors explain fully_shard gather global_view kernels
    load loss_scale_of mesh parallel per_example plan read_profile reduce_gradients register_wire reshard
    reshard_plan revise scaled_value_and_grad scan_layers shard_batch shard_init shard_matrices shard_optimizer
    train tune_overlap value_and_grad
""".split()


def test_the_public_names():
    assert sorted(dir(js)) == NAMES


STUBS = sorted((ROOT / "jshard").rglob("__init__.pyi"))


@pytest.mark.parametrize("stub", STUBS, ids=lambda p: str(p.relative_to(ROOT)))
def test_public_names_are_imported_as_themselves(stub):
    """`from x import y as y`, which type checkers take for a public name; and each is there."""
    package = importlib.import_module(".".join(stub.relative_to(ROOT).parts[:-1]))
    imports = [node for node in ast.walk(ast.parse(stub.read_text())) if isinstance(node, ast.ImportFrom)]
    assert all(alias.asname == alias.name for node in imports for alias in node.names)
    assert sorted(alias.name for node in imports for alias in node.names) == sorted(package.__all__) == dir(package)
    assert all(getattr(package, name) is not None for name in package.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_thing_has_a_docstring(name):
    value = PUBLIC[name]
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        return
    text = inspect.getdoc(value) or ""
    assert text.splitlines()[0].endswith((".", ":"))
    if inspect.isfunction(value):
        assert "Examples:" in text
        for parameter in inspect.signature(value).parameters.values():
            assert parameter.annotation is not inspect.Parameter.empty, f"{name}({parameter.name})"
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                assert f"{parameter.name}:" in text, f"{parameter.name} is not reported"
        assert inspect.signature(value).return_annotation is not inspect.Signature.empty


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_are_in_a_section_that_the_reference_reads(path):
    """The parser of Google docstrings knows `Examples:` alone; of anything else it makes a quotation."""
    assert not re.findall(r"^ *Example:$", path.read_text(), re.MULTILINE)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(64, 64, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + jax.nn.gelu(self.linear(x))


class MLP(nnx.Module):
    """8704 parameters."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(64, 8, use_bias=False, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model: MLP, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean()


def namespace(name: str) -> dict[str, Any]:
    """What the examples take for granted; where an example annotates the model itself, it is a plain one."""
    import dataclasses

    mesh = js.mesh()
    model = MLP(nnx.Rngs(0))

    def annotate(model: MLP) -> None:
        js.fully_shard(model, units=Block, mesh=mesh)

    if name not in ("fully_shard", "Strategy"):
        annotate(model)
    modules = {"js": js, "jax": jax, "jnp": jnp, "np": np, "nnx": nnx, "optax": optax, "dataclasses": dataclasses}
    values = {"mesh": mesh, "model": model, "blocks": model.blocks, "x": jnp.ones((32, 64)), "loss_fn": loss_fn}
    return {**modules, **values, "MLP": MLP, "Block": Block, "annotate": annotate}


def examples(value: Any) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(inspect.getdoc(value) or "")


class AnyOutputUnlessTold(doctest.OutputChecker):
    """An example need not show what it prints."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@pytest.mark.parametrize("name", [n for n, v in PUBLIC.items() if callable(v) and examples(v)])
def test_examples_run(name, capsys, monkeypatch):
    monkeypatch.setattr(wires, "REGISTERED", dict(wires.REGISTERED))  # errors, and their golden texts, list the names
    docs = inspect.getdoc(PUBLIC[name])
    test = doctest.DocTest(examples(PUBLIC[name]), namespace(name), name, None, 0, docs)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    results = doctest.DocTestRunner(AnyOutputUnlessTold(), optionflags=flags).run(test)
    assert results.attempted and not results.failed, capsys.readouterr().out


def test_an_example_that_is_wrong_is_found():
    bad = doctest.DocTest(doctest.DocTestParser().get_examples(">>> 1 + 1\n3\n"), {}, "bad", None, 0, "")
    assert doctest.DocTestRunner(verbose=False).run(bad, out=lambda text: None).failed == 1


@pytest.mark.parametrize("where", ["versions/3.13.0/bin", "installs/python/3.13.0/bin", "bin", None])
def test_ci_finds_a_newer_python_behind_a_shim_that_fails(tmp_path, where):
    def put(folder, code):
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "python3.13"
        file.write_text(f"#!/bin/sh\nexit {code}\n")
        file.chmod(0o755)
        return str(file)

    put(tmp_path / "shims", 127)
    real = put(tmp_path / where, 0) if where else ""
    path = f"{tmp_path / 'shims'}:{tmp_path / 'bin'}" if where != "bin" else f"{tmp_path / 'bin'}:{tmp_path / 'shims'}"
    bash = shutil.which("bash")
    found = subprocess.run([bash, ROOT / ".ci/newer-python"], env={"PATH": path}, capture_output=True, text=True)
    assert (found.stdout.strip(), found.returncode) == (real, 0 if where else 1)
