"""All tables and figures on one page, in the paper's order and with its numbers."""

from collections.abc import Sequence

from gpmil.paper import (
    all_models,
    figure1_graphical_models,
    figure2_five_patches,
    figure3_example_patches,
    figure4_negative_slides,
    figure5_heat_maps,
    figure6_variability,
    findings,
    table1_patches,
    table2_slides,
    table3_confusion,
    table4_times,
    table5_other_models,
    table6_panda,
)
from gpmil.paper.exhibit import Exhibit
from gpmil.paper.results import Results
from gpmil.show.report import Section, Table, page

TITLE = "Instance label correlation in multiple instance learning: the experiments, made anew"


def exhibits(results: Results, panda: Results | None) -> list[Exhibit]:
    """Everything, in the order of the paper; what is ours and not the paper's at the end."""
    return [
        findings.build(results, panda),
        figure1_graphical_models.build(),
        figure2_five_patches.build(),
        figure3_example_patches.build(results),
        table1_patches.build(results),
        table2_slides.build(results),
        table3_confusion.build(results),
        figure4_negative_slides.build(results),
        figure5_heat_maps.build(results),
        figure6_variability.build(results),
        table4_times.build(results),
        table5_other_models.build(results),
        table6_panda.build(panda),
        all_models.build(results),
    ]


def html(found: Sequence[Exhibit], results: Results, panda: Results | None) -> str:
    """The page, with contents at the top and settings at the end."""
    lead = (
        "Every table and figure of the experiments of Morales-Álvarez, Schmidt, Hernández-Lobato "
        "and Molina, “Introducing instance label correlation in multiple instance learning. "
        "Application to cancer detection on histopathological images”, computed again by gpmil "
        "and set beside the paper's own numbers; with the same model at settings learned from the "
        f"training slides in every table. {results.source}"
    )
    sections = [exhibit.section() for exhibit in found]
    return page(TITLE, lead, [*sections, settings(results, panda)], contents=True)


def settings(results: Results, panda: Results | None) -> Section:
    """What every method was run with, and what was learned."""
    rows = []
    for part in (results, panda):
        if part is not None:
            rows += [_settings_row(part, method.key) for method in part.methods]
    words = [
        "The Gaussian-process models of the paper run at its settings: squared exponential kernel "
        "of variance 1 and length √D on standardised features, prior mean 0, 200 inducing points "
        "(100 k-means centres in positive, 100 in negative slides), 200 iterations; VGPMIL with "
        "H = 100 and its original code's update and start. Runs differ in the seed of k-means and "
        "of the start, networks in that of their weights and of the validation split.",
        "Learned settings: variance, length, mean and λ that make the label of every training "
        "slide likeliest under the fit without it (VGPMIL-PR-I, direct maximisation of the bound).",
    ]
    columns = ["cohort", "method", "runs", "first run: learned or chosen"]
    table = Table(columns, rows, text=columns[:2], sentences=columns[3:])
    return Section("Settings", words, [table])


def _settings_row(results: Results, key: str) -> list[str]:
    runs = results.of(key)
    notes = runs[0].notes if runs else {}
    words = ", ".join(f"{k.rstrip('_')} {_short(v)}" for k, v in notes.items())
    return [results.name, results.method(key).label, str(len(runs)), words]


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
