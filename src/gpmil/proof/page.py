"""All tests on one page: what was asked, what came out, and the command that makes it again."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from gpmil.paper.exhibit import Exhibit
from gpmil.proof import bayes_distance, error_rates, posterior_ranks, real_sets, unit_tests
from gpmil.proof.plan import Plan
from gpmil.show.report import page

TITLE = "gpmil: tests with a known answer"


class Test(NamedTuple):
    """One part of the page: the fits that it needs, and what is made of them."""

    parts: Callable[[Plan], Iterator[Any]]
    build: Callable[[Sequence[tuple[Any, Any]]], Exhibit]
    words: str  # for the help of the command


TESTS = {
    "unit-tests": Test(unit_tests.parts, unit_tests.build, "algorithmic unit tests"),
    "shifted-mean": Test(bayes_distance.parts, bayes_distance.build, "distance to Bayes"),
    "posterior": Test(posterior_ranks.parts, posterior_ranks.build, "ranks of the truth"),
    "promises": Test(error_rates.parts, error_rates.build, "realised error rates"),
    "real-sets": Test(real_sets.parts, real_sets.build, "real data, with --data"),
}


def html(exhibits: Sequence[Exhibit], command: str) -> str:
    """The page, with contents at the top."""
    lead = (
        "What is the truth, and does a model find it? Bags are drawn in such a way that the answer "
        "is known, every model is fitted to them, and failures of our own models stand here as "
        f"those of others. Made by: {command}. Numbers of every table lie beside this page as csv."
    )
    return page(TITLE, lead, [one.section() for one in exhibits], contents=True)
