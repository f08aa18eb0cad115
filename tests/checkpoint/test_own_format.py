"""A checkpoint format from outside the package: the guide's example, and what is said of a format with a fault."""

import dataclasses
import doctest
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jshard as js
from jshard import cli
from jshard.checkpoint import CheckpointError, register_format
from jshard.checkpoint.errors import DamagedError
from jshard.checkpoint.formats import SafetensorsSource, foreign_source, stored_array, write_safetensors
from jshard.checkpoint.formats.registry import REGISTERED
from jshard.recipes.building import check_source
from tests.checkpoint.checkpoint_states import Held

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "adding_a_format.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
W = np.arange(32, dtype=np.float32).reshape(16, 2)


@pytest.fixture(autouse=True)
def no_format_is_left():
    yield
    REGISTERED.clear()


class OneFile:
    """A file of `np.save`, as one array `w`; a test changes what is read."""

    def __init__(self, path):
        self._array = np.load(path)
        self.leaves = {"w": stored_array(self._array.shape, self._array.dtype)}

    def read(self, name, box):
        return self._array[box]


def is_npy_file(path):
    return path.suffix == ".npy"


def register(name="npy file", detect=is_npy_file, source: Callable[[pathlib.Path], Any] = OneFile, **options):
    register_format(name=name, detect=detect, open=source, **options)


@pytest.fixture
def path(tmp_path):
    np.save(tmp_path / "w.npy", W)
    return tmp_path / "w.npy"


def restored(path, shape=W.shape):
    sharding = NamedSharding(js.mesh(fsdp=8), P("fsdp"))
    like = {"w": jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)}
    return js.checkpoint.restore(path, like)["w"]


def test_the_guides_test_fails_before_its_format_is_registered_and_passes_after(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write, test, register_it, run, rename = BLOCKS
    test = test.replace('jax.config.update("jax_num_cpu_devices", 8)', "")  # the tests have them
    names: dict = {"__name__": "adding_a_format"}
    exec(write + test, names)
    with pytest.raises(CheckpointError, match="There is no checkpoint to restore"):
        exec(run, names)
    exec(register_it, names)
    exec(run, names)
    exec(rename, names)


def test_the_example_of_its_docstring_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (test,) = doctest.DocTestFinder().find(register_format, globs={})
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


def test_commands_read_it_in_a_process_that_has_registered_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write, _, register_it, *_ = BLOCKS
    imports = write.partition("KERNEL")[0]
    exec(write, {})
    (tmp_path / "npy_folder.py").write_text(imports + register_it)
    command = re.search(r'^python -c "(.+)" ckpt inspect weights$', PAGE.read_text(), re.MULTILINE)
    assert command is not None
    done = subprocess.run(
        [sys.executable, "-c", command[1], "ckpt", "inspect", "weights"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "(64, 16)" in done.stdout and "2 leaves" in done.stdout

    exec(imports + register_it, {})
    assert cli.main(["ckpt", "import", "weights", "out"]) == 0
    like = {"layers": {"0": {"kernel": np.zeros((64, 16), np.float32), "bias": np.zeros(16, np.float32)}}}
    kernel = js.checkpoint.restore("out", like)["layers"]["0"]["kernel"]
    assert kernel.tolist() == np.arange(1024.0).reshape(64, 16).tolist()


@pytest.mark.parametrize("command", [["verify", "w.npy"], ["diff", "w.npy", "w.npy"], ["export", "w.npy", "out"]])
def test_commands_for_jshards_own_checkpoints_say_to_import_it_first(path, monkeypatch, capsys, command):
    monkeypatch.chdir(path.parent)
    register()
    assert cli.main(["ckpt", *command]) == 2
    assert f"jshard ckpt import {path} OUT" in capsys.readouterr().err


def test_an_array_on_eight_devices_and_a_number_on_the_host(path, tmp_path):
    register()
    np.testing.assert_array_equal(np.asarray(restored(path)), W)
    np.save(tmp_path / "step.npy", np.int64(7))
    assert js.checkpoint.restore(tmp_path / "step.npy", {"w": 0}) == {"w": 7}


def test_names_of_another_library_are_mapped(path):
    register()
    like = {"model": {"kernel": jax.ShapeDtypeStruct((16, 2), np.float32, sharding=NamedSharding(js.mesh(), P()))}}
    kernel = js.checkpoint.restore(path, like, names={"kernel": "w"})["model"]["kernel"]
    np.testing.assert_array_equal(np.asarray(kernel), W)


def test_a_clash_of_names_has_an_error_and_replace_replaces(path):
    register()
    with pytest.raises(CheckpointError, match="There is a checkpoint format of this name") as caught:
        register()
    assert caught.value.where == ("name='npy file'",)
    assert caught.value.why == "registered formats: dcp, safetensors, zero, torch, npy file."
    assert "replace=True" in caught.value.do
    register(detect=lambda path: False, replace=True)
    assert foreign_source(path) is None
    with pytest.raises(CheckpointError) as caught:  # it would be asked after its namesake, or before
        register(name="safetensors", replace=True)
    assert "replace=True" not in caught.value.do


def test_a_path_of_two_formats_is_an_error(path):
    register()
    register(name="also npy")
    with pytest.raises(CheckpointError, match="Several checkpoint formats detect this path") as caught:
        restored(path)
    assert caught.value.where == (str(path),)
    assert caught.value.why == "'npy file' and 'also npy' are registered, and nothing says which of them can read it."
    assert "`detect`" in caught.value.do


def test_a_registered_format_comes_before_those_of_the_library_and_never_before_a_checkpoint(tmp_path):
    write_safetensors(tmp_path / "there", Held({"w": W}))
    js.checkpoint.save(tmp_path / "ours", {"w": W})
    assert isinstance(foreign_source(tmp_path / "there"), SafetensorsSource)
    register(detect=lambda path: True, source=lambda path: Held({"w": -W}))
    np.testing.assert_array_equal(np.asarray(restored(tmp_path / "there")), -W)
    np.testing.assert_array_equal(np.asarray(restored(tmp_path / "ours")), W)


def test_a_dtype_may_be_a_name_as_an_index_of_text_has_it():
    assert stored_array([4, 2], "bfloat16") == stored_array((4, 2), np.dtype(jax.numpy.bfloat16))


def test_numbers_of_the_other_byte_order_are_read(path):
    class Swapped(OneFile):
        def __init__(self, path):
            self._array = np.load(path).astype(np.dtype(np.float32).newbyteorder())
            self.leaves = {"w": stored_array(self._array.shape, self._array.dtype)}

    register(source=Swapped)
    np.testing.assert_array_equal(np.asarray(restored(path)), W)


@pytest.mark.parametrize("array", [np.array(["a", "b"]), np.array([b"a"]), np.array([None]), np.zeros(2, "f4, f4")])
def test_what_is_no_array_of_numbers_is_refused_by_name(path, array):
    np.save(path, array)

    class WithObjects(OneFile):
        def __init__(self, path):
            self.leaves = {"w": stored_array(W.shape, np.float32), "labels": stored_array(array.shape, array.dtype)}

    register(source=WithObjects)
    with pytest.raises(CheckpointError, match="does not describe its arrays") as caught:
        restored(path)
    assert caught.value.where[-1] == f"labels  {array.dtype.name}"
    assert "leave" in caught.value.do


def test_a_renamed_leaf_is_read_below_the_one_name_of_like(path):
    register()
    leaf = jax.ShapeDtypeStruct(W.shape, np.float32, sharding=NamedSharding(js.mesh(), P()))
    like = {"model": {"kernel": leaf}}
    kernel = js.checkpoint.restore(path, like, rename={"model/kernel": "w"})["model"]["kernel"]
    np.testing.assert_array_equal(np.asarray(kernel), W)
    with pytest.raises(CheckpointError, match="does not fit") as caught:
        js.checkpoint.restore(path, like, rename={"kernel": "w"})
    assert "no leaf of `like` has it: kernel." in caught.value.why
    with pytest.raises(CheckpointError, match="does not fit") as caught:
        js.checkpoint.restore(path, like)
    assert 'rename={"model/kernel": "w"}' in caught.value.do


def test_one_name_of_like_is_left_out_though_another_leaf_is_renamed(tmp_path):
    register(detect=lambda path: path.name == "two", source=lambda path: Held({"a": W, "old": -W}))
    (tmp_path / "two").mkdir()
    leaf = jax.ShapeDtypeStruct(W.shape, np.float32, sharding=NamedSharding(js.mesh(), P()))
    like = {"model": {"a": leaf, "b": leaf}}
    model = js.checkpoint.restore(tmp_path / "two", like, rename={"model/b": "old"})["model"]
    np.testing.assert_array_equal(np.asarray(model["a"]), W)
    np.testing.assert_array_equal(np.asarray(model["b"]), -W)


def test_a_run_from_other_names_says_where_its_model_file_lists_them(path):
    register()
    file = dataclasses.replace(js.train.load_model_file("gpt"), hf_names=None)
    with pytest.raises(CheckpointError, match="does not fit") as caught:
        check_source(file, file.recipe()[1], js.mesh(), path)
    assert "hf_names(config)" in caught.value.do


class RaisesInRead(OneFile):
    def read(self, name, box):
        raise KeyError(name)


class ReadsAnotherDtype(OneFile):
    def read(self, name, box):
        return self._array[box].astype(np.float64)


class ReadsAll(OneFile):
    def read(self, name, box):
        return self._array


class ReadsAList(OneFile):
    def read(self, name, box):
        return self._array[box].tolist()


class DescribesShapes(OneFile):
    def __init__(self, path):
        super().__init__(path)
        self.leaves = {"w": self._array.shape}


def raises_in_open(path):
    return json.loads("{")


FAULTS = {
    RaisesInRead: ("failed", "its `read` raised KeyError: 'w'"),
    ReadsAnotherDtype: ("does not read what it describes", r"read\('w', \[0:2, 0:2\]\) returned \(2, 2\) float64"),
    ReadsAll: ("does not read what it describes", r"returned \(16, 2\) float32, not \(2, 2\) float32"),
    ReadsAList: ("does not read what it describes", "returned a list, not"),
    DescribesShapes: ("does not describe its arrays", "`leaves` must map each name to the shape and dtype"),
    raises_in_open: ("failed", "its `open` raised JSONDecodeError"),
    list: ("failed", "its `open` raised TypeError"),
}


@pytest.mark.parametrize("source", FAULTS, ids=lambda source: source.__name__)
def test_a_fault_of_a_format_is_an_error_that_names_it(path, source):
    register(source=source)
    what, why = FAULTS[source]
    with pytest.raises(CheckpointError, match=f"The checkpoint format 'npy file' {what}") as caught:
        restored(path)
    error = caught.value
    assert error.where[0] == str(path) and re.search(why, error.why) and error.do
    if "read" in what or "`read`" in why:
        assert error.where[-1].startswith("w  ")  # of many arrays, which one


def test_a_fault_of_detect_is_an_error_that_names_it(path):
    def detect(path):
        return path.no_such_attribute

    register(detect=detect)
    with pytest.raises(CheckpointError, match="The checkpoint format 'npy file' failed") as caught:
        restored(path)
    assert caught.value.why.startswith("its `detect` raised AttributeError")


def test_a_file_that_cannot_be_read_is_a_damaged_checkpoint(path):
    class IsGone(OneFile):
        def read(self, name, box):
            return np.load(path.with_name("gone.npy"))

    register(source=IsGone)
    with pytest.raises(DamagedError, match="ENOENT") as caught:
        restored(path)
    assert caught.value.where == (str(path), "w  (16, 2) float32", str(path.with_name("gone.npy")))


def test_what_is_restored_does_not_change_with_the_file(path):
    class Mapped(OneFile):
        def __init__(self, path):
            super().__init__(path)
            self._array = np.load(path, mmap_mode="r+")

    register(source=Mapped)
    like = {"w": jax.ShapeDtypeStruct(W.shape, np.float32, sharding=NamedSharding(js.mesh(), P()))}
    before = js.checkpoint.restore(path, like)["w"]
    np.load(path, mmap_mode="r+")[:] = 0
    np.testing.assert_array_equal(np.asarray(before), W)
