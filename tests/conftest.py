from hypothesis import settings

# No deadline: a first call into torch takes seconds, and a shared machine is slow at times.
# Derandomized: a failure belongs to a change, not to the day.
# `pytest --hypothesis-profile=search` looks further.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("repeatable")
