"""Measurements and pictures of them; uses only public names of the rest of the package."""
