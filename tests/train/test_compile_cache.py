"""Compiled programs beside the runs: whole or not there, private, bounded, and the numbers are the same."""

import json
import os
import subprocess
import sys

import pytest

from jshard.train import compile_cache
from jshard.train.compile_cache import ProgramCache
from jshard.train.records import read_metrics
from tests.compiling import environment

KEY = bytes(32)


def test_a_torn_or_damaged_program_is_taken_away(tmp_path):
    cache = ProgramCache(tmp_path, KEY)
    assert cache.get("a") is None
    cache.put("a", b"program" * 1000)
    assert ProgramCache(tmp_path, KEY).get("a") == b"program" * 1000
    (path,) = tmp_path.iterdir()
    for damaged in (path.read_bytes()[:-1], b"", path.read_bytes()[:100] + b"x" + path.read_bytes()[101:]):
        path.write_bytes(damaged)
        assert cache.get("a") is None and not path.exists()
        cache.put("a", b"program" * 1000)
    assert cache.get("a") == b"program" * 1000 and len(list(tmp_path.iterdir())) == 1


def test_a_program_that_another_user_made_is_not_executed(tmp_path):
    ProgramCache(tmp_path, b"somebody else" * 3).put("a", b"program")
    assert ProgramCache(tmp_path, KEY).get("a") is None
    ProgramCache(tmp_path, KEY).put("a", b"program")
    (tmp_path / "a.program").rename(tmp_path / "b.program")
    assert ProgramCache(tmp_path, KEY).get("b") is None, "it was signed as the program of another key"


def test_a_run_of_a_user_without_a_home_stores_no_programs(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "user_key", lambda: None)
    updates = {}
    monkeypatch.setattr(compile_cache.jax.config, "update", updates.__setitem__)
    assert "not stored" in compile_cache.keep_programs(tmp_path, str(tmp_path / "kept"))
    assert updates == {"jax_compilation_cache_dir": None} and not list(tmp_path.iterdir())


def test_what_was_not_used_for_longest_makes_room(tmp_path):
    cache = ProgramCache(tmp_path, KEY, most_bytes=300)
    for i, key in enumerate("abc"):
        cache.put(key, b"x" * 100)
        if key != "c":
            os.utime(tmp_path / f"{key}.program", (i, i))
    assert [cache.get(key) is None for key in "abc"] == [True, False, False]


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path):
    cache = ProgramCache(tmp_path / "nowhere", KEY)
    cache.put("a", b"x")
    assert cache.get("a") is None


def test_a_folder_where_others_may_write_is_not_used(tmp_path):
    compile_cache._make_private(tmp_path / "own" / "cpu")
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700
    (tmp_path / "own").chmod(0o770)
    with pytest.raises(OSError, match="others may write there"):
        compile_cache._make_private(tmp_path / "own" / "cpu")


@pytest.mark.wide
def test_a_run_that_finds_its_programs_has_the_same_numbers(tmp_path):
    def train(name):
        words = (
            "train gpt --recipe tiny --steps 3 --track --mesh fsdp=2 --processes 2 --sample-tokens 0 --set eval_every=3"
        )
        command = [sys.executable, "-m", "jshard", *words.split(), "--out", str(tmp_path / name)]
        ran = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        (start,) = json.loads((tmp_path / name / "run.json").read_text())["starts"]
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        return start["compile_cache"], [[line.get(key) for key in ("loss", "val_loss")] for line in lines]

    folder, cold = train("cold")
    assert folder.startswith(str(tmp_path / ".compiled" / "cpu-"))
    kept = {path.name: path.stat().st_mtime for path in tmp_path.glob(".compiled/*/*")}
    _, warm = train("warm")
    now = {path.name: path.stat().st_mtime for path in tmp_path.glob(".compiled/*/*")}
    # On a CPU each process has a program of its own, and none is to compile while the others wait.
    assert warm == cold and sum("jit_step" in name for name in kept) == 2
    assert kept.keys() <= now.keys() and all(now[name] > kept[name] for name in kept if "step" in name)  # found
