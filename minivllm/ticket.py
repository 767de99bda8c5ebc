"""What is known of a step that was launched, until and after it is collected."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minivllm.batch import Batch, Ints
from minivllm.graphs import Graph
from minivllm.sequence import Sequence

if TYPE_CHECKING:
    from minivllm.timeline import Step


@dataclass
class RowLogprobs:
    """Log probabilities of R drawn tokens and of the likeliest ones beside them, on the host."""

    logprobs: Tensor  # float32 [R]
    ranks: Tensor  # int32 [R]
    top_ids: Tensor  # int32 [R, n]
    top_logprobs: Tensor  # float32 [R, n]


@dataclass
class PromptLogprobs:
    """Log probabilities of ``count`` prompt tokens of a sequence, from position ``first`` on."""

    sequence: Sequence
    first: int
    tokens: list[int]
    rows: list[RowLogprobs]


@dataclass
class Replayed:
    """What the device has counted on from, after a step of a graph: see `minivllm.ops.StepCounters`."""

    graph: Graph
    slots: Ints
    positions: Ints

    def leads_to(self, batch: Batch, graph: Graph) -> bool:
        """Whether the words of this step are on the device already: the same rows, each a token further."""
        return (
            graph is self.graph
            and not batch.updates
            and np.array_equal(batch.slots, self.slots)
            and np.array_equal(batch.positions, self.positions + 1)
        )


@dataclass
class Ticket:
    """Stand for a launched step until it is collected."""

    batch: Batch
    tokens: Tensor  # int32 [R] on the host, good once `event` has happened
    event: torch.cuda.Event | None
    started: torch.cuda.Event | None = None
    seconds: float = 0.0  # that the launch took, where it is the step itself: on the CPU
    logprobs: RowLogprobs | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    errors: dict[int, Exception] = field(default_factory=dict)  # row -> what its logits_fn raised
    step: Step | None = None  # its record in the timeline

    def device_time(self) -> float:
        """Return the seconds that a collected step took on the device."""
        if self.started is None or self.event is None:
            return self.seconds
        return float(self.started.elapsed_time(self.event)) / 1e3
