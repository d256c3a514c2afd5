"""Requests are sent by aiperf, in an environment and a process of its own, on the schedule of a plan."""

from loadtests.sending.environment import prepare
from loadtests.sending.process import send
from loadtests.sending.sent import SenderFailed, Sent

__all__ = ["SenderFailed", "Sent", "prepare", "send"]
