"""`python -m training.base OUT` makes the base anew, as its recipe says."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from training.base.make import Recipe, make_base
from training.demo.making import prepare_torch


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.base", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make it in")
    parser.add_argument("--seed", type=int, default=Recipe().seed, help="another seed makes another base (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument(
        "--threads", type=int, default=2, help="of a CPU; their number changes the last bits (default: %(default)s)"
    )
    options = parser.parse_args()
    prepare_torch()
    torch.set_num_threads(options.threads)
    make_base(
        options.out, replace(Recipe(), seed=options.seed), torch.device(options.device), lambda line: print(line, flush=True)
    )


if __name__ == "__main__":
    main()
