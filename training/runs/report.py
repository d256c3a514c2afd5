"""`report.md`, `summary.json`, `recovery.json` and `curves.svg` of one run, or of several that differ by their seeds."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from training.runs import curves
from training.runs.checkpoints import write_whole
from training.runs.summary import NoRun, RunSummary, Spread, load, solved_before_and_after, spreads, summarize
from training.runs.watching import duration

SCHEMA_VERSION = 1


def write(folders: Sequence[Path], out: Path) -> dict[str, Any]:
    """Makes the files in `out` and returns what the summary says. Raises NoRun."""
    loaded = [(folder, load(folder)) for folder in folders]
    runs = [summarize(folder, lines) for folder, lines in loaded]
    found = as_json(runs)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "summary.json", json.dumps(found, indent=2).encode())
    write_whole(out / "recovery.json", json.dumps({one.folder: [asdict(r) for r in one.recoveries] for one in runs}).encode())
    seeds = [(one.seed, lines) for one, (_, lines) in zip(runs, loaded, strict=True)]
    write_whole(out / "curves.svg", curves.drawn(seeds))
    write_whole(out / "report.md", markdown(runs).encode())
    return found


def as_json(runs: Sequence[RunSummary]) -> dict[str, Any]:
    at_end, before = spreads([one.at_end for one in runs]), spreads([one.before for one in runs])
    return {
        "schema_version": SCHEMA_VERSION,
        "whole": all(one.is_whole for one in runs),
        "before": {name: asdict(one) for name, one in before.items()},
        "at_end": {name: asdict(one) for name, one in at_end.items()},
        "runs": [asdict(one) for one in runs],
    }


def markdown(runs: Sequence[RunSummary]) -> str:
    parts = [_title(runs), *_rates(runs), _costs(runs), "![curves](curves.svg)"]
    if any(one.recoveries for one in runs):
        parts.append(_recoveries(runs))
    return "\n\n".join(parts) + "\n"


def result_lines(found: Mapping[str, Any]) -> list[str]:
    """For the terminal: a line for each set and decoding that was played after the last step."""
    lines = []
    for name, rates in found["at_end"].items():
        before = found["before"].get(name)
        was = f"{before['mean']:.1%} -> " if before else ""
        spread = f" +- {rates['deviation']:.1%} over {rates['seeds']} seeds" if rates["seeds"] > 1 else ""
        lines.append(f"{name.replace('/', ' ')}: {was}{rates['mean']:.1%}{spread}")
    return lines


def _title(runs: Sequence[RunSummary]) -> str:
    told = f"{len(runs)} runs, seeds {', '.join(str(one.seed) for one in runs)}" if len(runs) > 1 else f"Seed {runs[0].seed}"
    unfinished = [one for one in runs if not one.is_whole]
    lines = [f"# {told}", f"Spec {', '.join(dict.fromkeys(one.spec_digest for one in runs))}. Rates are those of the last step."]
    lines += [f"Seed {one.seed} {one.ended} after {one.steps} of {one.total_steps} steps." for one in unfinished]
    return "\n\n".join(lines)


def _rates(runs: Sequence[RunSummary]) -> list[str]:
    before, at_end = spreads([one.before for one in runs]), spreads([one.at_end for one in runs])
    rows = []
    for name, after in at_end.items():
        held_out, decoding = name.split("/")
        each = "  ".join(_percent(one.at_end[name]) for one in runs)
        kept = [solved_before_and_after(Path(one.folder), held_out, decoding, 0, one.steps) for one in runs]
        turned = f"+{sum(gained for _, gained, _ in kept)} -{sum(lost for _, _, lost in kept)}"
        rows.append([held_out, decoding, _spread(before.get(name)), _spread(after), each, turned])
    header = ["set", "decoding", "before", "after", "after, each seed", "mazes gained, lost"]
    return ["## Solved", _table(header, rows)] if rows else []


def _costs(runs: Sequence[RunSummary]) -> str:
    header = ["seed", "steps", "wall-clock", "device-seconds", "tokens sampled", "tokens evaluated", "tokens trained", "troubles"]
    rows = [
        [
            str(one.seed),
            str(one.steps),
            duration(one.wall_s),
            f"{one.device_s:.0f} ({one.devices} x {one.device})",
            f"{one.sampled_tokens:,}",
            f"{one.evaluation_tokens:,}",
            f"{one.trained_tokens:,}",
            str(one.troubles),
        ]
        for one in runs
    ]
    names = list(dict.fromkeys(name for one in runs for name in one.parts_s))
    parts = [[str(one.seed), *(f"{one.parts_s.get(name, 0.0):.1f}" for name in names)] for one in runs]
    return "## Cost\n\n" + _table(header, rows) + "\n\nSeconds by part:\n\n" + _table(["seed", *names], parts)


def _recoveries(runs: Sequence[RunSummary]) -> str:
    header = ["seed", "taken up after step", "had reached", "steps lost", "start-up", "as far as before after"]
    rows = [
        [
            str(run.seed),
            str(one.at_step),
            str(one.reached_step),
            str(one.lost_steps),
            f"{one.start_up_s:.1f} s",
            "-" if one.caught_up_s is None else f"{one.caught_up_s:.1f} s",
        ]
        for run in runs
        for one in run.recoveries
    ]
    return "## Recovery\n\n" + _table(header, rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def _spread(one: Spread | None) -> str:
    if one is None:
        return "-"
    return _percent(one.mean) + (f" +- {one.deviation:.1%} ({one.lowest:.1%} to {one.highest:.1%})" if one.seeds > 1 else "")


def _percent(rate: float) -> str:
    return f"{rate:.1%}"


def main(arguments: Sequence[str]) -> int:
    """`python -m training.runs.report RUN [RUN...]`: into the run's folder, or of several into the one that they lie in."""
    folders = [Path(argument) for argument in arguments]
    try:
        found = write(folders, place_for(folders))
    except NoRun as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write("".join(f"{line}\n" for line in (*result_lines(found), f"report: {place_for(folders) / 'report.md'}")))
    return 0


def place_for(folders: Sequence[Path]) -> Path:
    return folders[0] if len(folders) == 1 else folders[0].parent


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
