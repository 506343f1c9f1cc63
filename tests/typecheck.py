"""The runtime type checker of the tests: beartype, with an int taken where a float is wanted.

Checking a call takes a tenth of a millisecond, two fifths of the time of a fit. So a test makes no
more than MOST checks: what comes after them goes through the same functions again and again, and
each of these is called by tests that are checked from beginning to end.
"""

import functools
import math

import jaxtyping
import pytest
from beartype import BeartypeConf, beartype

MOST = 2_000  # two checks a call: of its arguments, and of what it returns
typed = beartype(conf=BeartypeConf(is_pep484_tower=True))


class Checks:
    """How many were made in a test: a plugin of pytest, which tests/conftest.py registers."""

    def __init__(self) -> None:
        self.made = -math.inf  # without pytest there is no end of them
        self.off = jaxtyping.config.jaxtyping_disable  # JAXTYPING_DISABLE of the environment

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Another test, or an example of the documentation; its fixtures are checked too."""
        self.made = 0
        jaxtyping.config.update("jaxtyping_disable", self.off)

    def count(self) -> None:
        """One more; none from MOST on."""
        self.made += 1
        if self.made >= MOST:
            jaxtyping.config.update("jaxtyping_disable", True)


checks = Checks()


def check(function):
    """What jaxtyping calls: `function` has the signature to be checked, and no body."""
    checked = typed(function)

    @functools.wraps(checked)
    def counted(*args, **kwargs):
        checks.count()
        return checked(*args, **kwargs)

    return counted
