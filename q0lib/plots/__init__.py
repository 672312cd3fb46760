"""Figures in the house style. Frames in, axes out: nothing here computes or reads a result."""
