"""Names and sizes as text: patterns, operators, bytes and seconds. Imports no torch."""
