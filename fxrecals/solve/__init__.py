"""Solvers: from a graph and a limit to a schedule."""

SOLVERS = ("auto", "exact")
"""Names that `fxrecals.plan` takes."""
