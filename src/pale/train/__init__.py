"""The training loop and its parts; it uses only the Task interface."""
