"""The walk through the layers whose norms and rope are parts of the products, with a whole small model."""

from __future__ import annotations

import math

import pytest
import torch
from rows import BLOCK, CUDA, DIM, EPS, assert_rows_near, near_one, random, same_bits
from torch import Tensor

from minivllm import fused, loader, ops
from minivllm.config import ModelConfig
from minivllm.model import Cache, Inputs, Model
from minivllm.rope import RopeConfig

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_hopper")]


def config_of(**other) -> ModelConfig:
    return ModelConfig(
        **{
            "architecture": "LlamaForCausalLM",
            "vocab_size": 512,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_layers": 2,
            "num_q_heads": 32,
            "num_kv_heads": 8,
            "head_dim": DIM,
            "rms_norm_eps": EPS,
            "rope": RopeConfig(),
            "max_position_embeddings": 4096,
            "dtype": torch.bfloat16,
            **other,
        }
    )


def weights_of(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Draw the same numbers for any dtype."""
    torch.manual_seed(1)
    weights = {}
    for name, shape in loader.weight_shapes(config).items():
        if len(shape) == 2:
            weights[name] = random(*shape, scale=1.0 if name == "embed" else shape[1] ** -0.5)
        else:
            weights[name] = near_one(*shape) if "norm" in name else random(*shape, scale=0.1)
    return {name: weight.to(dtype) for name, weight in weights.items()}


def model_of(dtype: torch.dtype = torch.bfloat16, exact: bool = True, **other) -> Model:
    config = config_of(**other)
    return Model(config, weights_of(config, dtype), 4096, exact=exact)


class Walk:
    """Feeds sequences to a model, each in its own slot, and keeps its cache."""

    def __init__(self, model: Model, num_slots: int, max_len: int) -> None:
        config, self.model = model.config, model
        blocks = -(-max_len // BLOCK)
        shape = (config.num_layers, num_slots * blocks, 2, config.num_kv_heads, BLOCK, DIM)
        table = torch.arange(num_slots * blocks, device=CUDA, dtype=torch.int32).flip(0).view(num_slots, blocks)
        workspace = ops.attention_workspace(512, max_len, config.num_q_heads, DIM, CUDA)
        last = torch.zeros(num_slots, device=CUDA, dtype=torch.int32)
        self.cache = Cache(torch.full(shape, math.nan, device=CUDA, dtype=model.dtype), table, last, workspace)
        self.lens = [0] * num_slots

    def __call__(self, runs: dict[int, list[int]], decode: dict[int, int] | None = None, keep_all: bool = False):
        """Go on with one token of some slots, and then with runs of others; logits of all rows or of the last."""
        return self.model.logits(self.model.forward(self.inputs(runs, decode or {}), self.cache, keep_all))

    def inputs(self, runs: dict[int, list[int]], decode: dict[int, int]) -> Inputs:
        slots, positions, ids = [], [], []
        for slot, tokens in [*((s, [t]) for s, t in decode.items()), *runs.items()]:
            ids += tokens
            slots += [slot] * len(tokens)
            positions += range(self.lens[slot], self.lens[slot] + len(tokens))
            self.lens[slot] += len(tokens)
        order = [*decode, *runs]
        starts = [len(decode)]
        for tokens in runs.values():
            starts.append(starts[-1] + len(tokens))

        def ints(values) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=CUDA)

        inputs = Inputs(
            num_decode=len(decode),
            token_ids=ints(ids),
            positions=ints(positions),
            slots=ints(slots),
            sample_lens=ints([self.lens[s] for s in order]),
            sample_slots=ints(order),
            sample_rows=ints([*range(len(decode)), *(end - 1 for end in starts[1:])]) if runs else None,
            max_seq_len=max(self.lens),
        )
        if runs:
            inputs.seq_slots, inputs.seq_lens = ints(list(runs)), ints([self.lens[s] for s in runs])
            inputs.q_starts = ints([s - len(decode) for s in starts])
            inputs.max_q_len = max(map(len, runs.values()))
        return inputs


def tokens_of(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 512, (count,), generator=generator).tolist()


def steps(model: Model) -> list[Tensor]:
    """A prefill of several prompts, a mixed step, decodes of few and of many rows."""
    walk = Walk(model, 200, 512)
    found = [walk({0: tokens_of(300, 0), 1: tokens_of(5, 1), 2: tokens_of(70, 2)}, keep_all=True)]
    found.append(walk({3: tokens_of(33, 3), 4: tokens_of(129, 4)}, {0: 7, 2: 9}))
    found.append(walk({}, {0: 11, 1: 12, 2: 13, 3: 14}))
    found.append(walk({slot: tokens_of(3, slot) for slot in range(5, 200)}))
    found.append(walk({}, {slot: slot for slot in range(200)}))
    found.append(walk({}, {slot: slot for slot in range(64)}))
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"qkv_bias": True, "o_bias": True}, {"vocab_size": 9001}, {"vocab_size": 9000}],
    ids=["plain", "biases", "head for every card", "head in one chain"],
)
def test_a_model_is_fused_and_near(options: dict) -> None:
    model = model_of(**options)
    assert model.fused
    mine = steps(model)
    model.fused = False
    plain = steps(model)
    exact = model_of(torch.float32, **options)
    assert not exact.fused
    for i, (found, other, truth) in enumerate(zip(mine, plain, steps(exact), strict=True)):
        assert found.isfinite().all(), i
        assert not torch.equal(found, other), i  # they are two ways
        assert_rows_near(found, truth, other, times=3)
        assert (found.float() - truth).norm() <= 2 * (other.float() - truth).norm(), i


def test_a_sequence_has_the_same_bits_in_pieces() -> None:
    model = model_of()
    tokens = tokens_of(1200, 5)
    whole = Walk(model, 1, 1280)({0: tokens}, keep_all=True)
    for pieces in ([1, 2, 61, 64, 65, 100, 256, 257, 394], [700, 500], [256] * 4 + [176], [64] * 18 + [48]):
        walk, at = Walk(model, 1, 1280), 0
        for size in pieces:
            found = walk({0: tokens[at : at + size]}, keep_all=True)
            assert same_bits(found, whole[at : at + size]), (pieces, at)
            at += size
        assert at == len(tokens)


def test_a_step_in_which_nobody_draws() -> None:
    model, tokens = model_of(), tokens_of(150, 8)
    drawn, silent = Walk(model, 1, 256), Walk(model, 1, 256)
    drawn({0: tokens})
    inputs = silent.inputs({0: tokens}, {})
    inputs.sample_rows = inputs.sample_slots = inputs.sample_lens = torch.empty(0, dtype=torch.int32, device=CUDA)
    assert model.logits(model.forward(inputs, silent.cache)).shape == (0, 512)
    assert same_bits(silent.cache.kv, drawn.cache.kv)
    assert silent.cache.kv.isfinite().any()


def test_which_models_are_fused() -> None:
    assert not model_of(torch.float16).fused
    assert not model_of(qk_norm=True).fused
    assert not model_of(head_dim=128, num_q_heads=16, num_kv_heads=4).fused
    assert model_of(hidden_size=576, intermediate_size=1536, num_q_heads=9, num_kv_heads=3).fused
    assert model_of(vocab_size=1000).fused
    assert model_of(vocab_size=1001).fused
    assert not model_of(hidden_size=72, intermediate_size=128, num_q_heads=2, num_kv_heads=1).fused


def test_cublas_has_its_rows_where_bits_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    whole = fused.hidden_states

    def watched(model: Model, inputs: Inputs, cache: Cache, keep_all: bool) -> ops.Weighed:
        seen.append(len(inputs.token_ids))
        return whole(model, inputs, cache, keep_all)

    monkeypatch.setattr(fused, "hidden_states", watched)
    for exact, expected in ((False, [1024]), (True, [1024, 1025])):
        model = model_of(exact=exact)
        assert model.fused
        seen.clear()
        for count in (1024, 1025):
            Walk(model, 1, 1280)({0: tokens_of(count, 6)})
        assert seen == expected
