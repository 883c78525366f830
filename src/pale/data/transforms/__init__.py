"""Transforms of images, masks and objects."""
