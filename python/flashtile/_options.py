"""Options of attention, in the order in which the extension module takes them."""

from collections import namedtuple

from . import _flashtile

Options = namedtuple("Options", _flashtile.OPTIONS, defaults=(None,) * len(_flashtile.OPTIONS))
