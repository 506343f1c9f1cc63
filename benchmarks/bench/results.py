"""What a case found, and the bars it is held against."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.bandwidth import Bandwidth
from bench.measure import Memory, Spent, Timing
from gpmil.data.bags import Bags

BUSY = 0.8  # of the seconds on the clock: with less processor time others had the core
MET, MISSED = "met", "missed"


@dataclass
class Result:
    """One line of the table; None where a case has no such number."""

    case: str
    title: str
    size: str
    bags: int = 0
    patches: int = 0
    features: int = 0
    inducing: int = 0
    dtype: str = "float64"
    device: str = "cpu"
    threads: int = 1
    repeats: int = 0
    seconds: float | None = None
    first_seconds: float | None = None
    processor_seconds: float | None = None
    naive_seconds: float | None = None
    naive_processor_seconds: float | None = None
    ratio: float | None = None
    processor_ratio: float | None = None  # of processor times: hardly moved by other work
    extrapolated: str | None = None  # how the naive twin's seconds were arrived at
    difference: float | None = None  # largest between package and naive twin, relative
    parts: dict[str, float] = field(default_factory=dict)
    bytes_read: int | None = None
    read_seconds: float | None = None  # the least time for that at the measured bandwidth
    read_share: float | None = None  # of `seconds`
    peak_bytes: int | None = None  # beyond the features
    peak_per_4nm: float | None = None
    notes: list[str] = field(default_factory=list)
    curves: dict[str, Any] = field(default_factory=dict)
    bars: list[dict[str, str]] = field(default_factory=list)
    skipped: str | None = None

    @property
    def four_nm(self) -> int:
        """Bytes of an N x M matrix in float32."""
        return 4 * self.patches * self.inducing

    @property
    def sure_ratio(self) -> float | None:
        """The ratio that is judged: other work can raise that of the clock, so the lower one.

        With several threads against the twin's one, processor times say nothing.
        """
        if self.ratio is None or self.processor_ratio is None or self.threads > 1:
            return self.ratio
        return min(self.ratio, self.processor_ratio)

    def of(self, bags: Bags, inducing: int) -> "Result":
        """With the size of the cohort."""
        self.bags, self.patches = len(bags), int(bags.n_instances)
        self.features, self.inducing = int(bags.n_features), inducing
        return self

    def took(self, timing: Timing) -> "Result":
        """With the seconds of the package."""
        self.seconds, self.first_seconds = timing.seconds, timing.first
        self.repeats, self.processor_seconds = timing.repeats, timing.processor
        if timing.processor is not None and timing.processor < BUSY * timing.seconds:
            share = timing.processor / timing.seconds
            self.notes.append(f"the machine was busy: {share:.0%} of a core was had on average")
        return self

    def against(self, naive: Spent, share: float = 1.0) -> "Result":
        """With the time of the naive twin, run on this share of the patches."""
        self.naive_seconds, self.naive_processor_seconds = (t / share for t in naive)
        if share < 1:
            took = f"{naive.seconds:.3g} s"
            self.extrapolated = f"extrapolated from {share:.2%} of the patches, {took}"
        if self.seconds:
            self.ratio = self.naive_seconds / self.seconds
        if self.processor_seconds:
            self.processor_ratio = self.naive_processor_seconds / self.processor_seconds
        return self

    def reads(self, n_bytes: int, bandwidth: Bandwidth, at_a_time: int | None = None) -> "Result":
        """With the share of the time that reading so many bytes once takes at least."""
        self.bytes_read, self.read_seconds = int(n_bytes), bandwidth.seconds(n_bytes)
        if self.seconds:
            self.read_share = self.read_seconds / self.seconds
        small = (at_a_time or n_bytes) < bandwidth.array_bytes / 4
        if small and self.read_share is not None and self.read_share > 0.5:
            self.notes.append("what is read may stay in a cache: its share can exceed one")
        return self

    def held(self, memory: Memory, mapped: bool = False) -> "Result":
        """With the peak memory of the process of its own.

        `mapped`: the features are a file, whose pages in memory are the system's to take back.
        """
        own = memory.own if mapped else None
        self.peak_bytes = memory.peak if own is None else max(0, own)
        if self.four_nm:
            self.peak_per_4nm = self.peak_bytes / self.four_nm
        if not memory.exact:
            self.notes.append("peak memory is a lower bound: its mark could not be reset")
        if own is not None:
            self.notes.append(
                f"peak memory is the process's own, sampled; {memory.peak / 1e9:.3f} GB with pages "
                "of files"
            )
        return self

    def judged(self) -> "Result":
        """With what became of its bars."""
        found = [bar.judge(self) for bar in BARS.get((self.case, self.size), ())]
        self.bars = [judged for judged in found if judged is not None]
        return self

    @property
    def missed(self) -> bool:
        """Whether a bar was missed."""
        return any(bar["verdict"] == MISSED for bar in self.bars)


@dataclass(frozen=True)
class Bar:
    """A limit on one number of a result, and how far one would like to get."""

    number: str
    text: str
    limit: Callable[[Result], float]
    aim: Callable[[Result], float]
    at_least: bool = False
    device: str = "cpu"

    def judge(self, result: Result) -> dict[str, str] | None:
        """Met or missed; None for a result that has no such number or another device."""
        found = getattr(result, self.number)
        if found is None or result.device != self.device:
            return None
        verdict = MET if self._holds(found, self.limit(result)) else MISSED
        if verdict == MET and self._holds(found, self.aim(result)):
            return {"bar": f"{self.text}, reached", "verdict": verdict}
        return {"bar": self.text, "verdict": verdict}

    def _holds(self, found: float, limit: float) -> bool:
        return found >= limit if self.at_least else found <= limit


def seconds(most: float, aim: float, note: str = "", device: str = "cpu") -> Bar:
    """At most so many seconds."""
    text = f"at most {most:g} s{note}, aim {aim:g} s"
    return Bar("seconds", text, lambda _: most, lambda _: aim, device=device)


def ratio(least: float, aim: float) -> Bar:
    """At least so many times faster than the naive twin."""
    text = f"at least {least:g} times the naive twin, aim {aim:g}"
    return Bar("sure_ratio", text, lambda _: least, lambda _: aim, True)


def share(least: float, aim: float, device: str = "cpu") -> Bar:
    """At least such a share of the time for one read at the measured bandwidth."""
    text = f"at least {least:.0%} of one read of H, aim {aim:.0%}"
    return Bar("read_share", text, lambda _: least, lambda _: aim, True, device)


MEMORY = Bar(
    "peak_bytes",
    "peak memory at most 2.5 x 4NM bytes, aim 1.25 x 4NM bytes + 0.1 GB",
    lambda result: 2.5 * result.four_nm,
    lambda result: 1.25 * result.four_nm + 0.1e9,
)
THREE_GB = Bar("peak_bytes", "peak memory at most 3 GB", lambda _: 3e9, lambda _: 0.0)

BARS: dict[tuple[str, str], tuple[Bar, ...]] = {
    ("fit", "sicapv2"): (ratio(15, 20),),
    ("default", "sicapv2"): (ratio(1, 2.5),),
    ("sweeps", "sicapv2"): (ratio(10, 20),),
    ("sweep", "sicapv2"): (share(0.6, 0.7),),
    ("sweep", "panda"): (share(0.6, 0.7),),
    ("predict", "sicapv2"): (ratio(8, 12),),
    ("panda-fit", "panda"): (seconds(60, 20, " on 2 cores"), MEMORY),
    ("disk", "panda"): (THREE_GB,),
    ("panda-default", "panda"): (seconds(30, 15, " on 2 cores"),),
    ("gpu", "panda"): (seconds(0.15, 0.1, " with resident features", "cuda"),),
    ("gpu-sweep", "panda"): (share(0.6, 0.7, "cuda"),),
    ("gpu-default", "panda"): (seconds(5, 2.5, "", "cuda"),),
}
