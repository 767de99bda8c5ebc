"""What /metrics says, for Prometheus.

Names, labels and meanings are vLLM's where it has the quantity, so that dashboards made for it work; what it has not is
called ``minivllm:…``. The registry is the server's own: two servers in one process do not meet.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from minivllm.aio import AsyncEngine
from minivllm.request import Generation

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
# vLLM's word for a request that its client gave up.
_REASONS = {"cancelled": "abort"}


class _EngineCollector(Collector):
    """Read the engine's own counters when somebody asks."""

    def __init__(self, engine: AsyncEngine, model: str) -> None:
        self._engine, self._model = engine, model

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.engine.stats
        used = stats.blocks_total - stats.blocks_free - stats.blocks_cached
        gauges = [
            ("vllm:num_requests_running", "Samples in slots.", stats.running),
            ("vllm:num_requests_waiting", "Samples that wait for a slot.", stats.queued),
            (
                "vllm:kv_cache_usage_perc",
                "Share of the KV blocks that requests own, 0 to 1.",
                used / stats.blocks_total,
            ),
            ("minivllm:blocks_free", "KV blocks that hold nothing.", stats.blocks_free),
            (
                "minivllm:blocks_cached",
                "KV blocks that nobody owns, kept for a prompt that begins alike.",
                stats.blocks_cached,
            ),
        ]
        counters = [
            (
                "vllm:prompt_tokens",
                "Prompt tokens computed or found in the prefix cache.",
                stats.prompt_tokens + stats.cached_tokens,
            ),
            ("vllm:generation_tokens", "Tokens generated.", stats.generated_tokens),
            ("vllm:num_preemptions", "Requests sent back to the queue.", stats.preemptions),
            (
                "vllm:prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                stats.prompt_tokens + stats.cached_tokens,
            ),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.cached_tokens),
            ("minivllm:steps", "Steps of the engine.", stats.steps),
        ]
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter


class Metrics:
    """Hold one server's registry; `observe` is told of every request that has ended."""

    def __init__(self, engine: AsyncEngine, model: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine, model))
        self._model = model

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            found = Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets)
            found.labels(model)  # there from the start, at 0
            return found

        self._ended = Counter(
            "vllm:request_success", "Requests that ended.", ["model_name", "finished_reason"], registry=self.registry
        )
        self._refused = Counter(
            "minivllm:requests_refused", "Requests answered 429.", ["model_name"], registry=self.registry
        )
        self._refused.labels(model)
        self._ttft = histogram("vllm:time_to_first_token_seconds", "From the arrival to the first token.", _SECONDS)
        self._between = histogram("vllm:inter_token_latency_seconds", "Mean time between a request's tokens.", _SECONDS)
        self._total = histogram("vllm:e2e_request_latency_seconds", "From the arrival to the last token.", _SECONDS)
        self._queued = histogram("vllm:request_queue_time_seconds", "From the arrival to a slot.", _SECONDS)
        self._prompts = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _LENGTHS)
        self._answers = histogram("vllm:request_generation_tokens", "Tokens of an answer.", _LENGTHS)

    def observe(self, generation: Generation) -> None:
        """Count a request that has ended."""
        model, stats = self._model, generation.stats
        reason = generation.finish_reason
        self._ended.labels(model, _REASONS.get(reason, reason)).inc()
        self._total.labels(model).observe(stats.total_time)
        self._prompts.labels(model).observe(len(generation.prompt_token_ids))
        if generation.token_ids:
            self._queued.labels(model).observe(stats.queue_time)
            self._ttft.labels(model).observe(stats.ttft)
        if stats.decode_tokens_per_s > 0:
            self._between.labels(model).observe(1.0 / stats.decode_tokens_per_s)
        for sample in generation.samples:
            self._answers.labels(model).observe(len(sample.token_ids))

    def refused(self) -> None:
        """Count a request that found the queue full."""
        self._refused.labels(self._model).inc()

    def text(self) -> bytes:
        """Return the exposition."""
        return generate_latest(self.registry)
