"""Keeps Python's cycle collector from stopping every stream for what will never be garbage."""

from __future__ import annotations

import gc


class SettlingHeap:
    """From loading to the end of serving.

    while loading   no collections: little becomes garbage, and each looks at all there is (30 ms of a start)
    settle()        one, then what is left is taken out of the collector's sight
    while serving   a full collection looks at what requests made, and no longer at vocabulary, blocks and
                    modules: with SmolLM2 those took it 27 to 55 ms, in which no stream gets a token
    left            everything is in sight again, so that cycles are freed at exit
    """

    def __enter__(self) -> SettlingHeap:
        gc.disable()
        return self

    def settle(self) -> None:
        gc.collect()
        gc.freeze()
        gc.enable()

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()
        gc.enable()
