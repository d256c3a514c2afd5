"""The servers beside each other: how each is started, told of adapters, brought into a tier, and changed while it serves."""

from __future__ import annotations

from loadtests.peers.peer import CannotDo, NotPut, Peer
from loadtests.peers.starting import ATTACHABLE, attached, start
from loadtests.servers import NotStarted

__all__ = ["ATTACHABLE", "CannotDo", "NotPut", "NotStarted", "Peer", "attached", "start"]
