"""Which blocks hold which tokens, and after which other tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from octavo.kv.block import Block

Tokens = tuple[int, ...]


class Namespace(NamedTuple):
    """Who shares content: those of one group, under one salt. Equal in both, or nothing is found.

    group: of people (a household, or one key alone), given by the server's owner. salt: what a request
    itself asks for.
    """

    group: str = ""
    salt: str = ""


COMMON = Namespace()
"""Where everybody is who says nothing else."""


class PrefixNode:
    """One block of known content: these tokens, after everything its parents say, in one namespace.

    `block` is where the keys and values are. A root stands for a namespace, has no tokens
    and no block.
    `pending` until the step that computes the block has returned. What follows says how worth keeping it is:
    `owner`, who used it last; `background`, whether only background work has; `ends_turn`, whether an answer
    ended here and nothing has gone on; `is_fork`, whether ways have parted here. `last_used` and `ticket`
    belong to `EvictionOrder`.

    A node of a full block may have children. A *partial* one has fewer tokens than a block holds: it is what
    an answer or a pause left behind, a leaf whose block nobody refers to, to be copied or written on.
    """

    __slots__ = (
        "background",
        "block",
        "children",
        "ends_turn",
        "is_fork",
        "last_used",
        "namespace",
        "owner",
        "parent",
        "pending",
        "ticket",
        "tokens",
    )

    def __init__(
        self, parent: PrefixNode | None, tokens: Tokens, namespace: Namespace, block: Block | None
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.namespace = namespace
        self.block = block
        self.pending = block is not None
        self.owner = ""
        self.background = False
        self.ends_turn = False
        self.is_fork = False
        self.last_used = 0
        self.ticket = 0
        # First token -> the nodes that begin with it, in order of their tokens: what begins alike is side by
        # side, so that neither an exact match nor the longest common start scans a thousand siblings.
        self.children: dict[int, list[PrefixNode]] = {}

    def child(self, tokens: Tokens) -> PrefixNode | None:
        """The node that follows this one with exactly these tokens, compared one by one.

        Cost: O(block_size log siblings).
        """
        alike = self.children.get(tokens[0])
        if alike is None:
            return None
        place = bisect_left(alike, tokens, key=_tokens)
        return alike[place] if place < len(alike) and alike[place].tokens == tokens else None

    def longest_start(self, tokens: Tokens) -> Start:
        """The committed child that has most of the first of these tokens, and how many; (None, 0): none has.

        Of two with equally many, the shorter: it may be partial, and end there.
        Cost: O(block_size log siblings), and one comparison for each pending sibling beside the place.
        """
        best = Start(None, 0)
        alike = self.children.get(tokens[0]) if tokens else None
        if alike is None:
            return best
        # In this order, the further from where `tokens` would stand, the less a sibling has in common.
        place = bisect_left(alike, tokens, key=_tokens)
        for neighbours in (range(place, len(alike)), range(place - 1, -1, -1)):
            for at in neighbours:
                if not alike[at].pending:
                    count = common_start(alike[at].tokens, tokens)
                    if best.node is None or (count, -len(alike[at].tokens)) > (
                        best.num_tokens,
                        -len(best.node.tokens),
                    ):
                        best = Start(alike[at], count)
                    break
        return best


class Start(NamedTuple):
    """A node, and how many of its first tokens are meant."""

    node: PrefixNode | None
    num_tokens: int


def common_start(one: Tokens, other: Tokens) -> int:
    """How many first tokens two of them have in common."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def _tokens(node: PrefixNode) -> Tokens:
    return node.tokens


class PrefixIndex:
    """A tree of blocks for each namespace; that and equal tokens are the only way to find one.

        ("", "")  - [The cat sat on] - [the mat and then]    a node is (parent, tokens, namespace)
                                     \\ [the hat of a man]    it has exactly one block
                                     \\ [the mat]             partial
        ("", "b") - [The cat sat on]                         same tokens, other salt: another tree

    A node whose block is about to be written is forgotten. Only leaves are (`EvictionOrder`), and a sequence
    holds every block before its last, so no node ever loses its parent.
    """

    def __init__(self) -> None:
        self._roots: dict[Namespace, PrefixNode] = {}
        self._pending: list[PrefixNode] = []

    def root(self, namespace: Namespace) -> PrefixNode | None:
        """The root of a namespace's tree, or None while nothing is known there."""
        return self._roots.get(namespace)

    def insert(
        self, parent: PrefixNode | None, tokens: Tokens, namespace: Namespace, block: Block
    ) -> PrefixNode:
        """Make a block findable as these tokens after `parent` (None: at the beginning); pending for now.

        Cost: O(block_size log siblings), and moving pointers to those behind it.
        """
        node = self._insert(parent, tokens, namespace, block)
        self._pending.append(node)
        return node

    def insert_partial(
        self, parent: PrefixNode | None, tokens: Tokens, namespace: Namespace, block: Block
    ) -> PrefixNode:
        """Make the first slots of a block findable, which an earlier step has computed; nobody is to write
        the block while its node lives. Cost: as `insert`."""
        node = self._insert(parent, tokens, namespace, block)
        node.pending = False
        return node

    def _insert(
        self, parent: PrefixNode | None, tokens: Tokens, namespace: Namespace, block: Block
    ) -> PrefixNode:
        assert block.node is None, f"{block} already stands for other tokens"
        if parent is None or parent.parent is None:
            # A root that the caller looked up may have lost its last child since, and its place with it.
            parent = self._roots.setdefault(namespace, PrefixNode(None, (), namespace, None))
        node = PrefixNode(parent, tokens, namespace, block)
        parent.is_fork |= bool(parent.children)
        parent.ends_turn = False
        alike = parent.children.setdefault(tokens[0], [])
        place = bisect_left(alike, tokens, key=_tokens)
        assert place == len(alike) or alike[place].tokens != tokens, "two nodes for the same tokens"
        alike.insert(place, node)
        block.node = node
        return node

    def commit(self) -> None:
        """The step has returned: what it registered is content from now on."""
        for node in self._pending:
            node.pending = False
        self._pending.clear()

    def rollback(self) -> None:
        """The step failed: forget what it registered. Whoever computes its blocks still holds them."""
        undone = self._pending[::-1]
        self._pending.clear()
        for node in undone:
            assert node.block is not None
            assert node.block.ref_count > 0, f"{node.block} was returned before its step had ended"
            node.pending = False
            self.forget(node)

    def forget(self, node: PrefixNode) -> None:
        """Remove a leaf; its block no longer stands for anything.

        Cost: O(block_size log siblings), and moving pointers to those behind it.
        """
        parent, block = node.parent, node.block
        assert parent is not None, "a root is not forgotten by itself"
        assert block is not None, "a node without a block was left in the index"
        assert not node.pending, f"{block} is forgotten before its step has ended"
        assert not node.children, f"{block} is forgotten before the blocks that continue it"
        block.node = None
        node.block = None
        alike = parent.children[node.tokens[0]]
        del alike[bisect_left(alike, node.tokens, key=_tokens)]
        if not alike:
            del parent.children[node.tokens[0]]
            if parent.parent is None and not parent.children:
                del self._roots[node.namespace]

    @property
    def pending(self) -> tuple[PrefixNode, ...]:
        """What this step registered so far, in order."""
        return tuple(self._pending)

    def roots(self) -> Iterator[tuple[Namespace, PrefixNode]]:
        """Every namespace and its root. For the audit."""
        return iter(self._roots.items())
