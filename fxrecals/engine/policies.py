"""Which saved tensor goes first when room is needed.

A policy scores what can be evicted; the lowest score goes first. `lru` and `dtr` are built in, and
any function of an `Evictable` will do:

    >>> largest_first = lambda tensor: -tensor.nbytes
    >>> small, large = (Evictable(n, 1e-3, 0.0, 7) for n in (10, 20))
    >>> min((small, large), key=largest_first).nbytes
    20

`dtr` is the heuristic of Kirisame et al., "Dynamic Tensor Rematerialization" (ICLR 2021): what it
costs to bring a tensor back, for each byte that it frees and each moment that it is not needed.
Costs count what was evicted around it as well, which must be brought back with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fxrecals.errors import OptionError


class Evictable(NamedTuple):
    """A saved tensor that could be computed again.

    Attributes:
        nbytes: of its storage.
        seconds: that its op takes, estimated.
        lost_seconds: that the ops around it take whose results are not in memory.
        age: ops since it was last used, in the forward; in the backward, how many saved tensors
            are asked for before it, as far as the order of saving tells.
    """

    nbytes: int
    seconds: float
    lost_seconds: float
    age: int


Policy = Callable[[Evictable], float]


def lru(tensor: Evictable) -> float:
    """The tensor first that was last used the longest ago.

    >>> lru(Evictable(1, 1.0, 0.0, age=9)) < lru(Evictable(1, 1.0, 0.0, age=2))
    True
    """
    return -tensor.age


def dtr(tensor: Evictable) -> float:
    """The tensor first that is cheap to bring back, large, and not needed for long.

    >>> dtr(Evictable(8, 1.0, 0.0, age=1)) < dtr(Evictable(8, 1.0, 3.0, age=1))
    True
    """
    return (tensor.seconds + tensor.lost_seconds) / (max(1, tensor.nbytes) * max(1, tensor.age))


NAMES: dict[str, Policy] = {"lru": lru, "dtr": dtr}


def named(policy: str | Policy) -> Policy:
    """The policy of a name, or the function that was given.

    >>> named("dtr") is dtr
    True
    >>> named("fifo")
    Traceback (most recent call last):
    fxrecals.errors.OptionError: policy='fifo' does not work; what works: 'lru', 'dtr', or a ...
    """
    if callable(policy):
        return policy
    if policy not in NAMES:
        expected = ", ".join(map(repr, NAMES)) + ", or a function of an Evictable"
        raise OptionError("policy", policy, expected)
    return NAMES[policy]
