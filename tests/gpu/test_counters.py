"""What a captured step leaves for the next one of the same rows, and the steps that the host sends nothing for."""

from __future__ import annotations

import pytest
import torch
from engines import greedy, outcomes, prompt, tiny_engine
from rows import CUDA
from sampling_rows import Row, int32, make_state

from minivllm import SamplingParams, ops
from minivllm.runner import Runner

pytestmark = pytest.mark.gpu

TURNS = 4


def counters_of(rows: int, width: int) -> ops.StepCounters:
    host = torch.full((TURNS, width), -7, dtype=torch.int32).pin_memory()
    turns = int32([i % TURNS for i in range(rows)], CUDA)
    ids = torch.full((rows,), -1, dtype=torch.int32, device=CUDA)
    return ops.StepCounters(ids, int32(range(100, 100 + rows), CUDA), turns, host)


@pytest.mark.parametrize("vocab", [7, 32003, 128256])
@pytest.mark.parametrize("rows", [1, 3, 130, 1100])
@pytest.mark.parametrize("settled", [False, True])
def test_rows_count_on_and_the_host_learns_of_tokens(rows: int, vocab: int, settled: bool) -> None:
    torch.manual_seed(rows)
    logits = torch.randn(rows, vocab, device=CUDA)
    kinds = [Row(temperature=0), Row(), Row(top_k=5), Row(top_p=0.7, min_p=0.01)]
    state = make_state([kinds[i % 4] for i in range(rows)], CUDA)
    slots = torch.randperm(rows, device=CUDA).int()
    slots[5::7] = -1
    lens = int32([3 * i for i in range(rows)], CUDA)
    workspace = ops.sample_workspace(rows, vocab, CUDA)
    expected = ops.sample(logits, slots, lens, state.clone(), workspace=workspace)
    counters, grown = counters_of(rows, rows + 3), lens.clone()
    found = ops.sample(logits, slots, grown, state, workspace=workspace, settled=settled, counters=counters)
    torch.cuda.synchronize()
    drawn = slots >= 0
    assert torch.equal(found[drawn], expected[drawn])
    assert torch.equal(grown, lens + drawn)
    assert torch.equal(counters.positions, torch.arange(100, 100 + rows, device=CUDA) + drawn)
    assert torch.equal(counters.token_ids, torch.where(drawn, expected, -1))
    before = torch.arange(rows, device=CUDA) % TURNS
    assert torch.equal(counters.turns, torch.where(drawn, (before + 1) % TURNS, before))
    told = torch.full((TURNS, rows + 3), -7, dtype=torch.int32)
    for row in drawn.nonzero().flatten().tolist():
        told[row % TURNS, row] = expected[row]
    assert torch.equal(counters.host_tokens, told)


def test_rows_with_leaders_count_on(on_hopper: None) -> None:
    linear = ops.Linear(torch.randn(4096, 128, device=CUDA).bfloat16())
    x = torch.randn(70, 128, device=CUDA).bfloat16()
    state = make_state([Row(temperature=0)] * 70, CUDA)
    state[:, ops.FLAGS] = ops.LEADER_SUFFICES
    slots, lens = int32(range(70), CUDA), int32(range(70), CUDA)
    slots[69] = -1
    leaders = ops.empty_leaders(70, 4096, CUDA)
    logits = linear.logits(x, ops.Leaders(leaders, slots, state))
    counters, workspace = counters_of(70, 70), ops.sample_workspace(70, 4096, CUDA)
    for turn in range(1, 6):
        tokens = ops.sample(
            logits, slots, lens, state, workspace=workspace, leaders=leaders, settled=True, counters=counters
        )
        torch.cuda.synchronize()
        assert torch.equal(tokens[:69], ops.argmax(linear(x, out_dtype=torch.float32))[:69])
        assert lens.tolist() == [*range(turn, 69 + turn), 69]
    assert (counters.host_tokens[:, :69] == tokens[:69].cpu()).all()


def test_refusals() -> None:
    logits, slots = torch.zeros(3, 9, device=CUDA), int32([0, 1, 2], CUDA)
    state = make_state([Row()] * 3, CUDA)
    workspace = ops.sample_workspace(3, 9, CUDA)
    good = counters_of(3, 3)
    for bad in (
        good._replace(positions=good.positions[:2]),
        good._replace(token_ids=good.token_ids[:2]),
        good._replace(turns=good.turns.long()),
        good._replace(turns=good.positions),
        good._replace(turns=good.turns.cpu()),
        good._replace(host_tokens=torch.zeros(TURNS, 3, dtype=torch.int32)),
        good._replace(host_tokens=good.host_tokens[:, :2]),
        good._replace(host_tokens=good.host_tokens[:0]),
        good._replace(host_tokens=good.host_tokens.to(CUDA)),
    ):
        with pytest.raises(ValueError, match="turns"):
            ops.sample(logits, slots, slots.clone(), state, workspace=workspace, counters=bad)
    cpu = [t.cpu() for t in (logits, slots, slots, state)]
    with pytest.raises(ValueError, match="counters"):
        ops.sample(*cpu, counters=good)


def watch(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """Return where the rows of each step are noted, and of each that the host sends words for."""
    launched, sent = [], []
    launch, send = Runner._launch, Runner._send

    def watched_launch(self: Runner, batch) -> object:
        launched.append(batch.num_rows)
        return launch(self, batch)

    def watched_send(self: Runner, batch, graph) -> object:
        sent.append(batch.num_rows)
        return send(self, batch, graph)

    monkeypatch.setattr(Runner, "_launch", watched_launch)
    monkeypatch.setattr(Runner, "_send", watched_send)
    return launched, sent


def test_a_step_like_the_one_before_sends_nothing(path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched, sent = watch(monkeypatch)
    with tiny_engine(path, "cuda", block_size=16, cuda_graphs=True) as engine:
        engine.generate([prompt(5), prompt(5)], greedy(100))
    # The prompts' step, the first of two rows, one for each further block.
    assert len(launched) >= 100 and 3 <= len(sent) <= 12, (launched, sent)


def test_answers_are_those_of_steps_without_graphs(path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that come and go, change places, draw in all ways, and ask for log probabilities."""
    params = [
        SamplingParams(max_tokens=3 + 7 * (i % 9), temperature=0.9 * (i % 2), seed=i, ignore_eos=True, **more)
        for i, more in enumerate([{}, {"top_k": 4}, {"presence_penalty": 0.5}, {"logprobs": 2}, {}, {"top_p": 0.8}] * 5)
    ]
    prompts = [prompt(1 + 5 * i % 40) for i in range(len(params))]
    with tiny_engine(path, "cuda", num_slots=6) as engine:
        want = outcomes(engine.generate(prompts, params))
    launched, sent = watch(monkeypatch)
    with tiny_engine(path, "cuda", num_slots=6, cuda_graphs=True) as engine:
        assert outcomes(engine.generate(prompts, params)) == want
        assert len(sent) < len(launched), "no step followed by itself"
        assert outcomes(engine.generate(prompts[::-1], params[::-1])) == want[::-1]
        engine.check_integrity()


def test_tokens_of_a_step_outlast_the_next_one(path) -> None:
    """Steps that follow each other tell the host their tokens in different places."""
    with tiny_engine(path, "cuda", cuda_graphs=True) as engine:
        places = engine._runner._results.fill_(-7)
        (answer,) = engine.generate([prompt(5)], greedy(40))
        found = places[:, 0].tolist()
        assert places.is_pinned() and len(found) >= 3
        last = answer.token_ids[-len(found) :]
        assert found in [last[i:] + last[:i] for i in range(len(found))]
