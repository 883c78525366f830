"""Prediction of very many images in shards: independent jobs, output in atomic parts, and merging them."""

from .merge import Merged, merge_parts
from .run import ShardResult, predict_shard

__all__ = ["Merged", "ShardResult", "merge_parts", "predict_shard"]
