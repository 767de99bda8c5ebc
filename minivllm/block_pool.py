"""The blocks of the KV cache: the free-block list, reference counts and the prefix index. No torch."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from minivllm.request import IntegrityError

ROOT = 0


def _hash_block(parent: int, tokens: tuple[int, ...]) -> int:
    return hash((parent, tokens))


class BlockPool:
    """Hand out blocks and take them back; find blocks that already hold a prefix.

    A block is in exactly one of three places: free, owned (its reference count is the number of block-table rows that
    hold it), or cached (owned by nobody, its KV still good for a prefix, first in first out when blocks run short).

    Parameters
    ----------
    num_blocks : int
    block_size : int
        Tokens a block.
    caching : bool
        Keep written blocks findable by their tokens.
    hash_fn : callable
        Of (parent, tokens). A hit compares the tokens themselves, so that a poor one costs time, never a wrong hit.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        caching: bool = True,
        hash_fn: Callable[[int, tuple[int, ...]], int] = _hash_block,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self._hash_fn = hash_fn
        self.num_taken = self.num_given = 0  # changes of owners since the pool was made
        self.reset()

    def reset(self) -> None:
        """Forget everything: all blocks free, nothing cached."""
        self.free: deque[int] = deque(range(self.num_blocks))
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.refs: list[int] = [0] * self.num_blocks
        # A registered block's prefix: a node number that is never used again, its parent's node, its own tokens.
        self._node: dict[int, int] = {}
        self._key: dict[int, tuple[int, int, tuple[int, ...]]] = {}  # block -> (hash, parent node, tokens)
        self._index: dict[int, list[int]] = {}  # hash -> blocks
        self._next_node = ROOT + 1

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could still give."""
        return len(self.free) + len(self.cached)

    def allocate(self) -> int | None:
        """Take a block, the longest cached one where none is free; None when all are owned."""
        if self.free:
            block = self.free.popleft()
        elif self.cached:
            block, _ = self.cached.popitem(last=False)
            self._unregister(block)
        else:
            return None
        self.refs[block] = 1
        self.num_taken += 1
        return block

    def take(self, count: int) -> list[int]:
        """Take up to ``count`` blocks, as many as `allocate` would give."""
        blocks = [self.free.popleft() for _ in range(min(count, len(self.free)))]
        for block in blocks:
            self.refs[block] = 1
        self.num_taken += len(blocks)
        while len(blocks) < count and (last := self.allocate()) is not None:
            blocks.append(last)
        return blocks

    def share(self, block: int) -> None:
        """Add an owner to a full block."""
        if self.refs[block] == 0:
            del self.cached[block]
        self.refs[block] += 1
        self.num_taken += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give up a row's blocks, given in the row's order; the tail is forgotten before the head."""
        refs, cached, node = self.refs, self.cached, self._node  # looked up once: a long prompt has hundreds
        given = list(blocks)[::-1]
        self.num_given += len(given)
        for block in given:
            refs[block] -= 1
            if refs[block] > 0:
                continue
            if block in node:
                cached[block] = None
            else:
                self.free.append(block)

    def register(self, block: int, parent: int, tokens: Sequence[int]) -> int:
        """Make a full block findable; its KV must have been written (or stand before every later step).

        Parameters
        ----------
        block : int
        parent : int
            The node of the block before it in its row; `ROOT` for the first.
        tokens : sequence of int
            The block's own ``block_size`` tokens.

        Returns
        -------
        int
            The node of this prefix: the known one where an equal prefix stands in another block.
        """
        if not self.caching:
            return ROOT
        if block in self._node:
            return self._node[block]
        own = tuple(tokens)
        known = self._find(parent, own)
        if known is not None:
            return self._node[known]
        key = self._hash_fn(parent, own)
        self._index.setdefault(key, []).append(block)
        self._key[block] = (key, parent, own)
        self._node[block] = self._next_node
        self._next_node += 1
        return self._node[block]

    def match(self, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the blocks that hold the longest known prefix and their nodes; one token at least is left over."""
        blocks: list[int] = []
        nodes: list[int] = []
        size = self.block_size
        for i in range((len(tokens) - 1) // size if self.caching else 0):
            block = self._find(nodes[-1] if nodes else ROOT, tuple(tokens[i * size : (i + 1) * size]))
            if block is None:
                break
            blocks.append(block)
            nodes.append(self._node[block])
        return blocks, nodes

    def _find(self, parent: int, tokens: tuple[int, ...]) -> int | None:
        for block in self._index.get(self._hash_fn(parent, tokens), ()):
            _, its_parent, its_tokens = self._key[block]
            if its_parent == parent and its_tokens == tokens:
                return block
        return None

    def _unregister(self, block: int) -> None:
        key, _, _ = self._key.pop(block)
        del self._node[block]
        same = self._index[key]
        same.remove(block)
        if not same:
            del self._index[key]

    def check(self, rows: Iterable[Sequence[int]]) -> None:
        """Raise IntegrityError unless the three places hold every block once and counts equal the rows' holdings."""
        held = [0] * self.num_blocks
        for row in rows:
            for block in row:
                held[block] += 1
        if held != self.refs:
            wrong = [b for b in range(self.num_blocks) if held[b] != self.refs[b]]
            raise IntegrityError(f"reference counts differ from the rows that hold the blocks: {wrong[:8]}")
        free = set(self.free)
        owned = {b for b in range(self.num_blocks) if self.refs[b] > 0}
        cached = set(self.cached)
        if len(free) != len(self.free):
            raise IntegrityError("the free-block list holds a block twice")
        if free & owned or free & cached or owned & cached:
            raise IntegrityError("a block is in two of free, owned and cached")
        if len(free) + len(owned) + len(cached) != self.num_blocks:
            raise IntegrityError(f"{self.num_blocks - len(free) - len(owned) - len(cached)} blocks are lost")
        if not cached <= set(self._node):
            raise IntegrityError("a cached block is in no index")
        if free & set(self._node):
            raise IntegrityError("a free block can still be hit")
