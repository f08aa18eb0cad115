"""Objects in buckets: conditions that one of many meets, requests that fail, files in parts."""

import concurrent.futures
import random
from collections.abc import Iterator

import numpy as np
import pytest

from jshard.checkpoint.buckets import BucketError, BucketFolder, BucketPath
from jshard.checkpoint.packed.file_io import do_all
from jshard.checkpoint.packed.file_reads import Range, reads
from jshard.checkpoint.packed.layout import Piece, lay_out_files, parse_index, parse_tail
from jshard.checkpoint.packed.writer import write_file
from tests.checkpoint.bucket_servers import SCHEMES, Server, folder_of_a_test, serve

pytestmark = pytest.mark.wide

FAULTS = ("500", "503", "reset", "reset after", "cut", "slow 2")


@pytest.fixture(scope="module", params=SCHEMES)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with serve(request.param, request_s=1.0) as server:
        yield server


@pytest.fixture
def place(server: Server, request: pytest.FixtureRequest) -> Iterator[BucketPath]:
    yield from folder_of_a_test(server, request)


def first(server: Server, kind: str) -> None:
    """The next request fails."""
    left = [kind]
    server.fault = lambda method, path: left.pop() if left else None


def test_an_address_is_that_of_a_bucket_in_each_of_its_forms():
    path = BucketPath.parse("s3://one/two//three/")
    assert path == BucketPath("s3", "one", "two/three") == BucketPath.parse("s3:/one/two/three")
    assert str(path / "4") == "s3://one/two/three/4" and (path / "4").parent == path and path.name == "three"
    assert [BucketPath.parse(text) for text in ("run/100", "/s3/x", "http://x/y", "s3:")] == [None] * 4


def test_of_many_that_write_on_a_condition_one_does(server: Server, place: BucketPath):
    path = place / "owner"
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        wrote = list(pool.map(lambda number: path.create(b"%d" % number), range(8)))
        assert wrote.count(True) == 1 and path.read()[0] == b"%d" % wrote.index(True)
        _, tag = path.read()
        tags = list(pool.map(lambda number: path.replace(b"new %d" % number, tag), range(8)))
    (winner,) = (number for number, found in enumerate(tags) if found is not None)
    assert path.read() == (b"new %d" % winner, tags[winner])
    path.parent.delete(["owner"])
    assert path.replace(b"late", tag) is None and path.parent.objects() == {}
    with pytest.raises(FileNotFoundError, match="owner"):
        path.read()


@pytest.mark.parametrize("kind", FAULTS)
def test_a_request_that_fails_once_is_made_again(server: Server, place: BucketPath, kind: str):
    place = place / kind.replace(" ", "-")
    (place / "old").write(b"12345")
    (place / "gone").write(b"x")
    first(server, kind)
    assert (place / "new").create(b"new")
    tag = (place / "new").read()[1]
    first(server, kind)
    assert (place / "new").replace(b"newer", tag) == (place / "new").read()[1] != tag
    first(server, kind)
    (place / "old").write(b"123456")
    first(server, kind)
    assert bytes((place / "old").read_range(1, 3)) == b"234"
    first(server, kind)
    place.delete(["gone", "never"])
    first(server, kind)
    assert place.objects() == {"new": 5, "old": 6}


def test_an_error_names_the_object_and_how_often_it_was_tried(server: Server, place: BucketPath):
    for kind, text, attempts in (("503", "503 Service Unavailable", 4), ("403", "403 Forbidden", 1)):
        server.fault = lambda method, path, kind=kind: kind
        server.log.clear()
        with pytest.raises(BucketError, match=f"(?s){place}/x\n.*{text}.* [(]{attempts} attempts in"):
            (place / "x").write(b"x")
        assert len(server.log) == attempts
    server.fault = lambda method, path: None
    with pytest.raises(BucketError, match=f"(?s){place.scheme}://no-such-bucket/x\n.*why:   [45]"):
        BucketPath(place.scheme, "no-such-bucket", "x").objects()


def packed(num_bytes: int) -> tuple:
    values = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    (layout,) = lay_out_files([Piece(0, "weights", values.dtype, ((0, num_bytes),))])
    return values, layout


@pytest.mark.parametrize("num_bytes", [1000, 50 << 20])
def test_a_file_is_written_in_parts_and_read_in_ranges_while_requests_fail(
    server: Server, place: BucketPath, num_bytes: int
):
    values, layout = packed(num_bytes)
    dice = random.Random(num_bytes)
    folder = BucketFolder(place / str(num_bytes))
    server.fault = lambda method, path: dice.choice(FAULTS[:4]) if dice.random() < 0.2 else None
    checksum = write_file(folder, "f", layout, lambda number: values)
    size = (place / str(num_bytes) / "f").size()
    assert size == layout.num_bytes
    tail = bytearray(64)
    folder.read("f", size - 64, [memoryview(tail)])
    found = bytearray(parse_tail(bytes(tail), size))
    folder.read("f", size - len(found), [memoryview(found)])
    index = parse_index(found)
    assert index.checksum == checksum
    read = np.zeros_like(values)
    wanted = [Range(int(index.offsets[0]), read.nbytes, memoryview(read))]
    do_all(reads(folder, "f", wanted, sums=index.sums, end=index.index_begin), threads=folder.threads)
    np.testing.assert_array_equal(read, values)
    assert num_bytes < 8 << 20 or (server.count("PUT", "partNumber=") >= 7 and server.count("GET") > 10)
    with pytest.raises(OSError, match=f"the file is 1 bytes too short.*{place}"):
        folder.read("f", size - 63, [memoryview(tail)])


@pytest.mark.parametrize("part", ["uploads=", "partNumber=3", "uploadId="])
def test_a_file_that_cannot_be_written_is_not_there(server: Server, place: BucketPath, part: str):
    values, layout = packed(40 << 20)
    is_end = part == "uploadId="
    fails = lambda method, path: part in path and (method == "POST" or not is_end)
    server.fault = lambda method, path: "503" if fails(method, path) else None
    with pytest.raises(BucketError, match=f"(?s){place}/{part[:5]}\n.*503 Service Unavailable"):
        write_file(BucketFolder(place), part[:5], layout, lambda number: values)
    server.fault = lambda method, path: None
    assert place.objects() == {}


def test_the_end_of_an_upload_may_be_done_without_an_answer(server: Server, place: BucketPath):
    """The request is made again, and the upload is not known any more."""
    values, layout = packed(20 << 20)
    left = ["reset after"]
    server.fault = lambda method, path: left.pop() if left and method == "POST" and "uploadId=" in path else None
    write_file(BucketFolder(place), "f", layout, lambda number: values)
    assert not left and place.objects() == {"f": layout.num_bytes}
