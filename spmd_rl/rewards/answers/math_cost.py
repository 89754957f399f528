"""Cost of an expression: whether comparing it could take minutes or gigabytes."""

from __future__ import annotations

import math
from typing import Any

MAX_DIGITS = 5_000.0  # decimal digits of any number that is computed on the way
MAX_PARTS = 1_000  # numbers, symbols and operations in one expression
MAX_SIMPLIFIED = 150  # of these in two expressions of which the difference is simplified
MAX_SOLVED = 40  # the same of equations, inequalities and sets of intervals, which are solved
MAX_EXPANDED_POWER = 20  # of a sum with symbols, which may be multiplied out
MAX_MATRIX_POWER = 100
MAX_INVERTED = 9  # entries of a matrix with symbols that is a base of a power
_UNDONE = ("Sum", "Product", "Integral", "Derivative", "Limit")  # computing these may never end
_FACTORIALS = ("factorial", "factorial2", "subfactorial", "gamma")
_EXPONENTIALS = ("exp", "sinh", "cosh")


class _CostlyError(Exception):
    """The expression is too large."""


def is_costly(expression: Any) -> bool:
    """Return whether a parsed answer is too large to be computed, or has an open sum or limit.

    A text is not costly. The size of numbers is only estimated, and so nothing is computed here.
    """
    import sympy

    if isinstance(expression, str):
        return False
    try:
        for number, node in enumerate(sympy.preorder_traversal(expression)):
            if number >= MAX_PARTS or type(node).__name__ in _UNDONE:
                return True
        _digits(expression)
    except _CostlyError:
        return True
    return False


def num_parts(expression: Any) -> int:
    """Return how many numbers, symbols and operations an expression has."""
    import sympy

    return sum(1 for _ in sympy.preorder_traversal(expression))


def _digits(node: Any) -> float:
    """Return about how many decimal digits the value has at most; symbols count as one digit.

    Raises: _CostlyError when a part of it has more than MAX_DIGITS.
    """
    if getattr(node, "is_Number", False):
        return _digits_of_number(node)
    args = getattr(node, "args", ())
    digits = [_digits(arg) for arg in args]
    if not digits:
        return 1.0
    name = type(node).__name__
    if name in ("Pow", "MatPow"):
        value = _power(node, *digits)
    elif name in _EXPONENTIALS:
        value = _magnitude(digits[0])
    elif name in _FACTORIALS:
        value = _magnitude(digits[0]) * max(digits[0], 1.0)
    elif name == "binomial":
        value = _magnitude(digits[0])
    elif name in ("Mul", "MatMul"):
        value = math.fsum(digits)
    else:
        value = max(digits) + math.log10(len(digits))
    if value > MAX_DIGITS:
        raise _CostlyError
    return value


def _digits_of_number(number: Any) -> float:
    if number.is_Rational:
        return max(abs(int(number.p)).bit_length(), int(number.q).bit_length()) * math.log10(2)
    if not number.is_finite or number == 0:
        return 1.0
    _, mantissa, exponent, bits = number._mpf_  # of a Float: mantissa * 2 ** exponent
    return max(abs(exponent + bits), bits if mantissa else 0) * math.log10(2)


def _power(node: Any, base: float, exponent: float) -> float:
    """Return the digits of a power. Raises: _CostlyError for one that would be multiplied out."""
    power = _magnitude(exponent)
    sums = getattr(node.args[0], "is_Add", False) and node.args[0].free_symbols
    if sums and power > MAX_EXPANDED_POWER + 1:
        raise _CostlyError
    if getattr(node.args[0], "is_Matrix", False):
        is_large = node.args[0].free_symbols and math.prod(node.args[0].shape) > MAX_INVERTED
        if is_large or power > MAX_MATRIX_POWER + 1:
            raise _CostlyError
    return power * max(base, 0.3)


def _magnitude(digits: float) -> float:
    """Return the size of a number of so many digits, as far as it matters."""
    return float(10.0 ** min(digits, 10.0))
