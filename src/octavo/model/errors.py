"""The one way a model file is refused."""

from __future__ import annotations


class ModelFileError(Exception):
    """A model file that cannot be used. The message is one sentence that names the file and the fault."""
