"""All tests on one page: what was asked, what came out, and the command that makes it again."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from gpmil.paper.exhibit import Exhibit
from gpmil.proof import bayes_distance, error_rates, posterior_ranks, real_sets, unit_tests
from gpmil.proof.plan import Plan
from gpmil.show.report import page

TITLE = "gpmil: tests with a known answer"
NOTHING = "Nothing was asked for: real sets need --data FOLDER, other tests a --model they know."


class Test(NamedTuple):
    """One part of the page: the fits that it needs, and what is made of them."""

    parts: Callable[[Plan], Iterator[Any]]
    build: Callable[[Sequence[tuple[Any, Any]]], Exhibit]
    empty: Callable[..., Exhibit]  # as long as nothing is known

    def exhibit(self, plans: Sequence[Any], found: Sequence[tuple[Any, Any]]) -> Exhibit:
        """What is known by now, and what is not."""
        if not plans:
            return self.empty(missing=NOTHING)
        results = {id(part): result for part, result in found}
        known = [(part, results[id(part)]) for part in plans if id(part) in results]
        made = self.build(known) if known else self.empty()
        return replace(made, missing=unfinished(plans, [part for part, _ in known]))


def unfinished(plans: Sequence[Any], known: Sequence[Any]) -> str:
    """Which tables are not complete; "" where all are."""
    wanted, there = Counter(p.table for p in plans), Counter(p.table for p in known)
    short = [
        f"{table} ({wanted[table] - there[table]} of {wanted[table]})"
        for table in wanted
        if there[table] < wanted[table]
    ]
    return f"Not finished in time, or failed: {'; '.join(short)}." if short else ""


TESTS = {
    "unit-tests": Test(unit_tests.parts, unit_tests.build, unit_tests.exhibit),
    "shifted-mean": Test(bayes_distance.parts, bayes_distance.build, bayes_distance.exhibit),
    "posterior": Test(posterior_ranks.parts, posterior_ranks.build, posterior_ranks.exhibit),
    "promises": Test(error_rates.parts, error_rates.build, error_rates.exhibit),
    "real-sets": Test(real_sets.parts, real_sets.build, real_sets.exhibit),
}


def html(exhibits: Sequence[Exhibit], command: str, each: Sequence[str]) -> str:
    """The page, with contents at the top; `command` makes it, those of `each` its sections."""
    lead = (
        "What is the truth, and does a model find it? Bags are drawn in such a way that the answer "
        "is known, every model is fitted to them, and failures of our own models stand here as "
        "those of others. Numbers of every table lie beside this page as csv. All of it is made "
        f"by: {command}"
    )
    sections = [
        replace(section, paragraphs=[*section.paragraphs, f"Made by: {own}"])
        for section, own in zip((one.section() for one in exhibits), each, strict=True)
    ]
    return page(TITLE, lead, sections, contents=True)
