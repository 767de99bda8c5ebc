"""What happens on the device in one step: its words, forward, draw, the tokens to the host."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minivllm import ops
from minivllm.batch import Batch, Ints
from minivllm.graphs import Graph, Graphs
from minivllm.model import Cache, Inputs, Model
from minivllm.sampler import MAX_BIAS, NUM_SLOT_WORDS
from minivllm.sequence import Sequence
from minivllm.split_norm import take_rows
from minivllm.ticket import PromptLogprobs, Replayed, RowLogprobs, Ticket

if TYPE_CHECKING:
    from minivllm.split_norm import States

_LOGITS_ROWS = 256  # rows of a prompt whose logits stand in memory at once
# Host buffers, events and rows of tokens (whose turns the device counts too), in turn: used again after their step, and
# the one after it, were collected.
_RING = 4


class Runner:
    """Own the device: model, KV cache, one row of state a slot, staging buffers, graphs.

    Parameters
    ----------
    model : Model
    num_slots, num_blocks, block_size, max_seq_len, max_step_tokens : int
    cuda_graphs : bool
        Replay decode-only steps from captured graphs; no effect on the CPU.
    """

    def __init__(
        self,
        model: Model,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        max_seq_len: int,
        max_step_tokens: int,
        cuda_graphs: bool = True,
    ) -> None:
        config = model.config
        self.model, self.device = model, model.device
        self.on_gpu = self.device.type == "cuda"
        self.overlap = self.on_gpu  # the engine launches step t + 1 before it collects step t
        self.num_slots, self.max_seq_len = num_slots, max_seq_len
        self.vocab_size = config.vocab_size
        max_blocks = -(-max_seq_len // block_size)
        self.state = torch.zeros(num_slots, NUM_SLOT_WORDS + max_blocks, dtype=torch.int32, device=self.device)
        self.state[:, NUM_SLOT_WORDS:] = -1
        shape = (config.num_layers, num_blocks, 2, config.num_kv_heads, block_size, config.head_dim)
        self.cache = Cache(
            kv=torch.empty(shape, dtype=model.dtype, device=self.device),
            block_table=self.state[:, NUM_SLOT_WORDS:],
            last_tokens=self.state[:, ops.LAST_TOKEN],
            workspace=ops.attention_workspace(num_slots, max_seq_len, config.num_q_heads, config.head_dim, self.device),
        )
        self._sample_workspace = ops.sample_workspace(num_slots, config.vocab_size, self.device)
        finds_leaders = model.lm_head.finds_leaders
        self._leaders = ops.empty_leaders(num_slots, config.vocab_size, self.device) if finds_leaders else None
        self._counts: Tensor | None = None
        self._bias: tuple[Tensor, Tensor, Tensor] | None = None
        words = 16 + 2 * NUM_SLOT_WORDS + 2 * max_blocks  # of a slot, at most: its rows and its updates
        size = 4 * (max(max_step_tokens, num_slots) + 1) + words * num_slots + 66
        self._staging = torch.zeros(size, dtype=torch.int32, device=self.device)
        self._ring = [torch.zeros(size, dtype=torch.int32, pin_memory=self.on_gpu) for _ in range(_RING)]
        self._views = [buffer.numpy() for buffer in self._ring]
        self._results = torch.zeros(_RING, num_slots, dtype=torch.int32, pin_memory=self.on_gpu)
        self._events = [(self._event(), self._event()) for _ in range(_RING if self.on_gpu else 0)]
        self._turn = 0
        self._replayed: Replayed | None = None  # the step before, if it was a graph's
        use_graphs = cuda_graphs and self.on_gpu
        self._graphs = Graphs(self.device, num_slots, config.vocab_size) if use_graphs else None

    # ---------------------------------------------------------------- a step

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Ticket:
        """Start a step. On a GPU it returns before the step has run."""
        # Events and graphs go by the thread's current device, which need not be the engine's.
        with torch.cuda.device(self.device) if self.on_gpu else nullcontext():
            return self._launch(batch)

    def _launch(self, batch: Batch) -> Ticket:
        self._turn = (self._turn + 1) % _RING
        replayed, self._replayed = self._replayed, None
        started, ended = self._begin() if self.on_gpu else (None, None)
        start = time.perf_counter()
        for setup in batch.setups:
            self._set_up(setup.slot, setup.token_ids, setup.num_prompt_tokens, setup.uses_counts, setup.bias)
        graph = None
        if self._graphs is not None and batch.decode_only and not batch.host_rows:
            graph = self._graphs.get(batch.num_rows, self._record)
        errors: dict[int, Exception] = {}
        prompt_logprobs: list[PromptLogprobs] = []
        out = self._results[self._turn]
        if graph is not None:
            if replayed is None or not replayed.leads_to(batch, graph):
                self._send(batch, graph)
            graph.graph.replay()  # which tells the host its tokens
            self._replayed = Replayed(graph, batch.slots, batch.positions)
            logits, tokens = graph.logits[: batch.num_rows], graph.tokens[: batch.num_rows]
        else:
            inputs = self._send(batch, None)
            keep_all = bool(batch.prompt_logprobs)
            hidden = self.model.forward(inputs, self.cache, keep_all)
            if keep_all:
                prompt_logprobs = [self._prompt_logprobs(hidden, *entry) for entry in batch.prompt_logprobs]
                hidden = hidden if inputs.sample_rows is None else take_rows(hidden, inputs.sample_rows)
            logits = self._logits(hidden, inputs)
            drawn_from = self._call_logits_fns(batch, logits, errors) if batch.host_rows else logits
            tokens = self._sample(drawn_from, inputs)
            self._copy(out[: batch.num_rows], tokens)
        logprobs = None
        if batch.num_logprobs >= 0 and batch.num_rows:
            logprobs = self._row_logprobs(logits, tokens, batch.num_logprobs)
        if ended is not None:
            ended.record()
        return Ticket(batch, out, ended, started, time.perf_counter() - start, logprobs, prompt_logprobs, errors)

    def _begin(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Return the events of a step's start and end.

        While the step before is still running its end is this one's start, which saves recording it.
        """
        before = self._events[self._turn - 1][1]
        started, ended = self._events[self._turn]
        if not before.query():  # type: ignore[no-untyped-call]
            return before, ended
        started.record()
        return started, ended

    def _copy(self, to: Tensor, source: Tensor) -> None:
        if self.on_gpu:
            ops.copy_words(to, source)
        else:
            to.copy_(source)

    @staticmethod
    def _event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def collect(self, ticket: Ticket) -> Ints:
        """Wait for a launched step and return its tokens, -1 where a row's logits could not be drawn from."""
        if ticket.event is not None:
            ticket.event.synchronize()
        tokens: Ints = ticket.tokens.numpy()[: ticket.batch.num_rows].copy()
        return tokens

    def drain(self) -> None:
        """Wait until the device is done with everything launched."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def _send(self, batch: Batch, graph: Graph | None) -> Inputs:
        """Copy a step's arrays to the device, to where its graph looks for them if it has one."""
        view, rows = self._views[self._turn], batch.num_rows if graph is None else graph.rows
        longest = int(batch.positions.max()) + 1
        need = batch.size(rows)
        if need > len(view):
            raise RuntimeError(f"a step of {need} words does not fit the staging buffer of {len(view)}")
        at = batch.pack(view, rows, self._turn)
        staged = self._staging[: at[-1]]
        self._copy(staged, self._ring[self._turn][: at[-1]])
        parts = torch.split(staged, [end - start for start, end in itertools.pairwise(at)])
        if batch.updates:
            ops.update_state(self.state, parts[10].view(-1, 2))
        token_ids, positions, slots, lens, _, sample_rows, sample_slots, seq_slots, seq_lens, starts, _ = parts
        if batch.decode_only:
            return Inputs(rows, token_ids, positions, slots, lens, slots, None, max_seq_len=longest)
        return Inputs(
            batch.num_decode,
            token_ids,
            positions,
            slots,
            lens,
            sample_slots,
            sample_rows,
            seq_slots,
            seq_lens,
            starts,
            batch.max_q_len,
            longest,
        )

    def _logits(self, hidden: States, inputs: Inputs, out: Tensor | None = None) -> Tensor:
        noted = self._noted(inputs.sample_slots)
        leaders = None if noted is None else ops.Leaders(noted, inputs.sample_slots, self.state)
        return self.model.logits(hidden, out, leaders)

    def _noted(self, rows: Tensor) -> Tensor | None:
        """Return where the leaders of so many rows are noted, if the model's head finds them."""
        return None if self._leaders is None else self._leaders[: rows.shape[0]]

    def _sample(self, logits: Tensor, inputs: Inputs, counters: ops.StepCounters | None = None) -> Tensor:
        return ops.sample(
            logits,
            inputs.sample_slots,
            inputs.sample_lens,
            self.state,
            counts=self._counts,
            bias=self._bias,
            workspace=self._sample_workspace,
            leaders=self._noted(logits),
            settled=True,
            counters=counters,
        )

    def _row_logprobs(self, logits: Tensor, tokens: Tensor, top_n: int) -> RowLogprobs:
        found = ops.logprobs(logits, tokens, min(top_n, self.vocab_size))
        if not self.on_gpu:
            return RowLogprobs(*found)
        host = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in found]
        for into, values in zip(host, found, strict=True):
            into.copy_(values, non_blocking=True)
        return RowLogprobs(*host)

    def _record(self, rows: int, logits: Tensor) -> Tensor:
        """Run a decode step of this many rows as it is captured: its inputs lie where `_send` puts them."""
        token_ids, positions, slots, lens, turns = (self._staging[i * rows : (i + 1) * rows] for i in range(5))
        # A graph is captured once for all lengths, so it takes the limit.
        inputs = Inputs(rows, token_ids, positions, slots, lens, slots, None, max_seq_len=self.max_seq_len, first=True)
        logits = self._logits(self.model.forward(inputs, self.cache), inputs, logits)
        return self._sample(logits, inputs, ops.StepCounters(token_ids, positions, turns, self._results))

    # ---------------------------------------------------------------- what only some requests ask for

    def _set_up(
        self, slot: int, tokens: list[int], num_prompt: int, uses_counts: bool, bias: list[tuple[int, float, int]]
    ) -> None:
        if (uses_counts and self._counts is None) or (bias and self._bias is None):
            self.drain()
            if self._graphs is not None:
                self._graphs.clear()  # they know neither
        if uses_counts:
            if self._counts is None:
                self._counts = torch.zeros(self.num_slots, self.vocab_size, dtype=torch.int32, device=self.device)
            ops.count_tokens(self._counts[slot], self._upload(tokens, torch.int32), num_prompt)
        if bias:
            if self._bias is None:
                make = [torch.int32, torch.float32, torch.int32]
                ids, values, until = (
                    torch.zeros(self.num_slots, MAX_BIAS, dtype=dtype, device=self.device) for dtype in make
                )
                self._bias = (ids, values, until)
            for into, column in zip(self._bias, zip(*bias, strict=True), strict=True):
                into[slot, : len(bias)] = self._upload(column, into.dtype)

    def _upload(self, values: Seq[float], dtype: torch.dtype) -> Tensor:
        """Copy values to the device without waiting for what it is doing, as a copy of pageable memory would."""
        return torch.tensor(values, dtype=dtype, pin_memory=self.on_gpu).to(self.device, non_blocking=True)

    def _prompt_logprobs(self, hidden: States, sequence: Sequence, row: int, first: int, count: int) -> PromptLogprobs:
        """Compute log probabilities of the prompt tokens that follow the ``count`` tokens from ``first`` on."""
        end = min(first + count + 1, sequence.prompt_len)
        tokens = sequence.tokens[first + 1 : end]
        out = PromptLogprobs(sequence, first + 1, tokens, [])
        top_n = sequence.params.prompt_logprobs or 0
        for at in range(0, len(tokens), _LOGITS_ROWS):
            ids = self._upload(tokens[at : at + _LOGITS_ROWS], torch.int32)
            logits = self.model.logits(take_rows(hidden, slice(row + at, row + at + len(ids))))
            out.rows.append(self._row_logprobs(logits, ids, top_n))
        return out

    def _call_logits_fns(self, batch: Batch, logits: Tensor, errors: dict[int, Exception]) -> Tensor:
        """Give the users' functions a copy of their rows, the log probabilities being those of the raw logits."""
        logits = logits.clone()
        for row, sequence in batch.host_rows:
            fn = sequence.params.logits_fn
            assert fn is not None
            try:
                changed = fn(list(sequence.tokens), logits[row])
                if changed is not None:
                    logits[row] = torch.as_tensor(changed).to(logits[row]).reshape(self.vocab_size)
            except Exception as error:  # the user's code: its request fails, nothing else does
                errors[row] = error
        return logits

    # ---------------------------------------------------------------- saved KV

    def read_kv(self, blocks: list[int], tokens: int) -> Tensor:
        """Return the KV of a row's first ``tokens`` tokens, [layers, 2, kv heads, tokens, head_dim], on the host."""
        self.drain()
        ids = torch.tensor(blocks, dtype=torch.long, device=self.device)
        kv = self.cache.kv.index_select(1, ids).permute(0, 2, 3, 1, 4, 5).flatten(3, 4)
        return kv[:, :, :, :tokens].contiguous().cpu()

    def write_kv(self, blocks: list[int], kv: Tensor) -> None:
        """Put what `read_kv` gave into a row's blocks."""
        layers, two, heads, tokens, dim = kv.shape
        size = self.cache.kv.shape[4]
        padded = torch.zeros(layers, two, heads, len(blocks) * size, dim, dtype=kv.dtype)
        padded[:, :, :, :tokens] = kv
        arranged = padded.view(layers, two, heads, len(blocks), size, dim).permute(0, 3, 1, 2, 4, 5)
        ids = torch.tensor(blocks, dtype=torch.long, device=self.device)
        self.cache.kv.index_copy_(1, ids, arranged.to(self.device, self.model.dtype).contiguous())

    @property
    def closed(self) -> bool:
        """Whether the memory was given back."""
        return not self.__dict__

    def close(self) -> None:
        """Give all device memory back."""
        self.drain()
        if self._graphs is not None:
            self._graphs.clear()
        self.__dict__.clear()
