"""Settings, console output, progress and escaping."""
