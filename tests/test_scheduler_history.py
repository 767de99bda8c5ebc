"""Four prompts of 17, 14, 13 and 14 tokens through two slots: the whole history of the four stores, step by step."""

from __future__ import annotations

from engines import assert_empty, fake_answer, fake_engine, greedy

LENGTHS = (17, 14, 13, 14)
PROMPTS = [[1 + (7 * i + j) % 12 for j in range(n)] for i, n in enumerate(LENGTHS)]
ANSWERS = (6, 4, 5, 3)  # tokens each may draw


def look(engine):
    """Return the four stores: what is in the slots, the queue, the free-block list, the block table."""
    slots = [(v.request_id, v.phase, v.num_computed, v.num_tokens) for v in engine.slots]
    table = [[int(b) for b in row] for row in engine.block_table]
    return slots, [q.request_id for q in engine.queue], engine.free_blocks, table


def row(*blocks):
    """Return a row of the block table: 8 places, -1 where there is no block."""
    return [*blocks, *[-1] * (8 - len(blocks))]


FREE = (None, "free", 0, 0)

# After each step: the slots (request, phase, tokens with KV, tokens), the queue, the free blocks, the block table.
# Blocks of 4 tokens, 12 of them; the KV of a token drawn in a step is written in the next one.
HISTORY = [
    # Prompts 0 and 1 are computed whole, 17 and 14 tokens, and each draws its first token.
    ([(0, "decode", 17, 18), (1, "decode", 14, 15)], [2, 3], [9, 10, 11], [row(0, 1, 2, 3, 4), row(5, 6, 7, 8)]),
    ([(0, "decode", 18, 19), (1, "decode", 15, 16)], [2, 3], [9, 10, 11], [row(0, 1, 2, 3, 4), row(5, 6, 7, 8)]),
    ([(0, "decode", 19, 20), (1, "decode", 16, 17)], [2, 3], [9, 10, 11], [row(0, 1, 2, 3, 4), row(5, 6, 7, 8)]),
    # Request 1 takes block 9 for its seventeenth token, draws its fourth and last, and leaves: last block first.
    ([(0, "decode", 20, 21), FREE], [2, 3], [10, 11, 9, 8, 7, 6, 5], [row(0, 1, 2, 3, 4), row()]),
    # Slot 1 takes request 2 at the next step's head; request 0 takes a block first, as it did come first.
    ([(0, "decode", 21, 22), (2, "decode", 13, 14)], [3], [6, 5], [row(0, 1, 2, 3, 4, 10), row(11, 9, 8, 7)]),
    # Request 0 is at its end: 17 + 6 tokens, of which the last needs no KV.
    ([FREE, (2, "decode", 14, 15)], [3], [6, 5, 10, 4, 3, 2, 1, 0], [row(), row(11, 9, 8, 7)]),
    ([(3, "decode", 14, 15), (2, "decode", 15, 16)], [], [3, 2, 1, 0], [row(6, 5, 10, 4), row(11, 9, 8, 7)]),
    ([(3, "decode", 15, 16), (2, "decode", 16, 17)], [], [3, 2, 1, 0], [row(6, 5, 10, 4), row(11, 9, 8, 7)]),
    # Requests 3 and 2 end in one step; request 2 had taken block 3 for its seventeenth token.
    ([FREE, FREE], [], [2, 1, 0, 4, 10, 5, 6, 3, 7, 8, 9, 11], [row(), row()]),
]


def test_the_history_of_four_prompts_in_two_slots():
    engine = fake_engine(
        num_slots=2, block_size=4, num_blocks=12, max_seq_len=32, max_step_tokens=64, prefix_caching=False
    )
    handles = [engine.submit(p, greedy(n)) for p, n in zip(PROMPTS, ANSWERS, strict=True)]
    assert look(engine) == ([FREE, FREE], [0, 1, 2, 3], list(range(12)), [row(), row()])
    ended = []
    for number, expected in enumerate(HISTORY, 1):
        ended += [(number, g.request_id, g.finish_reason) for g in engine.step()]
        slots, queue, free, table = look(engine)
        assert (slots, queue) == expected[:2], f"step {number}"
        assert (free, table) == expected[2:], f"step {number}"
        engine.check_integrity()
    assert ended == [(4, 1, "length"), (6, 0, "length"), (9, 3, "length"), (9, 2, "length")]
    assert engine.step() == [] and look(engine) == look(engine)
    assert_empty(engine)
    for handle, prompt, count in zip(handles, PROMPTS, ANSWERS, strict=True):
        assert handle.result().token_ids == fake_answer(prompt, greedy(count), 0, limit=32)[0]


def test_a_long_prompt_is_cut_while_the_others_decode():
    """A budget of 5 tokens a step: decode rows first, the rest goes to the prompt."""
    engine = fake_engine(num_slots=2, block_size=4, num_blocks=12, max_step_tokens=5, prefix_caching=False)
    engine.submit(PROMPTS[2][:3], greedy(9))
    engine.submit(PROMPTS[0], greedy(2))
    seen = []
    for _ in range(7):
        engine.step()
        seen.append([(v.phase, v.num_computed) for v in engine.slots])
    assert seen == [
        [("decode", 3), ("prefill", 2)],
        [("decode", 4), ("prefill", 6)],
        [("decode", 5), ("prefill", 10)],
        [("decode", 6), ("prefill", 14)],
        [("decode", 7), ("decode", 17)],
        [("decode", 8), ("free", 0)],
        [("decode", 9), ("free", 0)],
    ]


def test_the_youngest_gives_way_and_comes_back_first():
    """A pool of 4 blocks of 2 tokens: two requests that need 4 each, and a third that must not overtake."""
    engine = fake_engine(num_slots=2, block_size=2, num_blocks=4, prefix_caching=False)
    prompts = [[1, 2, 3], [4, 5, 6], [7]]
    handles = [engine.submit(p, greedy(5)) for p in prompts]
    seen = []
    while any(not h.done for h in handles):
        engine.step()
        engine.check_integrity()
        seen.append(([v.request_id for v in engine.slots], [(q.request_id, q.preemptions) for q in engine.queue]))
    assert seen[:3] == [
        ([0, 1], [(2, 0)]),
        ([0, 1], [(2, 0)]),
        ([0, None], [(1, 1), (2, 0)]),
    ]
    assert [h.result().stats.preemptions for h in handles] == [0, 1, 1]
    for handle, prompt in zip(handles, prompts, strict=True):
        assert handle.result().token_ids == fake_answer(prompt, greedy(5), 0)[0]
