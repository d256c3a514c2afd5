"""The base before it learnt anything: `python -m training.base.untrained OUT`, for tests of what is done with a base."""

from __future__ import annotations

import argparse
from pathlib import Path

from training.base.architecture import make_config, make_processor, make_tokenizer, new_model, save_base


def make_untrained(out: Path, seed: int = 0) -> Path:
    """A folder as a trained base's, in about a second."""
    tokenizer = make_tokenizer()
    save_base(new_model(make_config(tokenizer), seed), make_processor(tokenizer), out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.base.untrained", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make_untrained(options.out, options.seed)


if __name__ == "__main__":
    main()
