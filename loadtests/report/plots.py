"""The plots of a report, as SVG that reads in black and white: shades and hatches tell peers and stages apart, not colours alone.

Each takes values and returns a Plot, or None where there is nothing to show. Text stays text.
"""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from loadtests.analysis.account import BEHIND, behind_ms, in_front_ms
from loadtests.analysis.requests import firsts, good
from loadtests.analysis.summary import LoadFigures, Summary
from loadtests.analysis.surroundings import CHANGES
from loadtests.records import Event, MemorySample, Record
from loadtests.report.parts import Plot
from loadtests.report.words import given, number, share
from loadtests.scenario import OURS, PEERS, Burst, Load, Phase

WIDTH_IN = 7.1  # of a column on A4
ROW_IN = 0.3
MIB = 2**20
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "loramux",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
LOOKS = {  # shade, hatch, marker, line
    OURS: ("#1b3a5c", "", "o", "-"),
    "vllm": ("#e3e3e3", "", "s", ":"),
    "stock-tuned": ("#b9c6d4", "////", "^", "--"),
    "stock": ("#8b98a6", "||||", "D", "-."),
}
TIERS = {"base": ("#9a9a9a", "x"), "engine": ("#1b3a5c", "o"), "disk": ("#5b87b5", "s"), "remote": ("#c0532b", "^")}
PARTS = {  # of a first token's time, in the order of its way
    "in front of the door": ("#f4f4f4", ""),
    "resolve": ("#000000", ""),
    "behind the door": ("#d5d5d5", "||||"),
    "fetch": ("#c0532b", ""),
    "stage": ("#e9b08f", "////"),
    "queue": ("#fdf3d0", "xxxx"),
    "load": ("#8fb0cf", "\\\\\\\\"),
    "engine": ("#1b3a5c", ""),
}
MOST_TIMELINES = 6
MOST_DOTS = 400


def draw(
    summary: Summary, records: Sequence[Record], events: Sequence[Event], samples: Sequence[MemorySample]
) -> dict[str, Plot]:
    """Every plot that has data, by name, in the order of a report."""
    with mpl.rc_context(STYLE):
        found = [
            peers(summary),
            tiers(summary, records),
            stages(summary, records),
            *timelines(summary, records, events),
            hits(summary),
            memory(summary, samples),
        ]
    return {plot.name: plot for plot in found if plot is not None}


def _plot(name: str, caption: str, figure: Figure) -> Plot:
    """The SVG without a date, with ids that are its own: several of them stand in one page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight", pad_inches=0.04)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    return Plot(name, caption, re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL))


def _log_ms(axes: Any, values: Iterable[float]) -> None:
    """A logarithmic axis of ms whose ticks are plain numbers."""
    low, high = min(values := list(values)), max(values)
    axes.set_xscale("log")
    axes.set_xlim(low / 1.25, high * 1.6)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: given(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="x")


def _thinned(values: Sequence[Any]) -> Sequence[Any]:
    step = max(1, len(values) // MOST_DOTS)
    return values[::step]


# -- peers side by side ------------------------------------------------------------------------------------------------


def peers(summary: Summary) -> Plot | None:
    """A small panel for each load that several peers answered: medians with their intervals, and the 95th percentile."""
    panels: dict[tuple[str, str], list[LoadFigures]] = defaultdict(list)
    for load in summary.loads:
        panels[load.phase, load.load].append(load)
    shown = {place: loads for place, loads in panels.items() if sum(load.ttft_ms is not None for load in loads) > 1}
    if not shown:
        return None
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    tallest = max(len(loads) for loads in shown.values())
    figure = Figure(figsize=(WIDTH_IN, rows * (0.62 + 0.21 * tallest)), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, place in zip(grid.flat, [*shown, *[None] * (rows * columns - len(shown))], strict=True):
        if place is None:
            axes.set_visible(False)
        else:
            _peers_panel(axes, place, shown[place])
    return _plot(
        "peers", "TTFT in ms: bars are medians with 95 % intervals, ticks the 95th percentile. Failures beside the bar.", figure
    )


def _peers_panel(axes: Any, place: tuple[str, str], loads: Sequence[LoadFigures]) -> None:
    ordered = sorted(loads, key=lambda load: PEERS.index(load.peer))
    for row, load in enumerate(ordered):
        shade, hatch, _, _ = LOOKS[load.peer]
        lie = load.ttft_ms
        bad = 1 - load.counts.ok / load.counts.planned if load.counts.planned else 0
        told = f", {share(bad)} bad" if bad else ""
        if lie is None:
            axes.text(0, row, f" no good answer of {load.counts.planned}", va="center", fontsize=7)
            continue
        p50 = lie.p50
        axes.barh(row, p50.value, 0.62, color=shade, hatch=hatch, edgecolor="#333333", linewidth=0.5)
        if p50.low is not None and p50.high is not None:
            for color, width in (("white", 2.6), ("black", 1.1)):  # seen on dark bars and on light ones
                axes.plot([p50.low, p50.high], [row, row], color=color, linewidth=width, solid_capstyle="butt")
        axes.plot([lie.p95.value] * 2, [row - 0.31, row + 0.31], color="black", linewidth=1.2)
        end = (max(lie.p95.value, p50.high or 0), row)
        axes.annotate(f"{number(p50.value)}{told}", end, (4, 0), textcoords="offset points", va="center", fontsize=7)
    late = any(load.schedule and not load.schedule.kept for load in loads)
    axes.set_title(" / ".join(place) + (" †" if late else ""))
    axes.set_yticks(range(len(ordered)), [load.peer for load in ordered])
    axes.set_ylim(len(ordered) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    most = max((max(load.ttft_ms.p95.value, load.ttft_ms.p50.high or 0) for load in ordered if load.ttft_ms), default=1)
    axes.set_xlim(0, most * (1.95 if any(load.counts.ok < load.counts.planned for load in ordered) else 1.35))
    axes.locator_params(axis="x", nbins=4)
    axes.grid(axis="x")


# -- first tokens by tier ----------------------------------------------------------------------------------------------


def tiers(summary: Summary, records: Sequence[Record]) -> Plot | None:
    """A strip of dots for each tier and peer: requests of loads that are no bursts, that followed nobody else's load."""
    bursts = {
        (phase.name, load.name) for phase in summary.scenario.phases for load in phase.loads if isinstance(load.arrivals, Burst)
    }
    alone = [record for record in good(records) if (record.phase, record.load) not in bursts and record.role != "follower"]
    strips = _strips(alone)
    if not strips:
        return None
    figure = Figure(figsize=(WIDTH_IN, 0.75 + ROW_IN * len(strips)), layout="constrained")
    axes = figure.subplots()
    chance = np.random.default_rng(1)
    for row, ((tier, peer), values) in enumerate(strips):
        shade = TIERS[tier][0]
        dots = np.asarray(_thinned(sorted(values)))
        off = chance.uniform(-0.24, 0.24, len(dots))
        size, alpha = (5, 0.45) if len(dots) > 60 else (10, 0.75)
        axes.scatter(dots, row + off, s=size, marker=LOOKS[peer][2], color=shade, alpha=alpha, linewidths=0)
        median = float(np.median(values))
        axes.plot([median, median], [row - 0.36, row + 0.36], color="black", linewidth=1.6)
        axes.text(max(values) * 1.06, row, f"{number(median)}  ({len(values)})", va="center", fontsize=7)
    for row in range(1, len(strips)):
        if strips[row][0][0] != strips[row - 1][0][0]:
            axes.axhline(row - 0.5, color="#888888", linewidth=0.6)
    axes.set_yticks(range(len(strips)), [f"{tier}, {peer}" for (tier, peer), _ in strips])
    axes.set_ylim(len(strips) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    _log_ms(axes, [value for _, values in strips for value in values])
    axes.set_xlabel("TTFT, ms (logarithmic)")
    caption = (
        "TTFT by the tier that answered; where a server doesn't tell, by the tier that was put, first requests only. Each "
        "dot is a request, the line the median, in brackets how many. Bursts and requests that followed another's load are "
        "left out."
    )
    return _plot("tiers", caption, figure)


def _strips(records: Sequence[Record]) -> list[tuple[tuple[str, str], list[float]]]:
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    tells = {record.peer for record in records if record.tier}
    first = {id(record) for record in firsts(records)}
    for record in records:
        tier = record.tier or ("base" if record.adapter is None else "")
        if not tier and record.peer not in tells and (id(record) in first or record.put == "engine"):
            tier = record.put or ""
        if tier in TIERS and record.ttft_ms is not None:
            found[tier, record.peer].append(record.ttft_ms)
    return sorted(found.items(), key=lambda item: (list(TIERS).index(item[0][0]), PEERS.index(item[0][1])))


# -- stages ------------------------------------------------------------------------------------------------------------


def stages(summary: Summary, records: Sequence[Record]) -> Plot | None:
    """Where a first token's time went, in the mean: the only figure whose parts add up."""
    bars = _bars(summary, records)
    if not bars:
        return None
    figure = Figure(figsize=(WIDTH_IN, 0.95 + ROW_IN * len(bars)), layout="constrained")
    axes = figure.subplots()
    widest = max(sum(parts.values()) for _, parts in bars)
    for row, (_, parts) in enumerate(bars):
        begin = 0.0
        for name, ms in parts.items():
            shade, hatch = PARTS[name]
            axes.barh(row, max(ms, 0), 0.66, left=begin, color=shade, hatch=hatch, edgecolor="#333333", linewidth=0.4)
            if ms > widest * 0.055:
                shown = {"ha": "center", "va": "center", "fontsize": 6.5, "color": "white" if _is_dark(shade) else "black"}
                box = {"facecolor": shade, "edgecolor": "none", "pad": 0.8} if hatch else None
                axes.text(begin + ms / 2, row, number(ms), bbox=box, **shown)
            begin += max(ms, 0)
        axes.text(begin + widest * 0.008, row, f"{number(begin)} ms", va="center", fontsize=7)
    names = dict.fromkeys(name for name in PARTS if any(name in parts for _, parts in bars))
    handles = [
        mpl.patches.Patch(facecolor=PARTS[n][0], hatch=PARTS[n][1], edgecolor="#333333", linewidth=0.4, label=n) for n in names
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), fontsize=7, handlelength=1.4, columnspacing=0.9)
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.set_ylim(len(bars) - 0.45, -0.55)
    axes.set_xlim(0, widest * 1.1)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    axes.set_xlabel("ms to the first token, means")
    caption = (
        "Where the time to the first token went, by phase, load and tier, in the mean: means add up. Requests that followed "
        "another's load are left out. What stands in front of and behind the door is on no stage's clock."
    )
    return _plot("stages", caption, figure)


def _bars(summary: Summary, records: Sequence[Record]) -> list[tuple[str, dict[str, float]]]:
    groups: dict[tuple[str, str, str, str], list[Record]] = defaultdict(list)
    order = {phase.name: n for n, phase in enumerate(summary.scenario.phases)}
    for record in good(records):
        if record.role != "follower" and {"resolve", "relay"} <= record.stages_ms.keys():
            groups[record.peer, record.phase, record.load, record.tier].append(record)
    several = len({peer for peer, *_ in groups}) > 1
    found = []
    for (peer, phase, load, tier), of_group in sorted(
        groups.items(), key=lambda item: (item[0][0], order[item[0][1]], item[0][2:])
    ):
        parts = {"in front of the door": [in_front_ms(one) for one in of_group]}
        parts |= {
            "resolve": [one.stages_ms["resolve"] for one in of_group],
            "behind the door": [behind_ms(one) for one in of_group],
        }
        parts |= {name: [one.stages_ms.get(name, 0.0) for one in of_group] for name in BEHIND}
        means = {name: float(np.mean(values)) for name, values in parts.items() if any(values)}
        found.append((f"{f'{peer}: ' if several else ''}{phase} / {load}, {tier}", means))
    return found


def _is_dark(shade: str) -> bool:
    red, green, blue = (int(shade[n : n + 2], 16) for n in (1, 3, 5))
    return 0.3 * red + 0.59 * green + 0.11 * blue < 120


# -- timelines ---------------------------------------------------------------------------------------------------------


def timelines(summary: Summary, records: Sequence[Record], events: Sequence[Event]) -> list[Plot]:
    """One for each phase in which something happens beside steady requests: its first round, of ours where we took part."""
    eventful = [phase for phase in summary.scenario.phases if phase.changes or len(phase.loads) > 1 or _loads_again(phase)]
    found = []
    for phase in eventful[:MOST_TIMELINES]:
        in_phase = [record for record in records if record.phase == phase.name]
        peer = OURS if any(record.peer == OURS for record in in_phase) else next((r.peer for r in in_phase), None)
        round_ = min((record.round for record in in_phase if record.peer == peer), default=0)
        shown = [r for r in in_phase if (r.peer, r.round) == (peer, round_) and r.sent_s is not None]
        beside = [e for e in events if (e.peer, e.round, e.phase) == (peer, round_, phase.name) and _has_lane(e)]
        if peer and (beside or any(record.role == "leader" for record in shown)):
            found.append(_timeline(phase, peer, shown, beside))
    return found


def _has_lane(event: Event) -> bool:
    """Whether it is one of those that a timeline shows; the store's first shape is what it was all the time."""
    return event.kind in (*CHANGES, "fetch") or (event.kind == "store" and event.at_s > 0)


def _loads_again(phase: Phase) -> bool:
    """Whether adapters are drawn at random over time, so that they may be loaded, pushed out and loaded again."""
    return any(load.popularity.kind == "power" and not isinstance(load.arrivals, Burst) for load in phase.loads)


def _timeline(phase: Phase, peer: str, records: Sequence[Record], events: Sequence[Event]) -> Plot:
    figure = Figure(figsize=(WIDTH_IN, 2.9), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.15))
    _requests_over_time(above, records)
    _lanes(below, records, events)
    for event in events:
        if event.kind != "fetch":
            above.axvline(event.at_s, color="#c0532b", linewidth=0.6, linestyle=(0, (3, 2)))
            if event.kind == "promote" and event.took_s:
                above.axvspan(event.at_s, event.at_s + event.took_s, color="#c0532b", alpha=0.12, linewidth=0)
    above.set_title(f"{phase.name}, {peer}")
    below.set_xlabel("s since the phase began")
    caption = (
        f"Phase {phase.name}, {peer}, first round. Above, requests by when they were sent and the tier that answered; "
        "crosses on the upper edge did not get a good answer. Below, loads that a request began (again: the adapter had "
        "been loaded before, so it was evicted in between), reads at the store, and changes."
    )
    return _plot(f"timeline-{_plain(phase.name)}", caption, figure)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _requests_over_time(axes: Any, records: Sequence[Record]) -> None:
    answered = [record for record in records if record.outcome == "ok"]
    for tier, (shade, marker) in TIERS.items():
        of_tier = [record for record in answered if (record.tier or record.put or "engine") == tier]
        if of_tier:
            dots = ([record.sent_s for record in of_tier], [record.ttft_ms for record in of_tier])
            axes.scatter(*dots, s=9, marker=marker, color=shade, linewidths=0.6, label=tier, alpha=0.85)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: given(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("TTFT, ms")
    axes.grid(axis="y")
    bad = [record.sent_s for record in records if record.outcome != "ok"]
    if bad:
        axes.plot(bad, [0.97] * len(bad), "kx", markersize=4, transform=axes.get_xaxis_transform(), label="no good answer")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), handletextpad=0.2, borderaxespad=0)


def _lanes(axes: Any, records: Sequence[Record], events: Sequence[Event]) -> None:
    first, again = _led(records)
    changes: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        changes[event.kind].append((event.at_s, event.took_s or 0.0))
    lanes = [("load", first), ("load again", again), *changes.items()]
    shown = [(name, spans) for name, spans in lanes if spans]
    until_s = max((record.sent_s or 0.0) + (record.total_ms or 0.0) / 1e3 for record in records)
    for row, (_, spans) in enumerate(shown):
        least = until_s / 400
        axes.broken_barh([(at_s, max(took_s, least)) for at_s, took_s in spans], (row - 0.34, 0.68), color="#333333", linewidth=0)
    axes.set_yticks(range(len(shown)), [f"{name} ({len(spans)})" for name, spans in shown])
    axes.set_ylim(max(len(shown), 1) - 0.5, -0.5)
    axes.set_xlim(-until_s * 0.01, until_s * 1.01)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def _led(records: Sequence[Record]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """When loads that a request led ran, to its first token: first ones of an adapter, and later ones."""
    first, again, seen = [], [], set[str | None]()
    for record in sorted(records, key=lambda record: record.sent_s or 0.0):
        if record.role == "leader" and record.sent_s is not None:
            (again if record.adapter in seen else first).append((record.sent_s, (record.ttft_ms or 0.0) / 1e3))
        if record.outcome == "ok":
            seen.add(record.adapter)
    return first, again


# -- hit rate over slots -----------------------------------------------------------------------------------------------


def hits(summary: Summary) -> Plot | None:
    """A line for each peer and popularity, over how many adapters there are for each slot."""
    lines = _hit_lines(summary)
    if not lines:
        return None
    slots = next((phase.slots for phase in summary.phases if phase.slots), None)
    figure = Figure(figsize=(WIDTH_IN * 0.72, 2.5), layout="constrained")
    axes = figure.subplots()
    for (peer, drawn), points in lines.items():
        marker = LOOKS[peer][2]
        style = {"marker": marker, "markeredgecolor": "black", "markeredgewidth": 0.5, "markersize": 5}
        line = "-" if drawn.startswith("Zipf") else ":"
        axes.plot(
            *zip(*sorted(points), strict=True),
            linestyle=line,
            color=_line_color(peer),
            label=f"{peer}, {drawn}",
            **style,
        )
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}".replace("%", " %")))
    axes.set_xticks(sorted({x for points in lines.values() for x, _ in points}))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{given(value)}{'x' if slots else ''}"))
    axes.set_xlabel(f"adapters over the engine's {slots} slots" if slots else "adapters")
    axes.set_ylabel("hit rate")
    axes.grid()
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), borderaxespad=0)
    caption = "Hit rate, the share of requests that began no load, over how many adapters were asked for."
    return _plot("hits", caption, figure)


def _hit_lines(summary: Summary) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Of phases with one load that draws at random; lines of one point are none."""
    loads = {phase.name: phase.loads[0] for phase in summary.scenario.phases if len(phase.loads) == 1 and _loads_again(phase)}
    lines: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for phase in summary.phases:
        if phase.loads and phase.phase in loads:
            lines[phase.peer, _popularity(loads[phase.phase])].append((phase.adapters / (phase.slots or 1), phase.loads.hit_rate))
    return dict(lines) if any(len({x for x, _ in points}) > 1 for points in lines.values()) else {}


def _popularity(load: Load) -> str:
    return f"Zipf {given(load.popularity.alpha)}" if load.popularity.alpha else "uniform"


# -- memory ------------------------------------------------------------------------------------------------------------


def memory(summary: Summary, samples: Sequence[MemorySample]) -> Plot | None:
    """A panel for each part, of the phase that was watched longest; a line for each peer and round."""
    lasted: dict[str, float] = defaultdict(float)
    for sample in samples:
        lasted[sample.phase] = max(lasted[sample.phase], sample.at_s)
    if not lasted:
        return None
    phase = max(lasted, key=lambda name: lasted[name])
    parts: dict[str, dict[tuple[str, int], list[MemorySample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        if sample.phase == phase:
            parts[sample.part][sample.peer, sample.round].append(sample)
    columns = min(3, len(parts))
    rows = -(-len(parts) // columns)
    figure = Figure(figsize=(WIDTH_IN, 0.35 + 1.55 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, part in zip(grid.flat, [*sorted(parts), *[None] * (rows * columns - len(parts))], strict=True):
        if part is None:
            axes.set_visible(False)
        else:
            _memory_panel(axes, part, parts[part])
    figure.supxlabel(f"minutes since phase {phase} began", fontsize=8)
    several = len({peer for of_part in parts.values() for peer, _ in of_part}) > 1
    if several:
        _legend_of_peers(figure, {peer for of_part in parts.values() for peer, _ in of_part})
    caption = (
        f"Memory that belongs to each part alone (USS), phase {phase}; a line for each {'peer and ' if several else ''}round."
    )
    return _plot("memory", caption, figure)


def _memory_panel(axes: Any, part: str, of_part: dict[tuple[str, int], list[MemorySample]]) -> None:
    for (peer, _), samples in sorted(of_part.items()):
        ordered = sorted(samples, key=lambda sample: sample.at_s)
        line = LOOKS[peer][3]
        points = ([one.at_s / 60 for one in ordered], [one.uss_bytes / MIB for one in ordered])
        axes.plot(*points, color=_line_color(peer), linestyle=line, linewidth=0.9)
    low, high = axes.get_ylim()
    middle = (low + high) / 2
    around = max(high - low, middle * 0.1) / 2  # a flat line looks flat
    axes.set_ylim(middle - around, middle + around)
    axes.set_title(f"{part}, MiB")
    axes.locator_params(nbins=4)
    axes.grid(axis="y")


def _legend_of_peers(figure: Figure, shown: set[str]) -> None:
    ordered = sorted(shown, key=PEERS.index)
    lines = [mpl.lines.Line2D([], [], color=_line_color(peer), linestyle=LOOKS[peer][3], label=peer) for peer in ordered]
    figure.legend(handles=lines, loc="outside upper left", ncols=len(ordered))


def _line_color(peer: str) -> str:
    """A bar's shade may be too light for a line."""
    shade = LOOKS[peer][0]
    return shade if _is_dark(shade) else "#777777"
