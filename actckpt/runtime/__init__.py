"""What happens inside a region: hooks, inputs, state, reruns. Nothing here is public."""
