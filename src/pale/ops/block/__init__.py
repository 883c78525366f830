"""Fused operators of a block, without the attention."""
