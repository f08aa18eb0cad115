"""A position in the data fits any number of processes and any batch size: no sample comes twice, none is left out."""

import threading
from concurrent.futures import ThreadPoolExecutor

import grain
import jax
import numpy as np
import pytest
from grain.experimental import ElasticIterator, FirstFitPackIterDataset
from hypothesis import given, settings
from hypothesis import strategies as st

from jshard.checkpoint.data_position import position as position_module
from jshard.checkpoint.data_position.position import is_data_position, position_text, set_position
from jshard.checkpoint.data_position.state_text import from_text, to_text
from jshard.checkpoint.errors import CheckpointError
from jshard.data import packed_batches as batches_module
from jshard.data.batches import GlobalBatches, order_of
from jshard.data.packed_batches import PackedBatches
from jshard.errors import RunError, ShardingError

FEW = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)


def samples(size=23, seed=3):
    return grain.MapDataset.range(size).shuffle(seed).map(lambda i: {"id": np.int64(i)}).repeat()


def documents(sizes=(5, 1, 9, 2, 2, 14, 3, 1, 1, 6, 4), seed=3):
    """Every token gives its document and its place there."""
    source = [100 * i + np.arange(size) for i, size in enumerate(sizes)]
    if seed is None:  # Grain takes milliseconds to shuffle a few
        return grain.MapDataset.source(source).repeat()
    return grain.MapDataset.source(source).shuffle(seed).repeat()


def processes(make, batch_size, count):
    """The batches of so many processes, each with its part of the rows."""
    return [make(batch_size, rows.tolist()) for rows in np.array_split(np.arange(batch_size), count)]


def global_batches(batch_size, rows):
    return GlobalBatches(samples(), batch_size=batch_size, rows=rows, read_options=FEW)


def packed_batches(batch_size, rows, **options):
    return PackedBatches(documents(), **{"pack": 4, **options}, batch_size=batch_size, rows=rows)


def taken(group, num_batches):
    """What the processes are handed out in so many batches, with the rows put together."""
    rows = []
    for _ in range(num_batches):
        for batches in group:
            rows.append(next(batches))
    return jax.tree.map(lambda *parts: np.concatenate(parts), *rows)


def text_of(group):
    """What processes store together: each in a thread that receives what the others send."""
    reported, barrier, mine = [""] * len(group), threading.Barrier(len(group), timeout=800), threading.local()

    def gather(text):
        reported[mine.index] = text
        barrier.wait()
        heard = list(reported)
        barrier.wait()
        return heard

    def run(index):
        mine.index = index
        return position_text(group[index])

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(group)) as pool:
        patch.setattr(batches_module, "gather_texts", gather)
        patch.setattr(position_module, "gather_texts", gather)
        texts = list(pool.map(run, range(len(group))))
    assert len(set(texts)) == 1
    return texts[0]


def closed(group):
    for batches in group:
        batches.close()


def unbroken(dataset, count):
    return [int(dataset[i]["id"]) for i in range(count)]


def lane_by_lane(docs, lanes, length, count):
    """The sequences of a run, made without Grain's packer: each lane's documents end to end, cut."""
    streams = [np.concatenate([docs[i] for i in range(lane, lanes * 200, lanes)]) for lane in range(lanes)]
    cut = lambda q: streams[q % lanes][(q // lanes) * length :][:length]
    return np.stack([cut(q) for q in range(count)])


def test_a_run_continues_with_other_processes_and_another_batch_size():
    found, text = [], None
    for count, batch_size, num_batches in ((2, 6, 3), (3, 4, 5), (1, 7, 2)):  # over the end of a pass, too
        group = processes(global_batches, batch_size, count)
        for batches in group:
            if text is not None:
                set_position(batches, text)
        found += taken(group, num_batches)["id"].tolist()
        text = text_of(group)
        closed(group)
    assert found == unbroken(samples(), 52)
    assert from_text(text)["state"]["samples"] == 52 and len(text) < 500


def test_the_position_counts_what_was_handed_out_and_not_what_was_read():
    ahead = threading.Event()
    dataset = grain.MapDataset.range(64).map(lambda i: (i >= 4 and ahead.set()) or {"id": np.int64(i)})
    batches = GlobalBatches(dataset, batch_size=2, rows=[0, 1], read_options=FEW)
    next(batches)
    assert ahead.wait(250)
    position = batches.get_state()
    assert position["samples"] == 2
    next(batches)
    batches.set_state(position)  # back, on the same object
    assert next(batches)["id"].tolist() == [2, 3]
    batches.close()


def test_a_sample_that_cannot_be_read_is_named_and_not_left_out():
    broken = {5}

    def read(i):
        if i in broken:
            raise OSError("stale handle")
        return {"id": np.int64(i)}

    batches = GlobalBatches(grain.MapDataset.range(12).map(read), batch_size=3, rows=[0, 2])
    assert next(batches)["id"].tolist() == [0, 2]
    with pytest.raises(RunError, match=r"sample 5 of the run\n.*OSError: stale handle"):
        next(batches)
    broken.clear()
    assert next(batches)["id"].tolist() == [3, 5]
    with pytest.raises(RunError, match=r"A sample is missing\.\n.*sample 1 of the run"):
        next(GlobalBatches(grain.MapDataset.range(9).filter(lambda i: i != 1), batch_size=2, rows=[0, 1]))
    batches.close()


segments = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(0, 4)), min_size=2, max_size=4)


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    lanes=st.integers(1, 7),
    length=st.integers(1, 6),
    segments=segments,
)
def test_packed_sequences_are_the_same_however_the_run_is_split(sizes, lanes, length, segments):
    """Saved and restored at random places, each time with another batch size and other processes."""
    docs = documents(sizes, seed=None)
    found, text = [], None
    for batch_size, count, num_batches in segments:
        options = {"pack": length, "batch_size": batch_size, "lanes": lanes}
        parts = np.array_split(np.arange(batch_size), min(count, batch_size))
        group = [PackedBatches(docs, **options, rows=rows.tolist()) for rows in parts]
        for batches in group:
            if text is not None:
                set_position(batches, text)
        if num_batches:
            found.append(taken(group, num_batches)["tokens"])
        text = text_of(group)
        closed(group)
    count = sum(map(len, found))
    if count:
        assert np.array_equal(np.concatenate(found), lane_by_lane(docs, lanes, length, count))


def first_fit(docs):
    tokens = docs.map(lambda document: {"tokens": document})
    return FirstFitPackIterDataset(tokens, length_struct={"tokens": 16}, num_packing_bins=3)


def test_any_packer_of_grain_and_a_filter_keep_their_buffers():
    make = lambda size, rows: PackedBatches(
        documents().filter(lambda document: len(document) != 2), pack=first_fit, batch_size=size, rows=rows
    )
    whole = make(4, range(4))
    wanted = taken([whole], 6)
    before = processes(make, 4, 2)
    first = taken(before, 3)  # in the middle of the three bins of each lane
    after = processes(make, 2, 1)
    set_position(after[0], text_of(before))
    joined = jax.tree.map(lambda *parts: np.concatenate(parts), first, taken(after, 6))
    assert sorted(joined) == ["tokens", "tokens_positions", "tokens_segment_ids"]
    jax.tree.map(np.testing.assert_array_equal, joined, wanted)
    closed([whole, *before, *after])


def test_another_packing_is_refused_with_everything_that_differs():
    text = text_of([batches := packed_batches(4, range(4))])
    next(batches)
    text = text_of([batches])
    other = packed_batches(4, range(4), pack=5, lanes=3)
    with pytest.raises(CheckpointError) as error:
        set_position(other, text)
    assert error.value.where == (
        "lanes  saved 4  here 3",
        "tokens  saved (4,) int64  here (5,) int64",
        "tokens_positions  saved (4,) int32  here (5,) int32",
        "tokens_segment_ids  saved (4,) int32  here (5,) int32",
    )
    with pytest.raises(CheckpointError, match="kind   saved PackedBatches  here GlobalBatches"):
        set_position(global_batches(2, [0]), text)
    batches.close()


def test_processes_out_of_step_and_rows_no_one_reads_are_no_position():
    for make in (global_batches, packed_batches):
        group = processes(make, 4, 2)
        next(group[1])
        with pytest.raises(RunError, match="not at the same place"):
            text_of(group)
        closed(group)
    half = packed_batches(4, [0, 1])
    next(half)
    with pytest.raises(RunError, match="No process reads some rows"):
        text_of([half])
    half.close()


def test_requests_that_cannot_work_are_refused_at_once():
    with pytest.raises(ShardingError, match=r"rows=\[1, 0\]"):
        GlobalBatches(samples(), batch_size=2, rows=[1, 0])
    with pytest.raises(ShardingError, match="do not fill a batch"):
        GlobalBatches([1, 2, 3], batch_size=4, rows=[0])
    with pytest.raises(ShardingError, match="endless documents"):
        PackedBatches([np.arange(3)], pack=4, batch_size=1, rows=[0])
    with pytest.raises(ShardingError, match=r"before \.to_iter_dataset\(\)"):
        GlobalBatches(samples().to_iter_dataset(FEW), batch_size=1, rows=[0])


def grain_iterator():
    return iter(samples().to_iter_dataset(FEW).batch(2))


def test_an_iterator_of_grain_goes_back_to_its_own_process_only(monkeypatch):
    iterator = grain_iterator()
    next(iterator)
    monkeypatch.setattr(position_module, "gather_texts", lambda text: [text, text])  # two processes
    text = position_text(iterator)
    with pytest.raises(CheckpointError, match=r"2 processes saved one each, 1 restore:(.|\n)*GlobalBatches\("):
        set_position(grain_iterator(), text)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    again = grain_iterator()
    set_position(again, text)
    assert next(again)["id"].tolist() == next(iterator)["id"].tolist()
    with pytest.raises(CheckpointError, match=r"saved from a .*, restored into a GlobalBatches"):
        set_position(global_batches(2, [0]), text)


def test_grains_elastic_iterator_restores_anywhere(monkeypatch):
    monkeypatch.setattr(position_module, "gather_texts", lambda text: [text, text])
    shard = lambda index, count: grain.sharding.ShardOptions(shard_index=index, shard_count=count)
    two = iter(ElasticIterator(samples(), 4, shard(0, 2), read_options=FEW))
    next(two)
    one = iter(ElasticIterator(samples(), 2, shard(0, 1), read_options=FEW))
    set_position(one, position_text(two))
    assert next(one)["id"].tolist() == unbroken(samples(), 6)[4:]
    two.close(), one.close()


def test_a_state_comes_back_exactly_and_objects_are_refused():
    state = {"a": (1, [2.5, None, True]), "b": b"\x00\xff", 3: {"~tuple": "x"}, "d": np.float32(2), "e": np.arange(3)}
    found = from_text(to_text(state))
    assert repr(found) == repr(state)
    with pytest.raises(ShardingError, match=r"state\['x'\]\[0\]\n.*a set"):
        to_text({"x": [{1}]})
    assert is_data_position(grain_iterator()) and not is_data_position({"get_state": 1})


@pytest.mark.parametrize("dataset", [samples(seed=4), samples(size=24)])
def test_other_data_or_another_order_are_refused(dataset):
    batches = GlobalBatches(dataset, batch_size=2, rows=[0, 1])
    with pytest.raises(CheckpointError) as error:
        batches.set_state(global_batches(2, [0, 1]).get_state())
    assert str(error.value) == (
        "The position in the data does not fit the data.\n"
        "  where: order  saved range of 23; shuffle of 23, seed 3; repeat without end\n"
        f"                here  {'; '.join(order_of(dataset))}\n"
        "  why:   it counts samples: in another order some would repeat and others would be skipped.\n"
        "  do:    build the batches from the data, the seed and the settings of the saved run;\n"
        "         or leave the position out, and choose the start: GlobalBatches(..., start=4096)."
    )
    assert batches.samples == 0
