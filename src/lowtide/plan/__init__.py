"""The best Policy for a budget: schedule, simulate, problem, solve."""
