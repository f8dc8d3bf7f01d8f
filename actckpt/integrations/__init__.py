"""What other libraries need beside `actckpt.apply`: a module per library, which imports it only when it is called.

docs/libraries.md says what to write with each of them, and for which `apply` alone is all.
"""
