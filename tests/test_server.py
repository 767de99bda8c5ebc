"""The server over a socket, with the openai package as its client."""

from __future__ import annotations

import asyncio
import base64
import gc
import http.client
import json
import re
import signal
import socket
import threading
import time
from contextlib import contextmanager

import httpx
import openai
import pytest
import uvicorn
from tiny import tiny_model

from minivllm import BatchEngine, SamplingParams
from minivllm.aio import AsyncEngine
from minivllm.request import SamplingParams as Params
from minivllm.server.app import create_app
from minivllm.server.gate import is_loopback
from minivllm.server.protocol import ChatBody, CompletionBody
from minivllm.server.run import serve

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
ENDLESS = {"ignore_eos": True}


class Served:
    """A running server: its address, its engine, clients for it."""

    def __init__(self, port, engine):
        self.base = f"http://127.0.0.1:{port}"
        self.port = port
        self.aengine = engine
        self.engine = engine.engine

    def client(self, key="unused"):
        return openai.OpenAI(base_url=f"{self.base}/v1", api_key=key, max_retries=0, timeout=60)

    def post(self, path, body, **options):
        return httpx.post(self.base + path, json=body, timeout=60, **options)

    def until(self, holds, seconds=30.0):
        end = time.monotonic() + seconds
        while not holds(self.engine.stats):
            assert time.monotonic() < end, f"it did not come to that: {self.engine.stats}"
            time.sleep(0.01)


@contextmanager
def server(model, *, num_slots=4, **options):
    engine = AsyncEngine(BatchEngine(model, device="cpu", num_slots=num_slots))
    app = create_app(engine, ["tiny", str(model)], **options)
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=5, ws="none")
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield Served(listener.getsockname()[1], engine)
            if engine.alive:
                engine.engine.check_integrity()
        finally:
            running.should_exit = True
            thread.join()
    assert not engine.alive  # the server's end closes the engine


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(model):
    with server(model) as served:
        yield served


@pytest.fixture
def client(served):
    with served.client() as client:
        yield client


@pytest.fixture(scope="module")
def expect(model):
    """Answers of an engine of our own, to compare with."""
    with BatchEngine(model, device="cpu", num_slots=2) as engine:
        yield engine


# ---------------------------------------------------------------- answers


def test_a_completion_is_what_the_engine_says(client, expect):
    [g] = expect.generate("hello", SamplingParams(max_tokens=16))
    answer = client.completions.create(model="tiny", prompt="hello", max_tokens=16, temperature=0)
    assert answer.object == "text_completion" and answer.model == "tiny"
    assert answer.choices[0].text == g.text
    assert answer.choices[0].finish_reason == g.finish_reason
    assert answer.usage.prompt_tokens == len(g.prompt_token_ids)
    assert answer.usage.completion_tokens == len(g.token_ids)
    assert answer.usage.total_tokens == len(g.prompt_token_ids) + len(g.token_ids)


def test_a_chat_is_what_the_engine_says(client, expect):
    [g] = expect.chat(CHAT, SamplingParams(max_tokens=16))
    answer = client.chat.completions.create(model="tiny", messages=CHAT, max_completion_tokens=16, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == g.text
    assert answer.usage.prompt_tokens == len(g.prompt_token_ids)
    parts = [{"role": "user", "content": [{"type": "text", "text": CHAT[0]["content"]}]}]
    again = client.chat.completions.create(model="tiny", messages=parts, max_tokens=16, temperature=0)
    assert again.choices[0].message.content == g.text


def test_prompts_as_lists_ids_and_samples(client, expect):
    params = SamplingParams(max_tokens=9, n=2, temperature=0.9, seed=11, top_p=0.8)
    prompts = ["hello", "the quick brown"]
    expected = [s.text for g in expect.generate(prompts, params) for s in g.samples]
    how = {"model": "tiny", "max_tokens": 9, "n": 2, "temperature": 0.9, "seed": 11, "top_p": 0.8}
    answer = client.completions.create(prompt=prompts, **how)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert [c.text for c in answer.choices] == expected
    ids = [expect.tokenizer.encode(p) for p in prompts]
    assert [c.text for c in client.completions.create(prompt=ids, **how).choices] == expected
    assert [c.text for c in client.completions.create(prompt=ids[0], **how).choices] == expected[:2]
    pieces = ["", "", "", ""]
    for chunk in client.completions.create(prompt=prompts, stream=True, **how):
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert pieces == expected


def test_streams_join_to_the_text_and_count_tokens(client, expect):
    [g] = expect.chat(CHAT, SamplingParams(max_tokens=24, ignore_eos=True))
    options = {"model": "tiny", "messages": CHAT, "max_tokens": 24, "temperature": 0, "extra_body": ENDLESS}
    usage = {"include_usage": True}
    chunks = list(client.chat.completions.create(stream=True, stream_options=usage, **options))
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    *body, last = chunks
    assert "".join(c.choices[0].delta.content or "" for c in body) == g.text
    assert [c.choices[0].finish_reason for c in body if c.choices[0].finish_reason] == ["length"]
    assert last.choices == [] and last.usage.completion_tokens == 24
    assert all(c.usage is None for c in body)
    raw = httpx.post(
        f"{client.base_url}chat/completions",
        json={"messages": CHAT, "max_tokens": 2, "stream": True},
        timeout=60,
    )
    assert raw.headers["content-type"].startswith("text/event-stream")
    assert raw.text.endswith("data: [DONE]\n\n") and "usage" not in raw.text


def test_a_stream_comes_before_its_end(served, client, expect, monkeypatch):
    [g] = expect.chat(CHAT, SamplingParams(max_tokens=24, ignore_eos=True))
    launch, permits = served.engine._runner.launch, threading.Semaphore(6)

    def permitted(batch):
        assert permits.acquire(timeout=60)
        return launch(batch)

    with monkeypatch.context() as patch:
        patch.setattr(served.engine._runner, "launch", permitted)
        how = {"model": "tiny", "messages": CHAT, "max_tokens": 24, "temperature": 0, "extra_body": ENDLESS}
        stream = iter(client.chat.completions.create(stream=True, **how))
        text = ""
        while not text:  # six tokens were computed and no more can be
            text += next(stream).choices[0].delta.content or ""
        assert g.text.startswith(text) and text != g.text
        permits.release(100)
        assert text + "".join(c.choices[0].delta.content or "" for c in stream) == g.text


def test_stop_texts_and_stop_ids(client, expect):
    [g] = expect.generate("hello", SamplingParams(max_tokens=30, ignore_eos=True))
    text, ids = g.text, g.token_ids
    stop = next(text[i : i + 2] for i in range(4, len(text) - 2) if "\ufffd" not in text[i : i + 2])
    how = {"model": "tiny", "prompt": "hello", "max_tokens": 30, "temperature": 0}
    answer = client.completions.create(stop=[stop], extra_body=ENDLESS, **how)
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].stop_reason == stop
    streamed = client.completions.create(stop=stop, stream=True, extra_body=ENDLESS, **how)
    assert "".join(c.choices[0].text for c in streamed) == text[: text.index(stop)]
    body = {**ENDLESS, "stop_token_ids": [ids[5]], "min_tokens": 1}
    answer = client.completions.create(extra_body=body, **how)
    assert answer.choices[0].stop_reason == ids[5]
    assert answer.usage.completion_tokens == ids.index(ids[5]) + 1


def test_extra_fields_reach_the_engine(client, expect):
    extra = {"top_k": 5, "min_p": 0.02, "repetition_penalty": 1.3, "min_tokens": 3, "ignore_eos": True}
    own = {"temperature": 1.2, "seed": 5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    [g] = expect.generate("hello", SamplingParams(max_tokens=20, **extra, **own, logit_bias={40: 2.0}))
    answer = client.completions.create(
        model="tiny", prompt="hello", max_tokens=20, logit_bias={"40": 2}, extra_body=extra, **own
    )
    assert answer.choices[0].text == g.text


def test_every_field_of_the_engine_can_be_sent():
    names = set(Params.__dataclass_fields__) - {"logits_fn"}
    assert names <= set(CompletionBody.model_fields)
    assert names <= set(ChatBody.model_fields)


def test_how_long_an_answer_is_where_a_body_does_not_say(client, expect):
    how = {"model": "tiny", "temperature": 0, "extra_body": ENDLESS}
    assert client.completions.create(prompt="hello", **how).usage.completion_tokens == 16
    two = client.completions.create(prompt=[[5], [5] * 507], **how)  # room for 16, and for 5
    assert two.usage.completion_tokens == 16 + expect.sizes.max_seq_len - 507
    more = {**how, "extra_body": {**ENDLESS, "min_tokens": 20}}
    assert client.completions.create(prompt="hello", **more).usage.completion_tokens == 20
    chat = client.chat.completions.create(messages=CHAT, **how).usage
    assert chat.prompt_tokens + chat.completion_tokens == expect.sizes.max_seq_len


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(client, expect, stream):
    [g] = expect.generate("hello", SamplingParams(max_tokens=6, logprobs=2, ignore_eos=True))
    values = [entry[t].logprob for entry, t in zip(g.logprobs, g.token_ids, strict=True)]
    how = {"model": "tiny", "prompt": "hello", "max_tokens": 6, "temperature": 0, "extra_body": ENDLESS}
    answer = client.completions.create(logprobs=2, stream=stream, **how)
    parts = [c.choices[0].logprobs for c in answer] if stream else [answer.choices[0].logprobs]
    found = [x for p in parts if p is not None for x in p.token_logprobs]
    assert found == pytest.approx(values)
    assert all(len(top) >= 1 for p in parts if p is not None for top in p.top_logprobs)

    [g] = expect.chat(CHAT, SamplingParams(max_tokens=6, logprobs=3))
    how = {"model": "tiny", "messages": CHAT, "max_tokens": 6, "temperature": 0}
    answer = client.chat.completions.create(logprobs=True, top_logprobs=3, stream=stream, **how)
    parts = [c.choices[0].logprobs for c in answer] if stream else [answer.choices[0].logprobs]
    content = [entry for p in parts if p is not None for entry in p.content]
    assert [e.logprob for e in content] == pytest.approx(
        [entry[t].logprob for entry, t in zip(g.logprobs, g.token_ids, strict=True)]
    )
    assert all(len(e.top_logprobs) == 3 and e.top_logprobs[0].logprob >= e.logprob for e in content)
    shown = b"".join(bytes(e.bytes) for e, t in zip(content, g.token_ids, strict=True) if t != 1)
    assert shown.decode("utf-8", "replace") == g.text


def test_echo_scores_a_prompt(client, expect):
    [g] = expect.generate("the quick", SamplingParams(max_tokens=1, logprobs=1, prompt_logprobs=1))
    answer = client.completions.create(
        model="tiny", prompt="the quick", max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    found = answer.choices[0].logprobs.token_logprobs
    assert answer.choices[0].text == "the quick" + g.text
    assert found[0] is None and len(found) == len(g.prompt_token_ids) + 1
    ids = g.prompt_token_ids[1:]
    assert found[1:-1] == pytest.approx([entry[t].logprob for entry, t in zip(g.prompt_logprobs[1:], ids, strict=True)])


def test_64_clients_at_once(served, expect):
    prompts = [f"{i} one two three"[: 3 + i % 13] for i in range(64)]
    params = [SamplingParams(max_tokens=5 + i % 7, temperature=i % 2, seed=i) for i in range(64)]
    expected = [g.text for g in expect.generate(prompts, params)]

    async def ask(client, i):
        how = {
            "model": "tiny",
            "prompt": prompts[i],
            "max_tokens": params[i].max_tokens,
            "temperature": i % 2,
            "seed": i,
        }
        if i % 3:
            return (await client.completions.create(**how)).choices[0].text
        stream = await client.completions.create(stream=True, **how)
        return "".join([c.choices[0].text async for c in stream])

    async def main():
        url = f"{served.base}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0, timeout=100) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(64)))

    assert asyncio.run(main()) == expected
    assert served.engine.stats.running == 0


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [320]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "temperature": True}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 100000}, "n"),
        ({"prompt": "a", "logprobs": 99}, "logprobs"),
        ({"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "max_tokens": 10**6}, "max_tokens"),
        ({"prompt": "a", "stop_token_ids": [999]}, "stop_token_ids"),
        ({"prompt": "a", "stop": ""}, "stop"),
        ({"prompt": "a", "stop": ["x"] * 65}, "stop"),
        ({"prompt": "a", "temperature": 1e39}, "temperature"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": "a", "temprature": 1}, "temprature"),
        ({"prompt": "a", "seed": 2**70}, "seed"),
        ({"prompt": "one " * 3000}, "prompt"),
        ([1, 2], None),
    ],
)
def test_bad_bodies_are_400(served, body, param):
    answer = served.post("/v1/completions", body)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"max_tokens": 3}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user"}]}, "messages"),
    ],
)
def test_bad_chats_are_400(served, extra, param):
    answer = served.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1, **extra})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_nan_broken_json_and_other_kinds_of_body(served):
    url = f"{served.base}/v1/completions"
    kind = {"Content-Type": "application/json"}
    deep, huge = b'{"prompt": ' + b"[" * 100_000, b'{"prompt": "a", "seed": ' + b"9" * 9999 + b"}"
    for content in (b'{"prompt": "a", "temperature": NaN}', b'{"prompt": ', b"\xff\xfe", b"", deep, huge):
        answer = httpx.post(url, content=content, headers=kind)
        assert answer.status_code == 400 and answer.json()["error"]["message"]
    # Half of a surrogate pair, which UTF-8 cannot hold, in the prompt and in what an error repeats.
    half = {"prompt": "a\ud800", "echo": True, "max_tokens": 1}
    assert httpx.post(url, content=json.dumps(half), headers=kind).json()["choices"][0]["text"][:2] == "a\ud800"
    half["model"] = "\ud800"
    assert httpx.post(url, content=json.dumps(half), headers=kind).status_code == 404
    # As a page of another origin could send without asking first.
    text = httpx.post(url, content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    assert text.status_code == 400


def test_errors_of_the_openai_package(client):
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4'") as unknown:
        client.completions.create(model="gpt-4", prompt="a")
    assert unknown.value.code == "model_not_found" and unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.completions.create(model="tiny", prompt="a", top_p=3)
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt=[5] * 600)
    assert long.value.code == "context_length_exceeded"


def test_unknown_routes_and_methods(served):
    assert httpx.get(f"{served.base}/v1/nothing").json()["error"]["message"]
    assert httpx.get(f"{served.base}/v1/nothing").status_code == 404
    assert httpx.get(f"{served.base}/v1/completions").status_code == 405
    assert httpx.get(f"{served.base}/docs").status_code == 404


def test_the_root_leads_to_the_live_page(served):
    answer = httpx.get(f"{served.base}/", follow_redirects=True)
    assert answer.url.path == "/live" and "text/html" in answer.headers["content-type"]


def test_models_and_health(served, client):
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 512
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert httpx.get(f"{served.base}/health").json() == {"status": "ok"}
    assert "access-control-allow-origin" not in httpx.get(f"{served.base}/health").headers


def test_metrics_count(model):
    prompt = "the quick brown fox " * 9  # more than a block, so that the second is found in the cache
    with server(model) as served:
        for _ in range(2):
            assert served.post("/v1/completions", {"prompt": prompt, "max_tokens": 3, **ENDLESS}).is_success
        text = httpx.get(f"{served.base}/metrics").text
    labels = '{model_name="tiny"}'
    assert f"vllm:generation_tokens_total{labels} 6.0" in text
    length = len(served.engine.tokenizer.encode(prompt))
    assert f"vllm:prompt_tokens_total{labels} {2 * length}.0" in text
    assert f"vllm:prefix_cache_queries_total{labels} {2 * length}.0" in text
    assert f"vllm:prefix_cache_hits_total{labels} {(length - 1) // 16 * 16}.0" in text
    assert f"vllm:num_requests_running{labels} 0.0" in text
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny"} 2.0' in text
    assert f"vllm:time_to_first_token_seconds_count{labels} 2.0" in text


def test_an_error_half_way_is_told_and_its_details_are_logged(model, monkeypatch, caplog):
    secret = "no room at /home/someone/cache"
    ids = []
    with server(model) as served, served.client() as client:
        launch, steps = served.engine._runner.launch, iter(range(1000))

        def failing(batch):
            if next(steps) == 3:
                raise RuntimeError(secret)
            return launch(batch)

        with monkeypatch.context() as patch:
            patch.setattr(served.engine._runner, "launch", failing)
            with pytest.raises(openai.InternalServerError, match="see the server's log") as whole:
                client.completions.create(model="tiny", prompt="hello", extra_body=ENDLESS)
            steps = iter(range(1000))
            with pytest.raises(openai.APIError, match="see the server's log") as streamed:
                how = {"model": "tiny", "prompt": "hello", "extra_body": ENDLESS}
                ids.extend(chunk.id for chunk in client.completions.create(stream=True, **how))
        for error in (whole.value, streamed.value):
            assert error.code == "internal_error" and secret not in str(error)
            ids.append(re.search(r"cmpl-\w+", str(error))[0])
            assert f"{ids[-1]} failed: RuntimeError: {secret}" in caplog.text
        assert len(set(ids)) == 2, "the stream's error names the stream"
        assert client.completions.create(model="tiny", prompt="hello", max_tokens=2).choices


def test_a_fault_of_the_server_is_logged_and_not_told(model, monkeypatch, caplog):
    with server(model) as served:
        monkeypatch.setattr(served.engine.tokenizer, "encode", lambda text: 1 / 0)
        answer = served.post("/v1/completions", {"prompt": "hello", "max_tokens": 2})
    error = answer.json()["error"]
    assert answer.status_code == 500 and error["code"] == "internal_error" and "division" not in error["message"]
    found = re.search(r"req-[0-9a-f]+", error["message"])[0]
    assert f"{found} failed: ZeroDivisionError: division by zero" in caplog.text


# ---------------------------------------------------------------- coming and going


def test_a_client_that_leaves_frees_its_slot(model):
    with server(model, num_slots=1) as served, served.client() as client:
        endless = {"prompt": "hello", "max_tokens": 500, "ignore_eos": True}
        stream = client.completions.create(model="tiny", stream=True, extra_body=endless, prompt="hello")
        next(iter(stream))
        stream.close()
        served.until(lambda stats: stats.cancelled == 1 and stats.running == 0)

        # Without a stream, in a slot and in the queue: the connection is cut while the engine is held.
        connections = []
        with served.engine._lock:
            for _ in range(2):
                connection = http.client.HTTPConnection("127.0.0.1", served.port)
                body = json.dumps(endless)
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                connections.append(connection)
            served.until(lambda stats: stats.queued == 2)
        served.until(lambda stats: stats.running == 1)
        for connection in connections:
            connection.close()
        served.until(lambda stats: stats.cancelled + stats.length == 3 and stats.running == stats.queued == 0)
        assert served.engine.stats.cancelled >= 2
        assert served.post("/v1/completions", {"prompt": "hello", "max_tokens": 2}).is_success


def test_a_full_queue_is_429(model):
    with server(model, num_slots=1, max_queue=1) as served, served.client() as client:
        answers = []

        def ask():
            answers.append(served.post("/v1/completions", {"prompt": "hello", "max_tokens": 3}))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        with served.engine._lock:  # no step can be taken: what comes now waits
            for thread in threads:
                thread.start()
            served.until(lambda stats: stats.queued == 2)
            with pytest.raises(openai.RateLimitError, match="queue is full") as full:
                client.completions.create(model="tiny", prompt="hello", max_tokens=1)
        for thread in threads:
            thread.join()
        assert int(full.value.response.headers["retry-after"]) >= 1
        assert full.value.code == "queue_full"
        assert [a.status_code for a in answers] == [200, 200]
        # What could never fit is not told to come again.
        assert served.post("/v1/completions", {"prompt": ["a"] * 3}).status_code == 400
        assert "minivllm:requests_refused_total" in httpx.get(f"{served.base}/metrics").text


def test_the_key(model):
    with server(model, api_key="right") as served:
        with served.client("right") as client:
            assert client.completions.create(model="tiny", prompt="hello", max_tokens=1).choices
        with served.client("wrong") as client, pytest.raises(openai.AuthenticationError) as refused:
            client.completions.create(model="tiny", prompt="hello", max_tokens=1)
        assert refused.value.code == "invalid_api_key"
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
            assert httpx.get(served.base + path).status_code == 401
        for given in ("right", "Bearer", "Bearer rightly", "Bearer \xe9", "Digest right"):
            header = {"Authorization": given.encode("latin-1")}
            assert httpx.get(f"{served.base}/v1/models", headers=header).status_code == 401
        assert httpx.get(f"{served.base}/health").status_code == 200


def basic(pair):
    return b"Basic " + base64.b64encode(pair)


def test_the_key_as_the_password_of_basic(model):
    key = "r\xefght: a key"
    secret = key.encode()
    with server(model, api_key=key) as served:

        def status(given, path="/v1/models", **headers):
            return httpx.get(served.base + path, headers={"Authorization": given, **headers}).status_code

        right = basic(b"any:" + secret)
        for given in (right, basic(b":" + secret), basic(b"\xff\xfe:" + secret), right.replace(b"Basic", b"bASIC ")):
            assert status(given) == 200, given
        assert status(b"Bearer " + secret) == 200
        wrong = [b"any:", b"any", b":", secret, secret + b":any", b"any:" + secret[:-1], b"any:" + secret + b" "]
        wrong += [b"any:\xff\xfe", b"any:" + key.encode("latin-1"), b"\xff" * 9]
        malformed = [b"Basic", b"Basic =", b"Basic a", b"Basic !!!!", b"Basic \xe9\xe9", b"Basic any:" + secret]
        malformed += [right[:-1], right + b"!", right.replace(b"Basic", b"Bearer"), b"Basic " + secret]
        for given in [*map(basic, wrong), *malformed]:
            assert status(given) == status(given, "/live") == 401, given
        # What a browser sends of itself for another site's page.
        assert status(right, Origin="https://other.example") == 401
        assert status(b"Bearer " + secret, Origin="https://other.example") == 200


def test_browsers_are_asked_for_the_key_on_the_live_page_alone(model):
    with server(model, api_key="right") as served:
        for path in ("/", "/live", "/live/live.js", "/live/live.css", "/live/events", "/live/nothing"):
            refused = httpx.get(served.base + path)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == 'Basic realm="minivllm"', path
        for path in ("/lively", "/v1/models", "/metrics"):
            assert httpx.get(served.base + path).headers["www-authenticate"] == "Bearer", path


def test_long_bodies_are_413(model):
    with server(model, max_body_bytes=2000) as served:
        long = json.dumps({"prompt": "a" * 3000, "max_tokens": 1}).encode()
        kind = {"Content-Type": "application/json"}
        answer = httpx.post(f"{served.base}/v1/completions", content=long, headers=kind)
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_long"
        pieces = (long[i : i + 500] for i in range(0, len(long), 500))  # sent without a length
        answer = httpx.post(f"{served.base}/v1/completions", content=pieces, headers=kind)
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_long"
        assert served.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).is_success


def test_origins_and_host_names(model):
    origin = {"Origin": "https://page.example"}
    with server(model, cors_origins=["https://page.example"], local_only=True) as served:
        url = f"{served.base}/v1/models"
        assert httpx.get(url, headers=origin).headers["access-control-allow-origin"] == origin["Origin"]
        asked = {**origin, "Access-Control-Request-Method": "POST"}
        assert httpx.options(url, headers=asked).status_code == 200
        other = httpx.get(url, headers={"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers
        # What a page may send though it may not read the answer: refused before it is looked at.
        assert other.status_code == 403 and other.json()["error"]["code"] == "foreign_origin"
        assert httpx.get(url, headers={"Origin": "null"}).status_code == 403
        assert httpx.get(url, headers={"Origin": "http://localhost:3000"}).status_code == 200
        assert httpx.get(url, headers={"Host": "evil.example"}).status_code == 403
        for host in ("localhost", f"localhost:{served.port}", "[::1]:80", "127.0.0.2"):
            assert httpx.get(url, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.evil.example", False),
    ],
)
def test_loopback(host, loopback):
    assert is_loopback(host) is loopback


def test_answers_on_their_way_end_with_the_server(model):
    with server(model, num_slots=1) as served:
        found = []
        thread = threading.Thread(
            target=lambda: found.append(
                served.post("/v1/completions", {"prompt": "hello", "max_tokens": 500, **ENDLESS})
            )
        )
        thread.start()
        served.until(lambda stats: stats.running == 1)
        served.aengine.close()
        thread.join()
    assert found[0].status_code == 503
    assert found[0].json()["error"]["code"] == "cancelled"


def test_the_collector_leaves_alone_what_stays_as_long_as_the_server(model, monkeypatch):
    frozen, numbers = [gc.get_freeze_count()], (signal.SIGINT, signal.SIGTERM)
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: frozen.append(gc.get_freeze_count()))
    before = [signal.getsignal(number) for number in numbers]
    how = {"host": "127.0.0.1", "port": 0, "api_key": None, "max_queue": 1, "max_body_bytes": 1 << 20}
    try:
        serve(lambda: BatchEngine(model, device="cpu"), ["tiny"], cors_origins=[], verbose=False, **how)
    finally:
        gc.unfreeze()
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert frozen[1] - frozen[0] > 10_000
