"""A key directory that is looked at again and again: what changed in it is in force without a restart.

Laws: looking is cheap (a few `stat`s) and rare; files are read only when one of them changed. A directory that cannot
be read, or is wrong, changes nothing: the keys before stay in force, and the reason is said once.
"""

from __future__ import annotations

import logging

from kvbaton.control import key_files as files
from kvbaton.control.base import ControlError
from kvbaton.control.keys import Keyring, reload

log = logging.getLogger(__name__)

LOOK_S = 2.0


class Following:
    """One process's view of its key directory. Used by one thread."""

    def __init__(self, keyring: Keyring, now: float) -> None:
        self.keyring = keyring
        self.next_look = now
        self._seen: files.Stamp | None = None  # unknown at first: it may have changed since it was loaded
        self._said = ""

    def look(self, now: float) -> Keyring | None:
        """The keyring if it is another than before; asked when `next_look` has come."""
        self.next_look = now + LOOK_S
        try:
            seen = files.stamp(files.existing(self.keyring.directory))
            if seen == self._seen:
                return None
            fresh = reload(self.keyring)
        except (ControlError, OSError) as error:
            self._complain(str(error))
            return None
        self._seen, self._said = seen, ""
        before, self.keyring = self.keyring, fresh
        return None if before == fresh else fresh

    def _complain(self, why: str) -> None:
        if why != self._said:
            self._said = why
            log.error("the keys of %s stay as they were: %s", self.keyring.name, why)
