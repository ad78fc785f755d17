"""The runtime engine, recals: any Python under a byte limit, where nothing can be traced."""

from fxrecals.engine.core import Stats
from fxrecals.engine.policies import Evictable
from fxrecals.engine.runtime import Recals, SavedBytes, recals

__all__ = ["Evictable", "Recals", "SavedBytes", "Stats", "recals"]
