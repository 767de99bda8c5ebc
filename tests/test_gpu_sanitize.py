"""The driver of compute-sanitizer: what it runs again and what its file says. The tool itself needs a card."""

from __future__ import annotations

import json
import sys

import gpu_sanitize
import pytest
import torch

TOOLS, PARTS = gpu_sanitize.TOOLS, ("a", "b")


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Return a function that runs the driver, with what a part comes to, and gives status, parts run and file."""
    monkeypatch.setattr(gpu_sanitize, "PARTS", {part: [] for part in PARTS})
    monkeypatch.setattr(gpu_sanitize, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(gpu_sanitize, "code_hash", lambda: driven.code)
    monkeypatch.setattr(gpu_sanitize, "build_library", lambda folder: "library")
    monkeypatch.setattr(gpu_sanitize.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(gpu_sanitize.signal, "signal", lambda *given: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")

    def driven(outcome, *arguments):
        ran = []

        def run(tool, part, library, seconds):
            ran.append((tool, part))
            return outcome(tool, part)

        monkeypatch.setattr(gpu_sanitize, "run", run)
        monkeypatch.setattr(sys, "argv", ["gpu_sanitize.py", "--jobs", "1", *arguments])
        status = gpu_sanitize.main()
        return status, ran, json.loads(gpu_sanitize.RESULTS.read_text())

    driven.code = "f" * 64
    return driven


def test_a_run_goes_on_where_the_last_one_of_the_same_code_stopped(driver):
    def one_fails(tool, part):
        return "status 1" if (tool, part) == ("memcheck", "b") else "clean"

    status, ran, file = driver(one_fails)
    assert status == 1 and sorted(ran) == sorted((tool, part) for tool in TOOLS for part in PARTS)
    assert ran[0][0] == "racecheck", "the slowest tool first"
    assert file["results"]["memcheck"] == {"a": "clean", "b": "status 1"}
    assert set(file["seconds"]) == set(TOOLS) and set(file["seconds"]["memcheck"]) == set(PARTS)
    status, ran, file = driver(lambda tool, part: "clean")
    assert status == 0 and ran == [("memcheck", "b")]
    assert all(what == "clean" for parts in file["results"].values() for what in parts.values())
    assert len(driver(lambda tool, part: "clean", "--again")[1]) == len(TOOLS) * len(PARTS)
    assert driver(lambda tool, part: "clean")[1] == []
    driver.code = "e" * 64
    assert len(driver(lambda tool, part: "clean")[1]) == len(TOOLS) * len(PARTS), "another code: all of it"


def test_what_was_not_reached_is_said(driver):
    def stop(tool, part):
        if part == "b":
            raise KeyboardInterrupt
        return "clean"

    with pytest.raises(KeyboardInterrupt):
        driver(stop)
    results = json.loads(gpu_sanitize.RESULTS.read_text())["results"]
    assert {what for parts in results.values() for what in parts.values()} == {"clean", "not run"}


def test_a_known_failure_stays_one_until_it_was_run_again(driver):
    driver(lambda tool, part: "status 9" if part == "b" else "clean")
    calls = []

    def stop_at_the_second(tool, part):
        calls.append(tool)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return "clean"

    with pytest.raises(KeyboardInterrupt):
        driver(stop_at_the_second)
    results = json.loads(gpu_sanitize.RESULTS.read_text())["results"]
    assert sorted(results[tool]["b"] for tool in TOOLS) == ["clean", "status 9", "status 9"]


def test_the_slowest_of_the_last_run_comes_first(driver):
    clean = driver(lambda tool, part: "clean")[2]
    clean["seconds"] = {"memcheck": {"a": 1, "b": 30}, "racecheck": {"a": 9, "b": 5}, "synccheck": {"a": 7, "b": 2}}
    gpu_sanitize.RESULTS.write_text(json.dumps(clean))
    order = driver(lambda tool, part: "clean", "--again")[1]
    took = [clean["seconds"][tool][part] for tool, part in order]
    assert took == sorted(took, reverse=True) and len(took) == len(TOOLS) * len(PARTS)


@pytest.mark.parametrize("held", ["{", "", "[]", '{"results": 3}', '{"results": {"memcheck": 1}, "seconds": 2}'])
def test_a_damaged_file_is_written_anew(driver, held):
    gpu_sanitize.RESULTS.write_text(held)
    status, ran, file = driver(lambda tool, part: "clean")
    assert status == 0 and len(ran) == len(TOOLS) * len(PARTS)
    assert all(what == "clean" for parts in file["results"].values() for what in parts.values())
