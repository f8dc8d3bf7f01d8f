"""What every way of checkpointing needs: torch's private names, state, random state, sites, subclasses, errors."""
