"""Makes torchvision importable beside a CPU build of torch: `python -m serve_app.torchvision_check [--undo]`.

Where only torchvision's CUDA build can be had, its operators don't load beside the CPU torch, and `import torchvision` ends
in "operator torchvision::nms does not exist"; transformers and vLLM's vision models fail with it. Nothing there calls those
operators: declaring their schemas is enough. The check looks first and changes the environment only if that one error shows.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

MODULE = "loramux_torchvision_ops"
MISSING_OPERATOR = ("operator torchvision::", "does not exist")

# Runs at every start of this environment's Python, so it imports nothing but sys; torch is already loaded when the finder fires.
# It fires after torchvision tried its own operators, and declares only what is missing: a working build, installed later, is left
# alone.
HOOK_SOURCE = '''"""Declares the torchvision operators that a CUDA build lacks beside a CPU torch.

Written by `python -m serve_app.torchvision_check`; its `--undo` removes it.
"""

import sys

SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_alive = []  # a torch.library fragment withdraws its schemas when it is collected


def declare():
    import torch

    missing = [schema for name, schema in SCHEMAS.items() if not hasattr(torch.ops.torchvision, name)]
    if missing:
        fragment = torch.library.Library("torchvision", "FRAGMENT")
        _alive.append(fragment)
        for schema in missing:
            fragment.define(schema)


class Finder:
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname == "torchvision._meta_registrations":  # the first module that needs the schemas
            sys.meta_path.remove(cls)
            declare()
        return None


def install():
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)
'''
PTH_SOURCE = f"import {MODULE}; {MODULE}.install()\n"


def site_packages() -> Path:
    """The folder of this interpreter's pure-Python packages."""
    return Path(sysconfig.get_paths()["purelib"])


def hook_files(site: Path) -> dict[Path, str]:
    """Path to content; the `.pth` comes last, so that it never names a module that is not there."""
    return {site / f"{MODULE}.py": HOOK_SOURCE, site / f"{MODULE}.pth": PTH_SOURCE}


def import_error() -> str:
    """What a fresh interpreter says to `import torchvision`: empty if it works, else the end of its trace."""
    done = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip()[-1500:] or f"exit status {done.returncode}"


def is_missing_operator(error: str) -> bool:
    return all(part in error for part in MISSING_OPERATOR)


def install(site: Path) -> None:
    """Writes the hook; each file appears whole, for another Python may start meanwhile."""
    for path, content in hook_files(site).items():
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text(content, encoding="utf-8")
        partial.replace(path)


def undo(site: Path) -> list[Path]:
    """Removes the hook, the `.pth` first; gives what it removed."""
    removed = [path for path in reversed(hook_files(site)) if path.exists()]
    for path in removed:
        path.unlink()
    return removed


def check(site: Path) -> tuple[int, str]:
    """Checks, repairs if it can, verifies: (exit status, what to tell)."""
    error = import_error()
    if not error:
        return 0, "torchvision imports: nothing to do"
    if "No module named 'torchvision'" in error:
        return 1, "torchvision is not installed: install the build that belongs to this torch (pip install torchvision)"
    if not is_missing_operator(error):
        return 1, f"torchvision does not import, for another reason. Install the build that belongs to this torch.\n{error}"
    install(site)
    error = import_error()
    if error:
        undo(site)
        return 1, f"declaring the missing operators did not help and was undone. Install torchvision's CPU build.\n{error}"
    return 0, f"torchvision lacked its compiled operators; declared them by {site / (MODULE + '.pth')}, and now it imports"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m serve_app.torchvision_check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--undo", action="store_true", help="remove what an earlier check installed")
    if parser.parse_args(argv).undo:
        removed = undo(site_packages())
        print("removed " + ", ".join(map(str, removed)) if removed else "nothing to remove")
        return 0
    status, message = check(site_packages())
    print(message, file=sys.stderr if status else sys.stdout)
    return status


if __name__ == "__main__":
    sys.exit(main())
