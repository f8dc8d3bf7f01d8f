"""The blocks of a model: finding them, reporting on them, and the caches passed to them."""
