"""The free-block list, the reference counts and the prefix index, without an engine."""

from __future__ import annotations

import random

import pytest

from minivllm.block_pool import ROOT, BlockPool
from minivllm.request import IntegrityError


def fill(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Give a row blocks for these tokens as the engine does: shared from the index, then new ones, all registered."""
    size = pool.block_size
    row, nodes = pool.match(tokens)
    for block in row:
        pool.share(block)
    while len(row) * size < len(tokens):
        block = pool.allocate()
        assert block is not None
        row.append(block)
    for i in range(len(nodes), len(tokens) // size):
        parent = nodes[-1] if nodes else ROOT
        nodes.append(pool.register(row[i], parent, tokens[i * size : (i + 1) * size]))
    return row


def test_blocks_are_taken_in_order_and_come_back():
    pool = BlockPool(5, 4)
    taken = [pool.allocate() for _ in range(6)]
    assert taken == [0, 1, 2, 3, 4, None]
    pool.check([[0, 1], [2], [3, 4]])
    pool.release([2])
    pool.release([0, 1])
    assert list(pool.free) == [2, 1, 0]
    assert pool.num_available == 3
    assert pool.allocate() == 2
    pool.check([[2], [3, 4]])


def test_each_of_many_rows_has_blocks_of_its_own():
    """Tokens and blocks are different units: fill the pool, then give back and take again one block at a time."""
    pool = BlockPool(7, 3, caching=False)
    rows = [[pool.allocate()] for _ in range(7)]
    for turn in range(50):
        row = rows.pop(turn * 5 % len(rows))
        pool.release(row)
        block = pool.allocate()
        assert block == row[0] and pool.allocate() is None
        rows.append([block])
        assert len({b for r in rows for b in r}) == 7
        pool.check(rows)


def test_a_shared_block_comes_back_with_its_last_owner():
    pool = BlockPool(4, 2)
    first = fill(pool, [1, 2, 3, 4, 5])
    second = fill(pool, [1, 2, 3, 4, 6])
    assert second[:2] == first[:2] and second[2] != first[2]
    pool.check([first, second])
    pool.release(first)
    assert pool.refs[first[0]] == 1 and first[0] not in pool.cached
    pool.check([second])
    pool.release(second)
    assert pool.num_available == 4
    pool.check([])


def test_a_cached_block_is_taken_last_and_its_prefix_forgotten():
    pool = BlockPool(3, 2)
    row = fill(pool, [1, 2, 3, 4])
    pool.release(row)
    assert list(pool.cached) == [row[1], row[0]], "the tail goes before the head"
    assert pool.match([1, 2, 3, 4, 5])[0] == row
    assert pool.allocate() == 2, "an empty one first"
    assert pool.allocate() == row[1]
    assert pool.match([1, 2, 3, 4, 5])[0] == row[:1]
    assert pool.allocate() == row[0]
    assert pool.match([1, 2, 3, 4, 5])[0] == []


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9])
def test_a_hit_leaves_a_token_to_compute(length):
    pool = BlockPool(9, 4)
    tokens = list(range(100, 100 + length))
    pool.release(fill(pool, tokens))
    blocks, nodes = pool.match(tokens)
    assert len(blocks) == len(nodes) == (length - 1) // 4


@pytest.mark.parametrize("hash_fn", [lambda parent, tokens: 7, lambda parent, tokens: parent % 2])
def test_equal_hashes_are_no_hit(hash_fn):
    """A hit compares the tokens and what comes before them, so that the worst hash costs time alone."""
    pool = BlockPool(12, 2, hash_fn=hash_fn)
    a, b = fill(pool, [1, 2, 3, 4]), fill(pool, [5, 6, 3, 4])
    assert not set(a) & set(b)
    assert pool.match([1, 2, 3, 4, 0])[0] == a
    assert pool.match([5, 6, 3, 4, 0])[0] == b
    assert pool.match([3, 4, 3, 4, 0])[0] == []
    pool.release(a)
    pool.release(b)
    pool.check([])


def test_a_tail_without_its_head_is_never_hit_under_another_head():
    """Node numbers are not used again: what was under a forgotten head stays unreachable."""
    pool = BlockPool(4, 1)
    row = fill(pool, [1, 2])
    pool._unregister(row[0])
    del row[0]
    other = fill(pool, [9])
    assert pool.match([9, 2, 0])[0] == other
    assert pool.match([1, 2, 0])[0] == []


def test_without_caching_nothing_is_kept():
    pool = BlockPool(4, 2, caching=False)
    row = fill(pool, [1, 2, 3, 4])
    pool.release(row)
    assert pool.match([1, 2, 3, 4, 5]) == ([], [])
    assert not pool.cached and len(pool.free) == 4


def test_two_rows_that_computed_the_same_share_a_node():
    """The second row keeps its own block, and what follows in either is found under the one node."""
    pool = BlockPool(6, 2)
    a, b = [pool.allocate(), pool.allocate()], [pool.allocate(), pool.allocate()]
    node_a = pool.register(a[0], ROOT, [1, 2])
    node_b = pool.register(b[0], ROOT, [1, 2])
    assert node_a == node_b
    pool.register(b[1], node_b, [3, 4])
    assert pool.match([1, 2, 3, 4, 5])[0] == [a[0], b[1]]
    pool.check([a, b])
    pool.release(a)
    pool.release(b)
    pool.check([])
    assert list(pool.free) == [4, 5, a[1], b[0]], "the block that is found nowhere is free at once"


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda pool: pool.free.append(pool.free[0]), "twice"),
        (lambda pool: pool.free.popleft(), "lost"),
        (lambda pool: pool.free.append(0), "two of"),
        (lambda pool: pool.refs.__setitem__(0, 2), "reference counts"),
        (lambda pool: pool.refs.__setitem__(5, 1), "reference counts"),
        (lambda pool: pool._node.__setitem__(pool.free[0], 9), "can still be hit"),
        (lambda pool: pool._node.clear(), "in no index"),
    ],
)
def test_check_sees_every_kind_of_harm(harm, words):
    pool = BlockPool(6, 2)
    row, old = fill(pool, [1, 2, 3]), fill(pool, [7, 8])
    pool.release(old)
    pool.check([row])
    harm(pool)
    with pytest.raises(IntegrityError, match=words):
        pool.check([row])


@pytest.mark.parametrize("size", [1, 2, 16])
@pytest.mark.parametrize("caching", [True, False])
def test_random_use_against_a_dictionary(size, caching):
    rng = random.Random(size)
    pool = BlockPool(11, size, caching, hash_fn=lambda parent, tokens: (parent + sum(tokens)) % 3)
    rows: list[list[int]] = []
    content: dict[int, tuple[int, ...]] = {}  # block -> the whole prefix that it ends, as far as it is full
    for _ in range(600):
        if rows and rng.random() < 0.45:
            pool.release(rows.pop(rng.randrange(len(rows))))
        else:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 4 * size + 1))]
            blocks, _ = pool.match(tokens)
            for i, block in enumerate(blocks):
                assert content[block] == tuple(tokens[: (i + 1) * size]), "a hit on another text"
            idle = sum(pool.refs[b] == 0 for b in blocks)
            if -(-len(tokens) // size) - len(blocks) > pool.num_available - idle:
                continue
            row = fill(pool, tokens)
            rows.append(row)
            for i in range(len(tokens) // size):
                content[row[i]] = tuple(tokens[: (i + 1) * size])
        pool.check(rows)
    for row in rows:
        pool.release(row)
    pool.check([])
    assert pool.num_available == 11
