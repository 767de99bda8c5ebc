"""``minivllm generate``: answers to many prompts."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.commands.jobs import Job, ResultFile, read_jobs
from minivllm.commands.options import make_engine, sampling
from minivllm.request import RequestError, SamplingParams

if TYPE_CHECKING:
    from minivllm.engine import BatchEngine
    from minivllm.request import Generation

Found = Callable[[Job, "Generation"], None]


def run(args: argparse.Namespace) -> int:
    """Answer the prompts; 1 where one of them ended with an error, 2 where all were refused."""
    if args.output is not None and args.format == "text":
        raise ValueError("--output holds JSONL: leave --format text out")
    jobs = read_jobs(args.prompts, args.input, args.jsonl, args.whole, args.chat, sampling(args))
    if args.output is None:
        return _print(args, jobs)
    results = ResultFile(Path(args.output), [job.key(args.model) for job in jobs])
    left = [job for job in jobs if job.index not in results.done]
    try:
        if left:
            with make_engine(args, progress=args.progress) as engine:

                def found(job: Job, generation: Generation) -> None:
                    results.write(job.index, _entry(job, generation))

                answer(engine, left, found, progress=args.progress)
    finally:
        results.close()
    return 0 if all(results.done.values()) else 1


def _print_as_it_comes(args: argparse.Namespace, job: Job) -> int:
    """Write one answer's text to standard output while it grows."""
    with make_engine(args, progress=args.progress) as engine:
        try:
            handle = engine.submit(_prompt(engine, job), _seeded(engine, job))
        except (TypeError, ValueError) as error:
            print(f"minivllm: {type(error).__name__}: {error}", file=sys.stderr)
            return 2
        for delta in handle:
            print(delta.text, end="", flush=True)
        print()
        try:
            handle.result()
        except RequestError as error:
            print(f"minivllm: prompt {job.index}: {error}", file=sys.stderr)
            return 1
    return 0


def _print(args: argparse.Namespace, jobs: list[Job]) -> int:
    """Write to standard output, in the prompts' order."""
    if args.format == "text" and len(jobs) == 1 and jobs[0].params.n == 1:
        return _print_as_it_comes(args, jobs[0])
    waiting: dict[int, tuple[Job, Generation]] = {}
    shown = failed = refused = 0

    def found(job: Job, generation: Generation) -> None:
        nonlocal shown, failed, refused
        failed += generation.error is not None
        refused += not generation.samples
        waiting[job.index] = (job, generation)
        while shown in waiting:
            show(*waiting.pop(shown))
            shown += 1

    def show(job: Job, generation: Generation) -> None:
        if args.format == "jsonl":
            print(json.dumps(_entry(job, generation), ensure_ascii=False), flush=True)
            return
        if not generation.samples and len(jobs) > 1:  # it was refused before it began
            print(f"==> {job.index} <==", flush=True)
        for sample in generation.samples:
            if len(jobs) > 1 or len(generation.samples) > 1:
                number = f"{job.index}.{sample.sample}" if len(generation.samples) > 1 else str(job.index)
                print(f"==> {number} <==")
            print(sample.text, flush=True)
        if generation.error is not None:
            where = "" if f"prompt {job.index}" in generation.error else f"prompt {job.index}: "
            print(f"minivllm: {where}{generation.error}", file=sys.stderr)

    with make_engine(args, progress=args.progress) as engine:
        answer(engine, jobs, found, progress=args.progress)
    return 2 if refused == len(jobs) else 1 if failed else 0


def _entry(job: Job, generation: Generation) -> dict[str, Any]:
    from minivllm.plain import plain_generation

    return {**job.label(), **plain_generation(generation)}


def answer(engine: BatchEngine, jobs: Iterable[Job], found: Found, *, progress: bool = False) -> None:
    """Answer jobs, few more at a time than there are slots; ``found`` is called as they end.

    A job that names no seed gets the one that it would have if all were run in one go, so that a run in two parts
    draws the same tokens.
    """
    from tqdm.auto import tqdm

    from minivllm.intake import failed

    listed = list(jobs)
    waiting = iter(listed)
    live: dict[int, Job] = {}
    stuck = 0
    with tqdm(total=len(listed), desc="Answering", unit="prompt", disable=not progress) as bar:
        while True:
            while len(live) < 2 * engine.sizes.num_slots and (job := next(waiting, None)) is not None:
                try:
                    live[engine.submit(_prompt(engine, job), _seeded(engine, job)).request_id] = job
                except (TypeError, ValueError) as error:
                    refusal = failed(job.prompt, job.index, error)
                    # To the engine each is a call by itself, with one prompt, number 0.
                    text = re.sub(r"^(\w+: prompt) 0\b", rf"\1 {job.index}", refusal.error or "")
                    found(job, replace(refusal, error=text))
                    bar.update(1)
            if not live:
                return
            try:
                ended = engine.step()
                stuck = 0
            except Exception:
                # Those it concerns have ended with the error, and the next step hands them out.
                stuck += 1
                if stuck > 1:
                    raise
                continue
            for generation in ended:
                if (job := live.pop(generation.request_id, None)) is not None:
                    found(job, generation)
                    bar.update(1)


def _seeded(engine: BatchEngine, job: Job) -> SamplingParams:
    """Return the job's parameters with a seed that follows from its place."""
    from minivllm.sampler import derive_seed

    params = job.params
    return params if params.seed is not None else replace(params, seed=derive_seed(engine.seed, job.index))


def _prompt(engine: BatchEngine, job: Job) -> str | list[int]:
    if job.messages is None:
        return job.prompt if job.prompt is not None else ""
    from minivllm.intake import need_tokenizer

    return need_tokenizer(engine.tokenizer, "chat").apply_chat_template(job.messages)
