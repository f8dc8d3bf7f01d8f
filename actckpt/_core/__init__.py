"""Shared by rerun, replay and offloading: torch's private names, state, random state, sites, subclasses, errors."""
