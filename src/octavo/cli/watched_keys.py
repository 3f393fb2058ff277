"""The keys of a configuration file that may change while the server runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from octavo.api.keys import Key
from octavo.cli.config_file import is_there, read_keys
from octavo.cli.config_place import BadConfig

logger = logging.getLogger("octavo.keys")


class WatchedKeys:
    """`octavo.api.keys.KeySource` over a file.

    A file that has gone, or has become wrong, leaves the keys as they were and one line in the log: a typing
    error must neither shut a household out nor let everybody in.

    beside: keys from elsewhere, which the file's may not equal.

    Raises (constructor): BadConfig, for a file that is there and is wrong.
    """

    def __init__(self, path: Path, beside: Sequence[Key] = ()) -> None:
        self.path = path
        self.keys: tuple[Key, ...] | None = None
        self._beside = beside
        # Taken before the file is read: what is written in between is seen by the next look.
        self._stamp = self._told = self._look()
        if is_there(path):
            self.keys = read_keys(path, beside)

    def changed(self) -> bool:
        """Whether `keys` is another than before."""
        stamp = self._look()
        if stamp == self._stamp:
            return False
        try:
            keys = read_keys(self.path, self._beside)
        except BadConfig as error:
            if stamp != self._told and (self.keys is not None or is_there(self.path)):
                logger.warning("%s; the keys stay as they were", error)
            self._told = stamp
            # What is wrong stays so until it is written anew. What could not be read (no descriptor was left,
            # perhaps) is read by the next look: a key that has been revoked there must not live on.
            if stamp is None or not isinstance(error.__cause__, OSError):
                self._stamp = stamp
            return False
        self._stamp = self._told = stamp
        if keys == self.keys:
            return False
        self.keys = keys
        logger.info("%s: %d keys", self.path, len(keys or ()))
        return True

    def _look(self) -> tuple[int, ...] | None:
        """What is another after every change: a file that is written anew, renamed into place, or replaced
        by an older one."""
        try:
            stat = os.stat(self.path)
        except OSError:
            return None
        return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
