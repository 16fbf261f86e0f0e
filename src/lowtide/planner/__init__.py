"""The fastest Policy for a budget: schedule, problem, solve, simulate. :func:`lowtide.plan` is its one call."""
