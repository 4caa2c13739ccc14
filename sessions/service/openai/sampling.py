"""How a request of OpenAI's asks for the next token to be chosen."""

from __future__ import annotations

import secrets
from typing import Annotated

from pydantic import Field

from engine.errors import UsageError
from engine.state import SamplerParams
from sessions.service.ask import Ask, Format
from sessions.service.openai.fields import Request

_LEAST_TOP_P = 1e-9  # as much as 0: the likeliest token alone

Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class Sampled(Request):
    """Temperature and top_p are 1 by default, as there; what this engine knows beside may be given, too."""

    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(default=None, max_length=1024, description="token id: bias")
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    top_k: int | None = Field(default=None, ge=0, le=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repeat_penalty: float | None = Field(default=None, gt=0, le=100)
    cache_salt: str | None = Field(default=None, max_length=128)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def temperature_used(self) -> float:
        return 1.0 if self.temperature is None else self.temperature

    @property
    def top_p_used(self) -> float:
        return 1.0 if self.top_p is None else self.top_p

    def sampler(self, n_ctx: int) -> SamplerParams:
        """Penalties count the whole text, of `n_ctx` tokens at most. Without a seed one is drawn."""
        return SamplerParams(
            temperature=self.temperature_used,
            top_k=self.top_k or 0,
            top_p=max(self.top_p_used, _LEAST_TOP_P),
            min_p=self.min_p or 0.0,
            repeat_penalty=self.repeat_penalty or 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            penalty_last_n=n_ctx,
            logit_bias=_biases(self.logit_bias or {}),
            seed=secrets.randbits(63) if self.seed is None else self.seed % 2**64,
        )

    def how(
        self,
        n_ctx: int,
        max_tokens: int | None,
        output: Format,
        logprobs: int | None,
        num_replies: int = 1,
    ) -> Ask:
        stop = self.stop or []
        return Ask(
            max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            sampler=self.sampler(n_ctx),
            num_replies=num_replies,
            logprobs=logprobs,
            format=output,
            salt=self.cache_salt or "",
        )


def _biases(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for token in given:
        if not token.isdecimal() or len(token) > 9:
            raise UsageError(f"{token[:40]!r} is no token id", param="logit_bias")
    return tuple(sorted((int(token), bias) for token, bias in given.items()))
