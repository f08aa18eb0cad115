"""A position in data whose order depends on other settings is refused; in the same data, built again, it is not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import grain
import numpy as np
import pytest
from grain.experimental import (
    ConcatThenSplitIterDataset,
    ElasticIterator,
    FlatMapTransform,
    InterleaveIterDataset,
    WindowShuffleMapDataset,
    ZipMapDataset,
)

import jshard as js
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.position import check_position, position_text, set_position
from jshard.checkpoint.sample_order import agreed, describe, differences
from jshard.checkpoint.state_text import from_text, to_text
from jshard.data.batches import GlobalBatches as Batches
from jshard.data.packed_batches import PackedBatches

FEW = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


def global_batches(dataset, **options):
    return Batches(dataset, read_options=FEW, **options)


def source(start=0, size=40):
    return grain.MapDataset.source(np.arange(start, start + size))


def a(seed=1):
    return source(0).shuffle(seed=seed).repeat()


def b(seed=1):
    return source(1000).shuffle(seed=seed).repeat()


def mix(parts, weights=None):
    return grain.MapDataset.mix(parts, weights=weights)


def concatenate(*parts):
    return grain.MapDataset.concatenate(list(parts)).shuffle(seed=0).repeat()


def zipped(*parts):
    return ZipMapDataset(list(parts)).map(lambda pair: np.array(pair)).shuffle(seed=0).repeat()


def windows(size, seed):
    return WindowShuffleMapDataset(source(), window_size=size, seed=seed).repeat()


class Split(FlatMapTransform):
    def __init__(self, max_fan_out):
        self._fan_out = max_fan_out

    @property
    def max_fan_out(self):
        return self._fan_out

    def flat_map(self, element):
        return [element] * self._fan_out


class Turns(grain.transforms.DatasetSelectionMap if hasattr(grain.transforms, "DatasetSelectionMap") else object):
    """Two samples of one source, then one of the other; or the reverse."""

    def __init__(self, first):
        self.first = first

    def __len__(self):
        return sys.maxsize

    def __getitem__(self, number):
        turn, place = divmod(number, 3)
        return (self.first, 2 * turn + place) if place < 2 else (1 - self.first, turn)


class Strided(grain.MapDataset):
    """A class of the user's that changes the order."""

    def __init__(self, parent, stride):
        super().__init__(parent)
        self.stride = stride

    def __len__(self):
        return len(self._parent)

    def __getitem__(self, number):
        return self._parent[number * self.stride]


def selected(first):
    from grain._src.python.dataset.transformations.mix import MixedMapDataset

    return MixedMapDataset([a(), b()], selection_map=Turns(first))


# By what changes: the pipeline of the save, and that of the restore.
CHANGED = {
    "weights": (lambda: mix([a(), b()], [0.5, 0.5]), lambda: mix([a(), b()], [0.9, 0.1])),
    "swapped sources": (lambda: mix([a(), b()]), lambda: mix([b(), a()])),
    "swapped weights": (lambda: mix([a(), b()], [0.2, 0.8]), lambda: mix([a(), b()], [0.8, 0.2])),
    "another source": (lambda: a(), lambda: b()),
    "concatenated in another order": (
        lambda: concatenate(source(0), source(99)),
        lambda: concatenate(source(99), source(0)),
    ),
    "zipped in another order": (lambda: zipped(source(0), source(99)), lambda: zipped(source(99), source(0))),
    "reseed_each_epoch": (
        lambda: source().shuffle(seed=0).repeat(),
        lambda: source().shuffle(seed=0).repeat(reseed_each_epoch=False),
    ),
    "seed of one source": (lambda: mix([a(1), b(2)]), lambda: mix([a(1), b(3)])),
    "default seed": (lambda: source().seed(1).shuffle().repeat(), lambda: source().seed(2).shuffle().repeat()),
    "window": (lambda: windows(4, 0), lambda: windows(8, 0)),
    "seed of a window": (lambda: windows(4, 0), lambda: windows(4, 1)),
    "slice": (lambda: source()[::2].repeat(), lambda: source()[1::2].repeat()),
    "slice of an endless one": (lambda: a()[::2], lambda: a()[1::2]),
    "repeats": (lambda: source().shuffle(seed=0).repeat(3), lambda: source().shuffle(seed=0).repeat(5)),
    "repeats below repeats": (
        lambda: source().shuffle(seed=0).repeat(1).repeat(),
        lambda: source().shuffle(seed=0).repeat(1, reseed_each_epoch=False).repeat(),
    ),
    "shuffle after repeat": (
        lambda: source().repeat(2).shuffle(seed=0).repeat(),
        lambda: source().shuffle(seed=0).repeat(2).repeat(),
    ),
    "batch size inside": (lambda: a().batch(4), lambda: a().batch(2)),
    "fan out": (
        lambda: grain.experimental.FlatMapMapDataset(a(), Split(2)),
        lambda: grain.experimental.FlatMapMapDataset(a(), Split(3)),
    ),
    "mixture inside a mixture": (
        lambda: mix([mix([a(), b()], [1, 2]), a(7)]),
        lambda: mix([mix([a(), b()], [2, 1]), a(7)]),
    ),
    "a rule of choice": (lambda: selected(0), lambda: selected(1)),
    "a class of the user's": (
        lambda: Strided(source(size=41), 3).repeat(),
        lambda: Strided(source(size=41), 5).repeat(),
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_position_in_data_of_another_order_is_refused(name):
    saved, here = (global_batches(build(), batch_size=4, rows=range(4)) for build in CHANGED[name])
    next(saved)
    text, state = position_text(saved), saved.get_state()
    for restore in (lambda: set_position(here, text), lambda: here.set_state(state)):
        with pytest.raises(CheckpointError, match="does not fit the data") as caught:
            restore()
        assert here.samples == 0
        assert "saved" in str(caught.value) and "GlobalBatches(..., start=4096)" in caught.value.do
    again = global_batches(CHANGED[name][0](), batch_size=4, rows=range(4))
    set_position(again, text)
    np.testing.assert_array_equal(next(again), next(saved))


def test_a_checkpoint_of_a_mixture_is_not_restored_into_other_weights(tmp_path):
    build = lambda weights: global_batches(mix([a(), b()], weights), batch_size=8, rows=range(8))
    batches = build([0.5, 0.5])
    next(batches)
    js.checkpoint.save(tmp_path / "1", {"data": batches})
    with pytest.raises(CheckpointError, match="mixed proportions  saved 1, 1  here 9, 1"):
        js.checkpoint.restore(tmp_path / "1", like={"data": build([0.9, 0.1])})
    again = build([3, 3])  # the same proportions
    js.checkpoint.restore(tmp_path / "1", like={"data": again})
    assert next(again).tolist() == next(batches).tolist()


def elements(start, folder):
    return grain.MapDataset.source([f"{folder}/{start + number}.jpg" for number in range(8)])


SAME = {
    "another map": (lambda: a().map(lambda x: x), lambda: a().map(lambda x: x + 1).map(lambda x: x)),
    "random map": (lambda: a().random_map(lambda x, rng: x, seed=1), lambda: a().random_map(lambda x, rng: x, seed=2)),
    "weights of the same proportions": (lambda: mix([a(), b()], [0.5, 0.5]), lambda: mix([a(), b()], [0.25, 0.25])),
    "files that moved": (lambda: elements(0, "/old/data"), lambda: elements(0, "/scratch/new")),
    "a list in place of an array": (
        lambda: grain.MapDataset.source(list(range(40))).shuffle(seed=1).repeat(),
        lambda: a(),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_what_does_not_change_the_order_may_change(name):
    saved, here = (global_batches(build(), batch_size=2, rows=range(2)) for build in SAME[name])
    next(saved)
    set_position(here, position_text(saved))
    assert here.samples == 2


DESCRIBED = """
import json
from tests.checkpoint.test_sample_order import CHANGED, describe
print(json.dumps([describe(build()) for both in CHANGED.values() for build in both]))
"""


@pytest.mark.wide
def test_a_pipeline_that_is_built_again_in_another_process_is_the_same():
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": "7", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", DESCRIBED], cwd=root, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    here = [describe(build()) for both in CHANGED.values() for build in both]
    assert json.loads(run.stdout.splitlines()[-1]) == json.loads(json.dumps(here))
    assert "0x" not in json.dumps(here)


# ---- Grain's own iterators, and packing ---------------------------------------------------------------


def iterators(*parts, weights=None):
    return iter(grain.IterDataset.mix([part.to_iter_dataset(FEW) for part in parts], weights=weights))


def even(x):
    return x % 2 == 0


def third(x):
    return x % 3 == 0


CHANGED_ITERATORS = {
    "weights": (lambda: iterators(a(), b(), weights=[1, 1]), lambda: iterators(a(), b(), weights=[1, 3])),
    "swapped sources": (lambda: iterators(a(), b()), lambda: iterators(b(), a())),
    "seed": (lambda: iter(a(1).to_iter_dataset(FEW)), lambda: iter(a(2).to_iter_dataset(FEW))),
    "filter": (
        lambda: iter(a().to_iter_dataset(FEW).filter(even)),
        lambda: iter(a().to_iter_dataset(FEW).filter(third)),
    ),
    "window": (
        lambda: iter(grain.experimental.WindowShuffleIterDataset(a().to_iter_dataset(FEW), window_size=4, seed=0)),
        lambda: iter(grain.experimental.WindowShuffleIterDataset(a().to_iter_dataset(FEW), window_size=5, seed=0)),
    ),
    "interleaved in another order": (
        lambda: iter(InterleaveIterDataset([a().to_iter_dataset(FEW), b().to_iter_dataset(FEW)], cycle_length=2)),
        lambda: iter(InterleaveIterDataset([b().to_iter_dataset(FEW), a().to_iter_dataset(FEW)], cycle_length=2)),
    ),
    "cycle": (
        lambda: iter(InterleaveIterDataset([a().to_iter_dataset(FEW), b().to_iter_dataset(FEW)], cycle_length=2)),
        lambda: iter(InterleaveIterDataset([a().to_iter_dataset(FEW), b().to_iter_dataset(FEW)], cycle_length=1)),
    ),
    "elastic": (
        lambda: iter(ElasticIterator(a(1), 4, grain.sharding.ShardOptions(0, 1), read_options=FEW)),
        lambda: iter(ElasticIterator(a(2), 4, grain.sharding.ShardOptions(0, 1), read_options=FEW)),
    ),
}


@pytest.mark.parametrize("name", CHANGED_ITERATORS)
def test_iterators_of_grain_are_compared_with_those_that_were_saved(name):
    saved, here = (build() for build in CHANGED_ITERATORS[name])
    for _ in range(3):
        next(saved)
    text = position_text(saved)
    with pytest.raises(CheckpointError, match="does not fit the data"):
        check_position(here, text)
    again = CHANGED_ITERATORS[name][0]()
    set_position(again, text)  # its own state has moved, what it is has not
    np.testing.assert_array_equal(next(again), next(saved))
    for iterator in (saved, here, again):
        iterator.close() if hasattr(iterator, "close") else None


def test_a_filter_without_a_name_is_known_by_what_passes():
    documents = grain.MapDataset.source([np.arange(size) for size in (3, 5, 4)]).repeat()
    build = lambda least: PackedBatches(
        documents.filter(lambda tokens: len(tokens) >= least), pack=4, batch_size=2, rows=range(2)
    )
    saved = build(4)
    next(saved)
    with pytest.raises(CheckpointError, match=r"filter passes  saved -[+][+]-"):
        build(5).set_state(saved.get_state())
    build(4).set_state(saved.get_state())


def test_the_settings_of_packing_are_compared():
    documents = grain.MapDataset.source([np.arange(size) for size in (3, 5, 4)]).repeat()

    def pack(bins):
        return lambda texts: grain.experimental.FirstFitPackIterDataset(
            texts.map(lambda tokens: {"tokens": tokens}), length_struct={"tokens": 8}, num_packing_bins=bins
        )

    build = lambda how, data=documents: PackedBatches(data, pack=how, batch_size=2, rows=range(2))
    saved = build(pack(2))
    next(saved)
    state, text = saved.get_state(), position_text(saved)
    for restore in (lambda batches: batches.set_state(state), lambda batches: set_position(batches, text)):
        with pytest.raises(CheckpointError, match="num_packing_bins  saved 2  here 3"):
            restore(build(pack(3)))
        with pytest.raises(CheckpointError, match="samples  saved"):
            restore(build(pack(2), grain.MapDataset.source([np.arange(size) for size in (5, 3, 4)]).repeat()))
        restore(build(pack(2)))
    cut = PackedBatches(documents, pack=8, batch_size=2, rows=range(2))
    assert ConcatThenSplitIterDataset.__name__.startswith(cut.sample_order["pipeline"]["step"])


# ---- Positions of before, of several processes, and of sources that cannot be recognised --------------


def test_positions_of_earlier_versions_are_restored():
    batches = global_batches(a(), batch_size=4, rows=range(4))
    next(batches)
    state = {key: value for key, value in batches.get_state().items() if key != "pipeline"}
    text = to_text({"format": 1, "kind": "GlobalBatches", "state": state})
    for restore in (lambda here: here.set_state(state), lambda here: set_position(here, text)):
        here = global_batches(a(), batch_size=4, rows=range(4))
        restore(here)
        assert here.samples == 4
    iterator = iter(a().to_iter_dataset(FEW))
    next(iterator)
    old = to_text({"format": 1, "kind": "x", "processes": [iterator.get_state()]})
    set_position(iter(a().to_iter_dataset(FEW)), old)


class Odd:
    """A source that breaks what Grain asks of one: its samples differ each time, or cannot be read."""

    def __init__(self, how):
        self.how, self.draw = how, np.random.default_rng()

    def __len__(self):
        return 40

    def __getitem__(self, number):
        if self.how == "fails":
            raise OSError("no network")
        return self.draw.random()


@pytest.mark.parametrize("how", ["random", "fails"])
def test_a_source_without_stable_samples_is_compared_by_its_length_alone(how):
    build = lambda: global_batches(grain.MapDataset.source(Odd(how)).shuffle(seed=0).repeat(), batch_size=4, rows=[0])
    here = build()
    set_position(here, position_text(build()))
    assert here.samples == 0


def test_processes_whose_samples_differ_store_what_they_agree_on(monkeypatch):
    one, other = describe(a()), describe(b())
    assert agreed([one, one]) == one
    together = agreed([one, other])
    assert differences(together, other) == [] and differences(together, describe(a(2))) != []
    assert agreed([one, describe(a(2))]) is None


def test_another_version_of_grain_may_name_its_steps_otherwise():
    saved, here = describe(mix([a(1), b()])), describe(mix([a(2), b()]))
    saved["pipeline"]["of"][0]["step"] = "Again"
    assert any("saved again" in line for line in differences(saved, here))
    saved["grain"] = "0.0"
    assert differences(saved, here) == []  # a step of another name is not compared


def test_what_is_not_of_grain_is_not_described():
    assert describe(range(3)) is None and describe(object()) is None
    assert from_text(position_text(global_batches([1, 2], batch_size=1, rows=[0])))["pipeline"] is not None
