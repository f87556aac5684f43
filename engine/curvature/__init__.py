"""Curvature of a model's loss: what is collected, decomposed and measured."""
