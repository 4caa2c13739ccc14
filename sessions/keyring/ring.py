"""All tenants' keys."""

from __future__ import annotations

import os
from pathlib import Path

from sessions.keyring.keyset import KeyFile, Scope
from sessions.keyring.master import MasterKeys
from sessions.keyring.private import read_private
from sessions.keyring.tenants import KEYS, TENANTS, TenantKeys
from sessions.stores.folder import disk_errors


class Keyring:
    """All tenants' keys in one folder, and the master keys that open them. Reads nothing before it must."""

    def __init__(self, folder: Path, masters: MasterKeys, scope: Scope = Scope.TENANT) -> None:
        """`scope` is of tenants that have no keys yet."""
        self.folder = folder
        self.scope = scope
        self._masters = masters

    def __repr__(self) -> str:
        return f"Keyring({str(self.folder)!r}, {self._masters!r})"

    def tenant(self, tenant: str) -> TenantKeys:
        """Raises NameRefused."""
        return TenantKeys(self.folder, tenant, self._masters)

    def files(self) -> list[KeyFile]:
        """What each tenant's key file says in the clear, by tenant; also of those that were erased. Needs no
        master key. Raises KeyFileRefused, StoreUnavailable."""
        folder = self.folder / TENANTS
        with disk_errors(f"listing the keys in {self.folder}"):
            paths = [folder / key / KEYS for key in os.listdir(folder)] if folder.is_dir() else []
        there = [(path, read_private(path)) for path in paths]
        files = [KeyFile.decode(data, f"the key file {path}") for path, data in there if data is not None]
        return sorted(files, key=lambda file: file.of)

    def rewrap(self) -> int:
        """Wrap every tenant's keys by the first master key, so that the others are needed no more. Touches no
        store. Returns how many were wrapped by another."""
        return sum(self.tenant(file.of).rewrap() for file in self.files() if file.erased is None)
