"""Folders of a run directory come to be, or it is said that they cannot."""

from pathlib import Path

import pytest

from jobrunner.data.layout import make_folder


def test_folders_are_made_to_any_depth_and_may_be_there_already(tmp_path):
    for _ in range(2):
        make_folder(tmp_path / "a/b/c")
    assert (tmp_path / "a/b/c").is_dir()


def test_a_place_where_no_folder_can_be_made_is_an_error_and_no_hang(tmp_path, monkeypatch):
    def mkdir(folder: Path, **_: object) -> None:
        # what /proc says, although the folder above is there
        raise FileNotFoundError(2, "No such file or directory", str(folder))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(FileNotFoundError):
        make_folder(tmp_path / "a")
