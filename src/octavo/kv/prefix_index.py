"""Which blocks hold which tokens, and after which other tokens."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.kv.block import Block

Tokens = tuple[int, ...]


class PrefixNode:
    """One full block of known content: these tokens, after everything its parents say, under one salt.

    `block` is where the keys and values are. A root stands for a salt, has no tokens and no block.
    `pending` until the step that computes the block has returned.
    """

    __slots__ = ("block", "children", "parent", "pending", "salt", "tokens")

    def __init__(self, parent: PrefixNode | None, tokens: Tokens, salt: str, block: Block | None) -> None:
        self.parent = parent
        self.tokens = tokens
        self.salt = salt
        self.block = block
        self.pending = block is not None
        # First token -> tokens of the whole block -> node. A dictionary compares the keys it finds, so equal
        # hashes of unequal tokens never meet; the first token is a level of its own, so that a search for a
        # block that begins alike sees only those that do.
        self.children: dict[int, dict[Tokens, PrefixNode]] = {}

    def child(self, tokens: Tokens) -> PrefixNode | None:
        """The node that follows this one with exactly these tokens. Cost: O(block_size)."""
        alike = self.children.get(tokens[0])
        return None if alike is None else alike.get(tokens)


class PrefixIndex:
    """A tree of full blocks for each salt; equal salt and equal tokens are the only way to find one.

        salt "" - [The cat sat on] - [the mat and then]      a node is (parent, tokens, salt)
                                   \\ [the hat of a man]      it has exactly one block
        salt "b" - [The cat sat on]                          same tokens, other salt: another tree

    A node whose block is about to be written is forgotten. Sequences return their last block first and hold
    every block before their last, so the coldest block is always a leaf: no node ever loses its parent.
    """

    def __init__(self) -> None:
        self._roots: dict[str, PrefixNode] = {}
        self._pending: list[PrefixNode] = []

    def root(self, salt: str) -> PrefixNode | None:
        """The root of a salt's tree, or None while nothing is known under this salt."""
        return self._roots.get(salt)

    def insert(self, parent: PrefixNode | None, tokens: Tokens, salt: str, block: Block) -> PrefixNode:
        """Make a block findable as these tokens after `parent` (None: at the beginning); pending for now."""
        assert block.node is None, f"{block} already stands for other tokens"
        if parent is None or parent.parent is None:
            # A root that the caller looked up may have lost its last child since, and its place with it.
            parent = self._roots.setdefault(salt, PrefixNode(None, (), salt, None))
        node = PrefixNode(parent, tokens, salt, block)
        alike = parent.children.setdefault(tokens[0], {})
        assert tokens not in alike, "two nodes for the same tokens after the same parent"
        alike[tokens] = node
        block.node = node
        self._pending.append(node)
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
        """Remove a leaf; its block no longer stands for anything. Cost: O(block_size)."""
        parent, block = node.parent, node.block
        assert parent is not None, "a root is not forgotten by itself"
        assert block is not None, "a node without a block was left in the index"
        assert not node.pending, f"{block} is forgotten before its step has ended"
        assert not node.children, f"{block} is forgotten before the blocks that continue it"
        block.node = None
        node.block = None
        alike = parent.children[node.tokens[0]]
        del alike[node.tokens]
        if not alike:
            del parent.children[node.tokens[0]]
            if parent.parent is None and not parent.children:
                del self._roots[node.salt]

    @property
    def pending(self) -> tuple[PrefixNode, ...]:
        """What this step registered so far, in order."""
        return tuple(self._pending)

    def roots(self) -> Iterator[tuple[str, PrefixNode]]:
        """Every salt and its root. For the audit."""
        return iter(self._roots.items())
