"""The sample order is a pure function of seed and global index: no mesh and no process count enters."""

import itertools

import jax
import numpy as np
import pytest

import jshard as js
from jshard.train.data import Corpus, DataError, Loader, load_corpus, local_rows

TEXT = np.arange(2000, dtype=np.int64).astype(np.uint8)
CORPUS = Corpus(train=TEXT, held_out=TEXT[:500], description="numbers")


def loader(rows=range(8), seed=0, sequence_length=10):
    return Loader(corpus=CORPUS, sequence_length=sequence_length, batch_size=8, seed=seed, rows=list(rows))


def test_targets_are_the_next_tokens():
    batch = next(loader().train(1))
    assert batch["inputs"].shape == batch["targets"].shape == (8, 10)
    assert batch["inputs"].dtype == np.int32
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    np.testing.assert_array_equal((batch["inputs"][:, -1] + 1) % 256, batch["targets"][:, -1])


@pytest.mark.parametrize("num_processes", [2, 4])
def test_processes_read_disjoint_shares_of_the_same_batches(num_processes):
    share = 8 // num_processes
    parts = [loader(range(p * share, (p + 1) * share)).train(30) for p in range(num_processes)]
    for whole, *shares in zip(loader().train(30), *parts, strict=True):
        joined = np.concatenate([part["inputs"] for part in shares])
        np.testing.assert_array_equal(joined, whole["inputs"])


def test_any_step_can_be_the_first():
    whole = list(loader().train(40))
    for start in (1, 25, 39):
        rest = list(loader().train(40, start_step=start))
        assert len(rest) == 40 - start
        np.testing.assert_array_equal(rest[0]["inputs"], whole[start]["inputs"])


def test_every_pass_holds_every_window_once_and_in_another_order():
    windows = (TEXT.size - 1) // 10
    steps = 2 * windows // 8 + 1
    starts = np.concatenate([batch["inputs"] for batch in loader().train(steps)])
    first, second = starts[:windows], starts[windows : 2 * windows]
    in_order = TEXT[: windows * 10].reshape(windows, 10).astype(np.int32)
    for one_pass in (first, second):
        np.testing.assert_array_equal(np.unique(one_pass, axis=0), np.unique(in_order, axis=0))
        np.testing.assert_array_equal(np.sort(one_pass, axis=None), np.sort(in_order, axis=None))
    assert (first != second).any()
    assert (first != in_order).any()


def test_seed_decides_the_order():
    orders = [next(loader(seed=seed).train(1))["inputs"] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(orders[0], orders[1])
    assert (orders[0] != orders[2]).any()


def test_held_out_is_the_same_every_time_and_spread_over_the_text():
    batches = list(loader().held_out(24))
    assert len(batches) == 3
    starts = [batch["inputs"][row] for batch in batches for row in range(8)]
    np.testing.assert_array_equal(starts[0], TEXT[:10])
    np.testing.assert_array_equal(starts[-1], TEXT[480:490])
    for batch, again in zip(batches, loader().held_out(24), strict=True):
        np.testing.assert_array_equal(batch["inputs"], again["inputs"])
    assert len(list(loader().held_out(1))) == 1  # at least a batch
    assert len(list(loader().held_out(10**6))) == 49 // 8  # at most the text


@pytest.mark.parametrize("axes", [{}, {"replica": 2}, {"replica": 2, "fsdp": 2, "tensor": 2}])
def test_one_process_reads_every_row_on_any_mesh(axes):
    assert local_rows(16, js.mesh(**axes)) == list(range(16))


def test_batches_are_the_same_on_every_mesh():
    meshes = [js.mesh(), js.mesh(replica=4), js.mesh(fsdp=2, devices=jax.devices()[:2])]
    batches = [next(loader(local_rows(8, mesh)).train(1)) for mesh in meshes]
    for one, other in itertools.pairwise(batches):
        np.testing.assert_array_equal(one["inputs"], other["inputs"])


def test_batch_that_does_not_split_is_refused():
    with pytest.raises(DataError, match=r"12 sequences does not split over 8 devices(.|\n)*12 = 1 x 8 \+ 4"):
        local_rows(12, js.mesh())


def test_corpus_of_a_folder_is_split_by_file(tmp_path):
    for number in range(200):
        (tmp_path / f"{number:03}.txt").write_text(f"text {number} ")
    corpus = load_corpus([tmp_path])
    train, held_out = (bytes(part).decode() for part in (corpus.train, corpus.held_out))
    for number in range(200):
        assert (f"text {number} \0" in train) != (f"text {number} \0" in held_out)
    assert 3 <= held_out.count("\0") <= 20
    # One more file moves no other file across.
    (tmp_path / "more.txt").write_text("more")
    assert bytes(load_corpus([tmp_path]).held_out).decode().replace("more\0", "") == held_out


def test_corpus_of_one_file_is_split_at_its_end(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("a" * 999)
    corpus = load_corpus([path])
    assert (corpus.train.size, corpus.held_out.size) == (950, 50)
    assert "the end of each file" in corpus.description


def test_corpus_of_the_standard_library_is_code():
    corpus = load_corpus()
    assert corpus.train.size > 3e6
    assert 0.01 < corpus.held_out.size / corpus.train.size < 0.2
    assert b"def __init__(self" in bytes(corpus.train)
    assert b"def __init__(self" in bytes(corpus.held_out)


def test_missing_text_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        load_corpus([tmp_path / "nowhere"])
    with pytest.raises(DataError, match="the folder holds no file"):
        load_corpus([tmp_path])


def test_text_shorter_than_a_sequence_is_an_error():
    with pytest.raises(DataError, match=r"The text is too short(.|\n)*500 bytes, a sequence 501"):
        loader(sequence_length=501)
