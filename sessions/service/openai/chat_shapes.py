"""The JSON of /v1/chat/completions: what is asked, which is checked here, and what is answered."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.errors import Unsupported, UsageError
from sessions.service.ask import Ask, ChatMessage, Format, Keep
from sessions.service.openai.contents import for_template, read_messages
from sessions.service.openai.fields import Ignored, Label, Metadata, Neutral, Nothing, Request
from sessions.service.openai.sampling import Sampled


class ResponseFormat(BaseModel):
    """What else it says is of kinds that are not supported."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str


class StreamOptions(Request):
    include_usage: bool | None = None
    include_obfuscation: Nothing = None


class ChatRequest(Sampled):
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=10_000)
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=16)
    max_tokens: int | None = Field(default=None, ge=1, le=2**31)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31)
    logprobs: bool | None = None
    response_format: ResponseFormat | None = None
    store: bool | None = Field(
        default=None, description="false: no byte of it is kept, also for the next call"
    )

    id_slot: int | None = Field(
        default=None, ge=-1, lt=2**31, description="llama-server's: the slot that stands for it; -1 for any"
    )

    metadata: Annotated[Metadata | None, Ignored()] = None
    cache_prompt: Nothing = None
    user: Annotated[Label | None, Ignored()] = None
    prompt_cache_key: Nothing = None
    prompt_cache_retention: Nothing = None
    prompt_cache_options: Nothing = None
    safety_identifier: Nothing = None
    service_tier: Nothing = None
    parallel_tool_calls: Nothing = None
    prediction: Nothing = None

    tools: Annotated[Any, Neutral([])] = None
    tool_choice: Annotated[Any, Neutral("none", "auto")] = None
    functions: Annotated[Any, Neutral([])] = None
    function_call: Annotated[Any, Neutral("none", "auto")] = None
    modalities: Annotated[Any, Neutral(["text"])] = None
    audio: Annotated[Any, Neutral()] = None
    reasoning_effort: Annotated[Any, Neutral("none")] = None
    verbosity: Annotated[Any, Neutral("medium")] = None
    web_search_options: Annotated[Any, Neutral()] = None
    moderation: Annotated[Any, Neutral()] = None

    def said(self) -> list[ChatMessage]:
        return for_template(read_messages(self.messages, "messages"))

    def ask(self, n_ctx: int) -> Ask:
        """Raises UsageError, Unsupported."""
        if self.top_logprobs is not None and not self.logprobs:
            raise UsageError("top_logprobs needs logprobs", param="top_logprobs")
        counts = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(counts) > 1:
            raise UsageError("max_tokens is the old name of max_completion_tokens", param="max_tokens")
        logprobs = self.top_logprobs or 0 if self.logprobs else None
        most = next(iter(counts), None)
        return self.how(
            n_ctx, most, read_format(self.response_format, "response_format"), logprobs, self.n or 1
        )

    @property
    def keep(self) -> Keep:
        return Keep.NOTHING if self.store is False else Keep.PAST

    @property
    def slot(self) -> int | None:
        return None if self.id_slot in (None, -1) else self.id_slot


def read_format(given: ResponseFormat | None, name: str) -> Format:
    """Raises Unsupported."""
    kind = "text" if given is None else given.type
    if kind not in list(Format):
        raise Unsupported(f"{name}: {kind[:40]!r} is not supported", param=f"{name}.type")
    unknown = next(iter((given and given.model_extra) or ()), None)
    if unknown is not None:
        raise UsageError(f"{name}: {unknown[:40]!r} is not known", param=f"{name}.{unknown[:40]}")
    return Format(kind)


# --- answered ---------------------------------------------------------------------------------


class TopLogprob(BaseModel):
    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None


class Message(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class Choice(BaseModel):
    index: int
    message: Message
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length"]


class PromptTokensDetails(BaseModel):
    """`cached_tokens` were had from memory or the store, and not read again."""

    cached_tokens: int


class ChatUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: ChatUsage
