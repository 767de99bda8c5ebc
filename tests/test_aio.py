"""AsyncEngine: the same answers, cancels, and a thread that outlives failing steps."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest
from tiny import tiny_model

from minivllm import BatchEngine, SamplingParams
from minivllm.aio import AsyncEngine
from minivllm.request import EngineClosedError, RequestError

PROMPTS = ["hello", "the quick brown", [5, 6, 7], "What is"]
SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(model):
    with BatchEngine(model, num_slots=3, device="cpu") as engine:
        yield engine


async def until(holds, seconds=20.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        await asyncio.sleep(0.005)


def test_the_answers_are_those_of_the_engine(engine):
    params = [SHORT, SamplingParams(max_tokens=20, temperature=1.0, seed=3, n=2), SHORT, SHORT]
    expected = engine.generate(PROMPTS, params)

    async def main():
        async with AsyncEngine(engine) as served:
            answers = await served.generate(PROMPTS, params)
            texts = {}
            async for delta in served.stream(PROMPTS, params):
                key = delta.index, delta.sample
                texts[key] = texts.get(key, "") + delta.text
            many = await asyncio.gather(*(served.generate(p, q) for p, q in zip(PROMPTS, params, strict=True)))
            engine.check_integrity()
            return answers, texts, many

    answers, texts, many = asyncio.run(main())
    assert [[s.token_ids for s in g.samples] for g in answers] == [[s.token_ids for s in g.samples] for g in expected]
    assert texts == {(g.index, s.sample): s.text for g in expected for s in g.samples}
    assert [g.text for [g] in many] == [g.text for g in expected]


def test_chat_and_errors(engine):
    messages = [{"role": "user", "content": "hi"}]
    expected = engine.chat(messages, SHORT)[0].text

    async def main():
        async with AsyncEngine(engine) as served:
            assert (await served.chat(messages, SHORT))[0].text == expected
            with pytest.raises(ValueError, match="is empty"):
                await served.generate(["fine", ""], SHORT)
            with pytest.raises(ValueError, match="on_error"):
                await served.generate("fine", on_error="ignore")
            answers = await served.generate(["hello", "", [9999]], SHORT, on_error="return")
            assert engine.stats.requests == 3  # a bad prompt of a list queued none of it
            return answers

    answers = asyncio.run(main())
    assert [g.index for g in answers] == [0, 1, 2]
    assert answers[0].error is None and "is empty" in answers[1].error and "9999" in answers[2].error


@pytest.mark.parametrize("how", ["break", "aclose", "task", "generate", "drop"])
def test_leaving_cancels(engine, how):
    async def read(served, seen):
        async for delta in served.stream("hello", ENDLESS):
            seen.append(delta)

    async def main():
        async with AsyncEngine(engine) as served:
            if how == "break":
                async for _ in served.stream("hello", ENDLESS):
                    break
            elif how == "aclose":
                handle = served.stream("hello", ENDLESS)
                await anext(handle)
                await handle.aclose()
                assert [d.finish_reason async for d in handle][-1] == "cancelled"
            elif how == "drop":
                await anext(served.stream("hello", ENDLESS))
            else:
                seen = []
                work = read(served, seen) if how == "task" else served.generate("hello", ENDLESS)
                task = asyncio.ensure_future(work)
                await until(lambda: engine.stats.generated_tokens > 0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            gc.collect()
            await until(lambda: engine.stats.cancelled == 1 and not served._watches)
            engine.check_integrity()
            assert engine.stats.running == engine.stats.queued == 0
            assert (await served.generate("hello", SHORT))[0].finish_reason == "length"

    asyncio.run(main())


def test_a_failing_step_ends_what_ran_and_nothing_else(engine, monkeypatch, caplog):
    launch = engine._runner.launch
    failures = iter([False, False, True])

    def failing(batch):
        if next(failures, False):
            raise RuntimeError("the card is on fire")
        return launch(batch)

    async def main():
        async with AsyncEngine(engine) as served:
            with monkeypatch.context() as patch, pytest.raises(RequestError, match="on fire") as caught:
                patch.setattr(engine._runner, "launch", failing)
                await served.generate("hello", SHORT)
            assert len(caught.value.generation.token_ids) == 2
            answer = await served.generate("hello", SHORT)
            engine.check_integrity()
            return answer

    assert asyncio.run(main())[0].finish_reason == "length"
    assert "on fire" in caplog.text


def test_a_step_that_cannot_begin_does_not_spin(engine, monkeypatch):
    def admit():
        raise RuntimeError("no admission")

    async def main():
        async with AsyncEngine(engine) as served:
            with monkeypatch.context() as patch:
                patch.setattr(engine._scheduler, "admit", admit)
                with pytest.raises(RequestError, match="no admission"):
                    await served.generate("hello", SHORT)
            return await served.generate("hello", SHORT)

    assert asyncio.run(main())[0].error is None


def test_it_sleeps_when_idle_and_ends_with_its_requests_cancelled(engine):
    async def main():
        served = AsyncEngine(engine)
        await served.generate("hello", SHORT)
        steps = engine.stats.steps
        await asyncio.sleep(0.2)
        assert engine.stats.steps == steps
        task = asyncio.ensure_future(served.generate("hello", ENDLESS))
        await until(lambda: engine.stats.running == 1)
        await asyncio.to_thread(served.close)
        served.close()
        assert (await task)[0].finish_reason == "cancelled"
        assert not served.alive and not served._thread.is_alive()
        with pytest.raises(EngineClosedError):
            served.submit("hello")

    asyncio.run(main())


def test_other_threads_may_use_the_engine_beside(engine):
    expected = [g.text for g in engine.generate(PROMPTS, SHORT)]
    found = []

    async def main():
        async with AsyncEngine(engine) as served:
            thread = threading.Thread(target=lambda: found.extend(engine.generate(PROMPTS, SHORT)))
            thread.start()
            answers = await served.generate(PROMPTS, SHORT)
            await asyncio.to_thread(thread.join)
            return answers

    answers = asyncio.run(main())
    assert [g.text for g in answers] == [g.text for g in found] == expected


def test_on_end_hears_of_every_request(engine):
    heard = []

    async def main():
        async with AsyncEngine(engine) as served:
            served.on_end = heard.append
            await served.generate(PROMPTS, SHORT)
            async for _ in served.stream("hello", ENDLESS):
                break
            await until(lambda: len(heard) == len(PROMPTS) + 1)

    asyncio.run(main())
    assert sorted(g.finish_reason for g in heard) == ["cancelled"] + ["length"] * len(PROMPTS)
