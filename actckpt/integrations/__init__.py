"""What other libraries need besides `actckpt.apply`: one module per library, which imports it only when called.

docs/libraries.md and docs/transformers.md show the code for each library, and for which of them `apply` alone suffices.
"""
