"""The publish contract: looks at a folder, says no early and why, or makes the one canonical form of the adapter."""

from adapters.contract.archive import opened
from adapters.contract.contract import Inspection, PublishOptions, inspect, prepare

__all__ = ["Inspection", "PublishOptions", "inspect", "opened", "prepare"]
