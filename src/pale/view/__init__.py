"""Attention maps, figures and HTML pages."""
