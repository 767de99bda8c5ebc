"""Weights: every value in its place, every damaged or strange file refused by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_model

from minivllm.config import ARCHITECTURES, ModelConfig
from minivllm.loader import load_weights, resolve_model
from minivllm.safetensors_file import StoredTensor, read_header
from minivllm.transfer import FileReader


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("untied"), tokenizer=False)


@pytest.fixture
def model(untied: Path, tmp_path: Path) -> Path:
    """Return a copy of the tiny model, to be damaged."""
    return Path(shutil.copytree(untied, tmp_path / "model"))


def load(path: Path, **options) -> dict[str, torch.Tensor]:
    return load_weights(path, ModelConfig.from_dir(path), **options)


def change(path: Path, **config) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


def rewrite(path: Path, edit) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    edit(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("shards", ["one file", "many files"])
def test_every_tensor_is_where_it_belongs(architecture: str, shards: str, tmp_path: Path) -> None:
    bias = {"attention_bias": True} if architecture == "LlamaForCausalLM" else {}
    size = "50GB" if shards == "one file" else "30KB"
    tiny_model(tmp_path, architecture, tokenizer=False, max_shard_size=size, head_dim=24, **bias)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) == 1) == (shards == "one file")
    theirs = {name: tensor for file in files for name, tensor in load_file(file).items()}
    ours = load(tmp_path)
    expected = {
        "embed": theirs.pop("model.embed_tokens.weight"),
        "norm": theirs.pop("model.norm.weight"),
        "lm_head": theirs.pop("lm_head.weight"),
    }
    for i in range(2):
        layer = f"model.layers.{i}."
        attention = layer + "self_attn."

        def joined(*names: str) -> torch.Tensor:
            return torch.cat([theirs.pop(name) for name in names])

        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            if f"{attention}q_proj.{kind}" in theirs:
                expected[f"layers.{i}.qkv{suffix}"] = joined(*(f"{attention}{x}_proj.{kind}" for x in "qkv"))
            if f"{attention}o_proj.{kind}" in theirs:
                expected[f"layers.{i}.o{suffix}"] = joined(f"{attention}o_proj.{kind}")
        for x in "qk":
            if f"{attention}{x}_norm.weight" in theirs:
                expected[f"layers.{i}.{x}_norm"] = joined(f"{attention}{x}_norm.weight")
        expected[f"layers.{i}.input_norm"] = joined(layer + "input_layernorm.weight")
        expected[f"layers.{i}.post_norm"] = joined(layer + "post_attention_layernorm.weight")
        expected[f"layers.{i}.gate_up"] = joined(layer + "mlp.gate_proj.weight", layer + "mlp.up_proj.weight")
        expected[f"layers.{i}.down"] = joined(layer + "mlp.down_proj.weight")
    assert not theirs
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name
        assert ours[name].is_contiguous()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_dtypes(stored: torch.dtype, wanted: str, model: Path) -> None:
    rewrite(model, lambda tensors: tensors.update({n: t.to(stored) for n, t in tensors.items()}))
    source = load_file(model / "model.safetensors")
    ours = load(model, dtype=wanted)
    assert torch.equal(ours["embed"], source["model.embed_tokens.weight"].to(getattr(torch, wanted)))
    up = source["model.layers.1.mlp.up_proj.weight"].to(getattr(torch, wanted))
    assert torch.equal(ours["layers.1.gate_up"][96:], up)


def test_staging_in_small_pieces(tmp_path: Path) -> None:
    source = {"a": torch.randn(37, 53), "b": torch.randn(7)}
    save_file(source, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    for buffer_bytes in (4, 100, 4096, 1 << 20):
        with FileReader(torch.device("cpu"), buffer_bytes) as reader:
            for name, tensor in source.items():
                into = torch.full_like(tensor, float("nan"), dtype=torch.bfloat16)
                reader.read(header[name], into)
                assert torch.equal(into, tensor.bfloat16())


def test_loading_to_a_device(device: torch.device, untied: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        expected = load(untied, dtype=dtype)
        for name, tensor in load(untied, device=device, dtype=dtype).items():
            assert tensor.device.type == device.type
            assert torch.equal(tensor.cpu(), expected[name]), name


def test_staging_to_a_device_reuses_buffers_in_time(device: torch.device, tmp_path: Path) -> None:
    # Hundreds of turns of two small buffers: one refilled before its copy has arrived would show.
    source = torch.randn(1 << 20)
    save_file({"a": source}, tmp_path / "x.safetensors")
    for dtype in (torch.float32, torch.bfloat16):
        into = torch.empty(1 << 20, dtype=dtype, device=device)
        with FileReader(device, 16384) as reader:
            reader.read(read_header(tmp_path / "x.safetensors")["a"], into)
        assert torch.equal(into.cpu(), source.to(dtype))


def test_staging_with_several_threads(tmp_path: Path) -> None:
    source = torch.arange(3_000_017, dtype=torch.float32)
    save_file({"a": source}, tmp_path / "x.safetensors")
    into = torch.empty_like(source, dtype=torch.float64)
    with FileReader(torch.device("cpu"), 5 << 20) as reader:
        reader.read(read_header(tmp_path / "x.safetensors")["a"], into)
    assert torch.equal(into, source.double())


@pytest.mark.parametrize("head", ["absent", "equal", "another"])
def test_tied_embeddings(head: str, model: Path) -> None:
    change(model, tie_word_embeddings=True)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        if head == "absent":
            del tensors["lm_head.weight"]
        elif head == "equal":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(model, edit)
    weights = load(model)
    assert "lm_head" not in weights and "embed" in weights


def test_untied_without_head_is_an_error(model: Path) -> None:
    rewrite(model, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"lm_head\.weight is missing and tie_word_embeddings is false"):
        load(model)


def test_rotary_buffers_are_passed_over(model: Path) -> None:
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(2)}
    rewrite(model, lambda tensors: tensors.update(extra))
    assert "embed" in load(model)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), ["missing", "layers.1.mlp.up_proj"]),
        (lambda t: t.update({"model.layers.2.x": torch.ones(2)}), ["unexpected", "model.layers.2.x"]),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
            ["unexpected", "q_proj.bias"],
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(65)}),
            ["model.safetensors", "model.norm.weight", "[65]", "[64]"],
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            ["model.safetensors", "model.norm.weight", "I8"],
        ),
        (lambda t: t.clear(), ["model.safetensors", "no tensors"]),
    ],
)
def test_wrong_tensors(edit, words: list[str], model: Path) -> None:
    rewrite(model, edit)
    with pytest.raises(ValueError) as caught:
        load(model)
    for word in [*words, str(model)]:
        assert word in str(caught.value)


def test_damaged_files(model: Path) -> None:
    file = model / "model.safetensors"
    whole = file.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n"
    header = int.from_bytes(whole[:8], "little")
    for content, words in [
        (whole[:-1], "is cut off"),
        (whole[: header // 2], "is cut off"),
        (whole + b"\0", "bytes that its header does not name"),
        (b"", "is not a safetensors file"),
        (b"\0" * 100, "is not a safetensors file"),
        (whole[:8] + b"x" + whole[9:], "damaged header"),
        (pointer, "Git LFS pointer"),
    ]:
        file.write_bytes(content)
        with pytest.raises(ValueError, match=words) as caught:
            load(model)
        assert str(file) in str(caught.value)


def test_header_that_contradicts_itself(tmp_path: Path) -> None:
    for entry in (
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2]},
        [],
    ):
        raw = json.dumps({"a": entry}).encode()
        file = tmp_path / "x.safetensors"
        file.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))
        with pytest.raises(ValueError, match="damaged header"):
            read_header(file)


def test_file_that_shrinks_while_read(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(bytes(6))
    with FileReader(torch.device("cpu")) as reader, pytest.raises(ValueError, match="ended 2 bytes early"):
        reader.read(StoredTensor(file, "a", "F32", (2,), 0, 8), torch.empty(2))


def test_index(tmp_path: Path) -> None:
    tiny_model(tmp_path, tokenizer=False, max_shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shards = sorted(set(content["weight_map"].values()))
    assert len(shards) > 2
    load(tmp_path)

    hidden = tmp_path / shards[1]
    moved = hidden.rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=f"names {shards[1]}, which is not there"):
        load(tmp_path)
    moved.rename(hidden)

    for change_to, words in [
        ({}, "has no weight_map"),
        ({"model.norm.weight": "../x.safetensors"}, "is not a file name"),
        ({**content["weight_map"], "model.y": shards[0]}, "says that model.y is in"),
    ]:
        index.write_text(json.dumps({"weight_map": change_to}))
        with pytest.raises(ValueError, match=words):
            load(tmp_path)
    index.write_text(json.dumps(content))
    save_file({"model.norm.weight": torch.ones(64), **load_file(hidden)}, hidden)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is both in"):
        load(tmp_path)


def test_other_weight_formats_are_named(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin, which are not read"):
        load(model)


def test_progress_bar(untied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(untied)
    assert capsys.readouterr().err == ""
    load(untied, progress=True)
    assert "Loading weights: 100%" in capsys.readouterr().err


def test_resolve_model(untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(untied) == untied
    assert resolve_model(str(untied)) == untied
    gguf = tmp_path / "x.gguf"
    gguf.touch()
    assert resolve_model(gguf) == gguf
    (tmp_path / "x.bin").touch()
    with pytest.raises(ValueError, match="is a file"):
        resolve_model(tmp_path / "x.bin")
    for absent in ("/no/such/model", "./nothing", "not here", tmp_path / "y", "x/y.gguf", ""):
        with pytest.raises(FileNotFoundError, match="no model"):
            resolve_model(absent)


def test_hub_ids(untied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "some/absent":
            raise OSError("the hub cannot be reached\nand much more")
        return str(untied)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("some/model-1.5B") == untied
    assert asked[0][0] == "some/model-1.5B" and "tokenizer.json" in asked[0][1]
    assert "*" not in asked[0][1]
    with pytest.raises(FileNotFoundError) as caught:
        resolve_model("some/absent")
    assert "some/absent" in str(caught.value) and str(caught.value).endswith("cannot be reached")


def test_peak_memory_is_the_model_once(tmp_path: Path) -> None:
    """The copy stands alone: no mapped pages beside it, no second copy."""
    # One large tensor is enough; writing it through transformers would take seconds.
    tiny_model(tmp_path, tokenizer=False, tie_word_embeddings=True)
    change(tmp_path, vocab_size=800_000)
    rewrite(tmp_path, lambda tensors: tensors.update({"model.embed_tokens.weight": torch.ones(800_000, 64)}))
    code = f"""
import re, torch
from minivllm.config import ModelConfig
from minivllm.loader import load_weights

def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

config = ModelConfig.from_dir({str(tmp_path)!r})
before = peak()
weights = load_weights({str(tmp_path)!r}, config)
print((peak() - before) / config.weight_bytes())
"""
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert 0.9 < float(done.stdout) < 1.1
