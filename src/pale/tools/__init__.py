"""Doctor, model information, features and probes, teachers, published weights."""
