"""The command line, mostly in this process; killed, resumed and served in others."""

from __future__ import annotations

import io
import json
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
from gguf_files import from_directory
from tiny import tiny_model

from minivllm import BatchEngine, SamplingParams, _extension, bench, cli, doctor, intake, plan
from minivllm.commands.options import parse_bytes
from minivllm.config import ModelConfig
from minivllm.plan import make_plan
from minivllm.random_model import SHAPES, random_model
from minivllm.server import run as server_run

MINIVLLM = [sys.executable, "-m", "minivllm"]
LLAMA = ModelConfig.from_dict(SHAPES["llama-3.2-1b"])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def expect(model):
    with BatchEngine(model, device="cpu", num_slots=2) as engine:
        yield engine


class Command:
    """Run a command in this process and hold what came of it."""

    def __init__(self, capsys, monkeypatch):
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, *words, stdin=None):
        fake = io.TextIOWrapper(io.BytesIO((stdin or "").encode()), encoding="utf-8")
        if stdin is None:
            fake = SimpleNamespace(isatty=lambda: True)
        self._monkeypatch.setattr(sys, "stdin", fake)
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
        out, err = self._capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err, rows=[json.loads(x) for x in _json_lines(out)])


def _json_lines(text):
    return [line for line in text.splitlines() if line.startswith("{") and line.endswith("}")]


@pytest.fixture
def run(capsys, monkeypatch):
    return Command(capsys, monkeypatch)


def refused(done):
    """One sentence, code 2, nothing on standard output."""
    assert done.code == 2, done
    assert done.out == "" and done.err.count("\n") == 1 and "Traceback" not in done.err
    return done.err


# ---------------------------------------------------------------- generate


def test_prompts_from_arguments_and_standard_input(run, model, expect):
    answers = [g.text for g in expect.generate(["hello", "the quick"], SamplingParams(max_tokens=5))]
    one = run("generate", model, "--max-tokens", 5, "hello")
    assert (one.code, one.out, one.err) == (0, answers[0] + "\n", "")
    two = run("generate", model, "hello", "the quick", "--max-tokens=5")
    assert two.out == f"==> 0 <==\n{answers[0]}\n==> 1 <==\n{answers[1]}\n"
    piped = run("generate", model, "--max-tokens", 5, "--format", "jsonl", stdin="hello\n\nthe quick\n")
    assert [row["text"] for row in piped.rows] == answers
    whole = run("generate", model, "--max-tokens", 5, "--whole", stdin="the quick")
    assert whole.out == answers[1] + "\n"


def test_jsonl_in_and_out(run, model, expect, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    talk = [{"role": "user", "content": "hi"}]
    lines = [
        "hello",
        [5, 6, 7],
        {"id": "a", "prompt": "hello", "max_tokens": 2, "logprobs": 1},
        {"messages": talk, "n": 2, "temperature": 1.0, "seed": 4},
        {"prompt": ""},
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines) + "\n")
    done = run("generate", model, "--input", prompts, "--format", "jsonl", "--max-tokens", 4, "--ignore-eos")
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    assert done.code == 1 and [row["index"] for row in done.rows] == [0, 1, 2, 3, 4]
    first, ids, short, chat, empty = done.rows
    assert first["text"] == expect.generate("hello", params)[0].text
    assert ids["token_ids"] == expect.generate([5, 6, 7], params)[0].token_ids
    assert short["id"] == "a" and len(short["token_ids"]) == len(short["logprobs"]) == 2
    own = SamplingParams(max_tokens=4, ignore_eos=True, n=2, temperature=1.0, seed=4)
    assert [s["text"] for s in chat["samples"]] == [s.text for s in expect.chat(talk, own)[0].samples]
    assert empty["error"] == "ValueError: prompt 4 is empty"
    two = run("generate", model, "hello", "", "--max-tokens", 2)
    assert two.code == 1 and two.err == "minivllm: ValueError: prompt 1 is empty\n"
    for form in ("text", "jsonl"):
        one = run("generate", model, "", "--format", form)
        assert one.code == 2 and "ValueError: prompt 0 is empty" in (
            one.err if form == "text" else one.rows[0]["error"]
        )
    assert run("generate", model, "").err == "minivllm: ValueError: prompt 0 is empty\n"


def test_chat_flag_and_every_sampling_flag(run, model, expect):
    talk = [{"role": "user", "content": "hello"}]
    done = run("generate", model, "hello", "--chat", "--max-tokens", 3)
    assert done.out == expect.chat(talk, SamplingParams(max_tokens=3))[0].text + "\n"
    given = {
        "temperature": 0.9, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "max_tokens": 9, "min_tokens": 2,
        "n": 2, "seed": 3, "stop": ("zz", "yy"), "stop_token_ids": (9, 17), "ignore_eos": True,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "logprobs": 1,
        "prompt_logprobs": 0, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.1, "logit_bias": {40: 2.0, 41: -1.0},
    }  # fmt: skip
    assert set(given) == set(SamplingParams.__dataclass_fields__) - {"logits_fn"}
    flags = []
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if name == "skip_special_tokens":
            flags.append("--no-skip-special-tokens")
        elif value is True:
            flags.append(flag)
        elif name == "stop":
            flags += [x for text in value for x in (flag, text)]
        elif name == "logit_bias":
            flags.append(f"{flag}=40=2,41=-1")
        elif name == "stop_token_ids":
            flags += [flag, "9,17"]
        else:
            flags += [flag, value]
    [row] = run("generate", model, "--format", "jsonl", *flags, "hello").rows
    [g] = expect.generate("hello", SamplingParams(**given))
    assert [s["token_ids"] for s in row["samples"]] == [s.token_ids for s in g.samples]
    assert row["prompt_logprobs"][1] and row["logprobs"][0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "/nowhere", "x"], "/nowhere"),
        (["generate", "MODEL"], "no prompt"),
        (["generate", "MODEL", "x", "--top-p", "2"], "top_p must be in"),
        (["generate", "MODEL", "x", "--top-k", "many"], "--top-k"),
        (["generate", "MODEL", "x", "--logit-bias", "five"], "17=-5"),
        (["generate", "MODEL", "x", "--tempo", "1"], "--tempo"),
        (["generate", "MODEL", "x", "--input", "file"], "not both"),
        (["generate", "MODEL", "--input", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["generate", "MODEL", "x", "--output", "f", "--format", "text"], "JSONL"),
        (["generate", "MODEL", "x", "--num-blocks", "0"], "num_blocks"),
        (["generate", "MODEL", "x", "--device", "tpu"], "tpu"),
        (["generate", "MODEL", ""], "empty"),
        (["chat", "MODEL", "--max-seq-len", "1"], "max_seq_len"),
        (["serve", "MODEL", "--port", "99999"], "--port"),
        (["serve", "MODEL", "--host", "0.0.0.0"], "--api-key"),
        (["serve", "MODEL", "--max-queue", "-1"], "--max-queue"),
        (["bench", "MODEL", "--workloads", "fast"], "latency_b1"),
        (["bench", "random:gpt", "--workloads", "cpu_b1"], "llama-3.2-1b"),
        (["bench", "MODEL", "--runs", "0"], "--runs"),
        (["plan", "MODEL"], "--kv-cache-bytes"),
        (["plan", "MODEL", "--kv-cache-bytes", "lots"], "8GiB"),
        (["plan", "MODEL", "--kv-cache-bytes", "1"], "holds no block"),
        (["plan", "/nowhere", "--kv-cache-bytes", "1GB"], "/nowhere"),
        (["convert", "/nowhere.gguf", "/tmp/out"], "/nowhere.gguf"),
        (["convert", "x.gguf", "MODEL"], "already"),
        (["frobnicate"], "frobnicate"),
        ([], "COMMAND"),
    ],
)
def test_bad_input_is_one_sentence(run, model, words, said):
    assert said in refused(run(*[model if word == "MODEL" else word for word in words]))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not JSON"),
        ('{"text": "a"}', "line 2: unknown key 'text'"),
        ('{"id": 1}', "line 2: needs either"),
        ('{"prompt": "a", "messages": []}', "line 2: needs either"),
        ('{"prompt": 5}', "line 2: a prompt is"),
        ('{"prompt": "a", "top_p": 7}', "line 2: top_p"),
    ],
)
def test_bad_lines_are_named(run, model, tmp_path, line, said):
    (tmp_path / "in.jsonl").write_text(f'"fine"\n{line}\n')
    assert said in refused(run("generate", model, "--input", tmp_path / "in.jsonl"))
    (tmp_path / "in.jsonl").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in refused(run("generate", model, "--input", tmp_path / "in.jsonl"))


def test_kill_and_resume(run, model, tmp_path):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(12)))
    words = ["generate", model, "--input", str(prompts), "--temperature", "1", "--ignore-eos"]
    words += ["--max-tokens", "300", "--num-slots", "1", "--device", "cpu"]
    killed = subprocess.Popen([*MINIVLLM, *words, "--output", str(output)], stdout=subprocess.PIPE)
    with killed:
        end = time.monotonic() + 60
        while not output.is_file() or output.read_bytes().count(b"\n") < 2:
            assert time.monotonic() < end and killed.poll() is None
            time.sleep(0.01)
        killed.kill()
    assert killed.returncode == -signal.SIGKILL
    kept = output.read_bytes()
    kept = kept[: kept.rindex(b"\n") + 1].splitlines()
    assert 2 <= len(kept) < 12
    with output.open("ab") as file:
        file.write(b'{"index": 11, "text": "half a li')
    done = run(*words, "--output", output)
    assert (done.code, done.out, done.err) == (0, "", "")
    lines = output.read_bytes().splitlines()
    assert set(kept) <= set(lines)  # times and all: they were not computed again
    rows = [json.loads(line) for line in lines]
    assert [row["index"] for row in rows] == list(range(12))
    # As if it had been one run: the seeds too.
    straight = run(*words, "--format", "jsonl").rows
    assert [row["token_ids"] for row in rows] == [row["token_ids"] for row in straight]
    # All are there: the model is not even loaded.
    assert run(*words, "--output", output, "--block-size", "0").code == 0
    assert output.read_bytes().splitlines() == lines
    assert "other prompts" in refused(run(*words, "--top-k", "3", "--output", output))
    output.write_text('{"a": 1}\n')
    assert "no result" in refused(run(*words, "--output", output))


# ---------------------------------------------------------------- chat, serve, bench


def test_chat_keeps_the_conversation(run, model, expect):
    params = SamplingParams(max_tokens=6)
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    first = expect.chat(talk, params)[0].text
    longer = [*talk, {"role": "assistant", "content": first}, {"role": "user", "content": "and now"}]
    second = expect.chat(longer, params)[0].text
    how = ["chat", model, "--system", "be brief", "--max-tokens", 6]
    done = run(*how, stdin="hello\nand now\n/reset\nhello\n/exit\nnever said\n")
    assert (done.code, done.out, done.err) == (0, f"{first}\n{second}\n{first}\n", "")
    odd = run(*how, stdin=f"/what\n{'long ' * 600}\nhello\n")
    assert odd.code == 0 and odd.out == first + "\n"
    assert "There is no /what" in odd.err and "/reset" in odd.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_until_a_signal(model, number):
    words = ["serve", model, "--port", "0", "--served-model-name", "tiny", "--device", "cpu"]
    with subprocess.Popen([*MINIVLLM, *words], stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stderr.readline()
            url = re.search(r"http://127\.0\.0\.1:\d+/v1", line)[0]
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
            assert httpx.post(f"{url}/completions", json=body, timeout=60).status_code == 200
            process.send_signal(number)
            assert process.wait(30) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()


@pytest.mark.parametrize(("words", "seed"), [([], 0), (["--seed", "7"], 7)])
def test_serve_passes_the_seed_on(run, model, monkeypatch, words, seed):
    seeds = []

    def serve(make_engine, *_, **__):
        with make_engine() as engine:
            seeds.append(engine.seed)

    monkeypatch.setattr(server_run, "serve", serve)
    assert run("serve", model, "--device", "cpu", *words).code == 0 and seeds == [seed]


def test_bench_writes_figures(run, model, tmp_path, monkeypatch):
    small = bench.Workload("cpu_b1", 1, (8, 8), (6, 6), "cpu")
    monkeypatch.setitem(bench.WORKLOADS, "cpu_b1", small)
    file = tmp_path / "cpu.json"
    how = ["bench", model, "--device", "cpu", "--runs", 2, "--output", file, "--commit", "abc", "--workloads"]
    done = run(*how, "cpu_b1")
    assert done.code == 0 and "cpu_b1" in done.out and "tok/s" in done.out
    assert run(*how, "start", "--json").code == 0
    found = json.loads(file.read_text())
    assert found["commit"] == "abc" and found["torch"] == torch.__version__ and found["card"]
    figure = found["workloads"]["cpu_b1"]
    assert len(figure["runs"]) == 2 and figure["tok_s"] == pytest.approx(6 / figure["s"], rel=0.01)
    assert found["workloads"]["start"]["s"] > 0


def test_the_start_that_is_measured_is_this_package_s(model, tmp_path, monkeypatch):
    (tmp_path / "minivllm").mkdir()
    (tmp_path / "minivllm/__init__.py").write_text("raise ImportError('another')")
    monkeypatch.chdir(tmp_path)
    figure = bench.measure_start(str(model), "cpu", 1, 2)
    assert len(figure["runs"]) == 2 and min(figure["runs"]) <= figure["s"] <= max(figure["runs"])
    with pytest.raises(RuntimeError, match=r"did not start: \w+Error: .*nowhere"):
        bench.measure_start(str(tmp_path / "nowhere"), "cpu", 1, 1)


def test_another_checkout_s_commit_is_not_this_one_s(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", tmp_path, *identity, "commit", "-q", "--allow-empty", "-m", "a"], check=True)
    (tmp_path / "site-packages").mkdir()
    assert bench.commit_name(tmp_path / "site-packages") == "unknown"
    assert len(bench.commit_name(tmp_path)) >= 7


def test_bench_refuses_at_once_what_cannot_be_measured(run, model, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "run_minivllm", lambda *_, **__: 1 / 0)
    file = tmp_path / "notes.txt"
    file.write_text("no model")
    cases = [(file, "is a file; a model is a directory"), (tmp_path, "no config.json"), ("/no/model", "no model")]
    for path, said in cases:
        assert said in refused(run("bench", path, "--device", "cpu"))
    done = run("bench", model, "--device", "cpu", "--output", tmp_path)
    assert f"--output {tmp_path} is a directory" in refused(done)


@pytest.mark.parametrize("held", ["garbage", "[]", '{"card": 1}', '{"workloads": []}', ""])
def test_bench_refuses_to_write_over_what_is_not_its_own(run, model, tmp_path, monkeypatch, held):
    monkeypatch.setattr(bench, "run_minivllm", lambda *_, **__: 1 / 0)
    file = tmp_path / "notes.json"
    file.write_text(held)
    for output in (file, file / "below.json"):
        assert "notes.json" in refused(run("bench", model, "--device", "cpu", "--output", output))
    assert file.read_text() == held


def test_the_benchmark_of_engines_refuses_it_before_it_measures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "run_minivllm", lambda *_, **__: 1 / 0)
    file = tmp_path / "notes.json"
    file.write_text("garbage")
    script = str(Path(__file__).parents[1] / "benchmarks" / "engine.py")
    cases = {tmp_path: "is a directory", file: "notes.json holds something else", file / "below.json": "notes.json"}
    for output, said in cases.items():
        monkeypatch.setattr(sys, "argv", [script, "/no/model", "--device", "cpu", "--output", str(output)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(script, run_name="__main__")
        assert end.value.code == 2 and said in capsys.readouterr().err
    assert file.read_text() == "garbage"


def test_bench_measures_the_card_that_was_asked_for(run, model, monkeypatch):
    cards, asked = {0: "NVIDIA T4", 1: "NVIDIA H200"}, []
    monkeypatch.setattr(intake, "choose_device", torch.device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: cards[torch.device(device).index or 0])

    def figures(path, names, runs, device, *_, **__):
        asked.append((device, names))
        return {}

    monkeypatch.setattr(bench, "run_minivllm", figures)
    found = json.loads(run("bench", model, "--device", "cuda:1", "--json").out)
    assert found["card"] == "NVIDIA H200"
    [(device, names)] = asked
    assert device == "cuda:1" and names[0] == "latency_b1" and "cpu_b1" not in names
    assert bench.machine_of("cuda:1") is bench.H200 and bench.machine_of("cuda:0") is None


def test_a_random_model(run, tmp_path, monkeypatch):
    shape = {**SHAPES["llama-3.2-1b"], "vocab_size": 200, "hidden_size": 64, "intermediate_size": 64}
    shape.update(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    monkeypatch.setitem(SHAPES, "small", shape)
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    path = random_model("small")
    assert path == tmp_path / "cache" / "random-small" == random_model("small")
    other = random_model("small", tmp_path / "other")
    weights = (path / "model.safetensors").read_bytes()
    assert weights == (other / "model.safetensors").read_bytes()
    assert weights != (random_model("small", tmp_path / "third", seed=1) / "model.safetensors").read_bytes()
    done = run("bench", "random:small", "--device", "cpu", "--runs", 1, "--workloads", "cpu_b8")
    assert done.code == 0 and "cpu_b8" in done.out


def test_convert(run, model, tmp_path, expect):
    file = from_directory(tmp_path / "x.gguf", Path(model), "llama")
    out = tmp_path / "converted"
    assert run("convert", file, out, "--dtype", "float32").out == f"{out}\n"
    answer = expect.generate("hello", SamplingParams(max_tokens=5))[0].text
    assert run("generate", out, "hello", "--max-tokens", 5).out == answer + "\n"


def test_interrupts_and_closed_pipes(run, model, monkeypatch):
    def interrupt(args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cli, "_run", interrupt)
        done = run("generate", model, "hello")
    assert (done.code, done.err) == (130, "")
    words = [*MINIVLLM, "generate", model, "--format", "jsonl", "--max-tokens", "2", "--device", "cpu"]
    piped = subprocess.run(
        ["sh", "-c", '"$@" | head -n 1', "sh", *words, *["hello"] * 200], capture_output=True, text=True, check=True
    )
    assert piped.stdout.count("\n") == 1 and piped.stderr == ""


def test_the_floors():
    """Of Llama-3.2-1B on an H200, worked out by hand from bytes and operations."""
    costs = bench.Costs(LLAMA, torch.bfloat16, bench.H200)
    assert costs.prefill(8192) == pytest.approx(25.4e-3, rel=0.01)
    assert costs.decode_step([128]) == pytest.approx(2 * 1.2357e9 / 4.6e12, rel=0.01)
    assert costs.decode_step([640] * 256) == pytest.approx(
        2 * 1.2357e9 * 256 / 800e12 + 256 * 640 * 32768 / 4.6e12, rel=0.01
    )
    seconds = {n: costs.floor(w.requests(1000)) for n, w in bench.WORKLOADS.items()}
    assert seconds["latency_b1"] == pytest.approx(0.276, rel=0.01)
    assert seconds["decode_b256"] == pytest.approx(0.841, rel=0.01)
    assert seconds["prefill_32x1k"] == pytest.approx(82.5e-3, rel=0.01)


def test_workloads_are_the_same_each_time():
    for workload in bench.WORKLOADS.values():
        requests = workload.requests(500)
        assert requests == workload.requests(500) and len(requests) == workload.count
        assert all(0 <= token < 500 for r in requests for token in r.prompt)
        low, high = workload.prompt_tokens
        assert all(low <= len(r.prompt) <= high for r in requests)
    assert bench.choose(None, "cpu") == ["cpu_b1", "cpu_b8", "start"]


# ---------------------------------------------------------------- plan, doctor, help


def test_plan_agrees_with_an_engine(run, model):
    how = ["plan", model, "--kv-cache-bytes", "64KiB", "--max-seq-len", 100, "--num-slots", 3]
    done = run(*how, "--block-size", 8, "--dtype", "float32", "--json")
    plan = json.loads(done.out)
    sizes = {"num_slots": 3, "block_size": 8, "kv_cache_bytes": 1 << 16, "max_seq_len": 100}
    with BatchEngine(model, device="cpu", dtype="float32", **sizes) as engine:
        assert plan["num_blocks"] == engine.sizes.num_blocks
        assert plan["cache_tokens"] == engine.sizes.num_blocks * 8
        # As many of full length as it says run without a preemption, and one more does not.
        count = plan["sequences"]
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        prompts = [[i + 2] * 40 for i in range(count + 1)]
        engine.generate(prompts[:count], params)
        assert engine.stats.preemptions == 0
        engine.generate(prompts, params)
        assert engine.stats.preemptions > 0 or count == 3
    text = run(*how, "--device", "cuda").out
    assert "blocks of 64 tokens" in text and "bfloat16" in text and re.search(r"^device +cuda: ", text, re.MULTILINE)


@pytest.mark.parametrize("compiled", [True, False])
def test_plan_takes_the_defaults_of_an_engine_here(run, model, monkeypatch, compiled):
    def has_cuda():
        if compiled:
            return False
        raise ImportError("not compiled")

    monkeypatch.setattr(plan, "has_cuda", has_cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = json.loads(run("plan", model, "--kv-cache-bytes", "256KiB", "--json").out)
    with BatchEngine(model, device="cpu", kv_cache_bytes=1 << 18) as engine:
        sizes = {name: getattr(engine.sizes, name) for name in ("num_slots", "block_size", "num_blocks", "max_seq_len")}
        assert {name: found[name] for name in sizes} == sizes
        assert found["dtype"] == str(engine.dtype).removeprefix("torch.") and found["device"] == "cpu"


def test_plan_of_a_known_model(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SHAPES["llama-3.2-1b"]))
    plan = make_plan(str(file), 8 << 30, max_seq_len=8192, device="cuda")
    assert plan.kv_bytes_per_token == 32768 and plan.block_bytes == 32768 * 64
    assert plan.num_blocks == 4096 and plan.sequences == 32
    assert plan.weight_bytes == pytest.approx(2.4716e9, rel=1e-3)
    assert plan.fits[512] == 256 and plan.fits[4096] == 64
    assert "raise --kv-cache-bytes" in make_plan(str(tmp_path), 1 << 22, device="cuda").text()


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("1KB", 1000), ("1KiB", 1024), ("1.5 GiB", 3 << 29), ("8e9", 8 * 10**9), ("2g", 2 * 10**9)],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


def test_doctor_is_content_here(run):
    done = run("doctor")
    assert done.code == 0 and "All is well." in done.out
    assert torch.__version__ in done.out
    checks = {check["name"]: check for check in json.loads(run("doctor", "--json").out)}
    assert checks["kernels"]["state"] == "well" or torch.cuda.is_available()


def test_doctor_says_what_to_type(run, monkeypatch):
    info = _extension.BuildInfo("2.1.0", "", ())
    monkeypatch.setattr(_extension, "build_info", lambda: info)
    _extension.load.cache_clear()
    try:
        done = run("doctor")
    finally:
        _extension.load.cache_clear()
    assert done.code == 1 and "pip install" in done.out and "1 thing is wrong" in done.out


def test_doctor_on_a_card_that_the_build_is_not_for(monkeypatch):
    properties = SimpleNamespace(name="Old Card", major=7, minor=0)
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_properties": lambda device: properties,
        "get_device_capability": lambda device: (7, 0),
        "get_device_name": lambda device: "Old Card",
        "mem_get_info": lambda device: (1 << 30, 2 << 30),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(_extension, "build_info", lambda: _extension.BuildInfo("2.13.0", "13.0", ("9.0a",)))
    [card] = [check for check in doctor._cards() if check.name == "card 0"]
    assert card.state == "wrong" and "7.0" in card.found and "TORCH_CUDA_ARCH_LIST=7.0" in card.advice


def test_doctor_names_missing_extras(monkeypatch):
    monkeypatch.setitem(doctor._EXTRAS, "server", ("no-such-package",))
    [check] = [check for check in doctor.examine() if check.name == "server"]
    assert check.state == "note" and "minivllm[server]" in check.advice


def test_serve_says_what_to_install(run, model, monkeypatch):
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "uvicorn" else object())
    assert "pip install 'minivllm[server]'" in refused(run("serve", model))


def test_help_is_quick_and_has_examples(run):
    for command in ("", *filter(None, cli.EXAMPLES)):
        done = run(*([command] if command else []), "--help")
        assert done.code == 0 and "minivllm" in done.out
    code = "import sys; from minivllm import cli\ntry: cli.main(['--help'])\nfinally: print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "False"
    done = subprocess.run([*MINIVLLM, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("minivllm ")
