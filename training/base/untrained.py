"""The base before it learnt anything: `python -m training.base.untrained OUT`, for tests of what is done with a base."""

from __future__ import annotations

import argparse
from pathlib import Path

from training.base.architecture import SHAPE, make_tokenizer
from training.small_vlm import config_of, new_model, processor_of, save_base


def make_untrained(out: Path, seed: int = 0) -> Path:
    """A folder as a trained base's, in about a second."""
    tokenizer = make_tokenizer()
    save_base(new_model(config_of(tokenizer, SHAPE), seed), processor_of(tokenizer, SHAPE), out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.base.untrained", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make_untrained(options.out, options.seed)


if __name__ == "__main__":
    main()
