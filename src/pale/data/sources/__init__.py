"""Sources of samples: folders, lists, shards, annotation files and generated scenes."""
