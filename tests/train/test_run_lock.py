"""Only those who may write into the folder of a run can keep it from being used."""

import os

import pytest

from jshard.checkpoint import ownership
from jshard.train.run_lock import RunLock


@pytest.mark.parametrize(("folder_mode", "mode"), [(0o755, 0o600), (0o775, 0o660), (0o777, 0o666), (0o700, 0o600)])
@pytest.mark.parametrize("before", [None, 0o644, 0o600])
def test_a_lock_can_be_opened_only_by_those_who_may_write_beside_it(tmp_path, folder_mode, mode, before):
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(folder_mode)
    path = folder / ".lock"
    if before is not None:
        path.touch()
        path.chmod(before)
    lock = RunLock(path)
    assert path.stat().st_mode & 0o777 == mode
    lock.release()


def test_the_lock_of_a_save_cannot_be_opened_by_others(tmp_path):
    number = ownership._open_and_lock(tmp_path / "1.owner", create=True)
    assert os.fstat(number).st_mode & 0o077 == 0
    os.close(number)
