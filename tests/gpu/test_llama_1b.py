"""The engine on a card with a randomly initialised Llama-3.2-1B: against transformers, and against itself."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest
import torch

from minivllm import BatchEngine, Generation, SamplingParams, ops
from minivllm.random_model import SHAPES

pytestmark = [pytest.mark.gpu, pytest.mark.time_limit(400)]

LIMIT = 4096


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    path = tmp_path_factory.mktemp("llama-1b")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPES["llama-3.2-1b"]))
    model.to(torch.bfloat16).save_pretrained(path)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return path


def reference_model(path: Path, dtype: torch.dtype):
    import transformers

    return transformers.LlamaForCausalLM.from_pretrained(path, dtype=dtype).to("cuda").eval()


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(128000) for _ in range(n)] for n in lengths]


def engine_of(path: Path, **options) -> BatchEngine:
    return BatchEngine(path, **{"device": "cuda", "max_seq_len": LIMIT, "num_blocks": 4096, **options})


def teacher_logits(model, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens], device="cuda")).logits[0].float()


def test_bfloat16_greedy_against_transformers(model_dir: Path) -> None:
    prompts = prompts_of([1, 17, 63, 64, 65, 129, 300, 1000])
    with engine_of(model_dir) as engine:
        answers = engine.generate(prompts, SamplingParams(max_tokens=32, ignore_eos=True))
        engine.check_integrity()
    model = reference_model(model_dir, torch.bfloat16)
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = teacher_logits(model, prompt + answer.token_ids)[len(prompt) - 1 : -1]
        top = logits.topk(2, dim=-1)
        rounding = 8 * 2.0**-8 * logits.abs().amax(-1)  # a few units in the last place of bfloat16 logits
        for i, token in enumerate(answer.token_ids):
            gap = float(top.values[i, 0] - logits[i, token])
            assert gap <= float(rounding[i]), f"prompt of {len(prompt)}, token {i}: {gap} below the likeliest"


def test_bfloat16_error_at_most_twice_that_of_transformers(model_dir: Path) -> None:
    prompts = prompts_of([257, 1023], seed=1)
    with engine_of(model_dir) as engine:
        answers = engine.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True))
    half = [teacher_logits(reference_model(model_dir, torch.bfloat16), p).log_softmax(-1) for p in prompts]
    exact = [teacher_logits(reference_model(model_dir, torch.float32), p).log_softmax(-1) for p in prompts]
    for prompt, answer, ours_half, ours_exact in zip(prompts, answers, half, exact, strict=True):
        assert answer.prompt_logprobs is not None
        found = torch.tensor([e[t].logprob for t, e in zip(prompt[1:], answer.prompt_logprobs[1:], strict=True)])
        index = torch.tensor(prompt[1:], device="cuda")[:, None]
        truth = ours_exact[:-1].gather(1, index)[:, 0].cpu()
        theirs = ours_half[:-1].gather(1, index)[:, 0].cpu()
        assert (found - truth).norm() <= 2 * (theirs - truth).norm()


def test_float32_greedy_equals_transformers(model_dir: Path) -> None:
    prompts = prompts_of([1, 16, 65, 200, 513], seed=2)
    with engine_of(model_dir, dtype="float32", num_blocks=512) as engine:
        answers = engine.generate(prompts, SamplingParams(max_tokens=48, ignore_eos=True))
    model = reference_model(model_dir, torch.float32)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert (
            teacher_logits(model, prompt + answer.token_ids)[len(prompt) - 1 : -1].argmax(-1).tolist()
            == answer.token_ids
        )


def requests(count: int, seed: int, longest: int = 700) -> tuple[list[list[int]], list[SamplingParams]]:
    """Random requests, greedy and drawn, a third of them beginning alike."""
    rng = random.Random(seed)
    head = [rng.randrange(128000) for _ in range(200)]
    prompts, params = [], []
    for i in range(count):
        own = [rng.randrange(128000) for _ in range(rng.randrange(1, longest))]
        prompts.append(head + own if i % 3 == 0 else own)
        params.append(
            SamplingParams(
                max_tokens=rng.randrange(1, 40),
                temperature=rng.choice([0.0, 0.7, 1.0]),
                top_p=rng.choice([1.0, 0.9]),
                top_k=rng.choice([0, 50]),
                presence_penalty=rng.choice([0.0, 0.5]),
                seed=i,
                ignore_eos=True,
                logprobs=2,
            )
        )
    return prompts, params


def essence(answers: list[Generation]) -> list[tuple[list[int], object]]:
    return [(a.token_ids, a.logprobs) for a in answers]


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> list[tuple[list[int], object]]:
    prompts, params = requests(200, seed=3)
    with engine_of(model_dir, prefix_caching=False) as engine:
        return essence([engine.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)])


def differing(a: list, b: list) -> list[int]:
    return [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]


@pytest.mark.parametrize(
    "options",
    [
        {"prefix_caching": False},
        {"prefix_caching": True},
        {"max_step_tokens": 64},
        {"max_step_tokens": 512, "prefix_caching": False},
        {"num_blocks": 160, "num_slots": 64},
        {"cuda_graphs": False},
    ],
    ids=["together", "cached", "chunks of 64", "chunks of 512", "preempted", "no graphs"],
)
def test_same_bits_alone_and_in_company(model_dir: Path, alone: list, options: dict) -> None:
    prompts, params = requests(200, seed=3)
    fill, fill_params = requests(56, seed=4)
    order = list(range(256))
    random.Random(5).shuffle(order)
    all_prompts, all_params = prompts + fill, params + fill_params
    with engine_of(model_dir, **options) as engine:
        answers = engine.generate([all_prompts[i] for i in order], [all_params[i] for i in order])
        engine.check_integrity()
        stats = engine.stats
        again = engine.generate(prompts[:40], params[:40])
    if "num_blocks" in options:
        assert stats.preemptions > 0
    back = dict(zip(order, essence(answers), strict=True))
    assert differing([back[i] for i in range(200)], alone) == []
    assert differing(essence(again), alone[:40]) == []


def test_the_check_sees_a_product_that_depends_on_the_batch(
    model_dir: Path, alone: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ops.Linear.add_to

    seen = []

    def split(self, residual, x, *sums):
        if x.shape[0] < 33:
            return whole(self, residual, x, *sums)
        seen.append(x.shape[0])
        half = x.shape[1] // 2
        parts = (torch.nn.functional.linear(x[:, c], self.weight[:, c]) for c in (slice(half), slice(half, None)))
        residual.copy_(residual.float() + sum(part.float() for part in parts))
        return None

    monkeypatch.setattr(ops.Linear, "add_to", split)
    prompts, params = requests(200, seed=3)
    with engine_of(model_dir) as engine:
        answers = engine.generate(prompts[:64], params[:64])
    assert seen, "the product was not asked"
    assert differing(essence(answers), alone[:64]) != []


def test_running_ahead_changes_nothing(model_dir: Path) -> None:
    def run(overlap: bool) -> list:
        with engine_of(model_dir, num_slots=16, num_blocks=200, max_step_tokens=300) as engine:
            engine._runner.overlap = overlap
            prompts, params = requests(60, seed=6, longest=200)
            out = essence(engine.generate(prompts, params))
            engine.check_integrity()
            return out

    assert differing(run(True), run(False)) == []


def test_an_end_token_is_the_last(model_dir: Path) -> None:
    with engine_of(model_dir, num_slots=8) as engine:
        [free] = engine.generate(prompts_of([50], 7), SamplingParams(max_tokens=30, ignore_eos=True))
        stop = free.token_ids[10]
        first = free.token_ids.index(stop)
        [cut] = engine.generate(prompts_of([50], 7), SamplingParams(max_tokens=30, stop_token_ids=(stop,)))
        assert cut.token_ids == free.token_ids[: first + 1]
        assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
        engine.check_integrity()
        assert len(engine.free_blocks) == 4096


def test_closing_gives_the_memory_back(model_dir: Path) -> None:
    prompts = prompts_of([20, 30], 8)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for how in ("close", "with", "del", "close", "del"):
        engine = engine_of(model_dir, num_slots=8, num_blocks=64)
        engine.generate(prompts, SamplingParams(max_tokens=4))
        if how == "close":
            engine.close()
        elif how == "with":
            with engine:
                pass
        del engine
        gc.collect()
        assert torch.cuda.memory_allocated() == before, how


def test_two_engines_side_by_side(model_dir: Path) -> None:
    prompts, params = requests(12, seed=9, longest=100)
    with (
        engine_of(model_dir, num_slots=8, num_blocks=128) as one,
        engine_of(model_dir, num_slots=4, num_blocks=128) as two,
    ):
        handles = [(one.submit(p, q), two.submit(p, q)) for p, q in zip(prompts, params, strict=True)]
        for a, b in handles:
            assert essence([a.result()]) == essence([b.result()])


def test_save_and_load(model_dir: Path, tmp_path: Path) -> None:
    prompts = prompts_of([150], 10)
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=1, ignore_eos=True, logprobs=1)
    with engine_of(model_dir, num_slots=4, num_blocks=64) as engine:
        handle = engine.submit(prompts[0], params)
        for _ in range(12):
            engine.step()
        handle.save(tmp_path / "r.safetensors")
        whole = handle.result()
        with engine_of(model_dir, num_slots=4, num_blocks=64, block_size=32) as other:
            assert essence([other.load(tmp_path / "r.safetensors").result()]) == essence([whole])
