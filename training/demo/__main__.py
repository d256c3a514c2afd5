"""`python -m training.demo OUT` leaves `OUT/base`, the maze base, and `OUT/adapters/{parrot-1,parrot-2,pirate-1}` for it."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from training.demo.making import make_adapters, put_base
from training.demo.text import SENTENCES


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m training.demo",
        description="Puts the maze base into a folder and makes adapters for it, each with a sentence of its own.",
        epilog="Example: python -m training.demo ./demo",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make them in")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other adapters (default: %(default)s)")
    options = parser.parse_args(argv)
    started = time.monotonic()
    base_dir = put_base(options.out)
    make_adapters(base_dir, options.out / "adapters", SENTENCES, options.seed)
    print(f"done in {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
