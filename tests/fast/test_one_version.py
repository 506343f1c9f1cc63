"""What is free to round is inlined: the process that compiles ends as all later ones do.

Of an inner function Numba keeps two versions, one compiled alone and one optimised once more with
its caller (fast/tails.py). Whole runs are compared by .ci/run.
"""

import dis
import functools
import importlib
import pkgutil

import pytest

import gpmil.fast

dispatcher = pytest.importorskip("numba.core.dispatcher", reason="pip install 'gpmil[fast]'")


def compiled_functions():
    """All of them by module and name."""
    names = [f"gpmil.fast.{m.name}" for m in pkgutil.iter_modules(gpmil.fast.__path__)]
    found = {}
    for name in ("gpmil.coupling.envelope", *names):
        try:
            module = importlib.import_module(name)
        except ImportError:  # Triton, CUDA
            continue
        for function in vars(module).values():
            if isinstance(function, dispatcher.Dispatcher):
                found[function.py_func] = function
    return found


def calls(function):
    """The compiled functions that it names."""
    named = {i.argval for i in dis.get_instructions(function) if i.opname == "LOAD_GLOBAL"}
    found = (function.__globals__.get(name) for name in named)
    return [f.py_func for f in found if isinstance(f, dispatcher.Dispatcher)]


def not_inlined(functions):
    """Those that others call, and that are free or call what is."""

    @functools.cache
    def is_free(function):
        own = functions[function].targetoptions.get("fastmath")
        return bool(own) or any(is_free(inner) for inner in calls(function))

    inner = {f for function in functions for f in calls(function)}
    return {
        f.__qualname__
        for f in inner
        if is_free(f) and not functions[f].targetoptions.get("forceinline")
    }


def test_what_is_free_is_inlined():
    functions = compiled_functions()
    assert len(functions) > 100
    assert not not_inlined(functions)


def test_a_free_function_that_is_called_is_found():
    numba = pytest.importorskip("numba")

    @numba.njit(fastmath={"contract"})
    def product(a, b):
        return a * b + a

    namespace = {"product": product}
    exec("def outer(a):\n    return product(a, a)", namespace)
    outer = numba.njit(namespace["outer"])
    functions = {f.py_func: f for f in (product, outer)}
    assert {name.rpartition(".")[2] for name in not_inlined(functions)} == {"product"}
