"""Decoding and augmentation on the device."""
