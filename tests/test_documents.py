"""The documents: their code runs, their links lead somewhere, the API reference is what the docstrings say."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import openai
import pytest
from tiny import tiny_model

from minivllm import BatchEngine, cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODELS = ("path/or/hub-id", "path/to/model")  # what the documents call a model
PORT = "8000"  # and where they find a server
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: (\S.*?) -->\s*$")


@dataclass
class Block:
    language: str
    code: str
    line: int
    reason: str | None  # why it is not run


def blocks_of(page):
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        mark = NOT_RUN.search(text[: found.start()])
        yield Block(found[2], found[3], text[: found.start()].count("\n") + 2, mark and mark[1])


def name(page):
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # As many ids as the documents' own examples name; the tokenizer knows the first 320.
    return tiny_model(tmp_path_factory.mktemp("model"), vocab_size=8192)


class Runner:
    """Run one page's blocks in order: Python in one namespace, shell lines in one folder, a server behind them."""

    def __init__(self, model, folder):
        self.model, self.folder = str(model), folder
        self.namespace = {"__name__": "document"}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = str(free.getsockname()[1])
        self.server = None

    def fill_in(self, code):
        for stand_in in MODELS:
            code = code.replace(stand_in, self.model)
        return code.replace(f":{PORT}", f":{self.port}").replace(f"--port {PORT}", f"--port {self.port}")

    def python(self, block, page):
        code = compile("\n" * (block.line - 1) + self.fill_in(block.code), name(page), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, self.namespace)
        assert ".cancel()" not in block.code or "cancelled" in out.getvalue(), "what is cancelled had ended"

    def shell(self, block):
        code = self.fill_in(block.code)
        lines = [line for line in code.replace("\\\n", " ").splitlines() if line.strip()]
        if lines[0].startswith("minivllm serve"):
            assert len(lines) == 1 and self.server is None
            self.serve(shlex.split(lines[0]))
        elif all(line.startswith("minivllm ") and not set("|<>$&") & set(line) for line in lines):
            for line in lines:  # in this process: starting torch anew for each takes seconds
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    assert cli.main(shlex.split(line)[1:]) == 0, line
                assert out.getvalue().strip(), f"{line} said nothing"
        else:
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
            command = ["bash", "-euc", code]
            done = subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=100)
            assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
            assert done.stdout.strip(), f"{code} said nothing"

    def serve(self, command):
        arguments = [sys.executable, "-m", "minivllm", *command[1:]]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.server = subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, text=True)
        end = time.monotonic() + 60
        while True:
            assert self.server.poll() is None, self.server.stderr.read()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except OSError:
                assert time.monotonic() < end, "the server did not start"
                time.sleep(0.1)

    def stop(self):
        try:
            for value in self.namespace.values():
                if isinstance(value, (BatchEngine, openai.OpenAI)):
                    value.close()
        finally:
            if self.server is not None:
                self.server.send_signal(signal.SIGINT)
                _, error = self.server.communicate(timeout=60)
        assert self.server is None or self.server.returncode == 0, error


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_code_runs(page, model, tmp_path, monkeypatch):
    blocks = [b for b in blocks_of(page) if b.language in ("python", "bash")]
    monkeypatch.chdir(tmp_path)
    runner = Runner(model, tmp_path)
    try:
        for block in blocks:
            if block.reason is not None:
                continue
            if "curl" in block.code and shutil.which("curl") is None:
                continue
            if block.language == "python":
                runner.python(block, page)
            else:
                runner.shell(block)
    finally:
        runner.stop()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_exist(page):
    """What is not run is read at least: commands by the parser of minivllm, targets of make, files of this checkout."""
    makefile = (ROOT / "Makefile").read_text()
    for block in blocks_of(page):
        if block.language not in ("bash", "sh", ""):
            continue
        for line in block.code.replace("\\\n", " ").splitlines():
            words = [w for w in shlex.split(line, comments=True) if not re.fullmatch(r"[A-Z_]+=.*", w)]
            if words[:1] == ["minivllm"]:
                with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                    cli.build_parser().parse_args([w for w in words[1:] if w not in "|&"])
            elif words[:1] == ["make"]:
                assert all(re.search(rf"^{w}:", makefile, re.MULTILINE) for w in words[1:]), line
            elif words[:1] == ["python"] and words[1].endswith(".py"):
                assert (ROOT / words[1]).is_file(), line


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|srcset)=\"([^\"]+)\"", text)
    for target in targets:
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        there = (page.parent / path) if path else page
        assert there.exists(), f"{name(page)}: {target}"
        if anchor and there.suffix == ".md":
            titles = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{name(page)}: {target}"


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


def test_every_picture_is_shown():
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for picture in (ROOT / "docs" / "images").iterdir():
        assert picture.name in pages, picture.name
        assert picture.stat().st_size < 400_000, picture.name


def plot():
    return runpy.run_path(str(ROOT / "docs" / "make_plot.py"))["render"]


def test_the_benchmarks_picture_is_what_the_figures_say():
    there = (ROOT / "docs" / "benchmarks.svg").read_text(encoding="utf-8")
    assert there == plot()(), "docs/benchmarks.svg is stale: python docs/make_plot.py"
    assert "vLLM 0.26 were given; they are not measured by this repository." in there
    for page in ("README.md", "docs/benchmarks.md"):
        assert "benchmarks.svg" in (ROOT / page).read_text(encoding="utf-8")


def test_the_picture_has_the_kernels_where_they_were_measured(tmp_path):
    results = Path(shutil.copytree(ROOT / "benchmarks" / "results", tmp_path / "results"))
    products = [
        {"name": "qkv", "num_tokens": 1, "us": 5, "torch_us": 6},
        {"name": "decode_step", "num_tokens": 1, "us": 700, "torch_us": 800},
        {"name": "decode_step", "num_tokens": 256, "us": 1400, "torch_us": 1200},
    ]
    attention = [
        {"name": "decode b1 c128", "us": 5, "tb_s": 0.1, "share": 0.1},
        {"name": "prefill 1x8192", "us": 1500, "tflops": 360, "flash": 270, "cudnn": 430},
        {"name": "prefill 1x4096 block 1", "us": 9000, "tflops": 170},
    ]
    figures = {"commit": "abc1234", "date": "2026-01-02", "linear": products, "attention": attention}
    (results / "h200_kernels.json").write_text(json.dumps(figures))
    elements = list(ElementTree.fromstring(plot()(results)).iter())
    words = [e.text for e in elements if e.text]
    for said in ("700 µs, cuBLAS 800 µs", "1.40 ms, cuBLAS 1.20 ms", "1.50 ms, flash 2.00 ms", "1.26 ms", "1 × 8,192"):
        assert said in words
    assert "its kernels at abc1234" in words[-2]
    edges = [float(e.get("x")) + float(e.get("width")) for e in elements if e.tag.endswith("rect")]
    assert max(edges) == edges[0] == 900, "no bar leaves the picture"


def test_the_api_reference_is_what_the_docstrings_say():
    made = runpy.run_path(str(ROOT / "docs" / "make_api.py"))["render"]()
    there = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert there == made, "docs/api.md is stale: python docs/make_api.py"
