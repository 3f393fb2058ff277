"""`octavo pull hf:owner/repo:file`, with a package in the place of huggingface-hub that reads a folder."""

from __future__ import annotations

import hashlib
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from octavo.model.catalog import models_dir, resolve_model
from octavo.model.download import DownloadError, Pulled, pull

NAME = "hf:me/models:q4/x.gguf"
CONTENT = b"GGUF from the hub" * 1000


@dataclass
class FileMetadata:
    etag: str | None
    size: int | None


class Silent:
    def note(self, text: str) -> None:
        """Nobody listens."""

    def progress(self, stage: str, done: int, total: int) -> None:
        assert stage == "downloading"
        assert 0 <= done <= total


def fetch() -> Pulled:
    return pull(NAME, Silent())


class FakeHub(ModuleType):
    """The functions that a pull calls, over a folder instead of the network."""

    def __init__(self, folder: Path) -> None:
        super().__init__("huggingface_hub")
        self.folder = folder
        self.reachable = True
        self.etag: str | None = hashlib.sha256(CONTENT).hexdigest()

    def hf_hub_url(self, repo: str, file: str) -> str:
        return str(self.folder / repo / file)

    def get_hf_file_metadata(self, url: str) -> FileMetadata:
        if not self.reachable:
            raise OSError("the network\nis down")
        return FileMetadata(self.etag, Path(url).stat().st_size)

    def hf_hub_download(self, repo: str, file: str, *, local_dir: Path) -> str:
        target = local_dir / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.folder / repo / file, target)
        return str(target)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    folder = tmp_path / "hub"
    (folder / "me/models/q4").mkdir(parents=True)
    (folder / "me/models/q4/x.gguf").write_bytes(CONTENT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hub, utils, bars = FakeHub(folder), ModuleType("huggingface_hub.utils"), ModuleType("tqdm")
    bars.disable_progress_bars = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", utils)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils.tqdm", bars)
    return hub


def test_a_file_arrives_and_is_verified_again_without_network(hub: FakeHub) -> None:
    result = fetch()
    assert result.fetched
    assert result.path == models_dir() / "me" / "models" / "x.gguf" == resolve_model(NAME)
    assert result.path.read_bytes() == CONTENT
    hub.reachable = False
    assert not fetch().fetched
    assert sorted(path.name for path in models_dir().iterdir()) == [".lock", "me"]


def test_a_file_that_changed_on_the_way_is_not_kept(hub: FakeHub) -> None:
    (hub.folder / "me/models/q4/x.gguf").write_bytes(b"GGUF of somebody else")
    with pytest.raises(DownloadError, match="nothing was kept"):
        fetch()
    assert not (models_dir() / "me").exists()


def test_a_file_without_a_checksum_is_refused(hub: FakeHub) -> None:
    hub.etag = "0123456789abcdef"  # what the Hub says of files that are not in its large-file store
    with pytest.raises(DownloadError, match="states no sha256"):
        fetch()


def test_an_unreachable_hub_is_one_sentence(hub: FakeHub) -> None:
    hub.reachable = False
    with pytest.raises(DownloadError, match=r"^cannot fetch hf:me/models:q4/x\.gguf: the network is down$"):
        fetch()


@pytest.mark.usefixtures("hub")
def test_without_the_package_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DownloadError, match=r"install it with: pip install 'octavo\[hub\]'"):
        fetch()
