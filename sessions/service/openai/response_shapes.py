"""The JSON of /v1/responses: what is asked, which is checked here, and what is answered."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from engine.errors import UsageError
from sessions.service.ask import Ask, ChatMessage, Format
from sessions.service.openai.chat_shapes import ResponseFormat, read_format
from sessions.service.openai.fields import Label, Metadata, Neutral, Nothing, Request
from sessions.service.openai.items import ItemOut, read_input
from sessions.service.openai.naming import session_of
from sessions.service.openai.notes import Settings
from sessions.service.openai.sampling import Sampled

LOGPROBS = "message.output_text.logprobs"
#: What may be asked to be told besides. Of all but the first there is nothing.
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class TextOptions(Request):
    format: ResponseFormat | None = None
    verbosity: Annotated[Any, Neutral("medium")] = None


class ConversationRef(Request):
    id: str


class InputRequest(Request):
    """What a response is to be to."""

    input: str | list[dict[str, Any]] = Field(description="what the user says, or items: messages of texts")
    model: str | None = None
    instructions: str | None = Field(
        default=None, description="the system message, of this response and no later one"
    )
    previous_response_id: str | None = Field(
        default=None, description="the response that it goes on from; several may go on from one"
    )
    conversation: str | ConversationRef | None = Field(
        default=None, description="the conversation that it goes on from, and is added to"
    )

    tools: Annotated[Any, Neutral([])] = None
    tool_choice: Annotated[Any, Neutral("none", "auto")] = None
    parallel_tool_calls: Nothing = None
    text: TextOptions | None = None
    reasoning: Annotated[Any, Neutral({}, {"effort": None}, {"effort": "none"})] = None
    truncation: Annotated[Any, Neutral("disabled")] = None

    def said(self) -> list[ChatMessage]:
        """The messages of the input. Raises UsageError, Unsupported."""
        messages = read_input(self.input)
        if not messages:
            raise UsageError("the input has no message", param="input")
        return messages

    @property
    def previous(self) -> str | None:
        """The session of the response that it goes on from. Raises SessionNotFound, UsageError."""
        if self.previous_response_id is None:
            return None
        if self.conversation is not None:
            text = "previous_response_id and conversation exclude each other"
            raise UsageError(text, param="previous_response_id")
        return session_of("resp", self.previous_response_id, "previous_response_id")

    @property
    def conversation_session(self) -> str | None:
        """Raises SessionNotFound."""
        given = self.conversation
        if given is None:
            return None
        return session_of("conv", given if isinstance(given, str) else given.id, "conversation")


class ResponseRequest(InputRequest, Sampled):
    stream: bool | None = None
    stream_options: Nothing = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=2**31)
    include: list[Include] | None = Field(default=None, max_length=16)
    store: bool | None = Field(default=None, description="false: no byte of it is kept")
    metadata: Metadata | None = None
    user: Label | None = None
    prompt_cache_key: Label | None = None
    safety_identifier: Label | None = None

    prompt_cache_retention: Nothing = None
    prompt_cache_options: Nothing = None
    service_tier: Nothing = None
    max_tool_calls: Nothing = None

    background: Annotated[Any, Neutral(False)] = None
    prompt: Annotated[Any, Neutral()] = None
    context_management: Annotated[Any, Neutral([])] = None
    moderation: Annotated[Any, Neutral()] = None

    @property
    def output(self) -> Format:
        """Raises Unsupported."""
        return read_format(None if self.text is None else self.text.format, "text.format")

    def ask(self, n_ctx: int) -> Ask:
        """Raises UsageError, Unsupported."""
        wanted = LOGPROBS in (self.include or []) or bool(self.top_logprobs)
        logprobs = self.top_logprobs or 0 if wanted else None
        return self.how(n_ctx, self.max_output_tokens, self.output, logprobs)

    def settings(self) -> Settings:
        return Settings(
            temperature=self.temperature_used,
            top_p=self.top_p_used,
            max_output_tokens=self.max_output_tokens,
            top_logprobs=self.top_logprobs or 0,
            format=self.output.value,
            metadata=self.metadata or {},
            user=self.user,
            prompt_cache_key=self.prompt_cache_key,
            safety_identifier=self.safety_identifier,
        )


# --- answered ---------------------------------------------------------------------------------


class InputTokensDetails(BaseModel):
    """`cached_tokens` were had from memory or the store, and not read again."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ConversationOut(BaseModel):
    id: str


class ResponseOut(BaseModel):
    """`store` is false, too, where it should have been stored and could not be."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
    error: dict[str, Any] | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    model: str
    output: list[ItemOut]
    previous_response_id: str | None
    conversation: ConversationOut | None
    store: bool
    usage: ResponseUsage | None
    temperature: float
    top_p: float
    max_output_tokens: int | None
    top_logprobs: int
    metadata: dict[str, str]
    user: str | None
    prompt_cache_key: str | None
    safety_identifier: str | None
    text: dict[str, Any]
    tools: list[Any]
    tool_choice: Literal["auto"]
    parallel_tool_calls: bool
    truncation: Literal["disabled"]
    background: bool


class Deleted(BaseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int
