import logging
import stat
from pathlib import Path

import pytest

from inferpool.service.settings.loader import load
from inferpool.service.speed.cache import SpeedCache


def cache_of(tmp_path: Path, folder: Path | str, speed: str = "auto") -> SpeedCache:
    env = {"INFERPOOL_CACHE_DIR": str(folder)}
    return SpeedCache(load({"model": "echo", "speed": speed}, env, tmp_path).settings)


def test_the_cache_folder_is_created(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    cache = cache_of(tmp_path, tmp_path / "deep" / "cache")
    assert cache.folder == str(tmp_path / "deep" / "cache")
    assert stat.S_IMODE(Path(cache.folder).stat().st_mode) == 0o700
    assert not list(Path(cache.folder).iterdir())
    cache.close()
    assert Path(cache.folder).is_dir()
    assert not caplog.messages


def test_an_unwritable_folder_is_named_once_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").write_text("in the way")
    wanted = tmp_path / "file" / "cache"
    with caplog.at_level(logging.WARNING):
        cache = cache_of(tmp_path, wanted)
    (line,) = caplog.messages
    assert str(wanted) in line
    assert "Not a directory" in line
    assert cache.folder is not None
    assert stat.S_IMODE(Path(cache.folder).stat().st_mode) == 0o700
    cache.close()
    assert not Path(cache.folder).exists()


def test_without_a_cache_replicas_share_a_temporary_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    cache = cache_of(tmp_path, "none")
    assert cache.folder is not None
    cache.close()
    assert not Path(cache.folder).exists()
    assert not caplog.messages


def test_without_a_choice_of_presets_no_folder_is_created(tmp_path: Path):
    cache_of(tmp_path, tmp_path / "cache", speed="exact").close()
    assert not (tmp_path / "cache").exists()
