"""BatchEngine: slots, queue, free-block list, block table, and the step that moves requests through them."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minivllm import logprobs
from minivllm._extension import first_process
from minivllm.block_pool import BlockPool
from minivllm.calls import Calls
from minivllm.config import ModelConfig, resolve_dtype
from minivllm.defaults import choose_sizes
from minivllm.intake import check_flags, check_seed, choose_device
from minivllm.integrity import check
from minivllm.loader import load_weights, resolve_model
from minivllm.lock import FairLock
from minivllm.model import Model
from minivllm.request import FinishReason, Generation
from minivllm.runner import Runner
from minivllm.saving import ModelFiles
from minivllm.scheduler import Scheduler
from minivllm.sequence import Request, Sequence
from minivllm.ticket import Ticket
from minivllm.timeline import Timeline
from minivllm.tokenizer import Tokenizer
from minivllm.turns import Turns
from minivllm.views import Views

if TYPE_CHECKING:
    from minivllm.batch import Batch

_TEXT_TURNS = 64  # steps after which a row's tokens become text, if nobody asked before


class BatchEngine(Turns, Calls, Views):
    """Serve a model by continuous batching over a paged KV cache.

    Parameters
    ----------
    model : str or Path
        A directory in the Hugging Face layout, a .gguf file, or a hub id.
    device : str or torch.device, optional
        CUDA where there is one, else the CPU.
    dtype : str or torch.dtype
        ``"auto"`` is the file's own, but for float32 on CUDA (bfloat16) and float16 on the CPU (float32).
    num_slots, block_size : int, optional
        Rows of the running batch: 256 on CUDA, 8 on the CPU. Tokens a block: 64 on CUDA, 16 on the CPU.
    num_blocks, kv_cache_bytes : int, optional
        Size of the KV cache, in blocks or in bytes; one of them. By default what ``num_slots`` sequences of
        ``max_seq_len`` (at most 8,192 on CUDA, 2,048 on the CPU) need, up to half of the card's free memory (a quarter
        of the free memory on the CPU).
    max_seq_len : int, optional
        Longest sequence, prompt and answer, in tokens. The model's own limit.
    max_step_tokens : int, optional
        Tokens computed in one step: longer prompts are cut into chunks. 8,192 on CUDA, 512 on the CPU.
    prefix_caching : bool
        Reuse the KV of equal prompt beginnings, by whole blocks.
    cuda_graphs : bool
        Replay decode steps from captured graphs.
    exact : bool
        Give a request the same bits alone and in any batch. False lets cuBLAS multiply on CUDA where it is the faster:
        in steps of more than 1,024 tokens on Hopper, everywhere on other cards and in float32. No effect on the CPU,
        where products are exact at no cost.
    seed : int
        From which the seeds of requests without one are drawn.
    progress : bool
        Show a bar while the weights are read.

    Examples
    --------
    >>> with BatchEngine(model, num_slots=2) as engine:  # engine.close() at its end
    ...     [g.finish_reason for g in engine.generate(["one", [1, 2, 3]], SamplingParams(max_tokens=3))]
    ['length', 'length']
    >>> engine.close()  # leaving the with statement did that; a second call does nothing
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        num_slots: int | None = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        kv_cache_bytes: int | None = None,
        max_seq_len: int | None = None,
        max_step_tokens: int | None = None,
        prefix_caching: bool = True,
        cuda_graphs: bool = True,
        exact: bool = True,
        seed: int = 0,
        progress: bool = False,
    ) -> None:
        self._closed = True  # until there is something to close
        check_flags(prefix_caching=prefix_caching, cuda_graphs=cuda_graphs, exact=exact, progress=progress)
        place, seed = choose_device(device), check_seed(seed)
        path = resolve_model(model)
        self.config = ModelConfig.from_dir(path)
        self.dtype = resolve_dtype(self.config, dtype, place)
        self.tokenizer = Tokenizer.load(path)
        wanted = {
            "num_slots": num_slots,
            "block_size": block_size,
            "num_blocks": num_blocks,
            "kv_cache_bytes": kv_cache_bytes,
            "max_seq_len": max_seq_len,
            "max_step_tokens": max_step_tokens,
        }
        choose_sizes(self.config, place, self.dtype, **wanted)  # what cannot be is refused before the weights are read
        self._files = ModelFiles(path)
        first_process()  # from here on threads may have been started, which a fork would lack
        weights = load_weights(path, self.config, place, self.dtype, progress)
        self.sizes = choose_sizes(self.config, place, self.dtype, **wanted)  # with the memory that is left
        network = Model(self.config, weights, self.sizes.max_seq_len, exact=exact)
        self._start(network, prefix_caching, cuda_graphs, seed)

    def _start(self, model: Model, prefix_caching: bool, cuda_graphs: bool, seed: int) -> None:
        sizes = self.sizes
        self.device, self.seed = model.device, seed
        runner = Runner(
            model,
            sizes.num_slots,
            sizes.num_blocks,
            sizes.block_size,
            sizes.max_seq_len,
            sizes.max_step_tokens,
            cuda_graphs,
        )
        self._begin(runner, BlockPool(sizes.num_blocks, sizes.block_size, prefix_caching))

    def _begin(self, runner: Runner, pool: BlockPool) -> None:
        sizes = self.sizes
        self._runner = runner
        self._scheduler = Scheduler(sizes.num_slots, pool, sizes.max_seq_len, sizes.max_step_tokens)
        self.timeline = Timeline()
        self._scheduler.on_preempt = self.timeline.preempted
        self._requests: dict[int, Request] = {}  # those that have not ended, by ordinal
        self._inbox: deque[list[Request]] = deque()  # added by any thread, taken at a step's head
        self._cancelled: deque[Request] = deque()
        self._tickets: deque[Ticket] = deque()  # launched steps, oldest first
        self._ended: list[Request] = []
        self._counts: Counter[str] = Counter()
        self._next_ordinal = 0
        self._lock = FairLock()
        self._add_lock = threading.Lock()
        self._in_turn = False
        self._half_done = False  # a turn was interrupted: the stores may disagree
        self._closed = False

    # ---------------------------------------------------------------- the life of a request

    def step(self) -> list[Generation]:
        """Take one turn of the loop by hand and return what ended in it.

        Whatever `generate`, `stream` or a server drives goes on beside it. On a GPU the host runs ahead of the device,
        and learns a step later what a step has ended. An exception of the forward pass ends the requests in slots with
        that error, leaves the engine ready, and is raised here.

        Examples
        --------
        >>> handle = engine.submit([1, 2, 3], SamplingParams(max_tokens=1))
        >>> while not (ended := engine.step()):
        ...     pass
        >>> [g.finish_reason for g in ended]
        ['length']
        """
        with self._turn():
            return [request.to_generation() for request in self._step()]

    def _step(self) -> list[Request]:
        """Queue, slot, launch, collect, end: every request passes through these lines."""
        scheduler, runner = self._scheduler, self._runner
        record = self.timeline.begin()
        self._take_inbox()
        for sequence in scheduler.admit():
            self._counts["cached_tokens"] += sequence.count_prompt(sequence.cached_tokens)
            self.timeline.admitted(sequence)
            if sequence.saved_kv is not None:
                kv = sequence.saved_kv
                runner.write_kv(scheduler.restored(sequence), kv)
        if scheduler.host_logits:  # a logits_fn sees all tokens: none may be in flight
            self._collect(keep=0)
        batch = scheduler.plan()
        if batch is not None:
            self._counts["steps"] += 1
            self._counts["prompt_tokens"] += sum(s.count_prompt(s.scheduled) for s in batch.runs)
            self._tickets.append(runner.launch(batch))
            self._tickets[-1].step = record
            scheduler.launched(batch)  # while the device is at it
            self._catch_up(batch)
        self._collect(keep=1 if batch is not None and runner.overlap else 0)
        self.timeline.finish(scheduler, batch)
        ended, self._ended = self._ended, []
        return ended

    def _catch_up(self, batch: Batch) -> None:
        """Turn tokens of some rows into text, in turns, so that little is left to do when many end at once."""
        for sequence in batch.sequences[self._counts["steps"] % _TEXT_TURNS : batch.num_decode : _TEXT_TURNS]:
            if sequence.state != "ended" and not sequence.params.stop:  # those look at each token
                sequence.advance_text()

    def _take_inbox(self) -> None:
        # Looked at first and taken last: an interrupt in between loses nothing, and the second time adds nothing.
        while self._inbox:
            new = [r for r in self._inbox[0] if r.ordinal not in self._requests and not r.done]
            self._scheduler.queue.extend(s for r in new for s in r.sequences if s.state != "ended")
            self._requests.update((r.ordinal, r) for r in new)
            self._inbox.popleft()
        while self._cancelled:
            for sequence in self._cancelled[0].sequences:
                self._end(sequence, "cancelled")
            self._cancelled.popleft()

    def _collect(self, keep: int) -> None:
        """Take the tokens of launched steps, oldest first, until ``keep`` are left."""
        while len(self._tickets) > keep:
            ticket = self._tickets.popleft()
            tokens = self._runner.collect(ticket)
            self.timeline.collected(ticket)
            if ticket.errors:
                tokens[list(ticket.errors)] = -1
            for prompt in ticket.prompt_logprobs:
                logprobs.store_prompt(prompt)
            for row, sequence in self._scheduler.apply(ticket.batch, tokens):
                self._look(ticket, row, sequence, int(tokens[row]))

    def _look(self, ticket: Ticket, row: int, sequence: Sequence, token: int) -> None:
        """See to a row that may have ended, or whose parameters want more than the token."""
        if token < 0:
            error = ticket.errors.get(row)
            what = (
                f"logits_fn raised {type(error).__name__}: {error}"
                if error is not None
                else f"the logits of output token {sequence.num_output + 1} hold NaN or no finite value"
            )
            self._end(sequence, "error", error=what, cause=error)
            return
        if sequence.first_token_at == 0:
            sequence.first_token_at = time.perf_counter()
        if sequence.logprobs is not None and ticket.logprobs is not None:
            sequence.logprobs.append(logprobs.of_row(sequence, ticket.logprobs, row, token))
        end = sequence.end_of_tokens()
        if end is not None:
            self._end(sequence, *end)
        elif sequence.params.stop and (stop := sequence.advance_text()) is not None:
            self._end(sequence, "stop", stop)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: str | None = None,
        cause: BaseException | None = None,
    ) -> None:
        """Close a sequence, free its slot and its blocks, and with the last of a request the request."""
        if sequence.state == "ended":
            return
        slot = sequence.slot
        self._scheduler.end(sequence)
        sequence.error, sequence.exception = error, cause
        sequence.end(reason, stop_reason)
        self._counts[str(sequence.finish_reason)] += 1
        self.timeline.ended(sequence, slot)
        request = sequence.request
        if request.done and self._requests.pop(request.ordinal, None) is not None:
            self._ended.append(request)

    def check_integrity(self) -> None:
        """Raise IntegrityError if any rule between slots, queue, blocks and block table is broken.

        Examples
        --------
        >>> _ = engine.submit([1, 2, 3]), engine.step(), engine.check_integrity()
        >>> engine.block_table[0, :2].tolist(), engine.free_blocks[0], len(engine.queue)
        ([0, -1], 1, 0)
        """
        with self._lock.held():
            with self._turn():
                self._take_inbox()
            with self._turn(repair=False):  # what is broken stays to be looked at
                check(self._scheduler, self._requests.values())

    def close(self) -> None:
        """Cancel what is left and give all device memory back. A second call finishes one that was interrupted."""
        with self._lock.held():
            if not self._closed:
                with self._turn():
                    self._take_inbox()
                    for request in list(self._requests.values()):
                        for sequence in request.sequences:
                            self._end(sequence, "cancelled")
                self._closed = True
            elif self._runner.closed:  # it is not where an interrupt cut the first call short
                return
            self._tickets.clear()
            self._runner.close()
            on_gpu = self.device.type == "cuda"
        if on_gpu:
            gc.collect()
            torch.cuda.empty_cache()

    def __enter__(self) -> BatchEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not self._lock.foreign:
            self.close()

    def __repr__(self) -> str:
        if self._closed:
            return "<BatchEngine, closed>"
        s, c = self.sizes, self.config
        return (
            f"<BatchEngine {c.architecture} on {self.device}, {len(self._scheduler.running)}/{s.num_slots} slots, "
            f"{len(self.free_blocks)}/{s.num_blocks} blocks of {s.block_size} free, {len(self.queue)} queued>"
        )
