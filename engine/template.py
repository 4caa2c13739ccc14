"""Messages to a prompt, by the model's own chat template, without losing whose words are whose.

A template writes control tokens as text ("<|im_start|>"), and so may a person. Before rendering, a character
that occurs nowhere is put inside every special-token text of the messages; after it, what is still whole was
written by the template, and the character is taken out again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from blake3 import blake3

from engine.builtin_templates import BUILTIN_TEMPLATES
from engine.errors import TemplateRefused
from engine.template_sandbox import MAX_TEXT, Sandbox
from engine.tokenizer import TextPiece, Tokenizer

_MAX_SOURCE = 2**20
#: Linear A. Letters, so that a list of messages that is printed as such shows them as they are, unescaped.
_GUARDS = range(0x10600, 0x10737)


class ChatTemplate:
    """A compiled template. `specials` are the texts that mean a control token when the template writes them.

    Raises TemplateRefused for a source that is not jinja.
    """

    def __init__(
        self,
        source: str,
        specials: Collection[str],
        bos: str = "",
        eos: str = "",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        if len(source) > _MAX_SOURCE:
            raise TemplateRefused(f"the chat template is {len(source)} characters long")
        self.source = source
        self._names = {"bos_token": bos, "eos_token": eos}
        # One character has no inside to guard; it stays text, whoever wrote it.
        self._specials = frozenset(text for text in specials if len(text) > 1)
        self._bounds = _Bounds(self._specials)
        try:
            self._template = Sandbox(now).from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateRefused(f"the chat template cannot be read: {_one_line(error)}") from error

    @property
    def digest(self) -> str:
        """`b3-<64 hex>` over the source and the tokens it is given."""
        hasher = blake3(self.source.encode("utf-8", "replace"))
        for name, text in sorted(self._names.items()):
            hasher.update(f"\0{name}={text}".encode("utf-8", "replace"))
        return "b3-" + hasher.hexdigest()

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> tuple[TextPiece, ...]:
        """The prompt, in order: special pieces are the template's own control tokens, all else is text.

        Raises TemplateRefused, with what the template says, where it cannot render these messages.
        """
        guard = self._unused_character(messages)
        guarded = [self._guarded(message, guard) for message in messages]
        text = self._rendered(guarded, add_generation_prompt)
        return tuple(self._pieces(text, guard))

    def _unused_character(self, messages: Sequence[Mapping[str, Any]]) -> str:
        used = _characters(messages) | set(self.source) | _characters(tuple(self._specials))
        texts = "\n".join(_texts(messages)) if "\\" in used else ""
        for code in _GUARDS:
            if chr(code) not in used and _escaped(chr(code)) not in texts:
                return chr(code)
        raise TemplateRefused("the messages use every letter of Linear A, which leaves none to guard them")

    def _rendered(self, messages: list[Any], add_generation_prompt: bool) -> str:
        stream = self._template.generate(
            messages=messages, add_generation_prompt=add_generation_prompt, **self._names
        )
        parts: list[str] = []
        room = MAX_TEXT
        try:
            for part in stream:
                room -= len(part)
                if room < 0:
                    raise TemplateRefused(f"the chat template makes more than {MAX_TEXT} characters")
                parts.append(part)
        except TemplateRefused:
            raise
        except Exception as error:  # it is a stranger's program: it may raise anything
            raise TemplateRefused(f"the chat template refuses: {_one_line(error)}") from error
        return "".join(parts)

    def _guarded(self, value: Any, guard: str) -> Any:
        """`value` with `guard` in every text that is special, or could become so beside the template's."""
        if isinstance(value, str):
            return self._bounds.guarded(value, guard)
        if isinstance(value, Mapping):
            return {
                self._bounds.inside(key, guard) if isinstance(key, str) else key: self._guarded(item, guard)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._guarded(item, guard) for item in value]
        return value

    def _pieces(self, text: str, guard: str) -> Iterator[TextPiece]:
        plain = ""
        for part, special in _parts(text, self._specials):
            if special:
                if plain:
                    yield TextPiece(plain)
                    plain = ""
                yield TextPiece(part, special=True)
            else:
                plain += part.replace(guard, "").replace(_escaped(guard), "")
        if plain:
            yield TextPiece(plain)


class _Bounds:
    """Where a message's text needs guarding: inside whole specials, and at ends that are part of one."""

    def __init__(self, specials: Collection[str]) -> None:
        self._specials = specials
        self._heads = {text[:n] for text in specials for n in range(1, len(text))}
        self._tails = {text[n:] for text in specials for n in range(1, len(text))}
        self._longest = max(map(len, specials), default=0)

    def guarded(self, text: str, guard: str) -> str:
        # Templates strip blanks at the ends, so the ends are those of the stripped text.
        core = text.strip()
        if not core:
            return text
        before, after = text[: text.index(core[0])], text[len(text.rstrip()) :]
        inside = self.inside(core, guard)
        lengths = range(1, min(self._longest, len(core)) + 1)
        if any(core[:n] in self._tails for n in lengths):
            inside = guard + inside
        if any(core[-n:] in self._heads for n in lengths):
            inside += guard
        return before + inside + after

    def inside(self, text: str, guard: str) -> str:
        """`text` with no special whole. Again until it is so: one that is cut may have lain over another."""
        while any(special in text for special in self._specials):
            text = "".join(
                part[0] + guard + part[1:] if special else part
                for part, special in _parts(text, self._specials)
            )
        return text


def named_template(name: str) -> str:
    """The source of a built-in template. Raises TemplateRefused with the names there are."""
    try:
        return BUILTIN_TEMPLATES[name]
    except KeyError:
        known = ", ".join(sorted(BUILTIN_TEMPLATES))
        raise TemplateRefused(f"no chat template is called {name!r} (there are: {known})") from None


def template_for(tokenizer: Tokenizer, source: str) -> ChatTemplate:
    """`source` with the special tokens of `tokenizer`."""
    bos, eos = (
        "" if token is None else tokenizer.token_text(token) for token in (tokenizer.bos_id, tokenizer.eos_id)
    )
    return ChatTemplate(source, tuple(tokenizer.special_ids()), bos, eos)


def _parts(text: str, specials: Collection[str]) -> Iterator[tuple[str, bool]]:
    """`text` cut at every special in it, the longer first where two begin at one place."""
    present = sorted((special for special in specials if special in text), key=len, reverse=True)
    if not present:
        yield text, False
        return
    end = 0
    for match in re.finditer("|".join(map(re.escape, present)), text):
        if match.start() > end:
            yield text[end : match.start()], False
        yield match.group(), True
        end = match.end()
    if end < len(text):
        yield text[end:], False


def _characters(value: Any) -> set[str]:
    return {character for text in _texts(value) for character in text}


def _texts(value: Any) -> Iterator[str]:
    """Every text in a message, names of fields too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _escaped(character: str) -> str:
    """The character as JSON writes it in plain ASCII."""
    return json.dumps(character)[1:-1]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
