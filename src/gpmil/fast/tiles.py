"""Products of matrices by tiles that stay in the registers. Imported only with Numba.

A tile is some rows and columns of the result: at every step one row of the right factor is read,
and each of its numbers is used for all rows of the tile. BLAS does the same; but the libraries
that NumPy and torch bring along use half of the vectors that AMD's processors have, and copy both
factors into blocks first, which matrices of a few hundred columns are not worth. Vectors are as
wide as those of the processor that this is compiled for (`VECTOR`). `GAIN` says whether all that is
worth it: where nothing is known of the vectors BLAS will know more.

Every entry is added up in the order of the rows or columns it is summed over, whatever the tiles.
"""

from typing import no_type_check

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.extending import intrinsic

from gpmil.fast.tails import DOOR, INNER

ACROSS = 3  # vectors side by side in a tile: with as many rows as below all registers are in use
TOGETHER = 64  # rows that are in the nearest cache while tiles go over them
FLOAT32_ROWS = 1024  # products of so many rows are added up in float32, then in float64


_HAS = binding.get_host_cpu_features()
VECTOR = 64 if _HAS.get("avx512f") else 32  # bytes
GAIN = bool(_HAS.get("avx512f") or (_HAS.get("avx2") and _HAS.get("fma")))
ROWS = VECTOR // 8  # of a tile


# --- A tile ---------------------------------------------------------------------------------------
class _Writer:
    """Writes the loop of a tile for LLVM: arrays come flat, places as numbers of entries."""

    def __init__(self, builder, kind):
        self.builder, self.kind = builder, kind
        self.bytes = 8 if isinstance(kind, ir.DoubleType) else 4
        self.width = VECTOR // self.bytes
        self.vector = ir.VectorType(kind, self.width)

    def number(self, value):
        """A whole number."""
        return ir.Constant(ir.IntType(64), value)

    def place(self, start, count, stride):
        """start + count stride."""
        return self.builder.add(start, self.builder.mul(count, stride))

    def at(self, array, place, kind):
        """Where the entry lies, as a number or as the first of a vector."""
        return self.builder.bitcast(self.builder.gep(array, [place]), kind.as_pointer())

    def vectors(self, place, count):
        """Where vectors side by side begin."""
        return [self.builder.add(place, self.number(v * self.width)) for v in range(count)]

    def load(self, array, place, kind):
        """A number or a vector."""
        found = self.builder.load(self.at(array, place, kind))
        found.align = self.bytes
        return found

    def store(self, value, array, place):
        """A vector."""
        self.builder.store(value, self.at(array, place, self.vector)).align = self.bytes

    def spread(self, number):
        """A vector that is one number everywhere."""
        nothing = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(nothing, number, ir.Constant(ir.IntType(32), 0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), self.width), None)
        return self.builder.shuffle_vector(first, nothing, zeros)

    def fused(self, a, b, total):
        """a b + total."""
        product = self.builder.fmul(a, b, flags=("contract",))
        return self.builder.fadd(product, total, flags=("contract",))


def _tile(rows, across):
    """C += A B of so many rows and vectors; or C = A B where `fresh`."""

    @intrinsic
    @no_type_check
    def tile(_context, A, a, a_row, a_step, B, b, b_step, C, c, c_row, n, fresh):
        def codegen(context, builder, signature, args):
            arrays = [
                context.make_array(signature.args[k])(context, builder, args[k]).data
                for k in (0, 4, 7)
            ]
            write = _Writer(builder, arrays[0].type.pointee)
            _write(write, arrays, (*args[1:4], *args[5:7], *args[8:]), rows, across)
            return context.get_dummy_value()

        whole = types.intp
        places = (whole,) * 3, (whole,) * 2, (whole,) * 3
        given = (A, *places[0], B, *places[1], C, *places[2], types.boolean)
        return types.void(*given), codegen

    return tile


def _write(write, arrays, places, rows, across):
    """The loop: what is in C or zero, the steps, and back to C."""
    builder, number = write.builder, write.number
    A, B, C = arrays
    a, a_row, a_step, b, b_step, c, c_row, n, fresh = places
    row_of_A = [write.place(a, number(r), a_row) for r in range(rows)]
    out = [
        place
        for r in range(rows)
        for place in write.vectors(write.place(c, number(r), c_row), across)
    ]
    zero = ir.Constant(write.vector, None)
    begin = [builder.select(fresh, zero, write.load(C, place, write.vector)) for place in out]
    before = builder.block
    body, end = (builder.function.append_basic_block() for _ in range(2))
    builder.cbranch(builder.icmp_signed(">", n, number(0)), body, end)

    builder.position_at_end(body)
    step = builder.phi(ir.IntType(64))
    step.add_incoming(number(0), before)
    totals = [builder.phi(write.vector) for _ in out]
    line = write.vectors(write.place(b, step, b_step), across)
    right = [write.load(B, place, write.vector) for place in line]
    left = [
        write.spread(write.load(A, write.place(start, step, a_step), write.kind))
        for start in row_of_A
    ]
    pairs = [(x, y) for x in left for y in right]
    after = [write.fused(x, y, total) for (x, y), total in zip(pairs, totals)]
    following = builder.add(step, number(1))
    step.add_incoming(following, body)
    builder.cbranch(builder.icmp_signed("<", following, n), body, end)

    builder.position_at_end(end)
    done = [builder.phi(write.vector) for _ in out]
    for total, first, new, last in zip(totals, begin, after, done):
        total.add_incoming(first, before)
        total.add_incoming(new, body)
        last.add_incoming(first, before)
        last.add_incoming(new, body)
    for value, place in zip(done, out):
        write.store(value, C, place)


_wide, _narrow = _tile(ROWS, ACROSS), _tile(ROWS, 1)
_row_wide, _row_narrow = _tile(1, ACROSS), _tile(1, 1)


@njit(**INNER)
@no_type_check
def tiles(A, a, a_row, a_step, B, b, b_step, C, c, c_row, n, fresh, rows, across):
    """One tile under the other: some rows, as wide as so many vectors, at most ACROSS."""
    even, width = rows - rows % ROWS, VECTOR // A.itemsize
    for i in range(0, even, ROWS):
        x, y = a + i * a_row, c + i * c_row
        if across == ACROSS:
            _wide(A, x, a_row, a_step, B, b, b_step, C, y, c_row, n, fresh)
        else:
            for j in range(0, across * width, width):
                _narrow(A, x, a_row, a_step, B, b + j, b_step, C, y + j, c_row, n, fresh)
    for i in range(even, rows):
        x, y = a + i * a_row, c + i * c_row
        if across == ACROSS:
            _row_wide(A, x, a_row, a_step, B, b, b_step, C, y, c_row, n, fresh)
        else:
            for j in range(0, across * width, width):
                _row_narrow(A, x, a_row, a_step, B, b + j, b_step, C, y + j, c_row, n, fresh)


# --- Whole matrices -------------------------------------------------------------------------------
@njit(**DOOR)
@no_type_check
def times(A, B, out, triangle):
    """out = A B; `triangle`: 1 where B is zero below its diagonal, -1 above, 0 where nowhere."""
    n, m = A.shape[0], B.shape[1]
    width = VECTOR // A.itemsize
    padded = m + -m % width
    B, plain = _padded(B, padded), padded == m
    C = out if plain else np.empty((TOGETHER, padded), out.dtype)
    for start in range(0, n, TOGETHER):
        rows = min(TOGETHER, n - start)
        _some(A, start, B, C, start if plain else 0, rows, triangle)
        if not plain:
            for i in range(rows):
                for j in range(m):
                    out[start + i, j] = C[i, j]


@njit(**INNER)
@no_type_check
def _some(A, start, B, C, to, rows, triangle):
    """A few rows of the product, all columns."""
    steps, m = B.shape
    width = VECTOR // A.itemsize
    # no constants: their types would be new ones, and all below compiled once more
    d, one, fresh = A.shape[1], np.int64(1), len(B) >= 0
    for j in range(0, m, ACROSS * width):
        across = min(ACROSS, (m - j) // width)
        first = min(j, steps) if triangle < 0 else 0
        n = (min(steps, j + across * width) if triangle > 0 else steps) - first
        a, b = start * d + first, first * m + j
        tiles(A, a, d, one, B, b, m, C, to * m + j, m, n, fresh, rows, across)


@njit(**INNER)
@no_type_check
def _padded(B, m):
    """B with columns of zeros up to m of them."""
    if B.shape[1] == m:
        return B
    out = np.zeros((len(B), m), B.dtype)
    for i in range(len(B)):
        for j in range(B.shape[1]):
            out[i, j] = B[i, j]
    return out


@njit(**DOOR)
@no_type_check
def weighted_gram(X, weights, sums, total):
    """total += X'diag(weights) X, multiplied in the dtype of `sums`.

    `sums` is (M, M), M with what it lacks to whole vectors, and zero before and behind.
    """
    m = X.shape[1]
    plain = np.zeros((TOGETHER, len(sums)), sums.dtype)
    scaled = np.zeros((TOGETHER, len(sums)), sums.dtype)
    many = FLOAT32_ROWS if sums.itemsize == 4 else len(X)
    for first in range(0, len(X), max(many, 1)):
        last = min(first + many, len(X))
        for start in range(first, last, TOGETHER):
            rows = min(TOGETHER, last - start)
            for i in range(rows):
                row, weight = X[start + i], weights[start + i]
                for j in range(m):
                    plain[i, j] = row[j]
                    scaled[i, j] = weight * row[j]
            _below(scaled, plain, rows, sums)
        for i in range(m):
            for j in range(i + 1):
                total[i, j] += sums[i, j]
        for i in range(len(sums)):
            for j in range(len(sums)):
                sums[i, j] = 0
    for i in range(m):
        for j in range(i):
            total[j, i] = total[i, j]


@njit(**INNER)
@no_type_check
def _below(left, right, n, sums):
    """sums += left'right, on the diagonal and below it."""
    m = len(sums)
    width, one, fresh = VECTOR // left.itemsize, np.int64(1), n < 0
    for j in range(0, m, ACROSS * width):
        across = min(ACROSS, (m - j) // width)
        first = j - j % ROWS
        tiles(
            left, first, one, m, right, j, m, sums, first * m + j, m, n, fresh, m - first, across
        )  # fmt: skip


@njit(**DOOR)
@no_type_check
def solved(U, rows, out):
    """out = rows U^-1, U upper: what is below its diagonal is not looked at.

    A vector of columns at a time, J, with those before them known:
    X_J = (rows_J - X_<J U_<J,J) U_JJ^-1.
    """
    n, m = rows.shape
    width, one, fresh = VECTOR // rows.itemsize, np.int64(1), len(U) < 0
    padded = m + -m % width
    less, own = np.zeros((m, padded), U.dtype), np.empty((width, width), U.dtype)
    for i in range(m):
        for j in range(i + 1, m):
            less[i, j] = -U[i, j]
    X, Y = np.empty((n, padded), rows.dtype), np.zeros((n, width), rows.dtype)
    for j in range(0, padded, width):
        known = min(width, m - j)
        for i in range(n):
            for k in range(known):
                Y[i, k] = rows[i, j + k]
        tiles(X, 0, padded, one, less, j, padded, Y, 0, width, j, fresh, n, one)
        _inverse(U, j, known, own)
        tiles(Y, 0, width, one, own, 0, width, X, j, padded, known, not fresh, n, one)
    for i in range(n):
        for j in range(m):
            out[i, j] = X[i, j]


@njit(**INNER)
@no_type_check
def _inverse(U, start, size, out):
    """The inverse of a few rows and columns of U, and zeros around it."""
    out[:] = 0
    for i in range(size - 1, -1, -1):
        for k in range(i + 1, size):
            factor = U[start + i, start + k]
            for j in range(k, size):
                out[i, j] -= factor * out[k, j]
        inverse = 1 / U[start + i, start + i]
        for j in range(i + 1, size):
            out[i, j] *= inverse
        out[i, i] = inverse
