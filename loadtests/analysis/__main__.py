"""Writes the JSON schema of summaries: `python -m loadtests.analysis`."""

from loadtests.analysis.summary import SCHEMA, schema

SCHEMA.write_text(schema())
