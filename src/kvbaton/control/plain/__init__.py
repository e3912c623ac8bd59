"""Plain discovery, as MoRI-IO's and P2pNccl's workers do it: the receiving half, and the sending one
(`announcer`).

What trusting this means: the formats have no keys, no answer and no goodbye. Whoever reaches the listening port can put
a worker on the list that does not exist, replace one that does, and so be sent prompts by the router; it learns nothing
from here, since nothing is ever sent. What it can make the router hold and log is bounded, save for one thing that
libzmq does not bound: it gathers all frames of one message before it hands it on, however many come (100,000 of them,
400 MB, were taken). So it is opt-in, for loopback or a network in which every host is trusted; kvbaton's own registry
is the authenticated way, and what it lists is never displaced from here.
"""

from kvbaton.control.plain.announcement_listener import AnnouncedWorker, PlainListener, PlainSettings
from kvbaton.control.plain.announcements import Announcement, Fleet, PlainFault

__all__ = ["AnnouncedWorker", "Announcement", "Fleet", "PlainFault", "PlainListener", "PlainSettings"]
