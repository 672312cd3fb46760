"""Notebooks run, swept over a grid, and refreshed. Nothing here knows which study they tell."""
