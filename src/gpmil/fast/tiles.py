"""Products and elimination by tiles that stay in the registers. Imported only with Numba.

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

from gpmil.fast.memory import LINE
from gpmil.fast.tails import DOOR, INNER

ACROSS = 3  # vectors side by side in a tile: with as many rows as below all registers are in use
TOGETHER = 64  # rows that are in the nearest cache while tiles go over them
FLOAT32_ROWS = 1024  # products of so many rows are added up in float32, then in float64


_HAS = binding.get_host_cpu_features()
VECTOR = 64 if _HAS.get("avx512f") else 32  # bytes
GAIN = bool(_HAS.get("avx512f") or (_HAS.get("avx2") and _HAS.get("fma")))
ROWS = VECTOR // 8  # of a tile
FEW = ROWS * 3 // 4  # of a lower one: six rows are one or two of these, and none is filled up


# --- Where matrices begin -------------------------------------------------------------------------
@njit(**INNER)
@no_type_check
def unfilled(rows, columns, like):
    """An array of the dtype of `like` that begins where a line of memory does (memory.py)."""
    size, more = rows * columns, LINE // like.itemsize
    room = np.empty(size + more, like.dtype)
    start = -room.ctypes.data % LINE // like.itemsize
    return room[start : start + size].reshape((rows, columns))


@njit(**INNER)
@no_type_check
def in_lines(rows, columns, like):
    """The same with zeros."""
    out = unfilled(rows, columns, like)
    out[:] = 0
    return out


@njit(**INNER)
@no_type_check
def turned(x):
    """The columns of x side by side, zeros up to whole tiles."""
    n, d = x.shape
    out = in_lines(d, n + -n % ROWS, x)
    for start in range(0, n, 8):  # whole lines of the cache
        for k in range(d):
            for i in range(start, min(start + 8, n)):
                out[k, i] = x[i, k]
    return out


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
few_wide = _tile(FEW, ACROSS)


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
    B, room = filled_up(B, padded), in_lines(np.int64(0 if padded == m else TOGETHER), padded, out)
    for start in range(0, n, TOGETHER):
        into(A, start, B, out, start, min(TOGETHER, n - start), triangle, room)


@njit(**INNER)
@no_type_check
def into(A, start, B, out, to, rows, triangle, room):
    """A few rows of A B into `out`; by way of `room` where B has been filled up."""
    if B.shape[1] == out.shape[1]:
        product(A, start, B, out, to, rows, triangle)
        return
    product(A, start, B, room, np.int64(0), rows, triangle)
    for i in range(rows):
        for j in range(out.shape[1]):
            out[to + i, j] = room[i, j]


@njit(**INNER)
@no_type_check
def product(A, start, B, C, to, rows, triangle):
    """Rows of A B from `start` on, all columns, into those of C from `to` on."""
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
def filled_up(B, m):
    """B with columns of zeros up to m of them, in lines: elsewhere a product takes a fifth more."""
    if B.shape[1] == m and B.ctypes.data % LINE == 0:
        return B
    out = in_lines(len(B), m, B)
    for i in range(len(B)):
        for j in range(B.shape[1]):
            out[i, j] = B[i, j]
    return out


@njit(**DOOR)
@no_type_check
def half_gram(X, Y, weights, total):
    """total += X'diag(weights) Y on and below its diagonal, and above as below; in X's dtype."""
    m = X.shape[1]
    padded = m + -m % (VECTOR // X.itemsize)
    sums, together = in_lines(padded, padded, X), np.int64(TOGETHER)
    plain, scaled = in_lines(together, padded, X), in_lines(together, padded, X)
    many = FLOAT32_ROWS if X.itemsize == 4 else len(X)
    for first in range(0, len(X), max(many, 1)):
        last = min(first + many, len(X))
        for start in range(first, last, TOGETHER):
            rows = min(TOGETHER, last - start)
            for i in range(rows):
                row, other, weight = X[start + i], Y[start + i], weights[start + i]
                for j in range(m):
                    plain[i, j] = other[j]
                    scaled[i, j] = weight * row[j]
            below(scaled, plain, rows, sums)
        add_symmetric(sums, total)
        for i in range(len(sums)):
            for j in range(len(sums)):
                sums[i, j] = 0


@njit(**INNER)
@no_type_check
def add_symmetric(lower, total):
    """total += what is known on the diagonal and below it."""
    for i in range(len(total)):
        for j in range(i):
            total[i, j] += lower[i, j]
            total[j, i] = total[i, j]
        total[i, i] += lower[i, i]


@njit(**INNER)
@no_type_check
def below(left, right, n, sums):
    """sums += left'right, on the diagonal and below it."""
    m = len(sums)
    width, one, fresh = VECTOR // left.itemsize, np.int64(1), n < 0
    for j in range(0, m, ACROSS * width):
        across = min(ACROSS, (m - j) // width)
        first = j - j % ROWS
        tiles(
            left, first, one, m, right, j, m, sums, first * m + j, m, n, fresh, m - first, across
        )  # fmt: skip


# --- A Cholesky factor, and rows that are solved with it on the way -------------------------------
@njit(**INNER)
@no_type_check
def room(n, more, like):
    """Where `eliminate` works: n rows to be filled, and unit rows; then more rows, and zeros."""
    wide = n + -n % (VECTOR // like.itemsize)
    Z = unfilled(wide + more + -more % ROWS, wide, like)
    for i in range(len(Z)):
        first = n if i < n or wide <= i < wide + more else 0
        for j in range(first, wide):
            Z[i, j] = 1 if i == j else 0
    return Z, unfilled(wide, wide, like)


@njit(**INNER)
@no_type_check
def eliminate(Z, minus):
    """The first rows of Z are A = L L', and become L below the diagonal; others x become L^-1 x.

    Some columns J at a time, those before them known: X_J = (Z_J - X_<J L_J<') L_JJ^-T. That is
    true of A's own rows, too. `minus` takes -L' above its diagonal.
    """
    wide, width = Z.shape[1], VECTOR // Z.itemsize
    corner, own = in_lines(width, width, Z), in_lines(width, width, Z)
    for start in range(0, wide, ACROSS * width):
        across = min(ACROSS, (wide - start) // width)
        _less_known(Z, minus, np.int64(0), start, across)
        for j in range(start, start + across * width, width):
            _less_known(Z, minus, start, j, np.int64(1))
            _finish(Z, minus, j, corner, own)


@njit(**INNER)
@no_type_check
def _less_known(Z, minus, known, start, across):
    """Z_J - X_K L_JK' in all rows from J on, of so many vectors J and the columns K before them."""
    (height, wide), one, n, none = Z.shape, np.int64(1), start - known, len(Z) < 0
    left, above, here = start * wide + known, known * wide + start, start * wide + start
    rows = height - start
    tiles(Z, left, wide, one, minus, above, wide, Z, here, wide, n, none, rows, across)


@njit(**INNER)
@no_type_check
def _finish(Z, minus, start, corner, own):
    """X_J = Z_J L_JJ^-T of one vector J, nothing to be taken away any more."""
    (height, wide), width, one, fresh = Z.shape, len(own), np.int64(1), len(Z) >= 0
    _factor(Z, start, corner)
    _inverse(corner, own)
    here, rows, zero = start * wide + start, height - start, np.int64(0)
    # a tile reads all of its rows before it writes them
    tiles(Z, here, wide, one, own, zero, width, Z, here, wide, width, fresh, rows, one)
    for i in range(start + width, wide):
        for k in range(start, start + width):
            minus[k, i] = -Z[i, k]


@njit(**INNER)
@no_type_check
def _factor(Z, start, out):
    """L' of as many rows and columns as there are in `out`; nan where they are not positive."""
    for i in range(len(out)):
        for j in range(i, len(out)):
            total = Z[start + j, start + i]
            for k in range(i):
                total -= out[k, i] * out[k, j]
            out[i, j] = total / out[i, i] if j > i else np.sqrt(total)


@njit(**INNER)
@no_type_check
def _inverse(U, out):
    """The inverse of an upper triangle."""
    out[:] = 0
    for i in range(len(U) - 1, -1, -1):
        for k in range(i + 1, len(U)):
            factor = U[i, k]
            for j in range(k, len(U)):
                out[i, j] -= factor * out[k, j]
        inverse = 1 / U[i, i]
        for j in range(i + 1, len(U)):
            out[i, j] *= inverse
        out[i, i] = inverse
