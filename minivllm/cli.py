"""The command ``minivllm``: what it understands, and how it says that something is wrong."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from minivllm import __version__
from minivllm.commands.options import Parser, add_engine, add_exact, add_sampling, make_engine, parse_bytes

_RAW = argparse.RawDescriptionHelpFormatter

EXAMPLES = {
    "": """examples:
  minivllm generate path/to/model "Once upon a time" --max-tokens 50
  minivllm chat path/to/model
  minivllm serve path/to/model --port 8000
  minivllm plan path/to/model --kv-cache-bytes 8GiB --device cuda
  minivllm doctor""",
    "generate": """prompts come from the arguments, from --input (one a line; a .jsonl file holds texts, lists of token
ids, or objects {"prompt": …} or {"messages": […]} with an "id" and sampling parameters beside), or from
standard input, one a line. With --output, answers are appended as they come; the same command goes on
where a killed one stood.

examples:
  minivllm generate MODEL "What is 2+2?" --chat --max-tokens 64
  cat questions.txt | minivllm generate MODEL --format jsonl
  minivllm generate MODEL --input prompts.jsonl --output answers.jsonl --progress""",
    "chat": """examples:
  minivllm chat MODEL --system "Answer in one sentence." --temperature 0.7""",
    "serve": """examples:
  minivllm serve MODEL
  MINIVLLM_API_KEY=secret minivllm serve MODEL --host 0.0.0.0 --port 80
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Once", "max_tokens": 9}'""",
    "bench": """MODEL may be random:llama-3.2-1b, a model of that shape with random weights, made in the cache folder
($MINIVLLM_CACHE, else ~/.cache/minivllm).

workloads: by default latency_b1, decode_b8 to decode_b256, mixed_256, prefill_8k and prefill_32x1k on a card, cpu_b1
and cpu_b8 on the CPU, start on both. The number after b is how many requests run at once.

examples:
  minivllm bench random:llama-3.2-1b --output h200.json
  minivllm bench MODEL --workloads cpu_b1 cpu_b8 --runs 5""",
    "plan": """examples:
  minivllm plan MODEL --kv-cache-bytes 8GiB --device cuda
  minivllm plan path/config.json --kv-cache-bytes 500MB --max-seq-len 2048 --json""",
    "convert": """examples:
  minivllm convert model.Q4_K_M.gguf model/""",
    "doctor": """exit code 1 says that something is wrong.""",
}


def build_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="minivllm",
        description="A small, fast engine for Llama-family models.",
        epilog=EXAMPLES[""],
        formatter_class=_RAW,
    )
    parser.add_argument("--version", action="version", version=f"minivllm {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)

    def command(name: str, text: str) -> Parser:
        added: Parser = commands.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", epilog=EXAMPLES[name], formatter_class=_RAW
        )
        return added

    generate = command("generate", "answer prompts")
    add_engine(generate)
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="a text; none: see below")
    generate.add_argument("--input", metavar="FILE", help="read prompts from a file; - is standard input")
    generate.add_argument("--jsonl", action="store_true", help="the input is JSONL, whatever its name")
    generate.add_argument("--whole", action="store_true", help="the whole input is one prompt")
    generate.add_argument("--chat", action="store_true", help="send each text through the model's chat template")
    generate.add_argument("--format", choices=("text", "jsonl"), help="what to write (default: text; --output: jsonl)")
    generate.add_argument(
        "--output", metavar="FILE", help="append results to a JSONL file; those in it are not computed again"
    )
    generate.add_argument("--progress", action="store_true", help="show bars")
    add_sampling(generate)

    chat = command("chat", "talk with a model in the terminal")
    add_engine(chat)
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    add_sampling(chat, without=("n", "logprobs", "prompt_logprobs"))

    _add_serve(command("serve", "serve OpenAI's API over HTTP"))

    bench = command("bench", "measure this engine")
    bench.add_argument("model", metavar="MODEL", help="a directory, a .gguf file, a hub id, or random:llama-3.2-1b")
    bench.add_argument("--workloads", nargs="+", metavar="NAME", help="which (default: all that suit the device)")
    bench.add_argument(
        "--runs", type=int, default=3, metavar="N", help="runs after the warm-up; the median counts (default: 3)"
    )
    bench.add_argument("--device", help="cpu or cuda (default: cuda where there is a card)")
    add_exact(bench)
    bench.add_argument(
        "--output",
        metavar="FILE",
        help="write the figures as JSON; others in it stay where card and commit are the same",
    )
    bench.add_argument("--commit", help="written beside the figures (default: git's)")
    bench.add_argument("--json", action="store_true", help="print JSON in place of a table")

    plan = command("plan", "compute from config.json what fits, without a GPU")
    plan.add_argument("model", metavar="MODEL", help="a directory, its config.json, a .gguf file, or a hub id")
    plan.add_argument(
        "--kv-cache-bytes", type=parse_bytes, required=True, metavar="SIZE", help="size of the KV cache, such as 8GiB"
    )
    plan.add_argument(
        "--max-seq-len", type=int, metavar="N", help="longest prompt and answer, in tokens (default: the model's)"
    )
    plan.add_argument(
        "--device", choices=("cpu", "cuda"), help="whose defaults are taken (default: cuda where there is a card)"
    )
    plan.add_argument(
        "--num-slots", type=int, metavar="N", help="requests that run at once (default: 256, on the CPU 8)"
    )
    plan.add_argument("--block-size", type=int, metavar="N", help="tokens a block (default: 64, CPU 16)")
    plan.add_argument("--dtype", default="auto", help="auto, bfloat16, float16 or float32 (default: the file's own)")
    plan.add_argument("--json", action="store_true", help="print JSON")

    convert = command("convert", "turn a .gguf file into a model directory")
    convert.add_argument("gguf", metavar="GGUF", help="the file")
    convert.add_argument("out", metavar="OUT", help="the directory to make")
    convert.add_argument("--dtype", default="bfloat16", help="of the weights written (default: bfloat16)")

    doctor = command("doctor", "look for what is wrong with this installation")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_serve(serve: Parser) -> None:
    add_engine(serve)
    group = serve.add_argument_group("server")
    group.add_argument(
        "--seed", type=int, metavar="SEED", help="from which the seeds of requests without one are drawn (default: 0)"
    )
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; another than this machine's own needs a key (default: 127.0.0.1)",
    )
    group.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    group.add_argument("--api-key", metavar="KEY", help="wanted from clients (default: $MINIVLLM_API_KEY)")
    group.add_argument(
        "--served-model-name", metavar="NAME", help="what clients call the model (default: the last part of MODEL)"
    )
    group.add_argument(
        "--max-queue",
        type=int,
        default=1024,
        metavar="N",
        help="requests that may wait; the next is answered 429 (default: 1024)",
    )
    group.add_argument(
        "--max-body-bytes",
        type=parse_bytes,
        default=8 << 20,
        metavar="SIZE",
        help="longest request body (default: 8MiB)",
    )
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let pages of this origin call; may be repeated",
    )
    group.add_argument("--verbose", action="store_true", help="log every request")


def _serve(args: argparse.Namespace) -> int:
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise ImportError(f"the server needs {', '.join(missing)}: pip install 'minivllm[server]'")
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port must be in [0, 65535], not {args.port}")
    if args.max_queue < 0:
        raise ValueError(f"--max-queue must be at least 0, not {args.max_queue}")
    from minivllm.server.run import serve

    short = args.model.rstrip("/") if _is_hub_id(args.model) else Path(args.model).resolve().name
    names = [args.served_model_name] if args.served_model_name else [short]
    seed = {} if args.seed is None else {"seed": args.seed}
    serve(
        lambda: make_engine(args, **seed),
        list(dict.fromkeys([*names, args.model])),
        host=args.host,
        port=args.port,
        api_key=args.api_key or os.environ.get("MINIVLLM_API_KEY") or None,
        max_queue=args.max_queue,
        max_body_bytes=args.max_body_bytes,
        cors_origins=args.cors_origin,
        verbose=args.verbose,
    )
    return 0


def _is_hub_id(model: str) -> bool:
    return not Path(model).expanduser().exists() and model.count("/") <= 1


def _convert(args: argparse.Namespace) -> int:
    from minivllm.convert import convert_gguf

    if (Path(args.out) / "config.json").exists():
        raise ValueError(f"{args.out} holds a model already")
    if not Path(args.gguf).is_file():
        raise FileNotFoundError(f"there is no file {args.gguf}")
    print(convert_gguf(args.gguf, args.out, args.dtype))
    return 0


def _plan(args: argparse.Namespace) -> int:
    from minivllm.plan import make_plan

    plan = make_plan(
        args.model,
        args.kv_cache_bytes,
        max_seq_len=args.max_seq_len,
        num_slots=args.num_slots,
        block_size=args.block_size,
        dtype=args.dtype,
        device=args.device,
    )
    print(json.dumps(plan.to_dict(), indent=2) if args.json else plan.text())
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from minivllm.doctor import examine, report

    checks = examine()
    print(json.dumps([check._asdict() for check in checks], indent=2) if args.json else report(checks))
    return 1 if any(check.state == "wrong" for check in checks) else 0


def _run(args: argparse.Namespace) -> int:
    own = {"serve": _serve, "convert": _convert, "plan": _plan, "doctor": _doctor}
    if args.command in own:
        return own[args.command](args)
    code: int = import_module(f"minivllm.commands.{args.command}").run(args)
    return code


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    # argparse takes an optional positional for absent once a flag stands between: MODEL --max-tokens 5 "a prompt".
    flag = next((word for word in rest if word.startswith("-")), None)
    if args.command == "generate" and flag is None:
        args.prompts += rest
    elif rest:
        parser.error(f"unrecognised argument {flag or rest[0]!r}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the command line: 0 is well, 1 not all of it, 2 bad input, 130 Ctrl-C."""
    args = _parse(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an answer may hold what the terminal's encoding lacks
    try:
        code = _run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has enough; the interpreter's own flush at exit must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"minivllm: {_sentence(error)}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"minivllm: {_sentence(error)}", file=sys.stderr)
        return 1


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
