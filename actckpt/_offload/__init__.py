"""The offload engine: where offloaded bytes live and how they travel."""
