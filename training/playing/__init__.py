"""Mazes played through an OpenAI endpoint, and held against the trainer's own evaluation."""
