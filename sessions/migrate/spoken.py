"""Who said what, read back out of the token ids of a conversation, by the chat template that laid them out.

A state of another system has ids and no messages. Where a template writes every conversation in one pattern,
what stands before, between and behind the messages of a made-up one is found again in the real one; and it
is believed only if the template lays what was found over the same ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.batch import Ints
from engine.errors import TemplateRefused
from engine.template import ChatTemplate
from engine.tokenizer import Tokenizer
from engine.verbs import Verbs
from serialization.manifest import Message
from sessions.transcript import align, spell, whole_characters

#: words that no template has in it and none changes
_SAID = ("quohtSystemA", "quohtUserB", "quohtReplyC", "quohtUserD", "quohtReplyE")
_ROLES = ("system", "user", "assistant", "user", "assistant")


@dataclass(frozen=True, slots=True)
class _Pattern:
    """What a template writes: `opening` before the first message, then what lies between two."""

    opening: str
    first: str
    after_system: str
    after_user: str
    after_reply: str
    closing: str


def messages_of(engine: Verbs, ids: Sequence[int]) -> tuple[Message, ...]:
    """The messages of the conversation that `ids` are, each with its place among them; none where the model
    has no chat template, or where the ids are no conversation by it."""
    if engine.template is None:
        return ()
    text, ends = _spelled(ids, engine.tokenizer)
    for with_system in (False, True):
        pattern = _pattern(engine.template, with_system)
        found = [] if pattern is None else list(_messages(text, pattern))
        if found and _fits(engine.template, engine.tokenizer, found, ids):
            return tuple(_placed(found, ends, len(ids)))
    return ()


@dataclass(frozen=True, slots=True)
class _Found:
    """What was said at [start, stop) of the text."""

    role: str
    text: str
    start: int
    stop: int


def _spelled(ids: Sequence[int], tokenizer: Tokenizer) -> tuple[str, Ints]:
    """The text of all ids, control tokens as they are written, and where in it each id ends."""
    parts = [
        tokenizer.token_text(token) if tokenizer.is_special(token) else each.text.decode()
        for token, each in zip(ids, spell(ids, tokenizer), strict=True)
    ]
    return "".join(parts), np.cumsum([len(part) for part in parts], dtype=np.int64)


def _pattern(template: ChatTemplate, with_system: bool) -> _Pattern | None:
    skipped = 0 if with_system else 1
    said, roles = _SAID[skipped:], _ROLES[skipped:]
    probe = [{"role": role, "content": word} for role, word in zip(roles, said, strict=True)]
    try:
        pieces = template.render(probe, add_generation_prompt=False)
    except TemplateRefused:
        return None
    rest, between = "".join(piece.text for piece in pieces), []
    for word in said:
        before, found, rest = rest.partition(word)
        if not found:
            return None
        between.append(before)
    opening, *others = between
    after_system = others.pop(0) if with_system else ""
    after_user, after_reply, _ = others
    if not (after_user and after_reply):
        return None
    return _Pattern(opening, roles[0], after_system, after_user, after_reply, rest)


def _messages(text: str, pattern: _Pattern) -> Iterator[_Found]:
    """By turns, up to where the text ends. Nothing, where it does not begin as the pattern does."""
    if not text.startswith(pattern.opening):
        return
    role, at = pattern.first, len(pattern.opening)
    following = {"system": "user", "user": "assistant", "assistant": "user"}
    after = {"system": pattern.after_system, "user": pattern.after_user, "assistant": pattern.after_reply}
    while True:
        border = text.find(after[role], at) if after[role] else -1
        if border < 0:
            break
        yield _Found(role, text[at:border], at, border)
        role, at = following[role], border + len(after[role])
    last = text[at:]
    # The end of the last message may be there in part: as much of it as an id or a few give.
    for count in range(len(pattern.closing), 0, -1):
        if last.endswith(pattern.closing[:count]):
            last = last[: len(last) - count]
            break
    if last:
        yield _Found(role, last, at, at + len(last))


def _fits(template: ChatTemplate, tokenizer: Tokenizer, found: Sequence[_Found], ids: Sequence[int]) -> bool:
    """Whether the template lays these messages over the same ids."""
    messages = [{"role": each.role, "content": each.text} for each in found]
    reply = found[-1].role == "assistant"
    try:
        pieces = template.render(messages, add_generation_prompt=not reply)
    except TemplateRefused:
        return False
    plan = align(ids, pieces, tokenizer)
    # What a template writes behind the last reply need not have been fed, nor what was fed be written by it.
    return plan.kept == len(ids) or (reply and plan.kept >= len(ids) - 1)


def _placed(found: Sequence[_Found], ends: Ints, length: int) -> Iterator[Message]:
    """A message of the user has its ids from the end of the reply before to the beginning of the next, as
    where it is said here."""
    at = 0
    for index, each in enumerate(found):
        if index + 1 == len(found):
            stop = length
        elif each.role == "assistant":
            stop = int(np.searchsorted(ends, each.stop))
            stop += bool(stop < length and ends[stop] == each.stop)
        else:
            stop = int(np.searchsorted(ends, found[index + 1].start, side="right"))
        yield Message(each.role, whole_characters(each.text), at, stop)
        at = stop
