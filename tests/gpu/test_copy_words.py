"""Words between the device and pinned memory: every size, both ways, and nothing beside them."""

from __future__ import annotations

import pytest
import torch
from rows import CUDA, random

from minivllm import ops

pytestmark = pytest.mark.gpu


def words(count: int, pinned: bool) -> torch.Tensor:
    drawn = torch.randint(-(2**31), 2**31 - 1, (count,)).to(torch.int32)
    return drawn.pin_memory() if pinned else drawn.to(CUDA)


@pytest.mark.parametrize("to_host", [False, True])
@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("count", [1, 3, 4, 5, 255, 1024, 4099, 70001])
def test_words_arrive(count: int, offset: int, to_host: bool) -> None:
    source, to = words(count + 16, not to_host), words(count + 16, to_host)
    expected = to.clone()
    expected[8 : 8 + count] = source[offset : offset + count].to(to.device)
    ops.copy_words(to[8 : 8 + count], source[offset : offset + count])
    torch.cuda.synchronize()
    assert torch.equal(to, expected)


def test_it_waits_for_a_kernel_that_lets_it_start_early() -> None:
    """On a stream of its own, behind products that take long and let the next kernel start at once."""
    linear = ops.Linear(random(8192, 8192, scale=0.01))
    x, state = random(4096, 8192), torch.zeros(64, dtype=torch.int32, device=CUDA)
    pairs = [torch.tensor([[i, 100 * turn + i] for i in range(64)], dtype=torch.int32) for turn in range(4)]
    host = [torch.full((64,), -1, dtype=torch.int32).pin_memory() for _ in pairs]
    given = [pair.pin_memory() for pair in pairs]
    device = [torch.zeros(64, 2, dtype=torch.int32, device=CUDA) for _ in pairs]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for words_in, pair, words_out in zip(given, device, host, strict=True):
            linear(x)
            ops.copy_words(pair, words_in)
            ops.update_state(state, pair)
            ops.copy_words(words_out, state)
    torch.cuda.synchronize()
    for turn, words_out in enumerate(host):
        assert words_out.tolist() == [100 * turn + i for i in range(64)]


def test_it_keeps_to_the_stream() -> None:
    host, device = torch.zeros(1000, dtype=torch.int32).pin_memory(), torch.zeros(1000, dtype=torch.int32, device=CUDA)
    seen = []
    for i in range(1, 9):
        device += i
        ops.copy_words(host, device)
        device.mul_(2)
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
        seen.append(host.unique().tolist())
    total, expected = 0, []
    for i in range(1, 9):
        total += i
        expected.append([total])
        total *= 2
    assert seen == expected


def test_refusals() -> None:
    host, device = words(8, pinned=True), words(8, pinned=False)
    for given, match in [
        ((device, torch.zeros(8, dtype=torch.int32)), "pinned"),
        ((device, device), "pinned"),
        ((host, host), "CUDA"),
        ((device[:4], host), "words"),
        ((device[::2], host[:4]), "contiguous"),
        ((device.long(), host), "int32"),
    ]:
        with pytest.raises(ValueError, match=match):
            ops.copy_words(*given)
