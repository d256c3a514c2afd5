"""The curves of runs: solve rates of evaluations and of batches, reply lengths, and what the learner says of itself."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from training.runs.events import EvalEvent, Line, StepEvent, history

Run = tuple[int, Sequence[Line]]

# Without dates and random ids the same run draws the same bytes.
STABLE = {"svg.hashsalt": "loramux", "svg.fonttype": "none"}

LEARNER = {
    "gradient norm": "policy/raw_grad_norm",
    "drift from the sampler, mean |log-prob|": "policy/rollout_train_logprobs_abs_diff_mean",
    "entropy": "policy/policy_entropy",
}


def drawn(runs: Sequence[Run]) -> bytes:
    """SVG: each run a line, of evaluations the mean over runs with its range."""
    with mpl.rc_context(STABLE):
        figure = Figure(figsize=(11, 9), layout="constrained")
        panels = iter(figure.subplots(3, 2).flat)
        _evaluations(next(panels), runs)
        _per_step(next(panels), runs, "solve rate of the batch", lambda event: event.solve_rate)
        _per_step(next(panels), runs, "turns an episode", lambda event: event.turns_mean)
        for name, key in LEARNER.items():
            _per_step(next(panels), runs, name, lambda event, key=key: _of_learner(event, key))
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _of_learner(event: StepEvent, key: str) -> float:
    """A gap where a batch had nothing to learn from: such figures are zero for want of tokens."""
    learnt = event.learner.get("policy/trained_tokens", 1.0)
    return event.learner.get(key, float("nan")) if learnt else float("nan")


def _evaluations(axes: Axes, runs: Sequence[Run]) -> None:
    found: dict[str, dict[int, list[float]]] = {}
    for _, lines in runs:
        for event in (line.event for line in history(lines)):
            if isinstance(event, EvalEvent):
                found.setdefault(f"{event.set} {event.decoding}", {}).setdefault(event.step, []).append(event.solve_rate)
    for name, by_step in found.items():
        steps = sorted(by_step)
        means = [sum(by_step[step]) / len(by_step[step]) for step in steps]
        (line,) = axes.plot(steps, means, marker="o", markersize=3, label=name)
        lowest, highest = ([pick(by_step[step]) for step in steps] for pick in (min, max))
        axes.fill_between(steps, lowest, highest, alpha=0.15, color=line.get_color())
    axes.set(title="solved in evaluations: mean, lowest to highest", xlabel="step", ylim=(0, 1))
    if found:
        axes.legend(fontsize=7)


def _per_step(axes: Axes, runs: Sequence[Run], title: str, of: Callable[[StepEvent], float]) -> None:
    for seed, lines in runs:
        steps = [line.event for line in history(lines) if isinstance(line.event, StepEvent)]
        axes.plot([event.step for event in steps], [of(event) for event in steps], linewidth=1, label=f"seed {seed}")
    axes.set(title=title, xlabel="step")
    if len(runs) > 1:
        axes.legend(fontsize=7)
