"""Values of parsed answers: a cheap test that two are not equal, and how numbers are compared.

An expression with symbols is computed where these have certain values, positive ones and negative
ones. Expressions that differ there are not equal, and nothing has to be simplified to know that.
math-verify compares six decimals, by which all numbers near zero are equal. Here, numbers that are
not exact also have to agree in five digits.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from zlib import crc32

DIGITS = 60  # of each value that is computed
CANCELLED = 1e-45  # a sum that is so much smaller than its parts is zero
EXACT, APPROXIMATE = 1e-30, 1e-5  # relative differences of equal numbers
DECIMALS = 6  # that numbers with a decimal point have in common if they are equal


class _Value(NamedTuple):
    """A complex number, and whether no decimal point has a part in it."""

    real: Any
    imaginary: Any
    is_exact: bool


def is_word(expression: Any) -> bool:
    """Return whether an expression is a symbol, such as one that text in letters is read as."""
    import sympy

    return isinstance(expression, sympy.Symbol)


def same_number(gold: Any, found: Any) -> bool | None:
    """Return whether two numbers are equal; None unless both are numbers. One of them may be the
    right side of x = 5. A percentage also equals the number before its sign.
    """
    import sympy

    numbers = _number(gold), _number(found)
    if None in numbers or (isinstance(gold, sympy.Eq) and isinstance(found, sympy.Eq)):
        return None
    golds, others = map(_readings, numbers)
    if len(golds) == len(others):
        golds, others = golds[:1], others[:1]
    return any(_agree(_value(a, 0), _value(b, 0)) for a in golds for b in others)


def have_same_values(gold: Any, found: Any) -> bool | None:
    """Return whether two expressions, or lists of them, have the same values; None: not known."""
    golds, others = _flat(gold), _flat(found)
    if golds is None or others is None:
        return None
    if len(golds) != len(others):
        return False
    is_set = "FiniteSet" in (type(gold).__name__, type(found).__name__)
    for point in (0, 1):
        sides = [[_value(one, point) for one in side] for side in (golds, others)]
        if any(value is None for side in sides for value in side):
            return None
        if is_set:
            sides = [sorted(side, key=_place) for side in sides]
        if not all(map(_agree, *sides)):
            return False
    return True


def _flat(expression: Any) -> list[Any] | None:
    """Return the expressions of a list, set, matrix or interval; None for what is none of them."""
    import sympy

    if isinstance(expression, sympy.Eq) and isinstance(expression.lhs, sympy.Symbol):
        return _flat(expression.rhs)
    if isinstance(expression, sympy.MatrixBase):
        listed = expression
    elif isinstance(expression, sympy.Interval):
        listed = [expression.start, expression.end]
    elif isinstance(expression, (sympy.Tuple, sympy.FiniteSet)):
        listed = expression.args
    else:
        return [expression] if isinstance(expression, sympy.Expr) else None
    parts = [_flat(one) for one in listed]
    return None if None in parts else [one for part in parts for one in part or ()]


def _number(expression: Any) -> Any | None:
    found = _flat(expression)
    if found is None or len(found) != 1 or found[0].free_symbols or not _value(found[0], 0):
        return None
    return found[0]


def _readings(number: Any) -> list[Any]:
    """Return a number, and for a percentage also what stands before its sign."""
    import sympy

    whole = number.xreplace({_percent(): sympy.Integer(1)})
    return [number] if whole == number else [number, whole]


def _percent() -> Any:
    import sympy

    return sympy.UnevaluatedExpr(sympy.Rational(1, 100))


def _value(expression: Any, point: int) -> _Value | None:
    """Return what an expression is at a point, or None for no finite number."""
    import sympy

    floats = {number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)}
    symbols = {symbol: _at(symbol.name, point) for symbol in expression.free_symbols}
    try:
        value = _computed(expression, {**floats, **symbols, _percent(): sympy.Rational(1, 100)})
        real, imaginary = value.as_real_imag()
    # sympy raises anything for what has no value
    except Exception:  # noqa: BLE001
        return None
    is_number = all(part.is_Number and part.is_finite for part in (real, imaginary))
    return _Value(real, imaginary, not floats) if is_number else None


def _computed(node: Any, known: dict[Any, Any]) -> Any:
    """Return the number that an expression is, from those of its parts, which `known` keeps.

    sympy's own `evalf` of a whole expression may take exponentially long.
    """
    import sympy

    if node not in known:
        parts = [_computed(part, known) for part in node.args]
        value = node.func(*parts) if parts else node
        value = value if value.is_Rational else value.evalf(DIGITS)
        if node.is_Add and abs(value) < CANCELLED * max(map(abs, parts)):
            value = sympy.Integer(0)
        known[node] = value
    return known[node]


def _at(name: str, point: int) -> Any:
    """Return the value of a symbol: between 1 and 4, or its negative."""
    import sympy

    size = sympy.Rational(1000 + crc32(name.encode()) % 2999, 1000)
    return -size if point else size


def _agree(gold: _Value | None, found: _Value | None) -> bool:
    if not gold or not found:
        return False
    pairs = (gold.real, found.real), (gold.imaginary, found.imaginary)
    apart = max(abs(a - b) for a, b in pairs)
    size = max(abs(part) for pair in pairs for part in pair)
    if apart <= EXACT * size:
        return True
    if (gold.is_exact and found.is_exact) or apart > APPROXIMATE * size:
        return False
    return all(a.round(DECIMALS) == b.round(DECIMALS) for a, b in pairs)


def _place(value: _Value | None) -> tuple[float, float]:
    return (float(value.real), float(value.imaginary)) if value else (0.0, 0.0)
