"""What shardwise costs, next to what others cost for the same answer, measured in one run."""
