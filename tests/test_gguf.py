"""GGUF files: written here by the gguf package, read back against the model they were made from."""

from __future__ import annotations

import inspect
import json
import sys
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from gguf import GGMLQuantizationType as Kind
from tiny import CHAT_TEMPLATE, byte_level_tokenizer, sentencepiece_tokenizer, tiny_model

from minivllm.config import ModelConfig
from minivllm.convert import convert_gguf
from minivllm.gguf import GGUFFile
from minivllm.gguf_tokenizer import build_tokenizer, end_ids
from minivllm.loader import load_weights, stored_tensors
from minivllm.rope import RopeConfig
from minivllm.tokenizer import Tokenizer

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Order the rows of each head as files of the llama architecture have them: first half, second half, …"""
    half = weight.shape[0] // num_heads // 2
    heads = weight.reshape(num_heads, 2, half, -1)
    return np.stack([heads[:, 0], heads[:, 1]], axis=2).reshape(weight.shape)


def tokenizer_metadata(
    backend: tokenizers.Tokenizer, model: str, specials: list[str], **more: Any
) -> dict[str, Any]:
    vocab = backend.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = json.loads(backend.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in specials else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        **more,
    }


BYTE_LEVEL = tokenizer_metadata(
    byte_level_tokenizer(),
    "gpt2",
    ["<|begin|>", "<|end|>", "<|turn|>", "<|pad|>"],
    **{
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    },
)


def write(file: Path, arch: str, metadata: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """Write a file; a tensor is an array, or raw blocks with their type."""
    writer = gguf.GGUFWriter(file, arch)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        array, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def model_metadata(arch: str, config: ModelConfig, **more: Any) -> dict[str, Any]:
    fields = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_q_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope.theta,
        **more,
    }
    return {f"{arch}.{name}": value for name, value in fields.items()}


def from_directory(file: Path, model: Path, arch: str, kind: Kind = Kind.F32, **more: Any) -> Path:
    """Write what the usual conversion makes of a model: matrices of one type, norms and biases in float32."""
    config = ModelConfig.from_dir(model)
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        array = tensor.float().numpy()
        base, _, suffix = name.rpartition(".")
        if arch == "llama" and "q_proj" in name:
            array = interleaved(array, config.num_q_heads)
        if arch == "llama" and "k_proj" in name:
            array = interleaved(array, config.num_kv_heads)
        if base.startswith("model.layers."):
            _, _, layer, rest = base.split(".", 3)
            base = f"blk.{layer}.{NAMES[rest]}"
        else:
            base = NAMES[base]
        matrix = array.ndim == 2 and kind != Kind.F32
        tensors[f"{base}.{suffix}"] = (gguf.quants.quantize(array, kind), kind) if matrix else array
    return write(file, arch, {**model_metadata(arch, config, **more), **BYTE_LEVEL}, tensors)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama"), head_dim=32, attention_bias=True)


@pytest.mark.parametrize(
    ("arch", "architecture", "options"),
    [
        ("llama", "LlamaForCausalLM", {"head_dim": 32}),
        ("llama", "LlamaForCausalLM", {"attention_bias": True, "tie_word_embeddings": True}),
        ("qwen2", "Qwen2ForCausalLM", {}),
        ("qwen3", "Qwen3ForCausalLM", {"head_dim": 32}),
    ],
)
def test_model_is_the_one_it_was_made_from(
    arch: str, architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    tiny_model(tmp_path, architecture, tokenizer=False, **options)
    file = from_directory(tmp_path / "x.gguf", tmp_path, arch)
    expected = ModelConfig.from_dir(tmp_path)
    config = ModelConfig.from_dir(file)
    assert config.dtype == torch.bfloat16
    for name in ModelConfig.__dataclass_fields__:
        if name != "dtype":
            assert getattr(config, name) == getattr(expected, name), name
    theirs, ours = load_weights(tmp_path, expected), load_weights(file, config, dtype="float32")
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_simple_types(kind: Kind, llama: Path, tmp_path: Path) -> None:
    file = from_directory(tmp_path / "x.gguf", llama, "llama", kind)
    config = ModelConfig.from_dir(file)
    ours, exact = (
        load_weights(file, config, dtype="float32"),
        load_weights(llama, ModelConfig.from_dir(llama)),
    )
    steps = {Kind.F16: 2.0**-10, Kind.BF16: 2.0**-7, Kind.Q8_0: 1 / 127, Kind.Q4_0: 1 / 7, Kind.Q4_1: 1 / 7}
    for name, tensor in exact.items():
        if tensor.dim() == 1:
            assert torch.equal(ours[name], tensor), name
            continue
        # Half a step of a block of 32, whose largest value sets the step (twice that for the asymmetric range).
        largest = tensor.view(-1, 32).abs().amax(1, keepdim=True)
        error = (ours[name].view(-1, 32) - tensor.view(-1, 32)).abs()
        assert (error <= largest * steps[kind] * 1.01).all(), name
        assert error.max() > 0


def q4_k(raw: np.ndarray) -> np.ndarray:
    """Decode blocks of 144 bytes: d, dmin; eight 6-bit scales and minima; 256 4-bit values."""
    out = []
    for block in raw.reshape(-1, 144):
        d, dmin = block[:4].view(np.float16).astype(np.float32)
        packed, low = block[4:16].astype(int), block[16:].reshape(4, 32)
        for group in range(8):
            if group < 4:
                scale, minimum = packed[group] & 63, packed[group + 4] & 63
            else:
                scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6 << 4)
                minimum = (packed[group + 4] >> 4) | (packed[group] >> 6 << 4)
            nibbles = (low[group // 2] >> (4 * (group % 2))) & 15
            out.append(d * np.float32(scale) * nibbles.astype(np.float32) - dmin * np.float32(minimum))
    return np.concatenate(out)


def q6_k(raw: np.ndarray) -> np.ndarray:
    """Decode blocks of 210 bytes: low 4 bits, high 2 bits, sixteen 8-bit scales, d."""
    out = []
    for block in raw.reshape(-1, 210):
        scales, d = block[192:208].view(np.int8), block[208:].view(np.float16).astype(np.float32)[0]
        for index in range(256):
            half, rest = divmod(index, 128)
            quarter, lane = divmod(rest, 32)
            low = int(block[half * 64 + (quarter % 2) * 32 + lane]) >> (4 * (quarter // 2)) & 15
            high = int(block[128 + half * 32 + lane]) >> (2 * quarter) & 3
            value = (low | high << 4) - 32
            out.append(d * np.float32(scales[index // 16]) * np.float32(value))
    return np.array(out, dtype=np.float32)


@pytest.mark.parametrize(("kind", "block_bytes", "decode"), [(Kind.Q4_K, 144, q4_k), (Kind.Q6_K, 210, q6_k)])
def test_block_types(kind: Kind, block_bytes: int, decode: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    raw = random.integers(0, 256, (6, block_bytes), dtype=np.uint8)
    scales = random.uniform(0.001, 0.1, (6, 2)).astype(np.float16).view(np.uint8)
    if kind == Kind.Q4_K:
        raw[:, :4] = scales
    else:
        raw[:, 208:] = scales[:, :2]
    file = write(tmp_path / "x.gguf", "llama", {}, {"w": (raw.reshape(3, -1), kind)})
    header = GGUFFile(file)
    assert header.tensors["w"].shape == (3, 512)
    ours = header.read(header.tensors["w"])
    np.testing.assert_allclose(ours.numpy().reshape(-1), decode(raw), rtol=1e-6, atol=1e-6)


def test_large_tensors_come_in_pieces(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = from_directory(tmp_path / "x.gguf", llama, "llama", Kind.Q8_0)
    config = ModelConfig.from_dir(file)
    whole = load_weights(file, config)
    monkeypatch.setattr("minivllm.gguf._ELEMENTS_AT_ONCE", 64 * 7)
    pieces = load_weights(file, config)
    for name in whole:
        assert torch.equal(whole[name], pieces[name]), name


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_factors(factor: float, llama: Path, tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rope = RopeConfig.from_dict({"rope_theta": 500000.0, "rope_scaling": scaling})
    plain = RopeConfig(theta=500000.0)
    factors = (plain.inv_freq(128) / rope.inv_freq(128)).float()
    metadata = model_metadata("llama", ModelConfig.from_dir(llama)) | {
        "llama.attention.key_length": 128,
        "llama.rope.freq_base": 500000.0,
    }
    tensors = {"token_embd.weight": np.zeros((4, 64), np.float32), "rope_freqs.weight": factors.numpy()}
    file = write(tmp_path / "x.gguf", "llama", metadata, tensors)
    assert ModelConfig.from_dir(file).rope == rope
    GGUFFile(file).check_convertible()

    tensors["rope_freqs.weight"] = (factors * torch.linspace(1, 2, 64)).numpy()
    file = write(tmp_path / "y.gguf", "llama", metadata, tensors)
    frequencies = ModelConfig.from_dir(file).rope.inv_freq(128)
    expected = plain.inv_freq(128) / torch.from_numpy(tensors["rope_freqs.weight"]).double()
    torch.testing.assert_close(frequencies, expected, rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        convert_gguf(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rope_scaling_of_the_metadata(llama: Path, tmp_path: Path) -> None:
    def rope(**more: Any) -> RopeConfig:
        metadata = model_metadata("llama", ModelConfig.from_dir(llama), **more)
        tensors = {"token_embd.weight": np.zeros((4, 64), np.float32)}
        return ModelConfig.from_dir(write(tmp_path / "x.gguf", "llama", metadata, tensors)).rope

    assert rope().rope_type == "default"
    linear = rope(**{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    assert (linear.rope_type, linear.factor) == ("linear", 4.0)
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    }
    assert (rope(**yarn).rope_type, rope(**yarn).original_max_position) == ("yarn", 128)
    with pytest.raises(ValueError, match="longrope"):
        rope(**{"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0})


TEXTS = [
    "hello there é 漢 👩‍👩‍👧",
    "  two  spaces\n\n\tx ",
    "It's 12345 don't WE'LL 3.14",
    "<|turn|>a<|end|>",
    "",
]


def test_byte_level_tokenizer() -> None:
    ours = build_tokenizer(BYTE_LEVEL, "x")
    theirs = byte_level_tokenizer()
    assert ours is not None
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids
        for skip in (True, False):
            assert ours.decode(ours.encode(text), skip) == theirs.decode(
                ours.encode(text), skip_special_tokens=skip
            )
    assert ours.eos_ids == (1,) and ours.bos_id == 0
    assert ours.apply_chat_template([{"role": "user", "content": "hi"}])[0] == 0


def test_words_of_qwen2_and_llama3() -> None:
    from transformers import Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import TikTokenConverter

    vocab = {token: i for i, token in enumerate(BYTE_LEVEL["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in BYTE_LEVEL["tokenizer.ggml.merges"]]
    theirs = Qwen2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer
    without_begin = BYTE_LEVEL | {"tokenizer.ggml.add_bos_token": False}
    ours = build_tokenizer(without_begin | {"tokenizer.ggml.pre": "qwen2"}, "x")
    assert ours is not None
    for text in [*TEXTS, "e\u0301 \r\n\r\n  x  \n 1234567 ...!? ça va"]:
        words = theirs.pre_tokenizer.pre_tokenize_str(text)
        assert ours._backend.pre_tokenizer.pre_tokenize_str(text) == words
        assert ours._backend.normalizer.normalize_str(text) == theirs.normalizer.normalize_str(text)
    llama3 = build_tokenizer(without_begin | {"tokenizer.ggml.pre": "llama-bpe"}, "x")
    assert llama3 is not None
    pattern = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
    step = json.loads(llama3._backend.to_str())["pre_tokenizer"]["pretokenizers"][0]
    assert step["pattern"] == {"Regex": pattern}


def test_smollm_words_cut_digits() -> None:
    ours = build_tokenizer(BYTE_LEVEL | {"tokenizer.ggml.pre": "smollm"}, "x")
    assert ours is not None
    words = [word for word, _ in ours._backend.pre_tokenizer.pre_tokenize_str("a 123")]
    assert words == ["a", "Ġ", "1", "2", "3"]


def test_sentencepiece_tokenizer() -> None:
    theirs = sentencepiece_tokenizer()
    metadata = tokenizer_metadata(theirs, "llama", ["<s>", "</s>"])
    tokens = metadata["tokenizer.ggml.tokens"]
    merged = [merge.replace(" ", "") for merge in metadata.pop("tokenizer.ggml.merges")]
    metadata |= {
        "tokenizer.ggml.scores": [-float(merged.index(t)) if t in merged else -1e6 for t in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    metadata["tokenizer.ggml.token_type"][0] = 2
    ours = build_tokenizer(metadata, "x")
    assert ours is not None
    for text in [*TEXTS, "the hello Hel the", " a", "<s>the</s> the"]:
        ids = theirs.encode(text).ids
        assert ours._backend.encode(text).ids == ids
        assert ours.decode(ids) == theirs.decode(ids)


def test_end_ids() -> None:
    tokens = ["a", "<|eot_id|>", "<|im_end|>", "</s>", "<|endoftext|>"]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1, 3, 1, 3, 3],
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.eot_token_id": 1,
    }
    assert end_ids(metadata) == [3, 1, 4]  # <|im_end|> is an ordinary token here
    assert end_ids({}) == []


def test_without_tokenizer(tmp_path: Path) -> None:
    assert (
        Tokenizer.load(write(tmp_path / "x.gguf", "llama", {}, {"w": np.zeros((1, 1), np.float32)})) is None
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, "'tekken' is not served; served are .*llama-bpe"),
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not served"),
    ],
)
def test_tokenizers_that_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_tokenizer(BYTE_LEVEL | changes, "x")


def test_models_that_are_refused(llama: Path, tmp_path: Path) -> None:
    config = ModelConfig.from_dir(llama)
    embedding = {"token_embd.weight": np.zeros((4, 64), np.float32)}
    for arch, more, tensors, words in [
        ("gemma", {}, embedding, "'gemma' is not served; served are llama, qwen2, qwen3"),
        ("llama", {"expert_count": 8}, embedding, "experts"),
        ("llama", {"embedding_length": 0}, embedding, "hidden_size"),
        ("llama", {}, {"w": np.zeros((1, 1), np.float32)}, r"token_embd\.weight is missing"),
    ]:
        file = write(tmp_path / "x.gguf", arch, model_metadata(arch, config, **more), tensors)
        with pytest.raises(ValueError, match=words) as caught:
            ModelConfig.from_dir(file)
        assert str(file) in str(caught.value)
    file = write(
        tmp_path / "x.gguf", "llama", model_metadata("llama", config), {**embedding, "extra": np.ones(3)}
    )
    with pytest.raises(ValueError, match=r"missing \['model.norm.weight'.*unexpected \['extra'\]"):
        load_weights(file, ModelConfig.from_dir(file))


def test_damaged_files(llama: Path, tmp_path: Path) -> None:
    file = from_directory(tmp_path / "x.gguf", llama, "llama")
    config = ModelConfig.from_dir(file)
    content = file.read_bytes()
    for length in (6, 20, 100, 3000, len(content) // 3):
        file.write_bytes(content[:length])
        with pytest.raises(ValueError, match="cut off") as caught:
            load_weights(file, config)
        assert str(file) in str(caught.value)
    for content, words in [
        (b"", "not a GGUF file"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(100), "version 1"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ]:
        file.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            GGUFFile(file)


def test_missing_package_is_named(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = from_directory(tmp_path / "x.gguf", llama, "llama")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'minivllm\[gguf\]'"):
        load_weights(file, ModelConfig.from_dir(file))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_conversion(dtype: str, llama: Path, tmp_path: Path) -> None:
    file = from_directory(tmp_path / "x.gguf", llama, "llama", Kind.Q8_0)
    out = convert_gguf(file, tmp_path / "new" / "model", dtype)
    config, direct = ModelConfig.from_dir(out), ModelConfig.from_dir(file)
    assert config.dtype == getattr(torch, dtype)
    assert config.eos_token_ids == direct.eos_token_ids == (1,)
    ours, theirs = load_weights(out, config), load_weights(file, direct, dtype=dtype)
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name
    assert all(tensor.dtype == getattr(torch, dtype) for tensor in stored_tensors(out).values())
    converted, described = Tokenizer.load(out), Tokenizer.load(file)
    assert converted is not None and described is not None
    for text in TEXTS:
        assert converted.encode(text) == described.encode(text)
    chat = [{"role": "user", "content": "hi"}]
    assert converted.apply_chat_template(chat) == described.apply_chat_template(chat)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [1]
    with pytest.raises(ValueError, match="dtype"):
        convert_gguf(file, tmp_path / "other", "int8")


def test_conversion_that_fails_leaves_nothing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = from_directory(tmp_path / "x.gguf", llama, "llama")
    monkeypatch.setattr(Tokenizer, "save", lambda *_: 1 / 0)
    out = tmp_path / "new" / "model"
    with pytest.raises(ZeroDivisionError):
        convert_gguf(file, out)
    assert list(out.parent.iterdir()) == []


def test_conversions_at_once(llama: Path, tmp_path: Path) -> None:
    file = from_directory(tmp_path / "x.gguf", llama, "llama")
    out = tmp_path / "new" / "model"
    done: list[object] = []

    def work() -> None:
        try:
            done.append(convert_gguf(file, out))
        except BaseException as error:
            done.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [out] * 4
    assert list(out.parent.iterdir()) == [out]
    load_weights(out, ModelConfig.from_dir(out))
