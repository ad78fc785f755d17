"""Solvers: from a graph and a limit to a schedule."""
