"""Exports become versions, in the background; the gate decides which of them an alias moves to."""

from training.publishing.exports import Export, Exports, export_digest
from training.publishing.gate import Gate, Incumbent, Reason, Score, Verdict, judge
from training.publishing.origin import Origin, Target, code_revision
from training.publishing.publisher import Pauses, Publisher
from training.publishing.told import Judged, Published, PublishRefused, PublishTrouble, Unpublished

__all__ = [
    "Export",
    "Exports",
    "Gate",
    "Incumbent",
    "Judged",
    "Origin",
    "Pauses",
    "PublishRefused",
    "PublishTrouble",
    "Published",
    "Publisher",
    "Reason",
    "Score",
    "Target",
    "Unpublished",
    "Verdict",
    "code_revision",
    "export_digest",
    "judge",
]
