"""What clients send: the bodies of OpenAI's completions and chat, and vLLM's further fields.

A field that would change the answer and is not served is refused; one that would not (``user``, ``store``) is accepted
and does nothing. ``temperature`` is 1 where a body names none, as at OpenAI and in vLLM, and ``max_tokens`` 16 in
/v1/completions.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from minivllm.chat_template import check_variables
from minivllm.request import SamplingParams

COMPLETION_TOKENS = 16  # of an answer where a body of /v1/completions names no max_tokens, as at OpenAI and in vLLM
MAX_STOPS = 64  # stop texts of a request: each is looked for in every token's text, while the other requests wait


class BadRequestError(ValueError):
    """A request that cannot be served; ``param`` names the field, where it is one."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


def _number(value: object) -> object:
    if isinstance(value, (bool, str)):
        raise ValueError("must be a number")
    return value


Number = Annotated[float, BeforeValidator(_number)]
Tokens = list[StrictInt]


class StreamOptions(BaseModel):
    """Say what a stream carries beside the text."""

    model_config = ConfigDict(extra="forbid")
    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False


# Fields that are the engine's own, by name and meaning.
_SHARED = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
)


class Body(BaseModel):
    """Hold the fields that both endpoints have; None stands for a field that was not sent."""

    model_config = ConfigDict(extra="forbid")

    model: StrictStr | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    n: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    max_tokens: StrictInt | None = None
    stop: StrictStr | list[StrictStr] | None = None
    seed: StrictInt | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    # vLLM's
    top_k: StrictInt | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: StrictInt | None = None
    ignore_eos: StrictBool | None = None
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    prompt_logprobs: StrictInt | None = None
    # Without effect on the answer.
    user: StrictStr | None = None
    store: StrictBool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None
    # Not served, and said so.
    response_format: dict[str, Any] | None = None

    def refuse(self) -> None:
        """Raise BadRequestError for what is not served."""
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise BadRequestError("response_format is not served, other than of type 'text'", "response_format")
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOPS:
            raise BadRequestError(f"stop holds {len(self.stop)} texts; at most {MAX_STOPS} are served", "stop")
        if self.stream_options is not None and not self.stream:
            raise BadRequestError("stream_options is for streams: set stream to true", "stream_options")

    def sampling(self, **own: Any) -> SamplingParams:
        """Return the engine's parameters."""
        values = {name: getattr(self, name) for name in _SHARED if getattr(self, name) is not None}
        values = {"temperature": 1.0, **values, **own}
        if self.logit_bias:
            values["logit_bias"] = self.logit_bias
        try:
            return SamplingParams.from_dict(values)
        except (TypeError, ValueError) as error:
            first = str(error).split()[0]
            raise BadRequestError(str(error), first if first in type(self).model_fields else None) from None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that counts tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(Body):
    """Hold a body of /v1/completions."""

    prompt: StrictStr | list[StrictStr] | Tokens | list[Tokens]
    echo: StrictBool | None = None
    logprobs: StrictInt | None = None
    best_of: StrictInt | None = None
    suffix: StrictStr | None = None

    def refuse(self) -> None:
        """Raise BadRequestError for what is not served."""
        super().refuse()
        if self.suffix:
            raise BadRequestError("suffix is not served", "suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise BadRequestError("best_of is not served, other than equal to n", "best_of")
        if self.echo and self.stream:
            raise BadRequestError("echo is not served in a stream", "echo")

    def params(self) -> SamplingParams:
        """Return the engine's parameters."""
        own: dict[str, Any] = {"max_tokens": self.max_tokens}
        if self.logprobs is not None:
            own["logprobs"] = self.logprobs
            if self.echo:
                own["prompt_logprobs"] = self.logprobs
        return self.sampling(**own)

    def prompts(self) -> list[str | list[int]]:
        """Return one prompt or several as a list."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [[i for i in prompt if isinstance(i, int)]]
        if not prompt:
            raise BadRequestError("prompt is empty", "prompt")
        return [p for p in prompt if not isinstance(p, int)]


class ChatBody(Body):
    """Hold a body of /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    add_generation_prompt: StrictBool = True
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None
    functions: list[Any] | None = None
    modalities: list[StrictStr] | None = None

    def refuse(self) -> None:
        """Raise BadRequestError for what is not served."""
        super().refuse()
        for name in ("tools", "functions"):
            if getattr(self, name):
                raise BadRequestError(f"{name} are not served", name)
        if self.tool_choice not in (None, "none", "auto"):
            raise BadRequestError("tools are not served", "tool_choice")
        if self.modalities not in (None, ["text"]):
            raise BadRequestError("only text is served", "modalities")
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        reserved = {"self", "messages", "tools", "add_generation_prompt"} & set(self.chat_template_kwargs or {})
        if reserved:
            raise BadRequestError(f"chat_template_kwargs may not set {sorted(reserved)[0]}", "chat_template_kwargs")
        try:
            check_variables(self.chat_template_kwargs or {})
        except TypeError as error:
            text = f"{str(error).partition(':')[0]}: sampling parameters are fields of the body"
            raise BadRequestError(text, "chat_template_kwargs") from None

    def params(self) -> SamplingParams:
        """Return the engine's parameters."""
        limit = self.max_completion_tokens
        own: dict[str, Any] = {"max_tokens": self.max_tokens if limit is None else limit}
        if self.logprobs:
            own["logprobs"] = self.top_logprobs or 0
        return self.sampling(**own)
