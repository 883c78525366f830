"""Readers, transforms and sampling; every random draw is a function of (seed, epoch, sample) or (seed, step)."""
