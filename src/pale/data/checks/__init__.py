"""Checks of a dataset before training."""
