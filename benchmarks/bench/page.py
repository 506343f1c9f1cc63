"""Results as lines, as a Markdown table, as JSON, and the picture of the case `scaling`."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from bench import bandwidth
from bench.results import Result
from gpmil.show import plots

FORMAT, VERSION = "gpmil-bench", 1
COLOURS = {
    "prepare": plots.NEGATIVE,
    "solve": plots.POSITIVE,
    "sweep": plots.SERIES[0][0],
    "default fit": plots.SERIES[1][0],
}


# --- Lines ----------------------------------------------------------------------------------------
def lines(result: Result) -> Iterator[str]:
    """What a case found, for a terminal."""
    yield f"{result.case}: {result.title}"
    if result.skipped:
        yield f"  skipped: {result.skipped}"
        return
    if result.patches:
        yield f"  {size(result)}; {result.dtype}, {_where(result)}"
    if result.seconds is not None:
        yield f"  {_seconds(result)}"
    if result.naive_seconds is not None:
        yield f"  {_twin(result)}"
    if result.parts:
        yield "  parts: " + ", ".join(f"{k} {_time(v)}" for k, v in result.parts.items())
    if result.bytes_read is not None and result.read_seconds is not None:
        share = f", {result.read_share:.1%} of the time" if result.read_share is not None else ""
        yield (
            f"  {result.bytes_read / 1e9:.4g} GB read once at the measured bandwidth: "
            f"{_time(result.read_seconds)}{share}"
        )
    if result.peak_bytes is not None:
        yield f"  peak memory beyond the features: {_memory(result)}"
    for axis, found in result.curves.items():
        low, high = found["values"][0], found["values"][-1]
        yield f"  {axis}, {low:g} to {high:g}: slopes {_slopes(found)}"
    for note in result.notes:
        yield f"  note: {note}"
    for bar in result.bars:
        yield f"  bar: {bar['bar']}: {bar['verdict']}"
    if not result.bars:
        yield "  bar: none at this size"


def _slopes(found: dict[str, Any]) -> str:
    return ", ".join(f"{cost} {curve['slope']:+.2f}" for cost, curve in found["costs"].items())


def size(result: Result) -> str:
    """Bags, patches, features and inducing points, in words."""
    return (
        f"{result.bags:,} bags, {result.patches:,} patches x {result.features:,} features, "
        f"M = {result.inducing}"
    )


def _where(result: Result) -> str:
    if result.device == "cuda":
        return "GPU"
    return f"{result.threads} thread" + ("s" if result.threads > 1 else "")


def _seconds(result: Result) -> str:
    assert result.seconds is not None
    if result.first_seconds is None:
        return _time(result.seconds)
    if result.first_seconds == result.seconds:
        return f"{_time(result.seconds)}, one run without one to warm up"
    median = f"{_time(result.seconds)}, median of {result.repeats}"
    return f"{median} (first run {_time(result.first_seconds)})"


def _twin(result: Result) -> str:
    how = f", {result.extrapolated}" if result.extrapolated else ""
    off = f"; they differ by {result.difference:.1e}" if result.difference is not None else ""
    times = f": {result.ratio:.1f} times as fast" if result.ratio is not None else ""
    if result.processor_ratio is not None:
        times += f" ({result.processor_ratio:.1f} in processor time)"
    return f"naive twin, one thread: {_time(result.naive_seconds or 0.0)}{how}{times}{off}"


def _memory(result: Result) -> str:
    assert result.peak_bytes is not None
    per = f" = {result.peak_per_4nm:.2f} x 4NM bytes" if result.peak_per_4nm is not None else ""
    return f"{result.peak_bytes / 1e9:.3f} GB{per}"


def _time(seconds: float) -> str:
    """Three digits, in seconds, or milliseconds where they are few.

    >>> _time(12.345), _time(0.01234), _time(0.0000123)
    ('12.3 s', '12.3 ms', '0.0123 ms')
    """
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def bandwidth_line(found: bandwidth.Bandwidth) -> str:
    """How fast memory is read."""
    where = "GPU" if found.device == "cuda" else f"{found.threads} thread(s)"
    rate, array = found.bytes_per_second / 1e9, found.array_bytes / 1e9
    return f"read bandwidth, {where}: {rate:.1f} GB/s over {array:.2f} GB"


# --- Files ----------------------------------------------------------------------------------------
def to_json(
    results: Sequence[Result], machine: dict[str, Any], read: Sequence[bandwidth.Bandwidth]
) -> bytes:
    """Everything, with the machine it was measured on."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "machine": machine,
        "bandwidth": [asdict(found) for found in read],
        "results": [asdict(result) for result in results],
    }
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()


COLUMNS = ("case", "size", "seconds", "naive twin", "ratio", "one read", "peak memory", "bars")


def to_markdown(
    results: Sequence[Result], machine: dict[str, Any], read: Sequence[bandwidth.Bandwidth]
) -> bytes:
    """A table, with the machine above it and what needs saying below.

    In brackets behind a ratio: that of processor times.
    """
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    head = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']:g} GB{gpu}; "
        f"torch {machine['torch']}, gpmil {machine['gpmil']}",
        "",
        *(f"{bandwidth_line(found)}  " for found in read),
        "",
    ]
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(_cells(r) for r in results if not r.skipped)]
    table = [f"| {' | '.join(row)} |" for row in rows]
    below = [
        f"- {result.case}, {result.dtype}: {text}"
        for result in results
        for text in _remarks(result)
    ]
    return "\n".join([*head, *table, "", *below, ""]).encode()


def _cells(result: Result) -> tuple[str, ...]:
    def shown(value: float | None, form: str) -> str:
        return "" if value is None else form.format(value)

    return (
        result.case,
        f"{size(result)}, {result.dtype}, {_where(result)}" if result.patches else "",
        "" if result.seconds is None else _time(result.seconds),
        ("" if result.naive_seconds is None else _time(result.naive_seconds))
        + (" (extrapolated)" if result.extrapolated else ""),
        shown(result.ratio, "{:.1f}") + shown(result.processor_ratio, " ({:.1f})"),
        shown(result.read_share, "{:.1%}"),
        "" if result.peak_bytes is None else _memory(result),
        "; ".join(f"{bar['bar']}: {bar['verdict']}" for bar in result.bars),
    )


def _remarks(result: Result) -> Iterator[str]:
    if result.skipped:
        yield f"skipped, {result.skipped}"
    if result.extrapolated:
        yield f"naive twin {result.extrapolated}"
    if result.parts:
        yield ", ".join(f"{name} {_time(took)}" for name, took in result.parts.items())
    for axis, found in result.curves.items():
        yield f"slopes against {axis}: {_slopes(found)}"
    yield from result.notes


# --- Picture --------------------------------------------------------------------------------------
def picture(result: Result) -> Figure:
    """Seconds against each number on logarithmic axes, with fitted slopes."""
    figure = plots.new_figure(8.2, 6.4)
    figure.set_layout_engine("constrained")
    axes = figure.subplots(2, 2).ravel()
    for ax, (name, found) in zip(axes, result.curves.items()):
        for cost, curve in found["costs"].items():
            ax.plot(
                found["values"],
                curve["seconds"],
                "o-",
                color=COLOURS[cost],
                markersize=3.5,
                linewidth=1.2,
                label=f"{cost}: slope {curve['slope']:.2f}",
            )
        ax.set_xscale("log")
        ax.set_yscale("log")
        for axis in (ax.xaxis, ax.yaxis):
            low, high = axis.get_data_interval()
            # over many decades the powers of ten have the room for their names
            subs = (1, 2, 5) if high < 50 * low else (1,)
            axis.set_major_locator(LogLocator(subs=subs, numticks=9))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_locator(NullLocator())
        ax.grid(color=plots.GRID, linewidth=0.6)
        plots.style(ax, name, "seconds")
        beside = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 2, "borderaxespad": 0.2}
        ax.legend(frameon=False, fontsize=plots.FONT - 1, labelcolor=plots.INK, **beside)
    return figure
