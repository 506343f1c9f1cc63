"""The tails of the normal distribution as polynomials, for loops that Numba compiles.

Nothing here calls a mathematical library or branches, and all is inlined (`forceinline`), so that
LLVM can work on several numbers at a time: a factor of four. Numba keeps what it compiled with the
files that call it: after a change here `make clean` makes it compile them anew.

Functions carry no annotations, as Numba takes the types from the arguments; `no_type_check` keeps
the tests' type checker from wrapping them.
"""

import math
from typing import no_type_check

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from scipy.special import erfcx

LARGEST = 36.0  # z = t / sqrt 2 up to which erfcx is represented
MIDDLE = 3.75  # z that lies halfway in (z - k) / (z + k): errors are even there
DEGREE = 20  # of the polynomial: 4e-15, and no better with more
ROOT_HALF = math.sqrt(0.5)
INV_ROOT_2PI = 1 / math.sqrt(2 * math.pi)

# Floating-point freedom. None of it lets NaN or infinity be assumed away.
FUSED = {"contract"}  # a * b + c in one step
ANY_ORDER = {"contract", "reassoc", "nsz"}  # and sums in any order, which vector units need

# What Python calls, and what only loops call; wrappers that nobody needs take time to compile.
# No constant is passed for a flag: its type would be a new one, and all below compiled once more.
DOOR = {"error_model": "numpy", "no_cfunc_wrapper": True, "nogil": True, "cache": True}
INNER = {"error_model": "numpy", "no_cfunc_wrapper": True, "no_cpython_wrapper": True}

# --- erfcx and exp as polynomials ---------------------------------------------------------------
# (1 + 2 z) erfcx(z) is smooth in (z - k) / (z + k), scaled to v in [-1, 1] (Shepherd & Laframboise)
LEFT, RIGHT = -1.0, (LARGEST - MIDDLE) / (LARGEST + MIDDLE)
CENTRE, SCALE = (LEFT + RIGHT) / 2, 2 / (RIGHT - LEFT)


def _smooth(v):
    u = CENTRE + v / SCALE
    z = MIDDLE * (1 + u) / (1 - u)
    return (1 + 2 * z) * erfcx(z)


def _coefficients():
    """Of the interpolant in Chebyshev's points, highest power first."""
    chebyshev = np.polynomial.chebyshev
    return chebyshev.cheb2poly(chebyshev.chebinterpolate(_smooth, DEGREE))[::-1]


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


_erfcx_polynomial = _polynomial(_coefficients())
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
def _erfcx(z):
    """erfcx(z) = exp(z^2) erfc(z), 0 <= z <= LARGEST."""
    v = ((z - MIDDLE) / (z + MIDDLE) - CENTRE) * SCALE
    return _erfcx_polynomial(v) / (1 + 2 * z)


@njit(fastmath=FUSED, error_model="numpy", forceinline=True)
@no_type_check
def _exp_square(z):
    """exp(-z^2), and 0 below 1e-304."""
    square = z * z
    e = exp(-min(square, 700.0))
    return e if square < 700 else 0.0  # a choice between two numbers is no branch


@njit(fastmath=FUSED, error_model="numpy", forceinline=True)
@no_type_check
def below(z):
    """Phi(t) at t = sqrt(2) z <= 0."""
    return 0.5 * _exp_square(z) * _erfcx(min(-z, LARGEST))


@njit(fastmath=FUSED, error_model="numpy", forceinline=True)
@no_type_check
def tail(z):
    """1 - Phi(t) at t = sqrt(2) z, without its factor exp(-z^2) where z > 0; and h(t)."""
    e, half = _exp_square(z), 0.5 * _erfcx(min(abs(z), LARGEST))
    left = z < 0
    upper = 1 - e * half if left else half
    # h = phi / (1 - Phi)
    return upper, INV_ROOT_2PI * (e if left else 1.0) / upper
