"""Stub."""


def text(plan):
    return f"peak {plan.peak_bytes}"


def timeline_text(plan):
    return ""
