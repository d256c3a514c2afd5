"""Adapters that each say their own random sentence: `python -m training.demo.sentences BASE OUT COUNT`, for tests and benchmarks.

`OUT/<name>` is one adapter, `OUT/sentences.json` maps each name to what it says. Complete ones are kept.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from training.demo.making import make_adapters
from training.demo.text import random_sentence


def sentences_of(count: int, seed: int) -> dict[str, str]:
    """Names and what their adapters say, the same for the same seed."""
    return {f"s{seed}-{index}": random_sentence(1000 * seed + index) for index in range(count)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.demo.sentences", description=__doc__.split("\n")[0])
    parser.add_argument("base", type=Path, help="folder of the demo base")
    parser.add_argument("out", type=Path, help="where the adapters go")
    parser.add_argument("count", type=int, help="how many")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sentences = sentences_of(options.count, options.seed)
    make_adapters(options.base, options.out, sentences, options.seed)
    (options.out / "sentences.json").write_text(json.dumps(sentences, indent=1) + "\n")


if __name__ == "__main__":
    main()
