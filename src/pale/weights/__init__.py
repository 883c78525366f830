"""Reading and writing weights, and the weights in the package."""
