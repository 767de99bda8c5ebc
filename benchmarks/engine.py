"""Measure this engine, vLLM or transformers with the same requests.

    python benchmarks/engine.py random:llama-3.2-1b
    python benchmarks/engine.py MODEL --engine vllm --workloads decode_b32 --output vllm.json

The figures of this engine go to benchmarks/results/h200.json or cpu.json, by the card; elsewhere with --output. With
--no-exact they go to h200-no-exact.json, and the difference is what exactness costs.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from pathlib import Path

import torch

from minivllm import bench
from minivllm.commands.bench import check_output, check_runs, recorder
from minivllm.commands.options import check_device
from minivllm.loader import resolve_model
from minivllm.random_model import model_path

Run = Callable[[list[bench.Request]], object]
RESULTS = Path(__file__).parent / "results"


def vllm_runner(path: str, device: str) -> Run:
    """Return what runs requests on vLLM, its defaults but for what the workloads fix."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=path,
        skip_tokenizer_init=True,
        max_num_seqs=bench.NUM_SLOTS,
        max_model_len=8256,
        enable_prefix_caching=False,
        seed=0,
    )

    def run(requests: list[bench.Request]) -> None:
        params = [
            SamplingParams(temperature=0.0, max_tokens=r.new_tokens, ignore_eos=True, detokenize=False)
            for r in requests
        ]
        prompts = [{"prompt_token_ids": r.prompt} for r in requests]
        answers = llm.generate(prompts, params, use_tqdm=False)
        assert [len(a.outputs[0].token_ids) for a in answers] == [r.new_tokens for r in requests]

    return run


def transformers_runner(path: str, device: str) -> Run:
    """Return what runs requests on transformers, as one padded batch.

    It has no way to end rows singly, so all get the longest answer that is asked for.
    """
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto").to(device).eval()
    model.generation_config.eos_token_id = None

    def run(requests: list[bench.Request]) -> None:
        longest = max(len(r.prompt) for r in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, longest - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, longest - len(request.prompt) :] = 1
        new = max(r.new_tokens for r in requests)
        with torch.inference_mode():
            out = model.generate(
                ids.to(device), attention_mask=mask.to(device), max_new_tokens=new, do_sample=False, pad_token_id=0
            )
        assert out.shape == (len(requests), longest + new)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="random:llama-3.2-1b", help="a directory, or random:NAME")
    parser.add_argument("--engine", choices=("minivllm", "vllm", "transformers"), default="minivllm")
    parser.add_argument(
        "--no-exact", dest="exact", action="store_false", help="let cuBLAS multiply where it is faster (minivllm alone)"
    )
    parser.add_argument("--workloads", nargs="+", metavar="NAME")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", help="where there is no git to ask")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if not args.exact and args.engine != "minivllm":
        parser.error("--no-exact is for minivllm")
    try:
        if args.output is not None:
            check_output(args.output)
        check_runs(args.runs)
        check_device(args.device)
        path = str(resolve_model(model_path(args.model)))
        names = bench.choose(args.workloads, args.device)
        if args.engine != "minivllm":
            importlib.import_module(args.engine)
        commit = args.commit or bench.commit_name(Path(__file__).parents[1])
        engine = bench.engine_name(args.exact) if args.engine == "minivllm" else args.engine
        result = bench.header(engine, args.model, args.device, commit)
        output = args.output
        if output is None and args.engine == "minivllm":
            kind = "h200" if "H200" in result["card"] else args.device
            output = RESULTS / f"{kind}{'' if args.exact else '-no-exact'}.json"
            check_output(output)
            if output.is_file() and json.loads(output.read_bytes()).get("model") != result["model"]:
                raise ValueError(f"{output} is of another model: give --output")
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{engine} on {result['card']}, torch {result['torch']}\n{bench.TABLE_HEAD}", flush=True)

    told = recorder(result, output)
    if args.engine == "minivllm":
        bench.run_minivllm(path, names, args.runs, args.device, told, exact=args.exact)
    else:
        run = {"vllm": vllm_runner, "transformers": transformers_runner}[args.engine](path, args.device)
        vocab_size = json.loads((Path(path) / "config.json").read_text())["vocab_size"]
        for name in names:
            if name == bench.START:
                continue
            requests = bench.WORKLOADS[name].requests(vocab_size)
            seconds = bench.measure(run, requests, args.runs)
            floor = bench.floor_of(path, name, args.device)
            figure = bench.summary(seconds, bench.WORKLOADS[name], requests, floor)
            told(name, figure)
    if output is not None:
        print(f"written to {output}")


if __name__ == "__main__":
    main()
