"""The chat at the terminal: lines in, replies and slash commands out."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from cli.drafting import told_drafting
from cli.files import named_file, replacing
from cli.lines import Lines
from cli.options import SamplingOptions
from cli.output import Output, counted, one_line, size
from cli.reply import Interrupts, show, tell_ending
from cli.restored import tell_restored, tell_reused
from engine.errors import RankLost, TenutoError, UsageError

if TYPE_CHECKING:
    from engine.reply import Piece
    from engine.runner import Engine
    from engine.state import SamplerParams
    from sessions.conversation import Conversation, Reply
    from sessions.manager import SessionManager

HELP = """\
/save [NAME]     save now; with NAME, keep this turn under it (`tenuto load NAME`)
/load NAME       go on in a new session from a kept turn
/fork [NAME]     make a second session with this past; this one goes on
/rewind [N]      take back the last N turns (1)
/regen           say the last reply anew
/edit TEXT       put TEXT in place of what you said last
/info            this session
/clear           go on in a new, empty session; this one stays stored
/export FILE     write this session to a file
/bye             leave (so do Ctrl-D, and Ctrl-C twice)
Three quotes begin and end a message of several lines. Ctrl-C stops a reply."""


class Repl:
    """Reads until the user leaves. `conversation` changes with /load and /clear; whoever made the
    Repl closes the one that is there in the end."""

    def __init__(
        self,
        out: Output,
        manager: SessionManager,
        engine: Engine,
        conversation: Conversation,
        sampler: SamplerParams,
        sampling: SamplingOptions,
        lines: Lines,
    ) -> None:
        self.conversation = conversation
        self._out = out
        self._manager = manager
        self._engine = engine
        self._sampler = sampler
        self._sampling = sampling
        self._lines = lines
        self._interrupts = Interrupts()
        self._leaving = False
        self._commands: dict[str, Callable[[str], None]] = {
            "/save": self._save,
            "/load": self._load,
            "/fork": self._fork,
            "/rewind": self._rewind,
            "/regen": self._regen,
            "/edit": self._edit,
            "/info": self._info,
            "/clear": self._clear,
            "/export": self._export,
            "/help": self._help,
        }

    def run(self) -> None:
        """Raises what kept the last turn from being saved, if it still does when the user leaves."""
        self._greet()
        interrupted = False
        while True:
            try:
                line = self._lines.read()
            except KeyboardInterrupt:
                if interrupted and self._may_leave():
                    return
                self._out.warn("\n(Ctrl-C again, or /bye, leaves)")
                interrupted = True
                continue
            interrupted = False
            if line is None or line.strip() == "/bye":
                if self._may_leave():
                    return
                continue
            self._leaving = False
            if line.strip():
                self._handle(line)

    def _handle(self, line: str) -> None:
        word, _, rest = line.strip().partition(" ")
        try:
            if not word.startswith("/"):
                self._say(line)
            elif word in self._commands:
                self._commands[word](rest.strip())
            else:
                raise UsageError(f"there is no {word}; /help lists what there is")
        except RankLost:  # nothing more can be said; what was saved stays
            raise
        except TenutoError as error:
            self._out.warn(f"tenuto: {one_line(str(error))}")
        except KeyboardInterrupt:  # a second Ctrl-C leaves at once, but not without what was said
            if self.conversation.save_error is not None:
                self.conversation.save()
            raise
        except OSError as error:
            self._out.warn(f"tenuto: {error.filename or 'i/o'}: {error.strerror or error}")
        self._interrupts.leave_if_asked()

    def _greet(self) -> None:
        restored = self.conversation.restored
        if restored is not None:
            tell_restored(self._out, restored)
        elif self._lines.interactive:
            self._out.note(f"{self._engine.model_name}. /help lists commands, /bye leaves.")

    def _may_leave(self) -> bool:
        """Unsaved turns are tried once more; if that fails a person is asked, a pipe gets the error."""
        if self.conversation.save_error is None:
            return True
        try:
            self.conversation.save()
        except TenutoError as error:
            if not self._lines.interactive:
                raise
            if not self._leaving:
                self._leaving = True
                self._out.warn(
                    f"tenuto: still not saved: {error}. /export FILE keeps it; /bye again leaves without it"
                )
                return False
        return True

    # --- talking ------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        self._reply(lambda ask: self.conversation.say(text, ask))

    def _regen(self, _: str) -> None:
        # The draw of a token is a function of seed and position: only another seed says other words.
        self._sampler = replace(self._sampler, seed=secrets.randbits(63))
        self.conversation.resample(self._sampler)
        self._reply(self.conversation.regenerate)

    def _edit(self, text: str) -> None:
        if not text:
            raise UsageError("/edit TEXT puts TEXT in place of what you said last")
        self._reply(lambda ask: self.conversation.edit(text, ask))

    def _reply(self, start: Callable[[Reply], Iterator[Piece]]) -> None:
        from sessions.conversation import Reply

        with self._interrupts as interrupts:
            ask = Reply(self._sampling.max_tokens, self._sampling.stop, interrupts.asked)
            finish = show(start(ask), self._out).finish
        tell_ending(self._out, finish, self._engine)
        tell_reused(self._out, self.conversation.reused)
        self._tell_unsaved()

    def _tell_unsaved(self) -> None:
        error = self.conversation.save_error
        if error is not None:
            self._out.warn(
                f"tenuto: not saved: {error}. The conversation is kept in memory and the next turn tries "
                "again; /export FILE writes it to a file"
            )

    # --- keeping ------------------------------------------------------------------------------

    def _save(self, name: str) -> None:
        if name:
            pin = self.conversation.pin(name)
            self._out.note(f"kept {counted(pin.length, 'token')} as {pin.name}")
        else:
            saved = self.conversation.save()
            self._out.note(f"saved turn {saved.generation}, {size(saved.bytes_written)} written")

    def _load(self, name: str) -> None:
        from sessions.conversation import Conversation

        if not name:
            raise UsageError("/load NAME goes on from a kept turn; `tenuto ls` lists them")
        self._put_away()
        info = self._manager.load(name)
        self._sampler = self._manager.manifest(info.id).sampler
        self._switch(lambda: Conversation.open(self._manager, info.id))
        if self.conversation.restored is not None:
            tell_restored(self._out, self.conversation.restored)

    def _clear(self, _: str) -> None:
        from sessions.conversation import Conversation

        self._put_away()
        self._switch(lambda: Conversation.new(self._manager, sampler=self._sampler))

    def _put_away(self) -> None:
        """Before another conversation takes its place, all of this one must be stored."""
        if self.conversation.messages and self.conversation.save_error is not None:
            self.conversation.save()

    def _switch(self, make: Callable[[], Conversation]) -> None:
        """Close this conversation and take the one that `make` opens; if it cannot, come back."""
        from sessions.conversation import Conversation

        stored = self.conversation.info()
        self.conversation.close()
        try:
            self.conversation = make()
        except BaseException:
            self.conversation = (
                Conversation.open(self._manager, stored.id)
                if stored is not None
                else Conversation.new(self._manager, sampler=self._sampler)
            )
            raise
        if stored is not None:
            self._out.note(f"the last session stays as {stored.name or stored.id}")

    def _fork(self, name: str) -> None:
        info = self.conversation.fork(name or None)
        self._out.note(f"forked: tenuto resume {info.name or info.id} opens it; this session goes on")

    def _rewind(self, count: str) -> None:
        if count and not count.isdecimal():
            raise UsageError("/rewind N takes back N turns")
        result = self.conversation.rewind(int(count or 1))
        self._out.note(
            f"back at {counted(len(self.conversation.ids), 'token')} (recomputed {result.recomputed:,})"
        )
        self._tell_unsaved()

    def _export(self, path: str) -> None:
        if not path:
            raise UsageError("/export FILE writes this session to FILE")
        target = named_file(path)
        with replacing(target) as out:
            archive = self.conversation.export(out)
        self._out.note(f"wrote {size(archive.nbytes)} to {target}")

    def _info(self, _: str) -> None:
        chat, info = self.conversation, self.conversation.info()
        self._out.text(
            f"session {chat.session.id}" + (f" ({chat.session.name})" if chat.session.name else "")
        )
        self._out.text(f"model {self._engine.model_name}, {len(chat.ids):,} of {self._engine.n_ctx:,} tokens")
        if info is None:
            self._out.text("not saved yet")
        else:
            sized = self._manager.info(info.id)
            self._out.text(
                f"turn {info.generation} saved: {size(sized.own_bytes)} of its own, "
                f"{size(sized.shared_bytes)} shared"
                + (f", kept as {', '.join(info.pins)}" if info.pins else "")
            )
        self._out.text(f"seed {self._sampler.seed}, temperature {self._sampler.temperature:g}")
        drafting = told_drafting(self._engine)
        if drafting is not None:
            self._out.text(drafting)

    def _help(self, _: str) -> None:
        self._out.text(HELP)
