"""The keys of tenants: a folder apart from every store, with one small file for each tenant's key set.

    FOLDER/tenants/<tenant key>/keys                 the tenant's key set, wrapped by a master key
    FOLDER/tenants/<tenant key>/sessions/<set id>    a session's own, wrapped by the tenant's

A running process sees at its next step what another one changed here. Folders are 0700 and files 0600.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.errors import Corrupt, Erased, KeyFileRefused, SealRefused
from sessions.keyring.ciphers import Ciphers
from sessions.keyring.keyset import SET_NBYTES, KeyFile, KeySet, Scope
from sessions.keyring.locks import changing, using
from sessions.keyring.master import MasterKeys, WrappingKey
from sessions.keyring.private import (
    Signature,
    read_private,
    remove_private,
    replace_private,
    signature,
)
from sessions.stores.base import tenant_key
from sessions.stores.folder import disk_errors, make_folders

TENANTS = "tenants"
KEYS = "keys"
SESSIONS = "sessions"

#: Ciphers of so many key sets are kept at hand.
_MAX_AT_HAND = 4096


class TenantKeys:
    """One tenant's keys, as they are now. Safe from many threads and processes."""

    def __init__(self, folder: Path, tenant: str, masters: MasterKeys) -> None:
        """Reads nothing yet. Raises NameRefused."""
        self.tenant = tenant
        self._masters = masters
        self._folder = folder / TENANTS / tenant_key(tenant)
        self._file = self._folder / KEYS
        self._sessions = self._folder / SESSIONS
        self._lock = threading.Lock()
        self._at_hand: OrderedDict[Path, tuple[Signature, Ciphers]] = OrderedDict()

    def __repr__(self) -> str:
        return f"TenantKeys({self.tenant!r})"

    # --- using --------------------------------------------------------------------------------

    @property
    def scope(self) -> Scope:
        """Raises as `current`."""
        return self.current().scope

    def exist(self) -> bool:
        """Whether the tenant has keys, or had some and was erased."""
        return self._signature(self._file) is not None

    def current(self) -> Ciphers:
        """The tenant's own key set. Raises SealRefused where there is none or the master key is another,
        Erased, KeyFileRefused, StoreUnavailable."""
        return self._ready(self._file, self._tenant_wrapper)

    def find(self, set_id: bytes) -> Ciphers | None:
        """The key set of that id, the tenant's or a session's; None of one that is not here or was destroyed.
        Raises as `current`, Corrupt where a session's keys are damaged."""
        own = self.current()
        if set_id == own.set_id:
            return own
        path = self._sessions / set_id.hex()
        if own.scope is Scope.TENANT or self._signature(path) is None:
            return None
        try:
            return self._ready(path, self._session_wrapper)
        except Erased:
            return None
        except KeyFileRefused as error:  # of one session, and no reason to hide the others
            raise Corrupt(str(error)) from error

    @contextlib.contextmanager
    def writing(self, session: str | None = None) -> Iterator[Ciphers]:
        """What to seal with, until the end: the tenant's set, or that of a session, which is made at need.
        Raises as `current`."""
        path, wrapper = self._file, self._tenant_wrapper
        if session is not None:
            path, wrapper = self._session_file(session), self._session_wrapper
        with self._using():
            yield self._ready(path, wrapper)

    @contextlib.contextmanager
    def writing_by(self, set_id: bytes) -> Iterator[Ciphers]:
        """The same with the set of that id. Raises Corrupt where it is not here."""
        with self._using():
            found = self.find(set_id)
            if found is None:
                raise Corrupt(f"sealed with keys that are not here (key set {set_id.hex()})")
            yield found

    # --- changing -----------------------------------------------------------------------------

    def make(self, scope: Scope = Scope.TENANT) -> bool:
        """Give the tenant keys, if it has none. Returns whether it had none. Raises Erased if it had some."""
        with self._making() as file:
            if file is not None and file.erased is not None:
                raise self._gone(file)
            if file is None:
                self._write_new(scope)
            return file is None

    def renew(self, scope: Scope = Scope.TENANT) -> bool:
        """The same, also for a tenant that was erased and begins anew."""
        with self._making() as file:
            if new := file is None or file.erased is not None:
                self._write_new(scope)
            return new

    def rotate(self) -> None:
        """One data key more: all that is sealed from now on is sealed with it."""
        now = time.time()
        self._change_all(lambda keys: keys.rotated(now))

    def drop_old(self) -> None:
        """Destroy every data key but the newest: what they sealed is lost."""
        self._change_all(KeySet.newest_only)

    def rewrap(self) -> bool:
        """Wrap the key set by the first master key. Returns whether it was wrapped by another."""
        with self._changing():
            file = self._known(self._file)
            if file.erased is not None or file.wrapper == self._masters.current.id:
                return False
            self._write(self._file, file, file.unwrap(self._tenant_wrapper(file)), self._masters.current)
            return True

    def erase(self) -> bool:
        """Destroy the tenant's keys. Needs no master key. Returns whether there were any."""
        if not self.exist():
            return False
        with self._changing():
            try:
                file = self._known(self._file)
            except KeyFileRefused:  # what cannot be read is destroyed all the same
                unknown = bytes(SET_NBYTES)
                file = KeyFile(self.tenant, unknown, Scope.TENANT, 0.0, None, None, None)
            if file.erased is None:
                replace_private(self._file, file.gone(time.time()).encode())
            for path in self._session_files():
                remove_private(path)
        return True

    def erase_session(self, session: str) -> bool:
        """Destroy a session's own keys. Returns whether it had any."""
        path = self._sessions / self.current().session_set(session).hex()
        if self._signature(path) is None:
            return False
        with self._changing():
            file = self._known(path)
            if file.erased is None:
                replace_private(path, file.gone(time.time()).encode())
        return True

    # --- parts --------------------------------------------------------------------------------

    def _using(self) -> contextlib.AbstractContextManager[None]:
        if not self.exist():
            raise self._none()
        return using(self._folder, self._sessions)

    def _changing(self) -> contextlib.AbstractContextManager[None]:
        if not self.exist():
            raise self._none()
        return changing(self._folder, self._sessions)

    @contextlib.contextmanager
    def _making(self) -> Iterator[KeyFile | None]:
        with disk_errors(f"making the folder {self._sessions}"):
            make_folders(self._sessions)
        with changing(self._folder, self._sessions):
            yield self._read(self._file)

    def _write_new(self, scope: Scope) -> None:
        now = time.time()
        file = KeyFile.wrap(self.tenant, KeySet.new(scope, now), now, self._masters.current)
        replace_private(self._file, file.encode())

    def _session_file(self, session: str) -> Path:
        """Where the session's keys are; they are made if there are none."""
        own = self.current()
        set_id = own.session_set(session)
        path = self._sessions / set_id.hex()
        if self._signature(path) is None:
            with self._changing():
                if self._signature(path) is None:
                    now = time.time()
                    keys = KeySet.new(Scope.SESSION, now, set_id)
                    replace_private(path, KeyFile.wrap(session, keys, now, own.session_wrapper()).encode())
        return path

    def _session_files(self) -> list[Path]:
        names = [name for name in os.listdir(self._sessions) if len(name) == 2 * SET_NBYTES]
        return [self._sessions / name for name in sorted(names)]

    def _change_all(self, change: Callable[[KeySet], KeySet]) -> None:
        with self._changing():
            self._change(self._file, self._tenant_wrapper, change)
        for path in self._session_files():  # each by itself: saves go on in between
            with self._changing():
                self._change(path, self._session_wrapper, change)

    def _change(
        self, path: Path, wrapper: Callable[[KeyFile], WrappingKey], change: Callable[[KeySet], KeySet]
    ) -> None:
        file = self._known(path)
        if file.erased is None:
            self._write(path, file, change(file.unwrap(wrapper(file))), wrapper(file))
        elif path == self._file:
            raise self._gone(file)

    def _write(self, path: Path, file: KeyFile, keys: KeySet, wrapper: WrappingKey) -> None:
        replace_private(path, KeyFile.wrap(file.of, keys, file.created, wrapper).encode())

    def _ready(self, path: Path, wrapper: Callable[[KeyFile], WrappingKey]) -> Ciphers:
        """The key set in a file, unwrapped once for each change of the file."""
        now = self._signature(path)
        with self._lock:
            kept = self._at_hand.get(path)
            if kept is not None and kept[0] == now:
                self._at_hand.move_to_end(path)
                return kept[1]
        file = self._known(path)
        if file.erased is not None:
            raise self._gone(file)
        ciphers = Ciphers(file.unwrap(wrapper(file)), self.tenant)
        if now is not None:  # taken before the file was read: at worst it is read once more
            with self._lock:
                self._at_hand[path] = now, ciphers
                while len(self._at_hand) > _MAX_AT_HAND:
                    self._at_hand.popitem(last=False)
        return ciphers

    def _known(self, path: Path) -> KeyFile:
        file = self._read(path)
        if file is None:
            raise self._none()
        return file

    def _read(self, path: Path) -> KeyFile | None:
        data = read_private(path)
        return None if data is None else KeyFile.decode(data, f"the key file {path}")

    def _tenant_wrapper(self, file: KeyFile) -> WrappingKey:
        """The master key that wrapped the file."""
        if file.of != self.tenant:
            raise KeyFileRefused(f"the key file {self._file} is another tenant's")
        found = self._masters.find(file.wrapper or b"")
        if found is None:
            if not self._masters:
                raise SealRefused(f"what {self.tenant} has is sealed, and no master key was given")
            raise SealRefused(
                f"the keys of {self.tenant} are wrapped by another master key than was given "
                f"(id {(file.wrapper or b'').hex()})"
            )
        return found

    def _session_wrapper(self, file: KeyFile) -> WrappingKey:
        found = self.current().session_wrapper()
        if file.wrapper != found.id:
            raise KeyFileRefused(f"the keys of session {file.of} are not this tenant's")
        return found

    def _signature(self, path: Path) -> Signature | None:
        with disk_errors(f"looking for the key file {path}"):
            return signature(path)

    def _none(self) -> SealRefused:
        return SealRefused(f"there are no keys of {self.tenant} in {self._folder.parent.parent}")

    def _gone(self, file: KeyFile) -> Erased:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(file.erased))
        return Erased(f"the keys of {file.of} were destroyed on {when}: nobody can read it any more")
