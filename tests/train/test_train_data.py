"""The sample order is a pure function of seed and global index: no mesh and no process count enters."""

import itertools
import threading

import numpy as np
import pytest

import jshard as js
from jshard.data import Data, DataError, Loader, local_rows
from jshard.data.text import TokenWindows
from jshard.errors import RunError

TEXT = np.arange(2000, dtype=np.int64).astype(np.uint8)
WINDOWS = 199  # of 10 tokens


def text_data(train=TEXT, held_out=TEXT[:500]):
    return data(TokenWindows(train, 10), TokenWindows(held_out, 10))


def data(train, held_out=None):
    return Data(train=train, held_out=held_out or train, description="numbers", fingerprint="numbers")


def loader(rows=range(8), seed=0, of=None):
    return Loader(data=of or text_data(), batch_size=8, seed=seed, rows=list(rows))


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


class Spy:
    """Samples that are their own number, and a record of what was read."""

    def __init__(self, size):
        self.size = size
        self.read = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        return {"id": np.int32(index)}


class Listed(list):
    """A list of samples is a source."""


@pytest.mark.parametrize("axes", [{}, {"replica": 2}, {"replica": 4, "fsdp": 2}])
@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_sample_ids_are_what_the_processes_read(axes, num_processes):
    rows = local_rows(8, js.mesh(**axes))
    share = 8 // num_processes
    spies = [Spy(20) for _ in range(num_processes)]
    batches = []
    for process, spy in enumerate(spies):
        own = loader(rows[process * share : (process + 1) * share], of=data(spy))
        spy.read.clear()  # the few of the check beforehand
        batches.append([batch["id"].tolist() for batch in own.train(6)])
        assert spy.read == flat(batches[-1])
    ids = [loader(of=data(Spy(20))).sample_ids(step) for step in range(6)]
    assert [flat(parts) for parts in zip(*batches, strict=True)] == ids
    passes = np.array(flat(ids))[:40].reshape(2, 20)
    assert (np.sort(passes) == np.arange(20)).all()  # each sample once in every pass
    assert (passes[0] != passes[1]).any()


def test_order_is_that_of_earlier_versions():
    # A run continues after an update with the samples it would have seen.
    assert loader(of=data(Spy(20))).sample_ids(0) == [15, 4, 10, 19, 8, 18, 14, 9]
    assert loader(seed=7, of=data(Spy(1000))).sample_ids(200) == [690, 964, 926, 634, 574, 173, 230, 386]


def test_any_step_can_be_the_first():
    whole = list(loader().train(40))
    for start in (1, 25, 39):
        rest = list(loader().train(40, start_step=start))
        assert len(rest) == 40 - start
        for batch, other in zip(rest, whole[start:], strict=True):
            np.testing.assert_array_equal(batch["inputs"], other["inputs"])
    assert list(loader().train(40, start_step=40)) == []


def test_batches_of_another_size_begin_where_the_others_ended():
    spy = Spy(WINDOWS)
    rest = loader(of=data(spy))
    spy.read.clear()
    assert len(list(rest.train(9, start_step=7, start_sample=11))) == 2
    assert spy.read == flat(rest.sample_ids(step) for step in range(4))[11:27]


def test_held_out_is_the_same_every_time_and_spread_over_the_text():
    batches = list(loader().held_out(24))
    assert len(batches) == 3
    starts = [batch["inputs"][row] for batch in batches for row in range(8)]
    np.testing.assert_array_equal(starts[0], TEXT[:10])
    np.testing.assert_array_equal(starts[-1], TEXT[480:490])
    for batch, again in zip(batches, loader().held_out(24), strict=True):
        np.testing.assert_array_equal(batch["inputs"], again["inputs"])
    assert len(list(loader().held_out(1))) == 1  # at least a batch


@pytest.mark.parametrize(
    ("size", "num_sequences", "batch_size", "num_samples"),
    [
        (40, 10**6, 32, [32, 8]),
        (45, 45, 8, [8] * 5 + [4, 1]),
        (45, 20, 8, [8, 8, 4]),
        (5, 16, 32, [4, 1]),
        (30, 30, 12, [12, 12, 6]),
        (3, 3, 1, [1, 1, 1]),
    ],
)
def test_every_held_out_sample_is_used_once_and_fills_its_share_of_a_batch(
    size, num_sequences, batch_size, num_samples
):
    samples = data(Listed({"id": i} for i in range(size)))
    batches = Loader(data=samples, batch_size=batch_size, seed=0, rows=range(batch_size)).held_out(num_sequences)
    assert batches.num_samples == num_samples
    ids = [batch["id"].tolist() for batch in batches]
    assert all(len(row) == batch_size for row in ids)
    counts = [{each: row.count(each) for each in row} for row in ids]
    for found, number in zip(counts, num_samples, strict=True):
        assert set(found.values()) == {batch_size // number} and len(found) == number
    used = [each for found in counts for each in found]
    assert len(used) == len(set(used)) == min(size, max(num_sequences, batch_size))


def test_samples_of_any_kind_are_stacked_by_key():
    images = Listed({"image": np.full((2, 3), i, np.float32), "label": i} for i in range(9))
    batch = next(loader(of=data(images)).train(1))
    assert batch["image"].shape == (8, 2, 3)
    assert batch["image"].dtype == np.float32
    assert batch["label"].dtype == np.int64
    np.testing.assert_array_equal(batch["image"][:, 0, 0], batch["label"])


def test_data_without_samples_is_an_error():
    with pytest.raises(DataError, match=r"Data\.train, a Listed\n.*Data\.held_out, a Listed\n(.|\n)*0 samples"):
        data(Listed(), Listed())


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_that_grain_cannot_use_is_an_error(seed):
    with pytest.raises(DataError, match=f"seed={seed}(.|\n)*between 0 and 4294967295"):
        loader(seed=seed)


def test_sample_unlike_the_others_is_found_before_training():
    images = Listed({"image": np.zeros((2, 3))} for _ in range(9))
    images[-1] = {"image": np.zeros((2, 4)), "mask": np.zeros(2, bool)}
    with pytest.raises(DataError) as caught:
        loader(of=data(images))
    assert caught.value.where == ("data.train[8]",)
    assert "'image' is (2, 4) float64, in data.train[0] (2, 3) float64." in caught.value.why
    assert "'mask' is (2,) bool, in data.train[0] no such key." in caught.value.why


def test_sample_unlike_the_others_is_found_while_training():
    images = Listed({"image": np.zeros((2, 3))} for _ in range(9))
    images[1] = {"image": np.zeros((2, 3), np.float32)}
    with pytest.raises(
        RunError, match=r"data\.train\[1\]\n(.|\n)*\(2, 3\) float32, in data\.train\[0\] \(2, 3\) float64"
    ):
        list(loader(of=data(images)).train(2))


@pytest.mark.parametrize(
    ("sample", "why"),
    [
        ([1, 2], "it is a list"),
        (np.zeros(2), "it is a ndarray"),
        ({}, "it is a dict without entries"),
        ({"name": "cat"}, "'name' is of dtype <U3"),
    ],
)
def test_sample_that_is_no_dict_of_arrays(sample, why):
    with pytest.raises(DataError, match=why):
        loader(of=data(Listed([sample])))


class Broken(Spy):
    def __getitem__(self, index):
        if index == 13:
            raise OSError(5, "Input/output error", "/disk/13.png")
        return super().__getitem__(index)


def test_sample_that_cannot_be_read_names_itself_and_keeps_its_cause():
    whole = loader(of=data(Spy(20)))
    step = next(step for step in itertools.count() if 13 in whole.sample_ids(step))
    batches = loader(of=data(Broken(20))).train(9)
    for _ in range(step):
        next(batches)
    with pytest.raises(RunError, match=r"data\.train\[13\], of a Broken\n(.|\n)*Input/output error") as caught:
        next(batches)
    assert isinstance(caught.value.__cause__, OSError)


def test_closing_early_ends_the_thread():
    before = set(threading.enumerate())
    batches = loader().train(10**6)
    next(batches)
    started = set(threading.enumerate()) - before
    assert started
    batches.close()
    for thread in started:
        thread.join(250)
        assert not thread.is_alive()
