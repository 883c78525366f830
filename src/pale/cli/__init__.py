"""The `pale` command."""
