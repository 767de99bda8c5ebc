"""The examples and the notebook run, on the demo model, with few tokens."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import sys
from pathlib import Path

import pytest
from notebooks import code_cells, run_cell
from test_live import server

import minivllm
from minivllm import SamplingParams

EXAMPLES = Path(__file__).parent.parent / "examples"
MOST = 6  # tokens an answer has here

pytestmark = pytest.mark.usefixtures("demo_model")  # made once, before any of them looks for it


def short(**params):
    """Stand in for SamplingParams: answers have a few tokens."""
    return SamplingParams(**{**params, "max_tokens": min(params.get("max_tokens") or MOST, MOST)})


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Return a function that runs an example as a script, its answers cut short, and returns what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def run(name, *arguments, stdin=""):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        spec = importlib.util.spec_from_file_location(f"example_{Path(name).stem}", EXAMPLES / name)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if hasattr(module, "SamplingParams"):
            module.SamplingParams = short
        module.main()
        return capsys.readouterr().out

    return run


def test_every_example_is_tested():
    tested = set(re.findall(r"run\(\s*\"(\w+\.py)\"", Path(__file__).read_text(encoding="utf-8")))
    assert tested == {path.name for path in EXAMPLES.glob("*.py")} - {"demo_model.py"}


def test_quickstart(run):
    said = run("quickstart.py")
    assert said.count("Q: ") == said.count("A: ") == 4
    assert "prompt 3 takes slot" in said and "tokens/s" in said


def test_streaming(run):
    said = run("streaming.py")
    assert re.search(r"^0: '.*' \(length\)$", said, re.MULTILINE) and re.search(r"^1: '", said, re.MULTILINE)
    assert said.rstrip().endswith("0 requests are running")


def test_chat(run):
    said = run("chat.py", stdin="What is the capital of France?\nAnd of Italy?\n\n")
    first, second = re.findall(r"\[(\d+) of (\d+) prompt tokens cached", said)
    assert first[0] == "0" and 0 < int(second[0]) < int(second[1])


def test_batch_jsonl(run, tmp_path):
    (tmp_path / "in.jsonl").write_text(
        '{"prompt": "The sky is"}\n{"prompt": []}\n{"prompt": [5, 6], "max_tokens": 3}\n'
    )
    said = run("batch_jsonl.py", "in.jsonl", "out.jsonl")
    first, bad, third = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert first["prompt"] == "The sky is" and first["text"] and "error" not in first
    assert said == "3 answers in out.jsonl, 1 of them errors\n"
    assert bad["finish_reason"] == "error" and "empty" in bad["error"]
    assert third["finish_reason"] in ("length", "stop")


def test_timeline(run, tmp_path):
    assert "prompt tokens computed" in run("timeline.py", tmp_path)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > 100


def test_timeline_without_matplotlib(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match=r"^no timeline\.png: [^\n]*minivllm\[plot\]'$"):
        run("timeline.py", tmp_path)
    assert (tmp_path / "trace.json").is_file() and not (tmp_path / "timeline.png").exists()


def test_the_client_without_openai(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(SystemExit, match=r"pip install openai$"):
        run("server_client.py")


def test_custom_logits(run):
    answers = re.findall(r"\? +(Yes|No|It depends) +\(by itself", run("custom_logits.py"))
    assert len(answers) == 3


def test_server_client(run, demo_model):
    with server(demo_model, num_slots=4) as served:
        said = run("server_client.py", served.base)
    assert said.count("Q: ") == said.count("A: ") == 3 and "the server has tiny" in said


def test_the_notebook_runs_and_shows_what_it_says(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(minivllm, "SamplingParams", short)
    namespace = {}
    try:
        shown = [run_cell(source, namespace)[1] for source in code_cells(EXAMPLES / "tour.ipynb")]
    finally:
        namespace["engine"].close()
    kinds = [type(value).__name__ for value in shown if value is not None]
    assert kinds[:4] == ["Generation", "QueueList", "SlotList", "BatchEngine"]
    assert all(hasattr(value, "_repr_html_") for value in shown if type(value).__name__ in kinds[:4])
    assert shown[-2] is True, "the same request alone gives other tokens"


def test_the_notebook_has_its_outputs():
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells if cell["cell_type"] == "code" for output in cell["outputs"]]
    kinds = [kind for output in outputs for kind in output.get("data", {})]
    assert kinds.count("text/html") >= 6 and kinds.count("image/png") == 1
    assert not any(output["output_type"] == "error" for output in outputs)
