"""A key directory that is looked at again and again: what changed in it is in force without a restart.

Laws: looking is cheap (a few `stat`s) and rare; files are read only when one of them changed. A directory that cannot
be read, or is wrong, changes nothing: the keys before stay in force, and the reason is said once. Whoever serves peers
does not look itself: a file system that is away would hold it up for as long.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from kvbaton.control import key_files as files
from kvbaton.control.addressing import ControlError
from kvbaton.control.keyring import Keyring, reload

log = logging.getLogger(__name__)

LOOK_S = 2.0


class Following:
    """One process's view of its key directory. Used by one thread, which either looks itself or has it done."""

    def __init__(self, keyring: Keyring, now: float) -> None:
        self.keyring = keyring
        self.next_look = now
        self._seen: files.Stamp | None = None  # unknown at first: it may have changed since it was loaded
        self._said = ""
        self._found: deque[Keyring] = deque(maxlen=1)
        self._looking = False
        self._again = False  # somebody wants a look that begins after now

    def look_soon(self, now: float) -> None:
        """Something has changed; from any thread, and whoever follows has to be woken."""
        self._again = True
        self.next_look = now

    def have_a_look(self, now: float, wake: Callable[[], None]) -> None:
        """Look on a thread of its own, unless one still does; `wake` is called there when `take` has something."""
        self.next_look = now + LOOK_S
        if self._looking:
            return
        self._looking = True
        try:
            threading.Thread(target=self._look, args=(now, wake), name="kvbaton-keys", daemon=True).start()
        except RuntimeError as error:  # no more threads
            self._looking = False
            self._complain(str(error))

    def take(self) -> Keyring | None:
        """What was found since it was last asked for, if it is another keyring than before."""
        return self._found.pop() if self._found else None

    def _look(self, now: float, wake: Callable[[], None]) -> None:
        try:
            while True:
                self._again = False
                fresh = self.look(now)
                if fresh is not None:
                    self._found.append(fresh)
                    wake()
                if not self._again:
                    break
        finally:
            self._looking = False

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
            log.error("[keys-unchanged] the keys of %s stay as they were: %s", self.keyring.name, why)
