"""Log probabilities, and the state and counts that slots keep."""

from __future__ import annotations

import math

import pytest
import torch
from sampling_rows import PROMPT_BIT, VOCAB_SIZES, int32, random_logits

from minivllm import ops


def test_update_state_skips_what_is_outside(device):
    state = torch.arange(40, dtype=torch.int32, device=device).reshape(4, 10)
    expected = state.clone()
    expected[1, 3], expected[3, 9] = 70, 71
    ops.update_state(state, int32([[13, 70], [-1, 5], [39, 71], [40, 6], [2**31 - 1, 7]], device))
    assert torch.equal(state, expected)


def test_count_tokens_starts_a_row_again(device):
    row = torch.full((9,), 77, dtype=torch.int32, device=device)
    ops.count_tokens(row, int32([2, 2, 8, 2, 0, 0], device), 3)
    assert row.tolist() == [2, 0, PROMPT_BIT + 1, 0, 0, 0, 0, 0, PROMPT_BIT]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_logprobs(vocab_size, device):
    logits = random_logits(5, vocab_size, seed=11)
    logits[1] = logits[1].round()
    logits[2] = 4.0
    logits[3] *= 1000
    wide = torch.full((5, vocab_size + 1), math.nan)
    wide[:, :vocab_size] = logits
    tokens = torch.tensor([vocab_size - 1, vocab_size // 2, vocab_size // 3, 0, -1], dtype=torch.int32)
    top_n = min(20, vocab_size)
    exact = torch.log_softmax(logits.double(), 1)
    order = torch.argsort(logits, dim=1, descending=True, stable=True)
    given = wide.to(device)[:, :vocab_size]
    found, ranks, top_ids, top_logprobs = (part.cpu() for part in ops.logprobs(given, tokens.to(device), top_n))
    for i in range(4):
        token = int(tokens[i])
        assert abs(float(found[i]) - float(exact[i, token])) <= 2e-5 + 1e-6 * abs(float(exact[i, token]))
        assert int(ranks[i]) == order[i].tolist().index(token) + 1
    assert math.isnan(found[4])
    assert int(ranks[4]) == 0
    assert torch.equal(top_ids.long(), order[:, :top_n])
    torch.testing.assert_close(top_logprobs.double(), exact.gather(1, top_ids.long()), rtol=1e-6, atol=2e-5)
    for i in range(5):
        alone = ops.logprobs(logits[i : i + 1].to(device), tokens[i : i + 1].to(device), top_n)
        assert torch.equal(alone[0].cpu().view(torch.int32), found[i : i + 1].view(torch.int32))
        assert torch.equal(alone[3].cpu(), top_logprobs[i : i + 1])
    nothing = ops.logprobs(given, tokens.to(device), 0)
    assert torch.equal(nothing[1].cpu(), ranks)
    assert nothing[2].shape == (5, 0)
