"""The config against what transformers makes of the same files, and everything it must refuse."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tiny import tiny_model

from minivllm.config import ARCHITECTURES, ModelConfig, resolve_dtype, rope_cos_sin
from minivllm.loader import load_weights, weight_shapes
from minivllm.rope import RopeConfig, cos_sin_table

LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}


def read(**changes) -> ModelConfig:
    generation = changes.pop("generation", None)
    return ModelConfig.from_dict(LLAMA_1B | changes, generation)


def test_llama_1b() -> None:
    config = read(generation={"eos_token_id": [128001, 128008, 128009], "temperature": 0.6})
    assert config.num_q_heads == 32 and config.num_kv_heads == 8 and config.head_dim == 64
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.bos_token_id == 128000
    assert config.dtype == torch.bfloat16
    assert config.max_seq_len == 131072
    assert config.num_parameters == 1_235_814_400
    assert config.weight_bytes() == 2 * 1_235_814_400
    assert config.weight_bytes(torch.float32) == 4 * 1_235_814_400
    assert config.kv_bytes_per_token() == 2 * 16 * 8 * 64 * 2


def test_end_ids_fall_back_to_config() -> None:
    assert read().eos_token_ids == (128001,)
    assert read(generation={"eos_token_id": None}).eos_token_ids == (128001,)
    assert read(eos_token_id=[5, 6, 5]).eos_token_ids == (5, 6)
    assert read(eos_token_id=None).eos_token_ids == ()
    assert read(generation={"eos_token_id": 0}).eos_token_ids == (0,)


def test_head_dim_and_heads() -> None:
    assert read(head_dim=128).head_dim == 128
    assert read(head_dim=None).head_dim == 64
    assert read(num_key_value_heads=None).num_kv_heads == 32
    qwen3 = {"architectures": ["Qwen3ForCausalLM"], "rope_scaling": None}
    assert ModelConfig.from_dict({k: v for k, v in (LLAMA_1B | qwen3).items() if k != "head_dim"}).head_dim == 128


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_files_of_each_architecture(architecture: str, tmp_path) -> None:
    tiny_model(tmp_path, architecture, tokenizer=False, head_dim=32)
    config = ModelConfig.from_dir(tmp_path)
    assert config.architecture == architecture
    assert (config.qkv_bias, config.qk_norm) == (architecture[:5] == "Qwen2", architecture[:5] == "Qwen3")
    assert config.head_dim == 32 and config.num_q_heads * 32 != config.hidden_size
    assert config.eos_token_ids == (1,) and config.bos_token_id == 0
    weights = load_weights(tmp_path, config)
    assert sum(w.numel() for w in weights.values()) == config.num_parameters
    assert {name: tuple(w.shape) for name, w in weights.items()} == weight_shapes(config)


@pytest.mark.parametrize(
    ("changes", "window", "limit"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, 4096, 4096),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None, 131072),
        ({"architectures": ["MistralForCausalLM"]}, 4096, 4096),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 512}, None, 131072),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 512,
                "use_sliding_window": True,
                "max_window_layers": 16,
            },
            None,
            131072,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 512,
                "use_sliding_window": True,
                "max_window_layers": 15,
            },
            512,
            512,
        ),
        ({"sliding_window": 512}, None, 131072),
    ],
)
def test_sliding_window_limits_the_length(changes: dict, window: int | None, limit: int) -> None:
    config = read(**changes)
    assert config.sliding_window == window
    assert config.max_seq_len == limit


def test_attention_bias() -> None:
    llama = read(attention_bias=True)
    assert llama.qkv_bias and llama.o_bias
    qwen2 = read(architectures=["Qwen2ForCausalLM"], attention_bias=True)
    assert qwen2.qkv_bias and not qwen2.o_bias
    assert not read(architectures=["MistralForCausalLM"], attention_bias=True).qkv_bias


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, ["GemmaForCausalLM", *ARCHITECTURES]),
        ({"architectures": None, "model_type": "gemma"}, ["gemma", *ARCHITECTURES]),
        ({"hidden_size": 0}, ["config.json", "hidden_size", "0"]),
        ({"hidden_size": "2048"}, ["hidden_size", "'2048'"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers"]),
        ({"vocab_size": None}, ["config.json", "vocab_size", "missing"]),
        ({"num_key_value_heads": 5}, ["config.json", "32", "5"]),
        ({"hidden_size": 2047, "head_dim": None}, ["hidden_size", "2047"]),
        ({"head_dim": 63}, ["head_dim", "63"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps"]),
        ({"rms_norm_eps": -1e-5}, ["rms_norm_eps"]),
        ({"rope_theta": 0}, ["rope_theta"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["awq"]),
        ({"torch_dtype": "int8"}, ["torch_dtype", "int8"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings"]),
        ({"eos_token_id": -1}, ["eos_token_id", "-1"]),
        ({"generation": {"eos_token_id": ["</s>"]}}, ["generation_config.json", "eos_token_id"]),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ["longrope", "llama3"]),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, ["'su'"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["factor"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ["layer type"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    ],
)
def test_refused(changes: dict, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        read(**changes)
    for word in words:
        assert word in str(caught.value)


def test_directory_without_config(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        ModelConfig.from_dir(tmp_path)


def test_errors_name_the_file(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_1B | {"vocab_size": -1}))
    with pytest.raises(ValueError, match="vocab_size") as caught:
        ModelConfig.from_dir(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_old_and_new_rope_fields_agree() -> None:
    new = {"rope_parameters": {**LLAMA_1B["rope_scaling"], "rope_theta": 500000.0}}
    old = {key: value for key, value in LLAMA_1B.items() if key not in ("rope_scaling", "rope_theta")}
    assert ModelConfig.from_dict(old | new) == read()
    assert ModelConfig.from_dict(old).rope == RopeConfig(theta=10000.0)
    legacy = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert ModelConfig.from_dict(old | legacy).rope == RopeConfig(rope_type="linear", factor=2.0)
    assert ModelConfig.from_dict(old | legacy).max_seq_len == 262144


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "llama3", "factor": 3.0, "low_freq_factor": 2.0, "high_freq_factor": 9.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 16.0, "beta_fast": 20, "beta_slow": 2, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.2},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
    ],
)
@pytest.mark.parametrize(("theta", "head_dim"), [(10000.0, 64), (500000.0, 128), (1000000.0, 96)])
def test_inverse_frequencies_are_those_of_transformers(scaling: dict, theta: float, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fields = {"max_position_embeddings": 131072, "head_dim": head_dim}
    original = {"original_max_position_embeddings": 8192} if scaling["rope_type"] in ("llama3", "yarn") else {}
    parameters = {**scaling, **original, "rope_theta": theta}
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, **fields, rope_parameters=dict(parameters))
    )
    ours = RopeConfig.from_dict({**fields, "rope_parameters": parameters})
    # Theirs are computed in float32.
    torch.testing.assert_close(ours.inv_freq(head_dim), theirs.inv_freq.double(), rtol=4e-6, atol=0, check_dtype=True)
    assert ours.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
    if scaling["rope_type"] != "default":
        plain = RopeConfig(theta=theta).inv_freq(head_dim)
        assert (ours.inv_freq(head_dim) - plain).abs().max() > 0


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
def test_angles_at_long_context(theta: float) -> None:
    head_dim = 64
    table = cos_sin_table(RopeConfig(theta=theta), head_dim, 131072)
    assert table.shape == (131072, head_dim) and table.dtype == torch.float32
    positions = np.concatenate([np.arange(0, 131072, 97), [8191, 8192, 131071]])
    frequencies = np.exp(-np.log(theta) * np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = positions[:, None] * frequencies
    expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    error = np.abs(table.numpy()[positions] - expected)
    # Half a unit in the last place of float32 below 1, and what 131071 * float64 rounding adds.
    assert error.max() < 2.0**-25 + 1e-9
    # The check can fail: angles in float32 are off by far more.
    rough = np.cos(positions[:, None].astype(np.float32) * frequencies.astype(np.float32))
    assert np.abs(rough - expected[:, :32]).max() > 1e-4


def test_table_of_a_config() -> None:
    config = read()
    table = rope_cos_sin(config, 9)
    angles = torch.arange(9, dtype=torch.float64)[:, None] * config.rope.inv_freq(64)
    assert torch.equal(table[:, :32], angles.cos().float())
    assert torch.equal(table[:, 32:], angles.sin().float())


def test_explicit_factors_divide_the_frequencies() -> None:
    rope = RopeConfig(freq_factors=(1.0, 2.0, 4.0, 8.0))
    plain = RopeConfig().inv_freq(8)
    assert torch.equal(rope.inv_freq(8) * torch.tensor([1, 2, 4, 8]), plain)
    with pytest.raises(ValueError, match="4 rope factors"):
        rope.inv_freq(16)


def test_resolve_dtype() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    config = read()
    assert resolve_dtype(config, "auto", cpu) == torch.bfloat16
    assert resolve_dtype(read(torch_dtype="float32"), "auto", cpu) == torch.float32
    assert resolve_dtype(read(torch_dtype="float32"), "auto", cuda) == torch.bfloat16
    assert resolve_dtype(read(torch_dtype="float16"), "auto", cuda) == torch.float16
    assert resolve_dtype(config, "float32", cpu) == torch.float32
    assert resolve_dtype(config, torch.float16, cpu) == torch.float16
    for bad in ("int8", torch.int8, "Float"):
        with pytest.raises(ValueError, match="dtype must be"):
            resolve_dtype(config, bad, cpu)
