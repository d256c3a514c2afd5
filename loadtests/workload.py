"""What is asked when: the requests of a phase, drawn from its loads. Pure: the same phase, pools and seed give the same plan.

Every load draws from dice of its own, named after seed, phase, load and what is drawn, so that another load beside it, or
longer prompts, move none of its arrivals.
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from PIL import Image

from loadtests.scenario import Arrivals, Burst, Change, Gamma, Load, Phase, Pool, Popularity, Spaced

HELLO = "Hello"
# Words that are one token each in the demo base's tokenizer, and after a space in those of most models.
_WORDS = (
    "able about above across action again almost alone always amber animal answer apple arrow autumn basket beach beautiful "
    "before behind better bicycle black blanket border bottle branch bread breakfast bridge brown camera candle carpet "
    "castle chair change church circle city clock cloud coffee copper corner cotton country danger diamond dinner door "
    "dream engine evening family farmer feather field figure flower forest friend future garden ghost giant glass grass "
    "green ground guitar hammer happy harvest heart history holiday honey horse hotel house island jacket kitchen ladder "
    "language letter library light little machine magic market metal mirror money morning mother mountain music nature "
    "night number ocean orange palace paper pencil picture pillow planet pocket powder promise purple queen quiet rabbit "
    "reason record ribbon river road rocket season second secret shadow silver simple sister square station stone storm "
    "story sugar summer table teacher temple together tower travel treasure tree valley velvet village voice water weather "
    "white window winter wonder yellow"
)
WORDS = tuple(_WORDS.split())
IMAGE_PX, IMAGE_CELLS = 64, 8


@dataclass(frozen=True, slots=True)
class Planned:
    """A request that leaves `at_s` after the phase's beginning. `adapter_index` counts within `pool`, newcomers after those
    that the pool began with; None asks the base. `images` are data URLs. `whole_length` asks for all of `max_tokens`, where
    an answer to HELLO may end when its sentence does."""

    number: int
    at_s: float
    load: str
    pool: str | None
    adapter_index: int | None
    alias: str | None
    prompt: str
    max_tokens: int
    images: tuple[str, ...] = ()

    @property
    def whole_length(self) -> bool:
        return self.prompt != HELLO


@dataclass(frozen=True, slots=True)
class Newcomer:
    """An adapter that may be asked for from `from_s` on."""

    index: int
    from_s: float


def plan(phase: Phase, pools: Mapping[str, Pool], seed: int) -> tuple[Planned, ...]:
    """All requests of a phase in the order of their times, numbered from 0."""
    drawn = [request for load in phase.loads for request in _of_load(phase, load, pools, seed)]
    drawn.sort(key=lambda request: request.at_s)
    return tuple(replace(request, number=number) for number, request in enumerate(drawn))


def newcomers(phase: Phase, pools: Mapping[str, Pool], pool: str) -> tuple[Newcomer, ...]:
    """The adapters that `publish` changes add to a pool, numbered on from its own in the order of their publication."""
    times = sorted(
        (at_s, change.asked_after_s)
        for change in phase.changes
        if change.do == "publish" and change.pool == pool
        for at_s in times_of(change)
    )
    first = pools[pool].count
    return tuple(Newcomer(first + k, at_s + asked_after_s) for k, (at_s, asked_after_s) in enumerate(times))


def times_of(change: Change) -> tuple[float, ...]:
    """When a change is made, in s after the phase's beginning; all at once where it has no `every_s`."""
    return tuple(change.at_s + k * (change.every_s or 0.0) for k in range(change.count))


def _of_load(phase: Phase, load: Load, pools: Mapping[str, Pool], seed: int) -> Iterator[Planned]:
    def dice(what: str) -> random.Random:
        return random.Random(f"{seed}/{phase.name}/{load.name}/{what}")

    at_s = [load.starts_s + after_s for after_s in _arrivals(load.arrivals, dice("arrivals"))]
    adapters: Sequence[int | None] = [None] * len(at_s)
    if load.pool is not None:
        adapters = _adapters(load.popularity, at_s, pools[load.pool].count, newcomers(phase, pools, load.pool), dice("adapters"))
    lengths, words, pictures = dice("lengths"), dice("words"), dice("images")
    for when_s, adapter in zip(at_s, adapters, strict=True):
        span = load.prompt_tokens
        yield Planned(
            number=0,
            at_s=when_s,
            load=load.name,
            pool=load.pool,
            adapter_index=adapter,
            alias=load.alias,
            prompt=HELLO if span is None else " ".join(words.choices(WORDS, k=max(1, words.randint(span.least, span.most)))),
            max_tokens=max(1, lengths.randint(load.output_tokens.least, load.output_tokens.most)),
            images=tuple(_picture(pictures) for _ in range(load.images)),
        )


def _arrivals(arrivals: Arrivals, dice: random.Random) -> Iterator[float]:
    match arrivals:
        case Burst(count=count):
            yield from (0.0 for _ in range(count))
        case Spaced(count=count, every_s=every_s):
            yield from (k * every_s for k in range(count))
        case Gamma(rate_per_s=rate, cv=cv, duration_s=duration_s):
            # Gaps of mean 1 / rate and standard deviation cv / rate.
            shape, scale_s = cv**-2, cv**2 / rate
            at_s = dice.gammavariate(shape, scale_s)
            while at_s < duration_s:
                yield at_s
                at_s += dice.gammavariate(shape, scale_s)


def _adapters(
    popularity: Popularity, at_s: Sequence[float], count: int, coming: Sequence[Newcomer], dice: random.Random
) -> list[int | None]:
    """Which adapter each request asks for. A newcomer is what the load asks for next, and from then on one of the pool: the
    most popular one of a power law, the last in turn otherwise, until the order is drawn anew."""
    power = popularity.kind == "power"
    order = list(range(count))
    if power:
        dice.shuffle(order)
    waiting, era, chosen = list(coming), 0, []
    for when_s in at_s:
        if popularity.churn_every_s and (now := int(when_s // popularity.churn_every_s)) > era:
            era = now
            dice.shuffle(order)
        if waiting and waiting[0].from_s <= when_s:
            newest = waiting.pop(0).index
            order.insert(0 if power else len(order), newest)
            chosen.append(newest)
        elif power:
            chosen.append(dice.choices(order, [place**-popularity.alpha for place in range(1, len(order) + 1)])[0])
        else:
            order.append(order.pop(0))
            chosen.append(order[-1])
    return chosen


def _picture(dice: random.Random) -> str:
    """A small picture as a data URL: coloured squares, each picture its own."""
    cells = Image.frombytes("RGB", (IMAGE_CELLS, IMAGE_CELLS), dice.randbytes(3 * IMAGE_CELLS**2))
    file = io.BytesIO()
    cells.resize((IMAGE_PX, IMAGE_PX), Image.Resampling.NEAREST).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
