"""A file of keys that changes, or breaks, under a running server."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from octavo.api.keys import Key, digest_of
from octavo.cli.config_place import BadConfig
from octavo.cli.keys_file import add_key, revoke_key
from octavo.cli.watched_keys import WatchedKeys


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "octavo.toml"


def add(path: Path, name: str) -> None:
    add_key(path, {"name": name, "hash": f"sha256:{digest_of(name.encode()).hex()}"})


def names(watched: WatchedKeys) -> list[str] | None:
    return None if watched.keys is None else [key.name for key in watched.keys]


def test_added_and_revoked_keys_are_seen_by_the_next_look(path: Path) -> None:
    add(path, "anna")
    watched = WatchedKeys(path)
    assert names(watched) == ["anna"]
    assert not watched.changed()
    for number in range(20):  # at once: the clock of the file system is slower than that
        add(path, f"key {number}")
        assert watched.changed()
        assert names(watched) == ["anna", *(f"key {n}" for n in range(number + 1))]
    revoke_key(path, "anna")
    assert watched.changed()
    assert "anna" not in (names(watched) or ())
    assert not watched.changed()


def test_a_file_that_comes_later_is_seen_too(path: Path) -> None:
    watched = WatchedKeys(path)
    assert names(watched) is None
    assert not watched.changed()
    add(path, "anna")
    assert watched.changed()
    assert names(watched) == ["anna"]


def test_an_older_file_of_the_same_size_put_back_is_a_change(path: Path) -> None:
    add(path, "anna")
    watched = WatchedKeys(path)
    before, times = path.read_text(), path.stat()
    path.write_text(before.replace('"anna"', '"anne"'))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert watched.changed()
    assert names(watched) == ["anne"]


@pytest.mark.parametrize(
    "wrong",
    [
        "[[keys",
        "[[keys]]\nname = 'x'\n",
        "[[key]]\n",
        "keys = 1",
        pytest.param("keys = " + "9" * 5000, id="digits"),
        pytest.param("keys = " + "[" * 50_000, id="nested"),
        None,
    ],
)
def test_a_file_that_has_become_wrong_keeps_the_keys_and_is_told_once(
    path: Path, wrong: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    add(path, "anna")
    right = path.read_text()
    watched = WatchedKeys(path)
    caplog.set_level(logging.INFO)
    if wrong is None:
        path.unlink()
    else:
        path.write_text(wrong)
    for _ in range(3):
        assert not watched.changed()
    assert names(watched) == ["anna"]
    (told,) = caplog.records
    assert told.levelno == logging.WARNING
    assert "octavo.toml" in told.getMessage()
    assert "the keys stay as they were" in told.getMessage()
    path.write_text(right.replace('"anna"', '"cleo"'))
    assert watched.changed()
    assert names(watched) == ["cleo"]


def test_a_file_that_could_not_be_read_is_read_by_the_next_look(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No descriptor was left: the key that is revoked meanwhile must not stay valid for good."""
    add(path, "anna")
    add(path, "ben")
    watched = WatchedKeys(path)
    revoke_key(path, "anna")

    def no_descriptor(*_: object, **__: object) -> str:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", no_descriptor)
        for _ in range(3):
            assert not watched.changed()
    assert names(watched) == ["anna", "ben"]
    (told,) = caplog.records
    assert "Too many open files" in told.getMessage()
    assert watched.changed()
    assert names(watched) == ["ben"]
    assert not watched.changed()


def test_the_rest_of_the_file_may_be_wrong_meanwhile(path: Path) -> None:
    """A prefix's file that has gone must not keep a key from being revoked."""
    add(path, "anna")
    add(path, "ben")
    watched = WatchedKeys(path)
    path.write_text(path.read_text() + '\n[[kv-cache.pinned-prefixes]]\nsystem-file = "gone.txt"\n')
    assert not watched.changed()
    revoke_key(path, "anna")
    assert watched.changed()
    assert names(watched) == ["ben"]


def test_a_wrong_file_at_the_start_and_the_key_of_the_flag_are_refused(path: Path) -> None:
    path.write_text("[[keys")
    with pytest.raises(BadConfig, match="is not TOML"):
        WatchedKeys(path)
    path.unlink()
    watched = WatchedKeys(path, (Key.of_flag("anna"),))
    add(path, "anna")
    assert not watched.changed()
    with pytest.raises(BadConfig, match="--api-key"):
        WatchedKeys(path, (Key.of_flag("anna"),))
