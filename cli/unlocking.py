"""Keys, as the command line is told of them: the folder that they are in, and the master key."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cli.folders import keys_folder
from engine.errors import UsageError

# The cipher library takes a moment to import, and stores in the clear do without.
if TYPE_CHECKING:
    from sessions.keyring.master import MasterKeys
    from sessions.keyring.ring import Keyring

#: The master key itself, for who has no file to keep it in. There is no option: other users see those.
MASTER_KEY = "TENUTO_MASTER_KEY"


@dataclass(frozen=True, slots=True)
class Unlocking:
    """Where keys are: `folder` is there whether anything is sealed or not, since API keys are in it too."""

    folder: Path
    master_file: Path | None

    @classmethod
    def said(cls, folder: str | None, master_file: str | None) -> Unlocking:
        """What --keys and --master-key said, or the environment."""
        return cls(
            Path(folder).expanduser() if folder else keys_folder(),
            Path(master_file).expanduser() if master_file else None,
        )

    def masters(self) -> MasterKeys:
        """The master keys that were given, or none. Raises KeyFileRefused, UsageError if given twice."""
        from sessions.keyring.master import MasterKeys

        text = os.environ.get(MASTER_KEY)
        if text and self.master_file is not None:
            raise UsageError(f"the master key is given twice: by a file, and in {MASTER_KEY}")
        if self.master_file is not None:
            return MasterKeys.read(self.master_file)
        return MasterKeys.parse(text, MASTER_KEY) if text else MasterKeys()

    def keyring(self) -> Keyring | None:
        """What seals the store; None where no master key was given, so that nothing is sealed."""
        from sessions.keyring.ring import Keyring

        masters = self.masters()
        return Keyring(self.folder, masters) if masters else None
