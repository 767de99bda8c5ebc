"""GGUF files as models, against the model that they were made from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import from_directory, model_metadata, write
from tiny import tiny_model

from minivllm.config import ModelConfig
from minivllm.convert import convert_gguf
from minivllm.gguf import GGUFFile
from minivllm.loader import load_weights
from minivllm.rope import RopeConfig


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
        # Half a step of a block of 32, whose largest value sets the step (twice that if asymmetric).
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
    file = write(tmp_path / "x.gguf", "llama", model_metadata("llama", config), {**embedding, "extra": np.ones(3)})
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
