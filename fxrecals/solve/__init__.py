"""Solvers: from a graph and a limit to a schedule."""

SOLVERS = ("auto",)
"""Names that `fxrecals.plan` takes."""
