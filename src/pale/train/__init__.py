"""The training loop and its parts; knows the Task protocol, no task."""
