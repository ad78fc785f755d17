"""The runtime engine, recals: any Python under a byte limit, where nothing can be traced."""

from fxrecals.engine.runtime import Recals, SavedBytes, recals

__all__ = ["Recals", "SavedBytes", "recals"]
