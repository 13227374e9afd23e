"""Options of attention, in the order in which the extension module takes them."""

import operator
from collections import namedtuple

from . import _flashtile

Options = namedtuple("Options", _flashtile.OPTIONS, defaults=(None,) * len(_flashtile.OPTIONS))


def integer(name, x):
    """x as an int, whatever integer it is; it names a size."""
    try:
        number = operator.index(x)
    except TypeError:
        raise TypeError(f"{name} is {x!r}, expected an integer") from None
    if number < 0:
        raise ValueError(f"{name} is {number}, expected 0 or more")
    return number


def one_of(name, x, known):
    """x, which is one of some names."""
    if x not in known:
        raise ValueError(f"{name} is {x!r}, expected one of {', '.join(known)}")
    return x
