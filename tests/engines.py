"""Engines to test: over a tiny random model, and over a forward that is a pure function of the tokens."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import torch

from minivllm import ops
from minivllm.defaults import Sizes
from minivllm.engine import BatchEngine
from minivllm.intake import RequestMaker, number
from minivllm.request import SamplingParams
from minivllm.sampler import slot_words

FAKE_VOCAB = 13
FAKE_END = 0  # the fake model's end token
_KINDS = 97


def greedy(max_tokens: int | None = None, **other) -> SamplingParams:
    """Return parameters that end at the length alone."""
    return SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **other})


def tiny_engine(path, device="cpu", *, poison: bool = True, **sizes) -> BatchEngine:
    """Open a tiny model with small odd sizes, its KV cache filled with NaN."""
    wanted = {"num_slots": 3, "block_size": 4, "num_blocks": 60, "cuda_graphs": False, **sizes}
    engine = BatchEngine(path, device=device, **wanted)
    if poison:
        engine._runner.cache.kv.fill_(math.nan)
    return engine


def assert_empty(engine: BatchEngine) -> None:
    """Assert that nothing is held: all slots free, all blocks back, nothing queued."""
    engine.check_integrity()
    assert [v.request_id for v in engine.slots] == [None] * engine.sizes.num_slots
    assert engine.queue == []
    assert sorted(engine.free_blocks) == list(range(engine.sizes.num_blocks))
    assert (engine.block_table == -1).all()


@lru_cache(1)
def _tables() -> tuple[np.ndarray, torch.Tensor]:
    rng = np.random.default_rng(11)
    weights = rng.integers(1, 1 << 20, 4096)
    logits = torch.from_numpy(rng.standard_normal((_KINDS, FAKE_VOCAB)).astype(np.float32) * 3)
    return weights, logits


def kind_of(tokens: np.ndarray) -> int:
    """Hash a whole history, its order included, to a row of the table of logits."""
    weights, _ = _tables()
    return int((tokens.astype(np.int64) * weights[: len(tokens)]).sum() % _KINDS)


class FakeModel:
    """Write each token into its KV block, read the whole history back through the block table, hash it.

    So the logits are a pure function of the tokens, and a block that is not the row's own shows at once.
    """

    def __init__(self) -> None:
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.config = SimpleNamespace(
            num_layers=1,
            num_q_heads=1,
            num_kv_heads=1,
            head_dim=2,
            vocab_size=FAKE_VOCAB,
            eos_token_ids=(FAKE_END,),
            architecture="Fake",
        )
        self.lm_head = SimpleNamespace(finds_leaders=False)
        self.before: Callable[[], None] | None = None  # called at the head of a forward
        self.forwards = 0

    def forward(self, inputs, cache, keep_all: bool = False) -> torch.Tensor:
        self.forwards += 1
        if self.before is not None:
            self.before()
        kv = cache.kv[0, :, 0, 0].numpy()  # [num_blocks, block_size, 2]: the token, and a mark of all up to it
        table, size = cache.block_table.numpy(), kv.shape[1]
        slots, positions = inputs.slots.numpy(), inputs.positions.numpy()
        tokens = inputs.token_ids.numpy()
        tokens = np.where(tokens < 0, cache.last_tokens.numpy()[slots], tokens)
        blocks = table[slots, positions // size]
        assert (blocks >= 0).all(), "a token without a block"
        assert (tokens >= 0).all(), "a slot without a last token"
        kv[blocks, positions % size, 0] = tokens
        starts = list(range(inputs.num_decode + 1))
        if inputs.q_starts is not None:
            starts += [inputs.num_decode + n for n in inputs.q_starts.tolist()[1:]]
        marks = np.zeros(len(tokens), np.int64)
        for first, last in itertools.pairwise(starts):  # a decode row, or a run of prompt tokens
            end = int(positions[last - 1]) + 1
            before = end - (last - first)
            history = kv[table[slots[first], : -(-end // size)]].reshape(-1, 2)[:end]
            assert not np.isnan(history[:, 0]).any(), "a place of the KV cache that nobody wrote"
            right = np.cumsum(history[:, 0].astype(np.int64) * _tables()[0][:end]) % _KINDS
            assert (history[:before, 1] == right[:before]).all(), "a block that was computed after another text"
            marks[first:last] = right[before:]
        kv[blocks, positions % size, 1] = marks
        cache.kv[0, :, 1, 0].numpy()[blocks, positions % size] = -tokens[:, None]  # values, which nobody reads
        hidden = torch.from_numpy(marks).float()[:, None]
        return hidden if keep_all or inputs.sample_rows is None else hidden[inputs.sample_rows.long()]

    def logits(self, hidden: torch.Tensor, out: None = None, leaders: None = None) -> torch.Tensor:
        return _tables()[1][hidden[:, 0].long()]


def fake_engine(
    *,
    num_slots: int = 2,
    block_size: int = 4,
    num_blocks: int = 32,
    max_seq_len: int = 64,
    max_step_tokens: int = 512,
    prefix_caching: bool = True,
    seed: int = 0,
) -> BatchEngine:
    """Start an engine on `FakeModel`, its KV cache filled with NaN."""
    engine = BatchEngine.__new__(BatchEngine)
    model = FakeModel()
    engine.config, engine.dtype, engine.tokenizer = model.config, model.dtype, None
    engine.sizes = Sizes(num_slots, block_size, num_blocks, max_seq_len, max_step_tokens)
    engine._start(model, prefix_caching, False, seed)
    engine._runner.cache.kv.fill_(math.nan)
    return engine


def fake_answer(
    prompt: list[int],
    params: SamplingParams,
    seed: int,
    sample: int = 0,
    limit: int = 64,
    drawn: tuple[int, ...] = (),
) -> tuple[list[int], str]:
    """Compute what the fake model answers, without an engine: the tokens and the finish reason.

    `limit` is the length at which a sequence ends whatever its parameters say; a branch goes on from `drawn`.
    """
    sizes = Sizes(1, 1, 1 << 20, 1 << 20, 1 << 20)
    request = RequestMaker(FakeModel().config, None, sizes)(prompt, params)
    number(request, 0, 0)
    request.seed = seed
    state = torch.tensor([slot_words(request, sample)], dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    tokens = [*prompt, *drawn]
    most = min(limit, len(prompt) + (params.max_tokens or limit))
    while True:
        logits = _tables()[1][kind_of(np.array(tokens))][None].clone()
        place = torch.tensor([len(tokens)], dtype=torch.int32)
        token = int(ops.sample(logits, zero, place, state)[0])
        tokens.append(token)
        if token in request.end_ids:
            return tokens[len(prompt) :], "stop"
        if len(tokens) >= most:
            return tokens[len(prompt) :], "length"


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return token ids of the tiny model, the same for the same arguments."""
    return random.Random(1000 * length + seed).choices(range(4, 320), k=length)


def outcome(g):
    """Return all of an answer that must not depend on anything else."""
    return g.token_ids, g.text, g.finish_reason, g.stop_reason, g.logprobs, g.prompt_logprobs


def outcomes(answers):
    """Return that of each answer."""
    return [outcome(g) for g in answers]
