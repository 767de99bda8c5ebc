"""Bad input, damaged files and calls in the wrong order: one clear error, and nobody else is hurt."""

from __future__ import annotations

import copy
import json
import pickle
import struct
import threading

import numpy as np
import pytest
import torch
from engines import assert_empty, fake_engine, greedy, tiny_engine
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import save_tokenizer, tiny_model

from minivllm.calls import DeltaStream
from minivllm.chat_template import ChatTemplate, read_templates
from minivllm.config import ModelConfig, read_json
from minivllm.gguf_header import read_gguf_header
from minivllm.loader import load_weights, resolve_model
from minivllm.request import MAX_SAMPLES, MAX_STOPS, SamplingParams
from minivllm.safetensors_file import read_header


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("hardening"))


def one_sentence(error: pytest.ExceptionInfo, longest: int = 250) -> str:
    text = str(error.value)
    assert text
    assert "\n" not in text
    assert len(text) <= longest
    return text


# -------------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "x" * 100_000),
        ("temperature", -(10**5000)),  # of more digits than Python prints
        ("max_tokens", -(10**400)),
        ("seed", 10**5000),
        ("stop", [1] * 100_000),
        ("stop", ["a"] * (MAX_STOPS + 1)),
        ("stop_token_ids", ["a"] * 100_000),
        ("logit_bias", [1] * 100_000),
        ("logit_bias", {10**5000: "a"}),
        ("ignore_eos", torch.zeros(5, 5)),
        ("logits_fn", "x" * 100_000),
    ],
    ids=range(11),
)
def test_an_error_shows_the_beginning_of_a_value(name, value):
    with pytest.raises((TypeError, ValueError)) as error:
        SamplingParams(**{name: value})
    assert one_sentence(error).startswith(name)


@pytest.mark.parametrize("bias", [[1], "abc", {"x": 1}, {"1.5": 1}, {None: 1}, 5])
def test_plain_data_with_a_bad_bias_names_it(bias):
    with pytest.raises((TypeError, ValueError)) as error:
        SamplingParams.from_dict({"logit_bias": bias})
    assert one_sentence(error).startswith("logit_bias")


@pytest.mark.parametrize("seed", [None, "x", 1.5, True, []])
def test_a_seed_that_is_none_is_refused_before_anything_is_read(seed):
    with pytest.raises(TypeError, match="seed must be an int"):
        tiny_engine("/nowhere", seed=seed)


def test_sizes_and_seeds_of_numpy_are_ints(path):
    sizes = {"num_slots": np.int64(2), "block_size": np.int32(4), "num_blocks": np.int64(20)}
    with tiny_engine(path, seed=np.int64(5), **sizes) as one, tiny_engine(path, seed=5) as other:
        hot = greedy(6, temperature=1.0)
        assert one.generate([1, 2], hot)[0].token_ids == other.generate([1, 2], hot)[0].token_ids
        handle = one.submit([1, 2], greedy(3))
        assert len(handle.fork(np.int64(2))) == 2


@pytest.mark.parametrize("name", ["num_slots", "block_size", "num_blocks", "max_step_tokens", "kv_cache_bytes"])
@pytest.mark.parametrize("value", [2**31 - 1, 2**31, 2**63, 10**400], ids=range(4))
def test_a_size_beyond_the_machine_is_named(path, name, value):
    if name == "kv_cache_bytes":
        value *= 2**20
    with pytest.raises(ValueError, match=name) as error:
        tiny_engine(path, **{"num_blocks": None, "block_size": 4, name: value})
    one_sentence(error)


@pytest.mark.parametrize("device", [object(), 1.5, []])
def test_a_device_of_another_type_is_refused_in_one_sentence(path, device):
    with pytest.raises(ValueError, match="device must be") as error:
        tiny_engine(path, device)
    one_sentence(error)


def test_what_holds_no_prompts_or_parameters_is_refused():
    with fake_engine() as engine:
        for prompts in (np.array(5), torch.tensor(5)):
            with pytest.raises(TypeError, match="prompts must be"):
                engine.generate(prompts)
        for params in (5, {SamplingParams()}, iter([SamplingParams()])):
            with pytest.raises(TypeError, match="params must be"):
                engine.generate([[1]], params)
        with pytest.raises(ValueError, match="k must be"):
            engine.submit([1, 2]).fork(MAX_SAMPLES + 1)


# -------------------------------------------------------------------- saved requests


def saved(engine, tmp_path, **params):
    """Save a request after a few tokens; return its tensors, its metadata and its state."""
    handle = engine.submit([1, 2, 3, 4, 5], greedy(12, **params))
    for _ in range(3):
        engine.step()
    handle.save(tmp_path / "good.safetensors")
    handle.result()
    with safe_open(tmp_path / "good.safetensors", framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors, metadata, json.loads(metadata["request"])


DAMAGES = [
    {"sample": 2**31},  # once, every request of the step ended with it
    {"sample": -1},
    {"sample": 1.5},
    {"sample": float("inf")},
    {"seed": 2**64},
    {"seed": float("inf")},
    {"seed": "x"},
    {"prompt": 5},
    {"prompt_tokens": 0},
    {"prompt_tokens": 10**30},
    {"logprobs": None},
    {"prompt_logprobs": None},
    {"prompt_logprobs": []},
    {"logprobs": [[["a", 0.0, 1, "x"]]] * 3},
    {"prompt_logprobs": [[[1, "x", 1, "x"]]] * 5},
    {"params": {"n": 3}},
    {"params": {"logit_bias": [1]}},
    {"params": None},
]


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_a_damaged_request_is_refused_and_hurts_no_other(path, tmp_path, damage):
    with tiny_engine(path, poison=False) as engine:
        tensors, metadata, state = saved(engine, tmp_path, logprobs=1, prompt_logprobs=1)
        file = tmp_path / "bad.safetensors"
        save_file(tensors, file, metadata={**metadata, "request": json.dumps({**state, **damage})})
        other = engine.submit([7, 8], greedy(6))
        with pytest.raises(ValueError, match=file.name):
            engine.load(file)
        assert len(other.result().token_ids) == 6
        assert_empty(engine)


@pytest.mark.parametrize("text", ["{", "[]", "null", "[" * 100_000])
def test_a_request_that_is_no_json_object_is_refused(path, tmp_path, text):
    with tiny_engine(path, poison=False) as engine:
        tensors, metadata, _ = saved(engine, tmp_path)
        save_file(tensors, tmp_path / "bad.safetensors", metadata={**metadata, "request": text})
        with pytest.raises(ValueError, match=r"bad\.safetensors"):
            engine.load(tmp_path / "bad.safetensors")
        tensors["kv"][..., 0] = float("nan")
        save_file(tensors, tmp_path / "bad.safetensors", metadata=metadata)
        with pytest.raises(ValueError, match="NaN"):
            engine.load(tmp_path / "bad.safetensors")


def test_where_a_request_cannot_be_read_or_written_the_path_is_named(tmp_path):
    with fake_engine() as engine:
        for place in (tmp_path, "/dev/null"):
            with pytest.raises(ValueError, match="is not a file"):
                engine.load(place)
        handle = engine.submit([1, 2])
        for place in (tmp_path, tmp_path / "no" / "where"):
            with pytest.raises(FileNotFoundError, match="cannot be written"):
                handle.save(place)


# -------------------------------------------------------------------- the order of calls


def test_a_stream_is_closed_beside_the_thread_that_reads_it(path):
    with tiny_engine(path, poison=False) as engine:
        inside, go_on = threading.Event(), threading.Event()

        def wait(tokens, logits):
            inside.set()
            go_on.wait(30)

        stream = engine.stream([[1, 2]], greedy(40, logits_fn=wait))
        read = []
        reader = threading.Thread(target=lambda: read.extend(stream))
        reader.start()
        assert inside.wait(30)
        closer = threading.Thread(target=stream.close)
        closer.start()
        go_on.set()
        closer.join(30)
        reader.join(30)
        assert not reader.is_alive()
        assert not closer.is_alive()
        assert read[-1].finish_reason == "cancelled"
        assert_empty(engine)


def test_a_logits_fn_may_close_the_stream_it_writes_for(path):
    with tiny_engine(path, poison=False) as engine:
        streams: list[DeltaStream] = []
        streams.append(engine.stream([[1, 2]], greedy(40, logits_fn=lambda tokens, logits: streams[0].close())))
        deltas = list(streams[0])
        assert deltas[-1].finish_reason == "cancelled"
        assert_empty(engine)


def test_an_engine_cannot_be_copied():
    with fake_engine() as engine:
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied"):
                make(engine)
        with pytest.raises(TypeError, match="cannot be copied"):
            pickle.dumps(engine.submit([1]))


def test_a_repair_that_fails_is_reported_and_made_up_for(monkeypatch):
    with fake_engine() as engine:
        handle, other = engine.submit([1, 2], greedy(4)), engine.submit([3], greedy(4))

        def broken(batch=None):
            if batch is not None:
                engine._cancelled.append(handle._request)  # as another thread may, which does not wait
            raise OSError("the device is gone")

        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, "drain", broken)
            patch.setattr(engine._runner, "launch", broken)
            for _ in range(2):
                with pytest.raises(OSError, match="the device is gone"):  # not a RecursionError
                    engine.step()
        assert len(other.result().token_ids) == 4
        assert handle.result().finish_reason == "cancelled"
        assert_empty(engine)


# -------------------------------------------------------------------- the files of a model


def config_of(path, **changed):
    return {**json.loads((path / "config.json").read_text()), **changed}


@pytest.mark.parametrize(
    "changed",
    [
        {"architectures": 5},
        {"num_hidden_layers": 10**30},
        {"max_position_embeddings": 2**63},
        {"vocab_size": 2**31},
    ],
    ids=str,
)
def test_a_config_that_cannot_be_is_refused(path, changed):
    with pytest.raises(ValueError, match=r"config\.json"):
        ModelConfig.from_dict(config_of(path, **changed))


def test_a_length_stretched_beyond_all_bounds_ends_at_an_int32(path):
    for kind, more in (("linear", {}), ("yarn", {"original_max_position_embeddings": 512})):
        rope = {"rope_type": kind, "factor": 1e308, "rope_theta": 1e4, **more}
        assert ModelConfig.from_dict(config_of(path, rope_parameters=rope)).max_seq_len == 2**31 - 1


def test_layers_that_no_file_could_hold_are_refused_at_once(path):
    config = ModelConfig.from_dict(config_of(path, num_hidden_layers=2**31 - 1))
    with pytest.raises(ValueError, match="num_hidden_layers"):
        load_weights(path, config)


def test_json_of_endless_depth_is_refused(tmp_path):
    deep = b"[" * 100_000
    (tmp_path / "config.json").write_bytes(deep)
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        read_json(tmp_path / "config.json")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(deep)) + deep)
    with pytest.raises(ValueError, match="damaged header"):
        read_header(tmp_path / "model.safetensors")


def test_a_name_that_is_too_long_is_no_model():
    with pytest.raises(FileNotFoundError, match="there is no model") as error:
        resolve_model("a" * 5000)
    one_sentence(error)


def test_a_directory_may_be_called_gguf(tmp_path):
    directory = tiny_model(tmp_path / "tiny.gguf")
    with tiny_engine(directory, poison=False) as engine:
        assert len(engine.generate("a", greedy(2))[0].token_ids) == 2


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/more.jinja"])
def test_a_template_that_is_no_text_names_its_file(tmp_path, name):
    save_tokenizer(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=name.rpartition("/")[2]):
        read_templates(tmp_path, {})


def test_a_list_of_templates_without_names_is_refused(tmp_path):
    with pytest.raises(ValueError, match="name and a template"):
        read_templates(tmp_path, {"chat_template": [{"template": "x"}]})


@pytest.mark.parametrize(
    "source",
    ["{% for i in range(10**9) %}{% endfor %}", "{{ 1 // 0 }}", "{{ raise_exception('one\ntwo') }}"],
)
def test_whatever_a_template_raises_is_a_value_error(source):
    with pytest.raises(ValueError, match="the chat template refuses") as error:
        ChatTemplate({"default": source}, {}).render([{"role": "user", "content": "hi"}])
    one_sentence(error)


def gguf_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "value",
    [
        gguf_text(b"general.alignment") + struct.pack("<II", 4, 0),
        gguf_text(b"general.alignment") + struct.pack("<I", 8) + gguf_text(b"x"),
        gguf_text(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000,
    ],
    ids=["no alignment", "alignment of text", "arrays of endless depth"],
)
def test_a_damaged_gguf_header_is_refused(tmp_path, value):
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + value + bytes(64))
    with pytest.raises(ValueError, match="cut off or damaged"):
        read_gguf_header(file)
