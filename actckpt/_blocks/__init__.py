"""The blocks of a model: which they are, what they did, and the caches that they are given."""
