"""Operators of the paper, each with several back-ends."""

from .pale_attention import attention_weights, pale_attention

__all__ = ["attention_weights", "pale_attention"]
