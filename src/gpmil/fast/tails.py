"""The tails of the normal distribution as polynomials, for loops that Numba compiles.

Nothing here calls a mathematical library or branches, and all is inlined (`forceinline`), so that
LLVM can work on several numbers at a time: a factor of four. Numba keeps what it compiled with the
files that call it: after a change here `make clean` makes it compile them anew.

Functions carry no annotations, as Numba takes the types from the arguments; `no_type_check` keeps
the tests' type checker from wrapping them.
"""

import math
from typing import no_type_check

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

LARGEST = 36.0  # z = t / sqrt 2 up to which erfcx is represented
ROOT_HALF = math.sqrt(0.5)
INV_ROOT_2PI = 1 / math.sqrt(2 * math.pi)

# Floating-point freedom. None of it lets NaN or infinity be assumed away.
FUSED = {"contract"}  # a * b + c in one step
ANY_ORDER = {"contract", "reassoc", "nsz"}  # and sums in any order, which vector units need

# What Python calls, and what only loops call; wrappers that nobody needs take time to compile.
# No constant is passed for a flag: its type would be a new one, and all below compiled once more.
DOOR = {"error_model": "numpy", "no_cfunc_wrapper": True, "nogil": True, "cache": True}
INNER = {"error_model": "numpy", "no_cfunc_wrapper": True, "no_cpython_wrapper": True}
# The same where there is freedom, or in what is called: inlined. Numba keeps two versions of an
# inner function: as compiled alone, which the process that compiles calls, and optimised once more
# with its caller, which all later ones find in the cache. A free sum would end differently there.
WITHIN = INNER | {"forceinline": True}


@intrinsic
@no_type_check
def widest(_context):
    """Loops of the function that begins with this take the widest vectors of the processor.

    Of Intel's processors LLVM takes half of them by itself, for the sake of their clock: loops with
    many products per number then take a sixth to two thirds more time.
    """

    def codegen(context, builder, _signature, _args):
        attributes = builder.function.attributes
        if isinstance(attributes, set):  # llvmlite adds names alone, this one has a value
            set.add(attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), codegen


# --- erfcx as a quotient of polynomials, exp as one -------------------------------------------
# erfcx(z) = P(z) / Q(z), lowest power first: the best for the relative error on 0 <= z <= LARGEST,
# by reweighted least squares with sixty digits. No coefficient is below zero, so nothing cancels.
P = (1.0000000000000041783, 2.0494710040035525193, 2.0697835972675997035, 1.3130446008174422321,
     0.56674977521476723888, 0.16996777367169681039, 0.034676070334309737053,
     0.0044370309086187384507, 0.00027760780824847765963)  # fmt: skip
Q = (1.0, 3.1778501711000377372, 4.6556035264512548456, 4.1407332378195436894,
     2.4740099861881814973, 1.0350225949507186996, 0.30519225407615470826, 0.061707757837227364269,
     0.0078644325217353975484, 0.00049204702876357569021)  # fmt: skip


def _polynomial(coefficients):
    """x -> p(x) by Horner's rule, highest power first, written out: a loop is not vectorised."""

    @intrinsic
    @no_type_check
    def horner(_context, _x):
        def codegen(_target, builder, _signature, args):
            first, *others = (ir.Constant(ir.DoubleType(), float(a)) for a in coefficients)
            total = first
            for a in others:
                product = builder.fmul(total, args[0], flags=("contract",))
                total = builder.fadd(product, a, flags=("contract",))
            return total

        return types.float64(types.float64), codegen

    return horner


_over, _twice_under = _polynomial(P[::-1]), _polynomial([2 * a for a in Q[::-1]])
_exp_polynomial = _polynomial([1 / math.factorial(k) for k in range(13, -1, -1)])
PER_LOG2 = 1 / math.log(2)
LOG2_HIGH = 0.693145751953125  # the first bits of log 2: its multiples up to 2^10 are exact
LOG2_LOW = 1.42860682030941723212e-06  # and the rest
# 1.5 x 2^52 rounds what is added to it to an integer; 1023 is the bias of the exponent
SHIFTER = 1.5 * 2.0**52 + 1023


@intrinsic
@no_type_check
def _power_of_two(_context, _shifted):
    """2^k from k + SHIFTER: its last bits are k + 1023, moved to where the exponent is."""

    def codegen(_target, builder, _signature, args):
        integer = ir.IntType(64)
        bits = builder.shl(builder.bitcast(args[0], integer), ir.Constant(integer, 52))
        return builder.bitcast(bits, ir.DoubleType())

    return types.float64(types.float64), codegen


@njit(fastmath=FUSED, error_model="numpy", forceinline=True)
@no_type_check
def exp(x):
    """exp(x), -700 <= x <= 0: x = k log 2 + r."""
    shifted = x * PER_LOG2 + SHIFTER
    k = shifted - SHIFTER
    r = (x - k * LOG2_HIGH) - k * LOG2_LOW
    return _exp_polynomial(r) * _power_of_two(shifted)


@njit(fastmath=FUSED, error_model="numpy", forceinline=True)
@no_type_check
def _exp_square(z):
    """exp(-z^2), and 0 below 1e-304."""
    square = z * z
    e = exp(-min(square, 700.0))
    return e if square < 700 else 0.0  # a choice between two numbers is no branch


@njit(fastmath=FUSED, error_model="numpy", forceinline=True)
@no_type_check
def _erfcx(z):
    """erfcx(z) = exp(z^2) erfc(z), 0 <= z <= LARGEST."""
    return 2 * _over(z) / _twice_under(z)


@njit(fastmath=FUSED, error_model="numpy", forceinline=True)
@no_type_check
def below(z):
    """Phi(t) at t = sqrt(2) z <= 0."""
    return 0.5 * _exp_square(z) * _erfcx(min(-z, LARGEST))


@njit(fastmath=FUSED, error_model="numpy", forceinline=True)
@no_type_check
def tail(z):
    """1 - Phi(t) at t = sqrt(2) z, without its factor exp(-z^2) where z > 0; and h(t)."""
    y, e, left = min(abs(z), LARGEST), _exp_square(z), z < 0
    over, under = _over(y), _twice_under(y)
    # (1 - Phi) under = rest and h = phi / (1 - Phi): one division for all, which takes as long as
    # ten products
    rest = under - e * over if left else over
    inverse = 1 / (rest * under)
    half = over * (rest * inverse)  # erfcx / 2
    upper = 1 - e * half if left else half  # nothing of it is lost near one
    return upper, INV_ROOT_2PI * (e if left else 1.0) * (under * under) * inverse
